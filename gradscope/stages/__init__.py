"""Losses, labels, transforms of gradients, reducers over samples, and their chains."""
