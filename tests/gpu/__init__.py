"""What runs on a GPU: `python -m tests.gpu`, on one, or on a device made of the CPU."""
