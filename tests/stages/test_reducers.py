"""Every reducer against numpy from dense rows, for every kind of block, split in any way."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from gradscope import Scope
from gradscope.blocks import DenseBlock, Gradients, MappedBlock, OuterBlock, ScatterBlock
from gradscope.errors import SpecError
from gradscope.stages.reducers import base
from gradscope.stages.reducers.accumulator import depends_on_split
from gradscope.stages.reducers.base import carried_state, reducers, taken_result
from tests.stages.examples import (
    DTYPES,
    MANY,
    Rows,
    compare,
    each,
    example,
    one_parameter,
    reducer,
    run,
    split,
    whole,
)


def with_error(rows: Rows) -> Rows:
    means = {name: g.mean(0) for name, g in rows.items()}
    errors = {f"{k}.standard_error": g.std(0, ddof=1) / MANY**0.5 for k, g in rows.items()}
    return means | errors


def histograms(bins: int, low: float, high: float) -> Callable[[Rows], Rows]:
    def right(rows: Rows) -> Rows:
        found: Rows = {}
        for name, g in rows.items():
            counts, edges = np.histogram(g, bins, (low, high))
            outside = np.array([(g < low).sum(), (g > high).sum(), 0])
            found |= {name: counts, f"{name}.edges": edges, f"{name}.outside": outside}
        return found

    return right


def gram(rows: Rows) -> Rows:
    flats = [g.reshape(len(g), -1) for g in rows.values()]
    return {"gram": sum(flat @ flat.conj().T for flat in flats)}


def no_bad_entries(rows: Rows) -> Rows:
    return {f"{k}.{word}": np.zeros(()) for k in rows for word in ("entries", "samples")}


TABLE: dict[str, Callable[[Rows], Rows]] = {
    "sum": each(lambda g: g.sum(0)),
    "mean": each(lambda g: g.mean(0)),
    "mean:standard_error=true": with_error,
    "var": each(lambda g: g.var(0, ddof=1)),
    "var:ddof=0": each(lambda g: g.var(0)),
    "var:ddof=23": each(lambda g: np.full(g.shape[1:], np.nan)),
    "std": each(lambda g: g.std(0, ddof=1)),
    "std:ddof=2": each(lambda g: g.std(0, ddof=2)),
    "second_moment": each(lambda g: (np.abs(g) ** 2).mean(0)),
    "moment:k=1": each(lambda g: g.mean(0)),
    "moment:k=2": each(lambda g: (g**2).mean(0)),
    "moment:k=3": each(lambda g: (g**3).mean(0)),
    "moment:k=4": each(lambda g: (g**4).mean(0)),
    "min": each(lambda g: g.min(0)),
    "max": each(lambda g: g.max(0)),
    "quantile:q=0.3": each(lambda g: np.quantile(g, 0.3, axis=0)),
    "quantile:q=1": each(lambda g: g.max(0)),
    "histogram:bins=7,low=-2.015,high=3.3": histograms(7, -2.015, 3.3),
    "gram": gram,
    "nonfinite": no_bad_entries,
}
ORDERED = ("min", "max", "quantile", "histogram")  # complex gradients are made real first
ELSEWHERE = {"kfac", "ekfac"}  # they read the blocks' factors: test_kfac, test_ekfac


def given(text: str, dtype: torch.dtype) -> tuple[Gradients, Rows]:
    grads, rows = example(dtype)
    if not (text.startswith(ORDERED) and dtype.is_complex):
        return grads, rows
    absolute = grads.map(lambda block: MappedBlock(block, torch.abs))
    return absolute, {name: np.abs(values) for name, values in rows.items()}


def test_every_reducer_has_a_case() -> None:
    assert {text.partition(":")[0] for text in TABLE} | ELSEWHERE == set(reducers.names())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", TABLE)
def test_at_once_and_in_any_split(text: str, dtype: torch.dtype) -> None:
    """Float32 blocks are exact products of float32 factors, but for those that go through f."""
    grads, rows = given(text, dtype)
    single = dtype == torch.float32
    found = whole(reducer(text), grads)
    compare(found, TABLE[text](rows), *((1e-5, 1e-6) if single else (1e-12, 1e-13)))
    # these are summed within a batch in the gradients' own precision; everything else in float64
    in_batch = single and text in ("sum", "mean", "second_moment", "moment:k=1", "gram")
    for seed in range(3):
        again = split(reducer(text), grads, seed)
        compare(again, found, *((1e-5, 1e-6) if in_batch else (1e-12, 1e-13)))


@pytest.mark.parametrize("text", TABLE)
def test_what_a_result_is_made_of_is_let_go_of(text: str) -> None:
    one = reducer(text)
    state = carried_state(one.start(given(text, torch.float64)[0]))
    wanted = one.result({**state})
    found = taken_result(one, state)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[k].nan_to_num(7), wanted[k].nan_to_num(7)) for k in wanted)
    assert one.separate == (set(state) == {"n"})


@pytest.mark.parametrize("text", TABLE)
def test_tiles_of_one_sample_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, rows = given(text, torch.float64)
    monkeypatch.setattr(base, "TILE_BYTES", 1)
    compare(whole(reducer(text), grads), TABLE[text](rows), 1e-12, 1e-13)


@pytest.mark.parametrize("text", ["min", "max", "quantile:q=0.5", "histogram"])
def test_what_has_no_order_is_refused(text: str) -> None:
    grads, _ = example(torch.complex128)
    with pytest.raises(SpecError, match="'outer' is complex"):
        reducer(text).start(grads)


@pytest.mark.parametrize("text", ["var", "std", "mean:standard_error=true"])
def test_one_sample_has_no_spread(text: str) -> None:
    grads, rows = example(torch.float64)
    found = whole(reducer(text), grads.select(slice(4, 5)))
    for name in rows:
        if text.startswith("mean"):
            np.testing.assert_allclose(found[name], rows[name][4], rtol=1e-13)
            assert np.isnan(found[f"{name}.standard_error"]).all()
        else:
            assert np.isnan(found[name]).all()


def test_bad_entries_are_counted_by_entry_and_by_sample() -> None:
    values = torch.ones(MANY, 3)
    values[2, 0], values[2, 2], values[9, 1] = torch.nan, torch.inf, -torch.inf
    grads = Gradients({"w": DenseBlock(values), "b": DenseBlock(torch.ones(MANY))})
    right = {"w.entries": 3.0, "w.samples": 2.0, "b.entries": 0.0, "b.samples": 0.0}
    for seed in range(5):
        assert split(reducer("nonfinite"), grads, seed) == right


def test_a_state_read_from_a_file_goes_on(tmp_path: Path) -> None:
    """States are stored as arrays by key, in any order; nothing else is needed to continue."""
    grads, rows = example(torch.float64)
    for text, right in TABLE.items():
        state = reducer(text).start(grads.select(slice(0, 9)))
        np.savez(tmp_path / "s.npz", **{f"a{k}": v.numpy() for k, v in enumerate(state.values())})
        with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
            read = {k: torch.from_numpy(file[f"a{j}"]) for j, k in enumerate(state)}
        read = {key: read[key] for key in sorted(read, reverse=True)}
        state = reducer(text).merge(read, reducer(text).start(grads.select(slice(9, MANY))))
        compare(reducer(text).result(state), right(rows), 1e-12, 1e-13)


ARGUMENTS = {"moment": ":k=3", "quantile": ":q=0.3"}
OWN = """
import gradscope

