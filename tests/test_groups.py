"""Rows of groups: every backend against a float64 loop over samples, summed by id."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope import Scope
from gradscope.blocks import DenseBlock
from gradscope.core.batch import Batch
from gradscope.errors import CertificateError, GradscopeError, SpecError, UnsupportedError
from tests.cases import INDEPENDENT, Case
from tests.oracle import cross_entropy, per_sample_gradients

BACKENDS = ("loop", "hooks", "vmap", "expand")
IDS = ["b", "a", "b", "é", "b"]  # in scrambled order, of unequal sizes
SCRAMBLED = [7, -2, 7, 3, 7, 7, -2, 9, 7, 3, 7, 7, 9]  # sizes 2, 2, 7, 2


def sums(rows: Tensor, ids: Sequence[Any]) -> Tensor:
    """Return the sum (g, ...) of the rows of each id, in ascending order of ids."""
    names, own = np.unique(np.asarray(ids), return_inverse=True)
    found = np.zeros((len(names), *rows.shape[1:]), rows.numpy().dtype)
    np.add.at(found, own, rows.numpy())
    return torch.from_numpy(found)


def close(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    size = max(float(rows.abs().max()) for rows in right.values())
    for name, rows in right.items():
        torch.testing.assert_close(found[name].detach(), rows, rtol=1e-7, atol=1e-9 * size)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case",
    [case for case in INDEPENDENT if case.name != "loss_reaches_no_parameter"],
    ids=lambda case: case.name,
)
def test_a_row_is_the_sum_of_its_samples(case: Case) -> None:
    """For 96 models; norms and sums come from blocks without formed gradients."""
    model, loss, inputs, targets = case.build()
    n = len(Batch.of(inputs, targets))
    ids = SCRAMBLED[:n] if n != len(IDS) else IDS
    _, rows = per_sample_gradients(model, loss, inputs, targets)
    right = {name: sums(value, ids) for name, value in rows.items()}
    flat = torch.cat([r.reshape(len(r), -1).abs() for r in right.values()], 1)
    ran = 0
    for backend in BACKENDS:
        with Scope(model, loss, backend=backend, group=ids) as scope:
            try:
                close(scope.per_sample_gradients(inputs, targets), right)
            except UnsupportedError:
                continue
            ran += 1
            found = scope.norms(inputs, targets)
            torch.testing.assert_close(found.detach(), flat.norm(dim=1), rtol=1e-6, atol=1e-9)
            squared = scope.expectation("square | sum", inputs, targets)
            close(squared, {name: r.abs().square().sum(0) for name, r in right.items()})
    assert ran


def network() -> nn.Module:
    """A convolution, norm and linear layers: blocks of several kinds."""
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 3, groups=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 5)
    return nn.Sequential(*layers).double()


def data(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 3, 8, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(5, (n,), generator=draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_clipping_acts_on_groups(backend: str, reduction: str) -> None:
    """DP-SGD for users: the gradient of a user is clipped, then users are summed."""
    model, (inputs, targets) = network(), data(13)
    _, rows = per_sample_gradients(model, cross_entropy, inputs, targets)
    flat = sums(torch.cat([r.flatten(1) for r in rows.values()], 1), SCRAMBLED).numpy()
    if reduction == "mean":
        flat = flat / np.unique(SCRAMBLED, return_counts=True)[1][:, None]
    bound = np.median(np.linalg.norm(flat, axis=1))
    clipped = flat * np.minimum(1, bound / np.linalg.norm(flat, axis=1))[:, None]
    options: dict[str, Any] = {"group": SCRAMBLED, "group_reduction": reduction}
    scope = Scope(model, "cross_entropy", backend=backend, **options)
    found = scope.expectation(f"clip:max_norm={bound} | sum", inputs, targets)
    ours = torch.cat([value.flatten() for value in found.values()])
    np.testing.assert_allclose(ours.detach().numpy(), clipped.sum(0), rtol=1e-9, atol=1e-12)
    norms = scope.norms(inputs, targets).detach().numpy()
    np.testing.assert_allclose(norms, np.linalg.norm(flat, axis=1), rtol=1e-9)
    each = scope.norms(inputs, targets, per="parameter")
    start = 0
    for name, value in each.items():
        part = flat[:, start : start + rows[name][0].numel()]
        start += part.shape[1]
        np.testing.assert_allclose(value.detach().numpy(), np.linalg.norm(part, axis=1), rtol=1e-8)


def test_ids_of_all_kinds_and_parts_of_the_data() -> None:
    """Groups come in ascending order of their ids; `index` selects the ids of the samples."""
    model, (inputs, targets) = network(), data(13)
    gradients = gradscope.per_sample_gradients(model, "cross_entropy", inputs, targets)
    texts = [f"user {k}" for k in SCRAMBLED]
    kinds: list[Any] = [SCRAMBLED, torch.tensor(SCRAMBLED), np.array(SCRAMBLED, np.int8)]
    kinds += [np.array(SCRAMBLED, np.float64), np.array(SCRAMBLED, object)]
    kinds += [texts, np.array(texts), np.array(texts, object), np.array(texts).astype("S")]
    for ids in kinds:
        with Scope(model, "cross_entropy", group=ids) as scope:
            close(
                scope.per_sample_gradients(inputs, targets),
                {name: sums(rows, np.asarray(ids)) for name, rows in gradients.items()},
            )
            names, sizes = scope.groups(inputs, targets)
            right = np.unique(np.asarray(ids), return_counts=True)
            assert [str(n) for n in names] == [
                k.decode() if isinstance(k, bytes) else str(k).removesuffix(".0")
                for k in right[0].tolist()
            ]
            assert sizes.tolist() == right[1].tolist()
            some = torch.tensor([12, 0, 5, 3])
            part = scope.per_sample_gradients(inputs[some], targets[some], index=some)
            own = np.asarray(ids)[some.numpy()]
            close(part, {name: sums(rows[some], own) for name, rows in gradients.items()})


@pytest.mark.parametrize("ids", [[4] * 13, [*range(13)]], ids=["one group", "groups of one"])
def test_one_group_and_groups_of_one(ids: list[int]) -> None:
    model, (inputs, targets) = network(), data(13)
    gradients = gradscope.per_sample_gradients(model, "cross_entropy", inputs, targets)
    with Scope(model, "cross_entropy", group=ids) as scope:
        found = scope.per_sample_gradients(inputs, targets)
        close(found, {name: sums(rows, ids) for name, rows in gradients.items()})
        out = {name: torch.full_like(rows, torch.nan) for name, rows in found.items()}
        again = scope.per_sample_gradients(inputs, targets, out)
        assert all(again[name].data_ptr() == out[name].data_ptr() for name in out)
        close(out, {name: rows.detach() for name, rows in found.items()})


def test_an_empty_batch_has_no_group() -> None:
    scope = Scope(network(), "cross_entropy", group=SCRAMBLED)
    inputs, targets = data(0)
    none = torch.zeros(0, dtype=torch.int64)
    assert scope.norms(inputs, targets, index=none).shape == (0,)
    assert scope.per_sample_gradients(inputs, targets, index=none)["0.weight"].shape == (0, 4, 3, 3)


def test_large_groups_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscope.scope._STREAMED", 4)
    model, (inputs, targets) = network(), data(13)
    scope = Scope(model, "cross_entropy", group=SCRAMBLED)
    assert [len(part) for part in scope.parts(Batch.of(inputs, targets))] == [2, 1, 1]
    gradients = gradscope.per_sample_gradients(model, "cross_entropy", inputs, targets)
    rows = torch.cat([sums(g, SCRAMBLED).flatten(1) for g in gradients.values()], 1)
    torch.testing.assert_close(scope.norms(inputs, targets), rows.norm(dim=1))
    assert scope.certificate is not None
    assert scope.certificate.samples == 4


def test_a_sample_without_a_finite_gradient_takes_its_group_with_it() -> None:
    model, (inputs, targets) = network(), data(13)
    inputs[1] = torch.inf
    ids = np.array(SCRAMBLED)
    scope = Scope(model, "cross_entropy", group=ids)
    assert scope.norms(inputs, targets).isfinite().tolist() == [False, True, True, True]
    with pytest.warns(gradscope.scope.NonFiniteWarning):
        found = scope.expectation("sum", inputs, targets)
    kept = torch.from_numpy(ids != -2)
    right = gradscope.expectation(model, "cross_entropy", "sum", inputs[kept], targets[kept])
    close(found, right)


def test_the_proof_finds_members_in_a_wrong_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, targets) = network(), data(13)

    def exchanged(block: Any, sizes: Tensor) -> DenseBlock:
        rows = block.dense()[torch.arange(block.n).roll(1)]
        return DenseBlock(torch.stack([part.sum(0) for part in rows.split(sizes.tolist())]))

    monkeypatch.setattr("gradscope.blocks.groups.grouped", exchanged)
    with pytest.raises(CertificateError) as raised:
        Scope(model, "cross_entropy", backend="loop", group=SCRAMBLED).norms(inputs, targets)
    assert raised.value.what == (
        "the loop backend is inconsistent: the gradients of groups are not the sums of their "
        "members'"
    )


class Documents(nn.Module):
    """Words and a head: the positions of a packed sequence are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.words(words)).tanh())
        return found


