"""Joining the files of one run."""
