"""Architectures that people train, at their real sizes, through the command line."""
