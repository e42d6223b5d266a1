"""Reads training scripts for init: the model, its arguments, its loss and its data."""
