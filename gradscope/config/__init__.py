"""What may be asked for: the run file, its options and their types."""
