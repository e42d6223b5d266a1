"""The sample axis and its layouts, on tensors whose owners are written down."""

from contextlib import suppress
from typing import Any

import pytest
import torch

from gradscope.backends.hooks.graph import axes as module
from gradscope.backends.hooks.graph.axes import (
    CONSTANT,
    OwnedAxis,
    OwnerPasses,
    OwnerWeights,
    SampleAxis,
    growth,
    layouts,
    nonzero,
    owned,
    owned_exactly,
    owned_singly,
    row_axis,
    support,
)

Shape = tuple[int, ...]


def labelled(before: int, n: int, after: int) -> torch.Tensor:
    """A merged axis whose entries are their owners' numbers."""
    return torch.arange(n).repeat_interleave(after).repeat(before)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_first_brings_each_samples_entries_to_its_row(before: int, after: int, axis: int) -> None:
    n, shape = 3, [7, 7]
    shape.insert(axis, before * n * after)
    owners = labelled(before, n, after).reshape([-1 if k == axis else 1 for k in range(3)])
    moved = SampleAxis(axis, before, after).first(owners.expand(shape), n)
    assert moved.shape[0] == n
    assert moved.shape[axis + 1] == before * after
    for sample in range(n):
        assert (moved[sample] == sample).all()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (2, 3)])
def test_only_keeps_one_samples_entries(before: int, after: int) -> None:
    n, owners = 3, labelled(before, 3, after)
    values = torch.rand(5, len(owners))
    kept = SampleAxis(1, before, after).only(values, n, sample=2)
    torch.testing.assert_close(kept, values * (owners == 2))


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        ((6, 3, 8), (6, 2, 8), (1, 1)),
        ((12, 8), (8, 8), (0, 4)),
        ((7, 5), (4, 5), (0, None)),  # uneven
        ((4, 4), (4, 4), CONSTANT),
        ((3, 3), (2, 2), None),
        ((6, 6, 4), (4, 4, 4), None),
        ((3,), (2, 1), None),
    ],
)
def test_the_axis_that_changes_is_the_sample_axis(first: Shape, second: Shape, right: Any) -> None:
    assert growth(first, 3, second, 2) == right


@pytest.mark.parametrize(("before", "after"), [(1, 6), (6, 1), (2, 3), (3, 2)])
def test_supports_tell_the_layouts_apart(before: int, after: int) -> None:
    n, owners = 3, labelled(before, 3, after)
    supports = {sample: owners == sample for sample in range(n)}
    (found,) = layouts(0, before * after, n, supports)
    assert (found.before, found.after) == (before, after)


def test_no_layout_fits_coupled_samples() -> None:
    everything = torch.ones(6, dtype=torch.bool)
    assert layouts(0, 2, 3, {0: everything, 1: everything}) == []


def test_a_nan_proves_nothing() -> None:
    gradient = torch.tensor([[0.0, 0.0], [torch.nan, 0.0], [torch.nan, 2.0]])
    assert support(gradient, 0).tolist() == [False, False, True]
    assert support(gradient, 1).tolist() == [False, True]


def marked(values: torch.Tensor, owner: torch.Tensor, marks: OwnerWeights) -> list[torch.Tensor]:
    """The gradients (entries, w) of the weighted losses, where an owner of -1 has none."""
    return [values * w[owner.clamp_min(0)].unsqueeze(1) for w in marks.weights]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 5, 300, 2000])
def test_owners_are_read_off_marked_gradients(axis: int, dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    owner = torch.randint(-1, n, (3 * n,), generator=generator)
    values = (torch.rand(3 * n, 4, generator=generator) + 0.1).to(dtype)
    values[owner == -1] = 0
    marks = OwnerWeights.of(values.new_zeros(n), seed=3)
    pair = (values, marked(values, owner, marks))
    if axis == 1:
        pair = (values.T, [t.T for t in pair[1]])
    assert owned(*pair, (axis,), marks).owner.tolist() == owner.tolist()


@pytest.mark.parametrize(
    ("share", "dtype"),
    [*((k, torch.float32) for k in (0.5, 0.3, 1e-2)), (0.5, torch.bfloat16), (0.3, torch.bfloat16)],
)
def test_an_entry_of_two_samples_has_no_owner(share: float, dtype: torch.dtype) -> None:
    """Whatever the marks are, bar chance: also in equal shares, whose mark is the middle."""
    seen = 0
    for seed in range(20):
        marks = OwnerWeights.of(torch.zeros(6, dtype=dtype), seed)
        gradient = torch.ones(6, 3, dtype=dtype)
        gradient[2] = 0.3
        every = [w.unsqueeze(1) * gradient for w in marks.weights]
        for weighted, w in zip(every, marks.weights, strict=True):
            weighted[2] = 0.3 * ((1 - share) * w[2] + share * w[4])
        try:
            owned(gradient, every, (0,), marks)
        except ValueError as error:
            assert "several samples" in str(error)
            seen += 1
    assert seen >= 19


@pytest.mark.parametrize("n", [40, 512, 1024])
def test_a_number_of_two_samples_passes_by_chance_seldom(n: int) -> None:
    """Where there is nothing else to go by, of a thousand samples one in eight, in one pass."""
    taken, generator = 0, torch.Generator().manual_seed(n)
    for seed in range(300):
        marks, both = (
            OwnerWeights.of(torch.zeros(n), seed),
            torch.randperm(n, generator=generator)[:2],
        )
        assert len(marks.weights) == 1
        with suppress(ValueError):
            owned(
                torch.full((1, 1), 2.0), [marks.weights[:, both].sum(1, keepdim=True)], (0,), marks
            )
            taken += 1
    assert taken < 38


def test_what_cancels_belongs_to_both() -> None:
    marks = OwnerWeights.of(torch.zeros(2), seed=0)
    (weighted,) = (torch.stack([w, (w[0] - w[1]).expand(2)]) for w in marks.weights)
    with pytest.raises(ValueError, match="several samples"):
        owned(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), [weighted], (0,), marks)


