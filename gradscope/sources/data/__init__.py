"""Data sets: the formats of data files, what a spec makes of them, and the user's own code."""
