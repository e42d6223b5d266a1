"""EK-FAC and the layers it is of, against numpy on dense rows of one sample at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.blocks import (
    DenseBlock,
    Gradients,
    LayerWeights,
    OuterBlock,
    Tuner,
    belongs,
    bias_of,
    layer_of,
)
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.engine.fold import prepare_chains
from gradscope.errors import InputError, SpecError, UnsupportedError
from gradscope.stages.reducers import eigen
from gradscope.stages.reducers.accumulator import Accumulator, depends_on_split
from gradscope.stages.reducers.base import Reducer
from gradscope.stages.reducers.eigen import eigenvectors
from gradscope.stages.reducers.kfac import bases_of
from tests.stages.examples import Draw, accumulated, compare, reducer, run


class InputsFirst(nn.Module):
    """A linear layer whose weight is (i, o), as in GPT-2."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(*s)) for s in ((i, o), (o,)))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.reshape(*x.shape[:-1], -1)


class Twice(nn.Module):
    """One layer, used twice, and a weight that a second bias goes with once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(x)))
        return self.head(hidden) + torch.tanh(nn.functional.linear(hidden, self.head.weight))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.up, self.down = InputsFirst(4, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.table(x)))))


class Positions(nn.Module):
    """Words at positions, as three parameters without factors: the words are the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(8, 4)
        self.grid, self.up = nn.Parameter(torch.randn(1, 6, 4)), nn.Linear(4, 4)
        self.many = nn.Embedding(9, 4)  # more rows than twice its columns

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1])) + self.many(x)
        hidden = torch.tanh(self.up(hidden))
        return nn.functional.linear(hidden + self.grid[:, : x.shape[1]], self.words.weight)


# parameters without factors, as rows and columns: with `full` each is one row, or a table
SHORT = {
    "convolution": {"2.bias": (1, 4)},
    "twice": {"head.bias": (1, 3)},
    "words": {"table.weight": (7, 4), "norm.weight": (1, 4), "norm.bias": (1, 4)},
}
Layers = dict[str, tuple[str | None, int, int, int, bool]]


def layers_of(name: str, *, full: bool) -> Layers:
    """The layers, with those short parameters that are one row or a table."""
    short = SHORT.get(name, {}) if full else {}
    return LAYERS[name] | {own: (None, 1, *sizes, False) for own, sizes in short.items()}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


# the model, its inputs, and its layers: weight -> (bias or None, groups, rows, columns, below)
LAYERS: dict[str, dict[str, tuple[str | None, int, int, int, bool]]] = {
    "linear": {"0.weight": ("0.bias", 1, 5, 5, False), "2.weight": (None, 1, 3, 5, False)},
    "convolution": {
        "0.weight": ("0.bias", 2, 3, 7, False),
        "2.weight": (None, 1, 6, 12, False),
    },
    "twice": {
        "shared.weight": ("shared.bias", 1, 4, 5, False),
        "head.weight": (None, 1, 3, 4, False),
    },
    "words": {"up.weight": ("up.bias", 1, 5, 4, True), "down.weight": (None, 1, 3, 4, False)},
    "inputs first": {"weight": ("bias", 1, 5, 3, True)},
}


def example(name: str, n: int = 9) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    if name == "linear":
        model: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
        x = numbers(n, 4)
    elif name == "convolution":
        model = nn.Sequential(
            nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.ConvTranspose1d(6, 4, 3), nn.Flatten()
        )
        x = numbers(n, 4, 6)
    elif name == "twice":
        model, x = Twice(), numbers(n, 4)
    elif name == "words":
        model, x = Words(), torch.randint(0, 7, (n, 5))
    elif name == "positions":
        model, x = Positions(), torch.randint(0, 7, (n, 5))
    else:
        model, x = InputsFirst(4, 3), numbers(n, 4)
    model = model.double()
    x = x if x.dtype == torch.int64 else x.double()
    return model, x, torch.randn_like(model(x)).detach()