def of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss for each position (n, t)."""
    return nn.functional.cross_entropy(outputs.mT, targets, reduction="none")


def of_counted_words(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, and which count: not those of padding."""
    return of_words(outputs, targets.clamp_min(0)), targets >= 0


DOCUMENTS = [[4, 4, 4, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, -1], [8, 8, 8, 8, 8, 8, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counted", [False, True], ids=["all positions", "padded"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_packed_documents_have_the_gradients_of_documents_alone(
    backend: str, counted: bool, reduction: str
) -> None:
    """Document 1 begins in one sequence and ends in the next."""
    torch.manual_seed(0)
    model, ids = Documents().double(), np.array(DOCUMENTS)
    words, targets = torch.randint(11, (2, 3, 7))
    if counted:
        targets[ids == -1] = -1
        names = [None if k == -1 else str(k) for k in ids.flatten()]  # padding has no document
        given: Any = np.array(names, object).reshape(3, 7)
    else:
        given = ids
    right: dict[str, list[Tensor]] = {}
    every = [k for k in np.unique(ids).tolist() if not (counted and k == -1)]
    for k in every:
        own = torch.from_numpy(ids == k)
        loss = of_words(model(words[own].unsqueeze(0)), targets[own].unsqueeze(0))
        loss = loss.sum() if reduction == "sum" else loss.mean()
        rows = torch.autograd.grad(loss, [*model.parameters()])
        for (name, _), row in zip(model.named_parameters(), rows, strict=True):
            right.setdefault(name, []).append(row)
    options: dict[str, Any] = {"group": given, "group_reduction": reduction, "rows": "token"}
    loss = of_counted_words if counted else of_words
    scope = Scope(model, loss, backend=backend, **options)
    stacked = {name: torch.stack(rows) for name, rows in right.items()}
    close(scope.per_sample_gradients(words, targets), stacked)
    names, sizes = scope.groups(words, targets)
    assert names == ([str(k) for k in every] if counted else every)
    assert sizes.tolist() == [int((ids == k).sum()) for k in every]
    norms = torch.cat([rows.flatten(1) for rows in stacked.values()], 1).norm(dim=1)
    torch.testing.assert_close(scope.norms(words, targets).detach(), norms)


def test_tokens_may_have_the_group_of_their_sample() -> None:
    torch.manual_seed(0)
    model = Documents().double()
    words, targets = torch.randint(11, (2, 3, 7))
    found = gradscope.per_sample_gradients(
        model, of_words, words, targets, rows="token", group=["y", "x", "y"]
    )
    each = gradscope.per_sample_gradients(model, lambda *g: of_words(*g).sum(1), words, targets)
    close(found, {name: sums(rows, ["y", "x", "y"]) for name, rows in each.items()})


NAN = float("nan")
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "None": (
        ["a", None, *["b"] * 11],
        {},
        "1 id of 13 is missing (None, NaN or empty): sample 1\n(group)\n"
        "Give these samples an id, or leave them out of the data.",
    ),
    "NaN": (
        [NAN, 1.0, NAN, 2.0, NAN, NAN, *[3.0] * 7],
        {},
        "4 ids of 13 are missing (None, NaN or empty): sample 0; sample 2; sample 4, ...",
    ),
    "empty": (["", *["b"] * 12], {}, "1 id of 13 is missing (None, NaN or empty): sample 0"),
    "fractions": ([0.5, *[1.0] * 12], {}, "found the id 0.5"),
    "infinity": ([float("inf"), *[1.0] * 12], {}, "found the id inf"),
    "dates": (np.full(13, "2026-01-01", "datetime64[D]"), {}, "found the id 2026-01-01"),
    "a mixture": ([1, "a", *[3] * 11], {}, "the ids are of type int, str"),
    "too few": (
        [1, 2, 3],
        {},
        "there are 3 ids for 13 samples",
    ),
    "of positions": (
        np.zeros((13, 4), int),
        {},
        "the ids have shape (13, 4), one id for each position of a sample, but a row is a sample",
    ),
    "no axis": (3, {}, "the ids have shape ()"),
    "of one process": (SCRAMBLED, {"labels": "sampled"}, "group cannot be combined with labels"),
    "own-loss": (SCRAMBLED, {"coupling": "own-loss"}, "group cannot be combined with coupling"),
    "reduction": (SCRAMBLED, {"group_reduction": "median"}, "unknown value 'median'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ids_are_refused(name: str) -> None:
    ids, options, message = WRONG[name]
    model, (inputs, targets) = network(), data(13)
    with pytest.raises(GradscopeError) as raised:
        Scope(model, "cross_entropy", group=ids, **options).norms(inputs, targets)
    assert str(raised.value.what).startswith(message.partition("\n")[0])


def test_ids_of_other_positions_than_the_loss() -> None:
    model, ids = Documents(), np.zeros((3, 7), int)
    words = torch.randint(11, (3, 7))
    with pytest.raises(GradscopeError) as raised:
        Scope(model, "causal_lm", group=ids, rows="token").norms(words, words)
    assert raised.value.what == "a sample has 7 ids, but the loss has 6 positions"


@pytest.mark.parametrize("chain", ["kfac", "ekfac"])
def test_chains_that_need_samples_are_refused(chain: str) -> None:
    model, (inputs, targets) = network(), data(13)
    with pytest.raises(GradscopeError) as raised:
        gradscope.expectation(model, "cross_entropy", chain, inputs, targets, group=SCRAMBLED)
    assert raised.value.where == "group"


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_backends_are_compared_on_groups(reduction: str) -> None:
    model, (inputs, targets) = network(), data(13)
    options: dict[str, Any] = {"group": SCRAMBLED, "group_reduction": reduction}
    stored = gradscope.per_sample_gradients(model, "cross_entropy", inputs, targets, **options)
    stored = {name: rows.detach() for name, rows in stored.items()}
    wrong = stored | {"3.bias": stored["3.bias"][[1, 0, 2, 3]]}
    found = gradscope.compare(
        model, "cross_entropy", inputs, targets, against={"a": stored, "b": wrong}, **options
    )
    status = {row.backend: row.status for row in found.rows}
    assert status == {**dict.fromkeys((*BACKENDS, "a"), "agrees"), "b": "disagrees"}
    assert found.groups == ("-2", "3", "7", "9")
    assert repr(found).startswith("Comparison of 4 groups in float64: DISAGREES")
    assert "groups are in another order" in str(found.rows[-1].reason)
    with pytest.raises(SpecError) as raised:
        gradscope.compare(
            model, "cross_entropy", inputs, targets, against={"own": lambda *_: {}}, **options
        )
    assert str(raised.value) == (
        "against: 'own' computes rows of samples, and the rows are groups\n"
        "Compare it without group. Or give its rows of groups as a stored result."
    )


def test_backends_are_compared_on_documents() -> None:
    model, words = Documents().double(), torch.randint(11, (3, 7))
    ids = np.array(DOCUMENTS)
    found = gradscope.compare(model, of_words, words, words, rows="token", group=ids)
    assert [row.status for row in found.rows] == ["agrees"] * 4
    assert found.samples == len(np.unique(ids))


def test_groups_work_with_dropout_graphs_and_earlier_passes() -> None:
    """Random numbers, and the nodes of a graph, are those of samples."""
    torch.manual_seed(0)
    _, own = np.unique(SCRAMBLED, return_inverse=True)
    inputs, targets = torch.randn(13, 8, dtype=torch.float64), torch.randint(3, (13,))
    layers = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)
    dropped = nn.Sequential(*layers).double().train()
    fixed: dict[str, Any] = {"randomness": "fixed"}
    some = torch.randperm(13)[:9]
    part = inputs[some], targets[some]
    each = Scope(dropped, "cross_entropy", **fixed).per_sample_gradients(*part, index=some)
    right = {name: sums(rows.detach(), own[some.numpy()]) for name, rows in each.items()}
    for backend in BACKENDS:
        scope = Scope(dropped, "cross_entropy", backend=backend, group=SCRAMBLED, **fixed)
        close(scope.per_sample_gradients(*part, index=some), right)
    matrix = torch.rand(13, 13, dtype=torch.float64)
    graph = (gradscope.Whole(inputs), gradscope.Whole(matrix))

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3).double()

        def forward(self, features: Tensor, matrix: Tensor) -> Tensor:
            return torch.mm(matrix, self.layer(features))

    nodes = Nodes()
    each = gradscope.per_sample_gradients(nodes, "cross_entropy", graph, targets)
    found = gradscope.per_sample_gradients(nodes, "cross_entropy", graph, targets, group=own)
    close(found, {name: sums(rows.detach(), own) for name, rows in each.items()})
    centred = gradscope.expectation(
        nodes, "cross_entropy", "center | square | mean", graph, targets, group=own
    )
    rows = {name: value.detach() for name, value in found.items()}
    close(centred, {name: value.var(0, correction=0) for name, value in rows.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_groups_in_low_precision(dtype: torch.dtype) -> None:
    model, (inputs, targets) = network().to(dtype), data(13)
    each = gradscope.per_sample_gradients(model, "cross_entropy", inputs.to(dtype), targets)
    scope = Scope(model, "cross_entropy", group=SCRAMBLED)
    for name, rows in scope.per_sample_gradients(inputs.to(dtype), targets).items():
        right = sums(each[name].detach().double(), SCRAMBLED)
        assert rows.dtype == dtype
        assert float((rows - right).norm()) <= 8 * torch.finfo(dtype).eps * float(right.norm())


def test_scores_of_groups_in_memory() -> None:
    model, (inputs, targets) = network(), data(13)
    plain = Scope(model, "cross_entropy")
    query = (plain, inputs[:3], targets[:3])
    found = gradscope.attribute(
        (Scope(model, "cross_entropy", group=SCRAMBLED), inputs, targets),
        query,
        curvature="identity",
    )
    each = gradscope.attribute((plain, inputs, targets), query, curvature="identity").values
    right = sums(torch.from_numpy(np.asarray(each)).T.contiguous(), SCRAMBLED).T.numpy()
    np.testing.assert_allclose(found.values, right, atol=1e-12)
    assert found.samples["id"].tolist() == [-2, 3, 7, 9]
    assert found.noun == "group"


def test_groups_have_no_positions() -> None:
    words = torch.randint(11, (3, 7))
    scope = Scope(Documents(), of_words, rows="token", group=np.array(DOCUMENTS))
    with pytest.raises(SpecError) as raised:
        scope.positions(words, words)
    assert str(raised.value) == ("the rows are groups, which have no position\nUse groups instead.")
    with pytest.raises(SpecError) as raised:
        Scope(Documents(), of_words, rows="token").groups(words, words)
    assert str(raised.value) == "the scope has no groups\nUse Scope(group=ids)."


def test_no_position_counts() -> None:
    words = torch.randint(11, (3, 7))
    ids = np.array(DOCUMENTS)
    scope = Scope(Documents(), of_counted_words, rows="token", group=ids)
    with pytest.raises(SpecError) as raised:
        scope.norms(words, torch.full_like(words, -1))
    assert raised.value.what == "no position of these samples counts towards the loss"
