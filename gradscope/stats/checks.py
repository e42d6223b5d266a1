"""Identities between the numbers, as checks of the file and of the arithmetic."""

import math

import numpy as np

from gradscope.stats.base import Record, Source, wide
from gradscope.stats.batches import BatchTests
from gradscope.stats.classes import Classes
from gradscope.stats.products import Products
from gradscope.stats.table import Table

TOLERANCE = 1e-4  # of float32 rows; what is wrong is wrong by far more


class Check(Record):
    """Two ways to the same number.

    Attributes:
        name: The identity.
        left: Its left side.
        right: Its right side.
        error: |left − right| / max(|left|, |right|).
        passed: Whether it is below 10⁻⁴.
    """

    name: str
    left: float
    right: float
    error: float
    passed: bool


def check(name: str, left: float | None, right: float | None, scale: float = 0.0) -> list[Check]:
    """Compare, if both sides are known; `scale` is what a difference is small against."""
    if left is None or right is None or not (math.isfinite(left) and math.isfinite(right)):
        return []
    size = max(abs(left), abs(right), scale)
    error = abs(left - right) / size if size else 0.0
    return [Check(name=name, left=left, right=right, error=error, passed=error <= TOLERANCE)]


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
    squares = {name: np.square(wide(file.norms[name])[table.rows]).sum() for name in file.norms}
    whole = float(np.square(table.norm).sum())
    done = check("‖gᵢ‖² = Σₚ ‖gᵢ,ₚ‖², all samples", whole, float(sum(squares.values())))
    if tests.inner_product is not None and tests.orthogonality is not None:
        both = tests.inner_product + tests.orthogonality
        done += check("norm test = inner-product + orthogonality test", tests.norm, both)
    if found.dots is not None:
        scale = float(np.sqrt(whole / table.n * big))  # of ‖gᵢ‖ ‖G‖, which bounds each product
        done += check("mean ⟨gᵢ, G⟩ = ‖G‖²", float(found.dots.mean()), big, scale)
    if found.swept is not None:
        parts = found.swept.parts
        swept = sum(part.squares for part in parts.values())
        done += check("stored rows have the recorded norms", swept, whole)
        mean = sum(part.mean_squared for part in parts.values())
        done += check("their mean has the recorded norm", mean, big, whole / table.n / table.n)
    if classes is not None and classes.between is not None and classes.within is not None:
        both, variance = classes.between + classes.within, whole / table.n - big
        done += check("between + within classes = variance", both, variance, whole / table.n)
    return tuple(done)
