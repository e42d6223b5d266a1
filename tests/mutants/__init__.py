"""Defects put into the package on purpose, one at a time, and which of its guards tells.

python -m tests.mutants        prints the table
"""

from tests.mutants import attribution, blocks, engine, files, hooks  # noqa: F401  (importing files the mutants)
from tests.mutants.base import MUTANTS, Mutant, Scenario, wrong

__all__ = ["MUTANTS", "Mutant", "Scenario", "wrong"]
