"""Defects in blocks."""
