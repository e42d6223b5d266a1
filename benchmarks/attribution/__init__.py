"""Does attribution predict what retraining does? Three small models, their ground truth, the peers.

Run it from the root of the repository: `python -m benchmarks.attribution --help`.
"""
