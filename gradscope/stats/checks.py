"""Identities between the numbers, as checks of the file and of the arithmetic."""

import math

import numpy as np

from gradscope.stats.base import Record, Source, wide
from gradscope.stats.batches import BatchTests
from gradscope.stats.classes import Classes
from gradscope.stats.products import Products
from gradscope.stats.stored import in_half, labels_of
from gradscope.stats.table import Table

_TOLERANCE = 1e-4  # of float32 rows; what is wrong is wrong by far more
_HALF = 0.02  # of rows in bfloat16, which has 8 bits


class Check(Record):
    """Two ways to the same number.

    Attributes:
        name: The identity.
        left: Its left side.
        right: Its right side.
        error: |left − right| / max(|left|, |right|).
        tolerance: 10⁻⁴; 0.02 where rows in half precision are held against exacter norms.
        passed: Whether the error is no larger.
    """

    name: str
    left: float
    right: float
    error: float
    tolerance: float
    passed: bool


def check(
    name: str,
    left: float | None,
    right: float | None,
    scale: float = 0.0,
    tolerance: float = _TOLERANCE,
) -> list[Check]:
    """Compare, if both sides are known; `scale` is what a difference is small against."""
    if left is None or right is None or not (math.isfinite(left) and math.isfinite(right)):
        return []
    size = max(abs(left), abs(right), scale)
    error = abs(left - right) / size if size else 0.0
    passed = error <= tolerance
    return [
        Check(name=name, left=left, right=right, error=error, tolerance=tolerance, passed=passed)
    ]


def identities(
    file: Source,
    table: Table,
    big: float | None,
    tests: BatchTests,
    found: Products,
    classes: Classes | None,
) -> tuple[Check, ...]:
    """Hold the numbers against each other.

    Args:
        file: The file.
        table: Its finite samples.
        big: ‖G‖².
        tests: Of the batch.
        found: The products.
        classes: The classes' summary.
    """
    if not table.n or big is None:
        return ()
    limit = _HALF if in_half(file) else _TOLERANCE
    squares = {name: np.square(wide(file.norms[name])[table.rows]).sum() for name in file.norms}
    whole = float(np.square(table.norm).sum())
    done: list[Check] = []
    if labels_of(file) != "exact":  # norms are then expectations over labels
        parts = float(sum(squares.values()))
        done += check("‖gᵢ‖² = Σₚ ‖gᵢ,ₚ‖², all samples", whole, parts)
    if tests.inner_product is not None and tests.orthogonality is not None:
        both = tests.inner_product + tests.orthogonality
        done += check("norm test = inner-product + orthogonality test", tests.norm, both)
    if found.dots is not None:
        scale = float(np.sqrt(whole / table.n * big))  # of ‖gᵢ‖ ‖G‖, which bounds each product
        done += check("mean ⟨gᵢ, G⟩ = ‖G‖²", float(found.dots.mean()), big, scale, limit)
    if found.swept is not None:
        swept = float(found.swept.squares.sum())
        done += check("stored rows have the recorded norms", swept, whole, 0.0, limit)
        mean, size = found.swept.mean_squared, whole / table.n**2
        done += check("their mean has the recorded norm", mean, big, size, limit)
    if classes is not None and classes.between is not None and classes.within is not None:
        both, variance = classes.between + classes.within, whole / table.n - big
        name, size = "between + within classes = variance", whole / table.n
        done += check(name, both, variance, size, limit)
    return tuple(done)
