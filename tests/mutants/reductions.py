"""Defects in reducers."""