@gradscope.reducer
def latest():
    def start(gradients):
        return {name: block.weighted_sum() for name, block in gradients.items()}

    return gradscope.Reducer(start, lambda a, b: b, lambda state: state)
"""


@pytest.mark.parametrize(
    "name", sorted(set(reducers.names()) - {"ekfac"})
)  # it merges once it has a basis
def test_what_depends_on_the_split_is_found_out(name: str) -> None:
    right = reducer(name + ARGUMENTS.get(name, ""))
    assert depends_on_split(right) is None
    assert depends_on_split(right._replace(merge=lambda a, b: b)) is not None


def test_of_a_users_own_it_is_noted(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with Scope(nn.Linear(3, 2), "mse") as scope:
        scope.expectation(f"{tmp_path}/own.py:latest", torch.randn(4, 3), torch.randn(4, 2))
        assert any("check its `merge`" in note for note in scope.notes)


def exact_variance(values: np.ndarray) -> np.ndarray:
    """The variance (ddof 1) of columns (n, p) of float64, without any rounding until the end."""
    found = []
    for column in values.T:
        numbers = [Fraction(float(x)) for x in column]
        mean = sum(numbers) / len(numbers)
        found.append(float(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)))
    return np.array(found)


@pytest.mark.parametrize("ratio", [1.0, 1e6, 1e8])
def test_a_mean_far_larger_than_the_spread(ratio: float) -> None:
    """The products of the factors are themselves exact, so that rows are known exactly."""
    generator = torch.Generator().manual_seed(7)
    n = 40
    left = torch.randint(-9, 10, (n, 1, 1, 3), generator=generator) + int(ratio)
    ones = torch.ones(n, 1, 1, 2)
    index = torch.arange(4).expand(n, 4)
    rows = torch.randint(-9, 10, (n, 4, 2), generator=generator) + int(ratio)
    dense = torch.randn(n, 4, generator=generator, dtype=torch.float64) + ratio
    blocks = {
        "outer": OuterBlock(left.double(), ones.double(), (3, 2)),
        "scatter": ScatterBlock(index, rows.double(), 5),
        "dense": DenseBlock(dense),
    }
    grads, var = Gradients(blocks), reducer("var")
    for name, block in blocks.items():
        right = exact_variance(block.dense().flatten(1).numpy()).reshape(block.shape)
        for found in (whole(var, grads), *(split(var, grads, k) for k in range(4))):
            np.testing.assert_allclose(found[name], right, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@drawn(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=30),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1e9]),
)
def test_the_variance_of_any_numbers(numbers: list[float], seed: int, shift: float) -> None:
    values = np.array(numbers)[:, None] + shift
    found = split(reducer("var"), one_parameter(values), seed)
    rounding = (1e-15 * np.abs(values).max()) ** 2  # of the mean, squared
    np.testing.assert_allclose(found["w"], exact_variance(values), rtol=1e-12, atol=rounding)


def test_xi_of_cabs_is_the_sum_of_the_variances() -> None:
    """ξ = Σⱼ (E[gⱼ²] − E[gⱼ]²) (Balles et al. 2017)."""
    grads, rows = example(torch.float64)
    flat = np.concatenate([g.reshape(len(g), -1) for g in rows.values()], 1)
    xi = ((flat**2).mean(0) - flat.mean(0) ** 2).sum()
    np.testing.assert_allclose(run("var:ddof=0 | norm:p=1", grads)["norm"], xi, rtol=1e-11)
