"""Every reducer against numpy from dense rows, for every kind of block, split in any way."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import SpecError
from gradscope.stages.chain import bind
from gradscope.stages.reducers import Reducer, base, reducers
from tests.stages.reducers.examples import DTYPES, N, Rows, close, example, real, split, whole


class Case(NamedTuple):
    right: Callable[[Rows], Rows]
    ordered: bool = False  # complex gradients are made real first


def each(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], Rows]:
    return lambda rows: {name: fn(g) for name, g in rows.items()}


def with_error(rows: Rows) -> Rows:
    means = {name: g.mean(0) for name, g in rows.items()}
    errors = {f"{k}.standard_error": g.std(0, ddof=1) / N**0.5 for k, g in rows.items()}
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


TABLE: dict[str, Case] = {
    "sum": Case(each(lambda g: g.sum(0))),
    "mean": Case(each(lambda g: g.mean(0))),
    "mean:standard_error=true": Case(with_error),
    "var": Case(each(lambda g: g.var(0, ddof=1))),
    "var:ddof=0": Case(each(lambda g: g.var(0))),
    "var:ddof=23": Case(each(lambda g: np.full(g.shape[1:], np.nan))),
    "std": Case(each(lambda g: g.std(0, ddof=1))),
    "std:ddof=2": Case(each(lambda g: g.std(0, ddof=2))),
    "second_moment": Case(each(lambda g: (np.abs(g) ** 2).mean(0))),
    "moment:k=1": Case(each(lambda g: g.mean(0))),
    "moment:k=2": Case(each(lambda g: (g**2).mean(0))),
    "moment:k=3": Case(each(lambda g: (g**3).mean(0))),
    "moment:k=4": Case(each(lambda g: (g**4).mean(0))),
    "min": Case(each(lambda g: g.min(0)), ordered=True),
    "max": Case(each(lambda g: g.max(0)), ordered=True),
    "quantile:q=0.3": Case(each(lambda g: np.quantile(g, 0.3, axis=0)), ordered=True),
    "quantile:q=1": Case(each(lambda g: g.max(0)), ordered=True),
    "histogram:bins=7,low=-2.015,high=3.3": Case(histograms(7, -2.015, 3.3), ordered=True),
    "gram": Case(gram),
    "nonfinite": Case(no_bad_entries),
}
ELSEWHERE = {"kfac"}  # it reads the blocks' factors, which have no dense rows: test_kfac


def reducer(text: str) -> Reducer:
    bound = bind(text).reducer
    assert bound is not None
    return bound


def given(text: str, dtype: torch.dtype) -> tuple[Gradients, Rows]:
    grads, rows = example(dtype)
    return real(grads, rows) if TABLE[text].ordered else (grads, rows)


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Float32 blocks are exact products of float32 factors, but for those that go through f."""
    return (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)


def test_every_reducer_has_a_case() -> None:
    assert {text.partition(":")[0] for text in TABLE} | ELSEWHERE == set(reducers.names())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", TABLE)
def test_against_numpy(text: str, dtype: torch.dtype) -> None:
    grads, rows = given(text, dtype)
    close(whole(reducer(text), grads), TABLE[text].right(rows), *tolerances(dtype))


def split_tolerances(text: str, dtype: torch.dtype) -> tuple[float, float]:
    """What is taken of a batch in the gradients' own precision; everything else is in float64."""
    in_batch = ("sum", "mean", "second_moment", "moment:k=1", "gram")
    own = dtype == torch.float32 and text in in_batch
    return (1e-5, 1e-6) if own else (1e-12, 1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", TABLE)
def test_any_split_merged_in_any_tree_gives_the_same(text: str, dtype: torch.dtype) -> None:
    grads, _ = given(text, dtype)
    right = whole(reducer(text), grads)
    for seed in range(8):
        close(split(reducer(text), grads, seed), right, *split_tolerances(text, dtype))


@pytest.mark.parametrize("text", TABLE)
def test_tiles_of_one_sample_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, rows = given(text, torch.float64)
    monkeypatch.setattr(base, "TILE_BYTES", 1)
    close(whole(reducer(text), grads), TABLE[text].right(rows), 1e-12, 1e-13)


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
    values = torch.ones(N, 3)
    values[2, 0], values[2, 2], values[9, 1] = torch.nan, torch.inf, -torch.inf
    grads = Gradients({"w": DenseBlock(values), "b": DenseBlock(torch.ones(N))})
    right = {"w.entries": 3.0, "w.samples": 2.0, "b.entries": 0.0, "b.samples": 0.0}
    for seed in range(5):
        assert split(reducer("nonfinite"), grads, seed) == right


def test_a_state_read_from_a_file_goes_on(tmp_path) -> None:
    """States are stored as arrays by key; nothing else is needed to continue."""
    grads, rows = example(torch.float64)
    for text, case in TABLE.items():
        if case.ordered or text.startswith("histogram"):
            continue
        state = reducer(text).start(grads.select(slice(0, 9)))
        np.savez(tmp_path / "s.npz", **{f"a{k}": v.numpy() for k, v in enumerate(state.values())})
        with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
            read = {k: torch.from_numpy(file[f"a{j}"]) for j, k in enumerate(state)}
        state = reducer(text).merge(read, reducer(text).start(grads.select(slice(9, N))))
        found = {k: v.numpy() for k, v in reducer(text).result(state).items()}
        close(found, case.right(rows), 1e-12, 1e-13)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moment", "needs k"),
        ("moment:k=0", "at least 1"),
        ("std:ddof=-1", "negative"),
        ("quantile", "needs q"),
        ("quantile:q=1.5", "between 0 and 1"),
        ("quantile:q=nan", "between 0 and 1"),
        ("quantile:q=0.5,error=0", "error"),
        ("histogram:bins=1", "from 2 to 16,777,216"),
        ("histogram:scale=sqrt", "symlog"),
        ("histogram:low=1", "together"),
        ("histogram:low=2,high=1", "below"),
        ("histogram:low=0,high=1,scale=log", "positive"),
        ("histogram:linear=0,scale=symlog", "positive"),
        ("kfac:positions=all", "mean or sum"),
        ("mean:standard_error=yes", "bool"),
    ],
)
def test_arguments_out_of_range(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        bind(text)
    assert words in str(caught.value) and "^" in str(caught.value)
