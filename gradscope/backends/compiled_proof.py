"""How far a compiled program's answer is from the uncompiled one, which is proved."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradscope.backends.compiled import State, Wanted
from gradscope.blocks import Evaluation

_NEGLIGIBLE = 1e-2  # an entry is measured against at least this share of its kind


def distance(found: Evaluation, right: Evaluation, wanted: Wanted, keys: Sequence[str]) -> float:
    """Return the largest relative error; NaN where it cannot be known.

    Entries are measured together: a single activation at its kink may fall on either side.

    Args:
        found: The program's answer.
        right: The uncompiled one, for the same batch.
        wanted: What was asked for.
        keys: Of the reductions that the program contains.
    """
    errors = torch.tensor(list(_errors(found, right, wanted, keys)), dtype=torch.float64)
    return float(errors.max())  # a NaN is the largest


def _errors(
    found: Evaluation, right: Evaluation, wanted: Wanted, keys: Sequence[str]
) -> Iterator[float]:
    finite = right.losses.isfinite() & right.gradients.norms.isfinite()
    everyone = bool(finite.all())
    yield _relative(found.losses[finite], right.losses[finite])
    sizes = right.gradients.norms[finite]
    for name, theirs in right.gradients.squared_norms.items():
        ours = found.gradients.squared_norms[name]
        yield _relative(ours[finite].sqrt(), theirs[finite].sqrt(), float(sizes.norm()))
    if everyone:  # what is not finite is left out of every sum
        states = wanted.starts(keys, right.gradients) if keys else {}
        for key, state in states.items():
            yield from _of_states(found.gradients.computed(key) or {}, state)
    if wanted.rows:
        for name, block in right.gradients.select(finite).items():
            row = found.gradients[name].select(finite).dense()
            yield _relative(row, block.dense(), float(sizes.norm()))


def _of_states(ours: State, theirs: State) -> Iterator[float]:
    if ours.keys() != theirs.keys():
        yield float("nan")
        return
    kinds: dict[str, list[float]] = {}
    for key, value in theirs.items():
        kinds.setdefault(key.partition(":")[0], []).append(_size(value))
    for key, value in theirs.items():
        whole = kinds[key.partition(":")[0]]
        yield _relative(ours[key], value, float(torch.tensor(whole).norm()))


def _relative(ours: Tensor, theirs: Tensor, whole: float = 0.0) -> float:
    """Return ‖ours − theirs‖ relative to ‖theirs‖, or to a share of the whole it is part of."""
    if ours.shape != theirs.shape:
        return float("nan")
    gap = _size(_wide(ours) - _wide(theirs))
    scale = max(_size(theirs), _NEGLIGIBLE * whole)
    return gap / scale if scale else gap


def _size(t: Tensor) -> float:
    return float(_wide(t).norm())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
