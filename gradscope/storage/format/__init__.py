"""The layout of a result file, shared by the writer and the reader."""
