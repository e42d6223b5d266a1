"""Data files: readers, columns, fit."""
