"""What lies where in a result file, for those who write and those who read it."""
