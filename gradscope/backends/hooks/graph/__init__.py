"""The autograd graph: what it recorded, where the samples are in it, and where parameters enter."""