def in_passes(values: torch.Tensor, parts: dict[int, float], some: OwnerPasses) -> list[Any]:
    """The gradients of each pass, of values to which so much of several samples adds."""
    shares = [sum(share * w[k] for k, share in parts.items()) for w in some.weights]
    return [values * share for share in shares]


@pytest.mark.parametrize("n", [2, 3, 7, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_passes_with_some_samples_show_owners_exactly(n: int, dtype: torch.dtype) -> None:
    """Whatever rounding does to the numbers, and down to the smallest there are."""
    generator = torch.Generator().manual_seed(n)
    owner = torch.randint(-1, n, (2 * n,), generator=generator)
    some = OwnerPasses.of(torch.zeros(n, dtype=dtype), seed=1)
    size = torch.rand(2 * n, 3, generator=generator).to(dtype) + 0.5
    size[::2] = torch.finfo(dtype).smallest_normal / 4
    passes = []
    for w in some.weights:
        noise = 1 + 0.4 * torch.rand(2 * n, 3, generator=generator).to(dtype)
        passes.append(size * noise * (w[owner.clamp_min(0)] * (owner >= 0)).unsqueeze(1))
    seen = [nonzero(t, (0,)) for t in passes]
    assert owned_exactly(seen, (0,), some).owner.tolist() == owner.tolist()
    seen = [nonzero(t.T, (1,)) for t in passes]
    assert owned_exactly(seen, (1,), some).owner.tolist() == owner.tolist()


@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-6, -1.0])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-30])
def test_a_little_of_another_sample_is_seen_at_any_size(n: int, share: float, size: float) -> None:
    some = OwnerPasses.of(torch.zeros(n), seed=1)
    for other in range(1, n):
        passes = in_passes(torch.full((4, 2), size), {0: 1.0, other: share}, some)
        with pytest.raises(ValueError, match="several samples"):
            owned_exactly([nonzero(t, (0,)) for t in passes], (0,), some)


def test_rounding_that_vanishes_in_some_passes_is_left_to_single_ones() -> None:
    some = OwnerPasses.of(torch.zeros(8), seed=1)
    seen = list(some.chosen.T.clone())
    seen[int(some.chosen[3].nonzero()[0])][3] = False
    with pytest.raises(ValueError, match="several samples"):
        owned_exactly(seen, (0,), some)
    single = torch.eye(8, dtype=torch.bool)
    single[5, 5] = False
    assert owned_singly([*single], (0,)).owner.tolist() == [0, 1, 2, 3, 4, -1, 6, 7]
    single[6, 2] = True
    with pytest.raises(ValueError, match="several samples"):
        owned_singly([*single], (0,))


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_an_axis_of_positions_is_found_at_once(
    axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples of five positions with four features: whatever cannot tell them waits."""
    tried: list[int] = []
    monkeypatch.setattr(
        module, "owned", lambda once, *rest: (tried.append(1), owned(once, *rest))[1]
    )
    rows = torch.arange(15).reshape(3, 5)
    marks, values = OwnerWeights.of(torch.zeros(5), 0), torch.rand(3, 5, 4) + 0.1
    weighted = [(values * w[:, None]).permute(axes) for w in marks.weights]
    samples = SampleAxis(axes.index(0))
    found = row_axis(values.permute(axes), weighted, samples, rows, marks)
    assert isinstance(found, OwnedAxis)
    assert found.own == (axes.index(0), axes.index(1))
    assert found.owner.tolist() == list(range(15))
    assert tried == [1]


def test_uneven_samples_are_padded_with_zeros() -> None:
    axis = OwnedAxis(1, torch.tensor([2, 0, 0, -1, 2, 2]))
    values = torch.arange(12.0).reshape(2, 6)
    first = axis.first(values, 3)
    assert first.shape == (3, 2, 3)
    assert first[0].tolist() == [[1, 2, 0], [7, 8, 0]]
    assert first[1].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert first[2].tolist() == [[0, 4, 5], [6, 10, 11]]
    assert axis.only(values, 3, 0).tolist() == [[0, 1, 2, 0, 0, 0], [0, 7, 8, 0, 0, 0]]
