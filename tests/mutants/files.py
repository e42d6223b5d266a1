"""Defects in files."""
