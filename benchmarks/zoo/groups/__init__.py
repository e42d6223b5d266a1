"""The groups: each lists names, and builds what a name stands for."""
