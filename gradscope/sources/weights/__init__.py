"""Checkpoints: formats, folders, shards."""
