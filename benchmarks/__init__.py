"""gradscope beside the field's other tools: the same models and data, in one run, as ratios.

Run it from the root of the repository: `python -m benchmarks --help`.
"""
