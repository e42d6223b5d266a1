"""The autograd graph: its operations, its sample axes, and where parameters enter."""
