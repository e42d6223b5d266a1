"""Defects put into the engine on purpose, one at a time, and which guard of the product tells.

python -m tests.mutants        prints the table
"""

from tests.mutants import blocks, files, graph, others, reductions, rules  # noqa: F401  (fill it)
from tests.mutants.base import MUTANTS, Mutant, Scenario, wrong

__all__ = ["MUTANTS", "Mutant", "Scenario", "wrong"]
