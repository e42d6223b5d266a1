"""The reader of result files; every byte is checked before it is used."""
