"""The table of rules: what an operator does to all samples at once.

A rule takes the samples and the operator's arguments, as the operator has them, and returns the
physical result. It returns NotImplemented where it does not apply; then the operator runs sample
by sample, which is exact for every operator.
"""

from collections.abc import Callable
from typing import Any

from gradscope.core.registry import Registry

Rule = Callable[..., Any]

rules: Registry[Rule] = Registry("expand rule")
