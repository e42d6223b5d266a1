"""The models and losses of the case table, one family a file."""
