"""Reading a result file, which is checked before anything of it is used."""
