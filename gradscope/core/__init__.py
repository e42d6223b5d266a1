"""Batches, chains, dtypes and registries: used by every other package."""
