"""Writing a result file: regions of rows, the journal of what is committed, the target file."""
