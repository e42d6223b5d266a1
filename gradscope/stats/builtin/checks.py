"""Problems of a file: samples that are not finite, identities that do not hold, missing chains."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.records import Record, wide
from gradscope.stats.sections import Section, short
from gradscope.stats.source import finite_samples, in_half, labels_of, rows_of
from gradscope.stats.summary import Data, Summary, statistic

_TOLERANCE = 1e-4  # for float32 rows; real errors are far larger
_HALF = 0.02  # for rows in bfloat16, which has 8 bits


class NonFinite(Record):
    """Samples whose loss or gradient is not finite; all other statistics leave them out."""

    count: int
    index: tuple[int, ...]


def _warn_nonfinite(found: NonFinite, summary: Summary) -> Iterator[str]:
    if found.count:
        listed = ", ".join(map(str, found.index)) + ", ..." * (found.count > len(found.index))
        text = f"{count(found.count, summary.noun)} not finite and left out below"
        yield f"{text}: {listed}" if found.index else text


def _answer_nonfinite(found: NonFinite, summary: Summary) -> Iterator[tuple[str, str]]:
    how_many = f"{count(found.count, summary.noun)} not finite"
    yield "problems", how_many if found.count else f"every {summary.noun} is finite"


@statistic("nonfinite", place=100, warnings=_warn_nonfinite, answers=_answer_nonfinite)
def nonfinite(data: Data) -> NonFinite:
    """Count the samples without finite loss or gradient, and list the first."""
    rows = np.flatnonzero(~finite_samples(data.file))[: data.options.top]
    index = data.file.samples["index"]
    return NonFinite(
        count=data.samples.total - data.samples.n, index=tuple(int(index[i]) for i in rows)
    )


class Check(Record):
    """A comparison of two ways to compute the same number."""

    name: str
    left: float
    right: float
    error: float
    tolerance: float
    passed: bool


def _warn_checks(checks: Sequence[Check], summary: Summary) -> Iterator[str]:
    for one in checks:
        if not one.passed:
            sides = f"{short(one.left)} and {short(one.right)}"
            yield f"a check failed at tolerance {one.tolerance:g}: {one.name} ({sides})"


def _answer_checks(checks: Sequence[Check], summary: Summary) -> Iterator[tuple[str, str]]:
    failed = sum(not one.passed for one in checks)
    if failed:
        yield "problems", f"{count(failed, 'check')} failed"


@statistic("checks", place=140, warnings=_warn_checks, answers=_answer_checks)
def checks(data: Data) -> tuple[Check, ...]:
    """Compare numbers that can be computed in two ways, to check the file."""
    samples, big, products = data.recorded, data.recorded_squared, data.products
    if not samples.n or big is None:
        return ()
    tests, classes = data.result("batch_tests"), data.result("classes")
    limit = _HALF if in_half(data.file) else _TOLERANCE
    whole = float(np.square(samples.norm).sum())
    # name, left side, right side, scale of the error, tolerance
    found: list[tuple[str, float, float, float, float]] = []
    if labels_of(data.file) != "exact":  # norms are then expectations over labels
        norms = data.file.norms
        parts = sum(float(np.square(wide(norms[name])[samples.rows]).sum()) for name in norms)
        found.append((f"‖gᵢ‖² = Σₚ ‖gᵢ,ₚ‖², all {data.noun}s", whole, parts, 0.0, _TOLERANCE))
    if None not in (tests.norm, tests.inner_product, tests.orthogonality):
        both = tests.inner_product + tests.orthogonality
        name = "norm test = inner-product + orthogonality test"
        found.append((name, tests.norm, both, 0.0, _TOLERANCE))
    if products.dots is not None:
        scale = float(np.sqrt(whole / samples.n * big))  # the RMS of ‖gᵢ‖ ‖G‖, the bound of ⟨gᵢ, G⟩
        found.append(("mean ⟨gᵢ, G⟩ = ‖G‖²", float(products.dots.mean()), big, scale, limit))
    if products.totals:
        squares, mean = float(products.squares.sum()), products.mean_squared
        found.append(("stored rows have the recorded norms", squares, whole, 0.0, limit))
        size = whole / samples.n**2
        found.append(("their mean has the recorded norm", mean, big, size, limit))
    if classes is not None and None not in (classes.between, classes.within):
        both, size = classes.between + classes.within, whole / samples.n
        found.append(("between + within classes = variance", both, size - big, size, limit))
    tested = []
    for name, left, right, scale, most in found:
        if math.isfinite(left) and math.isfinite(right):
            size = max(abs(left), abs(right), scale)
            error = abs(left - right) / size if size else 0.0
            sides = {"left": left, "right": right, "error": error, "tolerance": most}
            tested.append(Check(name=name, **sides, passed=error <= most))
    return tuple(tested)


class Missing(Record):
    """Statistics that could not be computed, and the chains that they need."""

    what: str
    needs: str


def _missing_section(found: Sequence[Missing], summary: Summary) -> Iterator[Section]:
    if found:
        yield Section("Not in this file", notes=[f"{one.what}: {one.needs}" for one in found])


@statistic("missing", place=90, sections=_missing_section)
def missing(data: Data) -> tuple[Missing, ...]:
    """Return the statistics that could not be computed, and what they need."""
    noun, found = data.noun, data.products
    every = f"statistics of the single {noun}s' gradients"
    if found.unusable is not None:
        return (Missing(what=every, needs=found.unusable),)
    if not data.options.rows and rows_of(data.file) is not None:
        return (Missing(what=every, needs="leave out --no-rows"),)
    wants = {}
    if found.dots is None:
        every = f"cosines with the mean gradient, opposed {noun}s, intervals, inner-product test"
        wants[every] = '-t identity, -t gram or -t "cosine:to=mean"'
    if data.entries is None:
        every = "signal to noise by entry, early-stopping evidence"
        wants[every] = "-t identity, or -t mean and -t second_moment"
    if found.gram is None:
        wants[f"spectrum, nearest {noun}s"] = "-t identity, -t gram or -t project:dim=256"
    if data.groups is not None and found.group_squares is None:
        wants["noise within and between classes"] = "-t identity or -t gram"
    return tuple(Missing(what=k, needs=f"compute with {need}") for k, need in wants.items())
