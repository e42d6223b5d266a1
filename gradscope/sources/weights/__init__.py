"""Checkpoints: their formats, folders and shards, and whether their weights fit a model."""
