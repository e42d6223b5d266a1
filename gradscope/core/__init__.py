"""Batches, chains, dtypes and registries: what every other room refers to."""