def dense_rows(name: str, n: int = 9) -> dict[str, np.ndarray]:
    model, x, y = example(name, n)
    rows = gradscope.per_sample_gradients(model, "mse", x, y, backend="loop")
    return {k: v.numpy() for k, v in rows.items()}


def matrices(
    rows: Mapping[str, np.ndarray], weight: str, layer: tuple[str | None, int, int, int, bool]
) -> np.ndarray:
    """The layer's gradients (n, k, r, c), its bias the last column or row."""
    bias, k, r, c, below = layer
    g, n = rows[weight], len(rows[weight])
    if bias is None:
        return g.reshape(n, k, r, c)
    if below:
        own = g.reshape(n, k, r - 1, c)
        return np.concatenate([own, rows[bias].reshape(n, k, 1, c)], axis=2)
    own = g.reshape(n, k, r, c - 1)
    return np.concatenate([own, rows[bias].reshape(n, k, r, 1)], axis=3)


def found(name: str, chain: str = "ekfac", n: int = 9, **options: Any) -> dict[str, np.ndarray]:
    model, x, y = example(name, n)
    options = {"backend": "hooks", **options}
    result = gradscope.expectation(model, "mse", chain, x, y, **options)
    return {k: v.numpy() for k, v in result.items()}


@pytest.mark.parametrize("full", [0, 512])
@pytest.mark.parametrize("name", LAYERS)
def test_eigenvalues_are_second_moments_in_the_eigenbasis(name: str, full: int) -> None:
    rows, layers = dense_rows(name), layers_of(name, full=bool(full))
    ours = found(name, "ekfac" if full else "ekfac:full=0")
    factors = found(name, f"kfac:bias=column,full={full}")
    for weight, layer in layers.items():
        g = matrices(rows, weight, layer)
        _, k, r, c = g.shape
        a, b = (ours[f"{weight}.{side}.vectors"] for side in "AB")
        assert a.shape == ((k, c, c) if k > 1 else (c, c)), weight
        a, b = a.reshape(k, c, c), b.reshape(k, r, r)
        for vectors, side in ((a, "A"), (b, "B")):  # of kfac's factors
            diagonal = vectors.transpose(0, 2, 1) @ factors[f"{weight}.{side}"] @ vectors
            off = diagonal * (1 - np.eye(diagonal.shape[-1]))
            assert np.abs(off).max() < 1e-12 * np.abs(diagonal).max()
            np.testing.assert_allclose(
                vectors.transpose(0, 2, 1) @ vectors, [np.eye(vectors.shape[-1])] * k, atol=1e-12
            )
        right = np.mean((b.transpose(0, 2, 1) @ g @ a) ** 2, axis=0)
        values = ours[f"{weight}.eigenvalues"].reshape(k, r, c)
        np.testing.assert_allclose(values, right, rtol=1e-9, atol=1e-14 * right.max())
        np.testing.assert_allclose(values.sum(), np.mean((g**2).sum((1, 2, 3))), rtol=1e-12)
    inside = {bias for bias, *_ in layers.values()}
    for parameter in rows.keys() - layers.keys() - inside:
        right = np.mean(rows[parameter] ** 2, axis=0)
        np.testing.assert_allclose(ours[f"{parameter}.diagonal"], right, rtol=1e-12)
    expected = 3 * len(layers) + len(rows) - len(layers) - len(inside - {None})
    assert len(ours) == expected
    trace = sum(v.sum() for k, v in ours.items() if k.endswith((".eigenvalues", ".diagonal")))
    total = np.mean(sum((v**2).reshape(len(v), -1).sum(1) for v in rows.values()))
    np.testing.assert_allclose(trace, total, rtol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_as_a_column_of_the_activations(name: str) -> None:
    """The factors of (a, 1), and what is left of them without the ones is as it was."""
    plain, joined = found(name, "kfac"), found(name, "kfac:bias=column")
    for weight, (bias, _, _, _, below) in LAYERS[name].items():
        side, other = ("B", "A") if below else ("A", "B")
        np.testing.assert_allclose(
            joined[f"{weight}.{other}"], plain[f"{weight}.{other}"], rtol=1e-12
        )
        longer = joined[f"{weight}.{side}"]
        if bias is None:
            np.testing.assert_allclose(longer, plain[f"{weight}.{side}"], rtol=1e-12)
            continue
        assert f"{bias}.diagonal" in plain and f"{bias}.diagonal" not in joined
        np.testing.assert_allclose(longer[..., :-1, :-1], plain[f"{weight}.{side}"], rtol=1e-12)
        np.testing.assert_array_equal(longer, longer.swapaxes(-1, -2))
    _, x, _ = example("linear")
    np.testing.assert_allclose(
        found("linear", "kfac:bias=column")["0.weight.A"][-1], [*x.mean(0), 1.0], rtol=1e-12
    )


@pytest.mark.parametrize("name", LAYERS)
def test_any_batch_size(name: str) -> None:
    model, x, y = example(name)
    whole_, every = found(name), Batch.of(x, y)
    with gradscope.Scope(model, "mse", backend="hooks") as scope:
        cuts = [slice(0, 4), slice(4, 5), slice(5, 9)]
        batches = [every.select(cut) for cut in cuts]
        (chain,) = prepare_chains(scope.session, [bind("ekfac")], lambda: batches)
        again = accumulated(chain, [(scope.evaluate(batch).gradients,) for batch in batches])
    for weight in layers_of(name, full=True):
        key = f"{weight}.eigenvalues"
        small = 1e-10 * whole_[key].max()
        # a basis of equal eigenvalues is any: but their sums are one
        np.testing.assert_allclose(again[key].sum(), whole_[key].sum(), rtol=1e-12)
        distinct = name != "convolution" or weight == "0.weight"
        if distinct:
            np.testing.assert_allclose(again[key].numpy(), whole_[key], rtol=1e-6, atol=small)


def test_a_short_parameter_has_its_whole_second_moment() -> None:
    rows = dense_rows("words")
    plain, ours = found("words", "kfac:full=4"), found("words", "ekfac:full=4")
    assert "norm.weight.diagonal" in found("words", "kfac:full=3") and "up.bias.A" in plain
    for own in ("norm.weight", "norm.bias"):
        moment = rows[own].T @ rows[own] / len(rows[own])
        np.testing.assert_allclose(plain[f"{own}.A"], moment, rtol=1e-10, atol=1e-14)
        assert plain[f"{own}.B"].tolist() == [[1.0]]
        vectors = ours[f"{own}.A.vectors"]
        values = ours[f"{own}.eigenvalues"][0]
        np.testing.assert_allclose((vectors * values) @ vectors.T, moment, rtol=1e-9, atol=1e-14)


def assert_decorrelated(
    g: np.ndarray, weights: np.ndarray, factors: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> None:
    """Compare the factors and moments {"A": ...} of a table with its rows (n, r, c), weighted."""
    c = g.shape[2]
    moment = np.einsum("i,irc,isc->rs", weights, g, g)
    small = 1e-13 * np.abs(moment).max()
    np.testing.assert_allclose(factors["B"], moment / c, rtol=1e-9, atol=small)
    np.testing.assert_array_equal(factors["A"], np.eye(c))
    np.testing.assert_array_equal(ours["A.vectors"].abs(), np.eye(c))
    b, values = ours["B.vectors"].numpy(), ours["eigenvalues"].numpy()
    right = np.einsum("i,irc->rc", weights, (b.T @ g) ** 2)
    np.testing.assert_allclose(values, right, rtol=1e-9, atol=small)
    np.testing.assert_allclose(b.T @ moment @ b, np.diag(values.sum(1)), rtol=1e-9, atol=10 * small)


def of_parameter(found: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{name}."): v for k, v in found.items() if k.startswith(f"{name}.")}


@pytest.mark.parametrize("dense", [False, True])
def test_the_rows_of_a_table_are_decorrelated(dense: bool) -> None:
    rows = dense_rows("positions")
    model, x, y = example("positions")
    batch = gradscope.Scope(model, "mse", backend="hooks").evaluate(Batch.of(x, y)).gradients
    tables = {"words.weight": (7, 4), "places.weight": (8, 4), "grid": (6, 4)}
    assert {batch[name].kind for name in tables} == {None, "scatter"}
    if dense:
        made = {k: DenseBlock(torch.from_numpy(rows[k])) for k in tables}
        batch = Gradients({**batch, **made})
    factors = run("kfac:bias=column,full=1", batch, (3,))
    ours = run("ekfac:with=stored", batch, (4, 7), {k: v.numpy() for k, v in factors.items()})
    for name, sizes in tables.items():
        g = rows[name].reshape(-1, *sizes)
        own = (of_parameter(found, name) for found in (factors, ours))
        assert_decorrelated(g, np.full(len(g), 1 / len(g)), *own)
    assert factors["many.weight.diagonal"].shape == (9, 4)
    plain = {k: v.numpy() for k, v in run("kfac:bias=column", batch).items()}
    stored = run("ekfac:with=stored", batch, (2,), plain)  # as of an earlier version
    for name in tables:
        right = np.mean(rows[name] ** 2, axis=0)
        np.testing.assert_allclose(stored[f"{name}.diagonal"], right, rtol=1e-12)


def test_a_complex_table() -> None:
    draw = Draw(torch.complex128, 6, 5)
    (block, rows), (layer, _) = draw.dense(4, 3), draw.outer(1, 2, 4, 3, (4, 3))
    batch = Gradients({"l": layer, "w": block})
    factors = run("kfac:full=1", batch, (2,))
    ours = run("ekfac:with=stored", batch, (3,), {k: v.numpy() for k, v in factors.items()})
    moment = np.einsum("irc,isc->rs", rows, rows.conj()) / len(rows)
    np.testing.assert_allclose(factors["w.B"], moment / 3, rtol=1e-12)
    b = ours["w.B.vectors"].numpy()
    right = np.mean(np.abs(b.conj().T @ rows) ** 2, axis=0)
    np.testing.assert_allclose(ours["w.eigenvalues"], right, rtol=1e-10)
    off = b.conj().T @ moment @ b
    np.testing.assert_allclose(off, np.diag(right.sum(1)), rtol=1e-10, atol=1e-12 * right.max())


@pytest.mark.parametrize(
    ("shape", "table"),
    [
        *(((1, 9), False), ((2, 9), True), ((9,), False), ((8, 4), True), ((9, 4), False)),
        *(((4, 2, 4), True), ((3, 3, 4), False), ((2, 4096), True), ((2, 4097), False)),
    ],
)
def test_which_parameters_are_tables(shape: tuple[int, ...], table: bool) -> None:
    batch = Gradients({**pair(), "w": DenseBlock(torch.ones(6, *shape, dtype=torch.float64))})
    assert {key for key in run("kfac:full=0", batch) if key[0] == "w"} == {"w.diagonal"}
    state = reducer("kfac:full=1").start(batch)
    assert ("rows:w" in state) == table and ("squares:w" in state) != table


def test_the_rows_of_a_table_for_all_labels() -> None:
    """The expectation over the labels, against one pass for each label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randint(0, 5, (8, 4)), torch.zeros(8, dtype=torch.int64)
    how = {"labels": "exact", "backend": "hooks"}
    factors = gradscope.expectation(model, "cross_entropy", "kfac:full=1", x, y, **how)
    ours = gradscope.expectation(model, "cross_entropy", "ekfac:full=1", x, y, **how)
    chances = torch.softmax(model(x).detach(), 1).numpy()
    each = [
        gradscope.per_sample_gradients(model, "cross_entropy", x, y + k, backend="loop")["0.weight"]
        for k in range(3)
    ]
    own = (of_parameter(found, "0.weight") for found in (factors, ours))
    assert_decorrelated(torch.cat(each).numpy(), chances.T.flatten() / 8, *own)


def test_a_table_has_factors_in_every_batch_or_in_none() -> None:
    """Its sums are never added to the sums of a layer of the same sizes."""
    factored, _ = Draw(torch.float64, 6, 3).outer(1, 2, 5, 4, (5, 4))
    made, layer = reducer("kfac:full=1"), pair()["l.weight"]
    one, other = (
        Gradients({"l": layer, "w": block})
        for block in (factored, DenseBlock(factored.dense().clone()))
    )
    for first, second in ((one, other), (other, one)):
        with pytest.raises(UnsupportedError, match="w is an outer product in some batches only"):
            made.merge(made.start(first), made.start(second))


def test_what_has_no_factors_is_said() -> None:
    model, x, y = example("words")
    with gradscope.Scope(model, "mse", backend="hooks") as scope:
        scope.expectation("ekfac:full=3", x, y)
        told = [note for note in scope.notes if "diagonal" in note]
    assert told == [
        "ekfac: diagonal only, because there are no Kronecker factors: norm.weight, norm.bias"
    ]
    with pytest.raises(UnsupportedError, match="kfac needs gradients as sums"):
        gradscope.expectation(model, "mse", "ekfac", x, y, backend="loop")


@pytest.mark.parametrize("backend", ["hooks", "loop"])
def test_stored_bases(backend: str) -> None:
    """As they are from `ekfac`, as eigenvectors of a `kfac`; other samples, any backend."""
    rows = dense_rows("linear", 14)
    stored = {k: torch.from_numpy(v) for k, v in found("linear").items()}
    model, x, y = example("linear", 14)
    factors = {k: torch.from_numpy(v) for k, v in found("linear", "kfac:bias=column").items()}
    batch = Batch.of(x, y)
    evaluated = gradscope.Scope(model, "mse", backend=backend).evaluate(batch).gradients
    for values in (stored, factors):
        ours = run("ekfac:with=stored", evaluated, (5,), {k: v.numpy() for k, v in values.items()})
        a, b = (ours[f"0.weight.{side}.vectors"].numpy() for side in "AB")
        np.testing.assert_array_equal(a, stored["0.weight.A.vectors"])
        g = matrices(rows, "0.weight", LAYERS["linear"]["0.weight"])[:, 0]
        right = np.mean((b.T @ g @ a) ** 2, axis=0)
        np.testing.assert_allclose(ours["0.weight.eigenvalues"], right, atol=1e-14 * right.max())


def test_wrong_bases_are_refused() -> None:
    block, _ = Draw(torch.float64, 5, 8).outer(1, 1, 4, 3, (4, 3))
    gradients = Gradients({"w": block})
    for stored, error, what in (
        ({"w": np.ones((4, 3))}, InputError, "no Kronecker factors"),
        ({"w.A": np.eye(7), "w.B": np.eye(4)}, SpecError, "do not fit"),
        ({"w.A": np.full((3, 3), np.nan), "w.B": np.eye(4)}, InputError, "not finite"),
    ):
        with pytest.raises(error, match=what):
            run("ekfac:with=stored", gradients, (), stored)


def test_other_eigenvectors_are_not_mixed_in() -> None:
    block, _ = Draw(torch.float64, 5, 8).outer(1, 1, 4, 3, (4, 3))
    gradients, states = Gradients({"w": block}), []
    made = [
        bind("kfac").reducer and run("kfac", gradients.select(part))
        for part in (slice(0, 3), slice(2, 5))
    ]
    earlier = reducer("ekfac").earlier
    assert earlier is not None
    one, other = (earlier.given(found) for found in made)
    states = [one.start(gradients), other.start(gradients)]
    with pytest.raises(UnsupportedError, match="the eigenvectors of 'w' differ"):
        other.merge(states[0], states[1])
    with pytest.raises(UnsupportedError, match="the eigenvectors of 'w' differ"):
        other.result(states[0])


def test_float32_keeps_small_gradients() -> None:
    """Squares of 1e-25 are beyond float32, and are taken in float64."""
    for t in (1, 3):
        draw = Draw(torch.float64, 6, 2)
        block, rows = draw.outer(1, t, 4, 3, (4, 3))
        stored = {"w.A.vectors": np.eye(3), "w.B.vectors": np.eye(4)}
        small = OuterBlock.matrix(
            block.left[:, 0].float() * 1e-13, block.right[:, 0].float() * 1e-12
        )
        ours = run("ekfac:with=stored", Gradients({"w": small}), (2,), stored)
        right = np.mean((rows * 1e-25) ** 2, axis=0)
        np.testing.assert_allclose(ours["w.eigenvalues"], right, rtol=1e-5)


@pytest.mark.parametrize("t", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_complex_and_several_positions(dtype: torch.dtype, t: int) -> None:
    draw = Draw(dtype, 9, 5)
    block, rows = draw.outer(2, t, 4, 3, (8, 3))
    ours = run("ekfac", Gradients({"w": block}), (4,))
    a, b = (ours[f"w.{side}.vectors"].numpy() for side in "AB")
    g = rows.reshape(9, 2, 4, 3)
    right = np.mean(np.abs(b.conj().transpose(0, 2, 1) @ g @ a.conj()) ** 2, axis=0)
    np.testing.assert_allclose(ours["w.eigenvalues"], right, rtol=1e-9, atol=1e-13 * right.max())
    np.testing.assert_allclose(right.sum(), np.mean((np.abs(g) ** 2).sum((1, 2, 3))), rtol=1e-12)


def test_ragged_rows_are_not_padded() -> None:
    """Positions are counted as they are, whatever other samples of the batch have."""
    block, _ = Draw(torch.float64, 6, 3).segments(20, 1, 4, 3, (4, 3))
    bias = DenseBlock(
        torch.zeros(6, 4, dtype=torch.float64).index_add_(0, block.sample, block.left)
    )
    gradients = Gradients({"l.weight": block, "l.bias": bias})
    ours = run("kfac:bias=column", gradients)
    longer = np.concatenate([block.right.numpy(), np.ones((20, 1))], axis=1)
    np.testing.assert_allclose(ours["l.weight.A"], longer.T @ longer / 20, rtol=1e-12)
    compare(run("kfac:bias=column", gradients, (1, 2, 4)), {k: v.numpy() for k, v in ours.items()})
    values = run("ekfac", gradients)
    g = np.concatenate([block.dense().numpy(), bias.values.numpy()[..., None]], axis=2)
    total = np.mean((g**2).sum((1, 2)))
    np.testing.assert_allclose(values["l.weight.eigenvalues"].sum(), total, rtol=1e-12)


def pair(*, last: float = 0.0) -> Gradients:
    """A layer whose bias is the sum of its output gradients, off by `last` in the last sample."""
    block, _ = Draw(torch.float64, 6, 3).outer(1, 2, 4, 3, (4, 3))
    bias = block.left.sum((1, 2))
    bias[-1, 0] += last
    return Gradients({"l.weight": block, "l.bias": DenseBlock(bias)})


def test_a_bias_that_is_another_sum_in_one_sample_stays_apart() -> None:
    """Also where it shows in a later batch only."""
    joined, apart = run("kfac:bias=column", pair()), run("kfac:bias=column", pair(last=1e-6), (3,))
    assert joined["l.weight.A"].shape == (4, 4) and "l.bias.diagonal" not in joined
    assert apart["l.weight.A"].shape == (3, 3) and "l.bias.diagonal" in apart
    compare(apart, {k: v.numpy() for k, v in run("kfac", pair(last=1e-6)).items()}, 1e-12)


def test_second_moments_need_no_pairing() -> None:
    """With a stored basis the matrix is the true gradient, whether the factors have ones or not."""
    stored = {"l.weight.A.vectors": np.eye(4), "l.weight.B.vectors": np.eye(4)}
    ours = run("ekfac:with=stored", pair(last=0.5), (2,), stored)
    g = pair(last=0.5).dense()
    right = torch.cat([g["l.weight"], g["l.bias"].unsqueeze(2)], 2).square().mean(0)
    torch.testing.assert_close(ours["l.weight.eigenvalues"], right, rtol=1e-12, atol=0)


def test_names_and_sizes() -> None:
    assert bias_of("a.b.weight") == "a.b.bias" and bias_of("in_proj_weight") == "in_proj_bias"
    assert bias_of("weight_ih_l0") == "bias_ih_l0" and bias_of("weights.w") is None
    shapes = {"weight": (5, 4), "bias": (5,)}
    assert layer_of("weight", (1, 5, 5), shapes) == LayerWeights("weight", "bias", (1, 5, 5))
    shapes = {"weight": (4, 5), "bias": (5,)}  # inputs first, of the same sizes
    assert layer_of("weight", (1, 5, 5), shapes) == LayerWeights(
        "weight", "bias", (1, 5, 5), below=True
    )
    assert layer_of("weight", (1, 4, 5), shapes) == LayerWeights("weight", None, (1, 4, 5))
    assert layer_of("weight", (1, 6, 5), shapes) is None
    bias, factor = DenseBlock(torch.ones(2, 3)), torch.full((2, 1, 4, 3), 0.25)
    assert belongs(bias, factor).tolist() == [True, True]
    assert belongs(bias.scale(torch.tensor([1.0, 1.001])), factor).tolist() == [True, False]
    assert belongs(bias, factor[..., :2]).tolist() == [False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_is_told_in_any_precision(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    factor = torch.randn(3, 2, 300, 4, generator=draw).to(dtype)
    right = factor.sum(2).flatten(1)
    for bias, same in ((right, True), (right.roll(1, 0), False), (right.flip(1), False)):
        assert belongs(DenseBlock(bias), factor).tolist() == [same] * 3
    assert belongs(DenseBlock(right * 0.5), factor).tolist() == [False] * 3
    assert belongs(DenseBlock(torch.full_like(right, torch.nan)), factor).tolist() == [True] * 3


def test_the_split_is_tried_with_a_basis() -> None:
    assert depends_on_split(reducer("ekfac")) is None
    made = reducer("ekfac")
    earlier = made.earlier
    assert earlier is not None

    def last_part_only(found: Mapping[str, Tensor]) -> Reducer:
        return earlier.given(found)._replace(merge=lambda a, b: b)

    wrong = made._replace(earlier=earlier._replace(given=last_part_only))
    assert depends_on_split(wrong) == "weight.eigenvalues"


def test_the_faster_program_decomposes_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = numbers(70, 60)
    matrix = (rows.T @ rows)[None]
    monkeypatch.setattr(eigen, "_LARGE", 32)
    monkeypatch.setattr(eigen, "_MEASURED", 32)
    seconds = iter([2.0, 1.0])  # of torch, of NumPy

    def timed(run: Any, device: torch.device) -> tuple[float, Any]:
        return next(seconds), run()

    with Tuner(timed=timed).active() as tuner:
        first, again = eigenvectors(matrix), eigenvectors(matrix)
    assert [one.variant for one in tuner.chosen.values()] == ["numpy"]
    np.testing.assert_array_equal(first[0], np.linalg.eigh(matrix[0].numpy())[1])
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(eigenvectors(matrix), torch.linalg.eigh(matrix)[1])


@pytest.mark.parametrize("rank", [90, 600])
@pytest.mark.parametrize("dead", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_eigenvectors_of_large_matrices(rank: int, dead: int, dtype: torch.dtype) -> None:
    """Of low rank, with sizes over six decades; zero rows hide the rank from a decomposition."""
    torch.manual_seed(0)
    rows = torch.randn(600, rank, dtype=dtype) * torch.logspace(0, -6, rank, dtype=torch.float64)
    rows[:dead] = 0.0
    matrix = rows @ rows.mH
    vectors = eigenvectors(matrix[None])[0]
    size = float(torch.linalg.matrix_norm(matrix, 2))
    torch.testing.assert_close(
        vectors.mH @ vectors, torch.eye(600, dtype=dtype), rtol=0, atol=1e-12
    )
    inside = vectors.mH @ matrix @ vectors
    off = inside - torch.diag(inside.diagonal())
    assert float(off.abs().max()) < 1e-13 * size
    wanted = torch.linalg.eigvalsh(matrix)
    found = inside.diagonal().real.sort().values
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13 * size)


def test_batches_are_added_in_place_as_they_are_merged() -> None:
    made = reducer("kfac:bias=column,full=3")
    assert made.add is not None
    short = DenseBlock(torch.arange(18.0, dtype=torch.float64).reshape(6, 3))
    table = DenseBlock(torch.arange(36.0, dtype=torch.float64).reshape(6, 3, 2))
    every = [
        Gradients({**one, "short": short, "table": table})
        for one in (pair(), pair(last=1.0), pair())
    ]
    added: dict[str, Tensor] = {}
    for gradients in every:
        added = made.add(gradients, added)
    first, second, third = (made.start(gradients) for gradients in every)
    merged = made.merge(made.merge(first, second), third)
    assert added.keys() == merged.keys()
    for key, value in merged.items():
        torch.testing.assert_close(added[key], value)
    other = Gradients({"more": every[0]["l.weight"], **every[0]})
    with pytest.raises(UnsupportedError, match="in some batches only"):
        made.add(other, added)


def test_factors_of_a_file_have_one_basis_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that read one file are merged, so no measured time may choose their basis."""

    def fail(*_: object) -> None:
        raise AssertionError("the time was measured")

    monkeypatch.setattr(eigen, "_decomposed", fail)
    monkeypatch.setattr(eigen, "_LARGE", 4)
    rows = torch.randn(20, 6, dtype=torch.float64)
    stored = {"w.A": rows.mT @ rows, "w.B": torch.eye(2, dtype=torch.float64)}
    found = bases_of(stored, "factors.h5")["w"].a[0]
    assert torch.equal(found, torch.linalg.eigh(stored["w.A"])[1])
    with pytest.raises(AssertionError, match="measured"):
        bases_of(stored)


@pytest.mark.parametrize("chain", ["kfac:bias=column", "ekfac:with=stored"])
def test_states_are_joined_in_place(chain: str) -> None:
    """The result is that of new states, and the tensors of the second state stay."""
    draw = torch.Generator().manual_seed(0)
    batches = [
        Gradients({"w": OuterBlock.matrix(*(torch.randn(4, 3, f, generator=draw) for f in (5, 6)))})
        for _ in range(4)
    ]
    made = reducer("kfac:bias=column")
    if chain.startswith("ekfac"):
        first = made.result(made.start(batches[0]))
        given = bind("ekfac").reducer
        assert given is not None and given.earlier is not None
        made = given.earlier.given({**first})
    total = Accumulator({0: made})
    apart = Accumulator({0: made._replace(join=None)})
    places: list[dict[str, int]] = []
    for gradients in batches:
        total.add({0: made.start(gradients)})
        apart.add({0: made.start(gradients)})
        places.append({k: v.data_ptr() for k, v in total.states[0].items() if "w" in k})
    assert total.states[0].keys() == apart.states[0].keys()
    large = [key for key in places[0] if key.partition(":")[0] in ("a", "b", "moments")]
    assert large and all(place[key] == places[0][key] for key in large for place in places)
    torch.testing.assert_close(total.result(0), apart.result(0))
