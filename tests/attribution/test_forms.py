"""The forms of scores and the losses of queries, against dense formulas and loops in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.attribution.curvature import ekfac_curvature, kfac_curvature
from gradscope.attribution.methods import Form, Method
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import load
from gradscope.errors import GradscopeError, OutputError
from gradscope.run import prepare
from tests.attribution.test_scoring import LAMBDA, M, N, Place, Rows, close, rows_of, whole
from tests.cli.conftest import Gradscope

FORMS: tuple[Any, ...] = get_args(Form)
MEASURES = """
def true_probability(outputs, targets):
    return -outputs.softmax(1).gather(1, targets[:, None])[:, 0]
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "measures.py").write_text(MEASURES)
    return Place(tmp_path)


def formed(form: str, train: Rows, query: Rows, inverse: Rows) -> Rows:
    """Scores (M, N) by a dense inverse (P, P)."""
    n = len(train)
    scores: Rows = query @ inverse @ train.T / n
    own, own_query = (np.diag(rows @ inverse @ rows.T) / n for rows in (train, query))
    if form != "influence":
        scores = scores / np.sqrt(own)
    return scores / np.sqrt(own_query)[:, None] if form == "cosine" else scores


def damped(blocks: list[Rows], relative: float, most: int) -> Rows:
    """The inverse of a block diagonal matrix, λ relative to the mean eigenvalue of each block."""
    size = sum(map(len, blocks))
    found, start = np.zeros((size, size)), 0
    for block in blocks:
        damping = relative * np.trace(block) / min(most, len(block))
        part = slice(start, start + len(block))
        found[part, part] = np.linalg.inv(block + damping * np.eye(len(block)))
        start += len(block)
    return found


def inverse_of(curvature: str, place: Place, damping: float = LAMBDA) -> Rows:
    """The inverse of the damped curvature as a dense matrix (P, P)."""
    path = place.result("train", "identity", "ekfac", "kfac:bias=column", name="dense")
    rows = rows_of(path)
    g = whole(rows)
    n, size = g.shape
    if curvature == "identity":
        return np.eye(size)
    if curvature == "fisher":
        return damped([g.T @ g / n], damping, n)
    if curvature == "blockfisher":
        layers = [np.concatenate([rows[f"{k}.weight"], rows[f"{k}.bias"]], 1) for k in (0, 2)]
        return damped([r.T @ r / n for r in layers], damping, n)
    moments = {name: np.square(r).mean(0) for name, r in rows.items()}
    if curvature in ("diagonal", "adam"):
        power = 1.0 if curvature == "diagonal" else 0.5
        each = [m**power for m in moments.values()]
        return np.diag(np.concatenate([1 / (m + damping * m.mean()) for m in each]))
    shapes = prepare(load(place.run_file("train"))).shapes
    units = torch.eye(size, dtype=torch.float64).split([np.prod(s) for s in shapes.values()], 1)
    pairs = zip(shapes.items(), units, strict=True)
    eye = Gradients({k: DenseBlock(v.reshape(-1, *shape)) for (k, shape), v in pairs})
    make, chain = (kfac_curvature, 2) if curvature == "kfac" else (ekfac_curvature, 1)
    with gradscope.open(path) as file:
        factors = {k: torch.tensor(v[...]) for k, v in file.chains[chain].items()}
    applied = make(factors, damping).apply(eye, torch.float64)
    found: Rows = torch.cat([v.flatten(1) for v in applied.values()], 1).numpy()
    if curvature in ("shrunk", "mean"):
        share = 0.95
        if curvature == "mean":
            directions = max(1.0, np.trace(g @ found @ g.T) / n**2) ** 1.5  # for each sample
            share = 2 / 3 * directions / (1 + 2 / 3 * directions)
        with_fisher = np.linalg.inv((1 - share) * g.T @ g / n + share * np.linalg.inv(found))
        if curvature == "shrunk":
            return with_fisher
        own = [np.trace(g @ inverse @ g.T) for inverse in (found, with_fisher)]
        found = (found + own[0] / own[1] * with_fisher) / 2
    return found


@pytest.mark.parametrize("curvature", [k for k in get_args(Method) if k != "auto"])
def test_each_form_and_curvature_is_the_dense_formula(place: Place, curvature: Any) -> None:
    inverse = inverse_of(curvature, place)
    train, query = place.result("train"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    computed = place.run_file("train", batch=11), place.folder / "query.npz"
    for form in FORMS:
        for sides in ((train, query), computed):
            found = gradscope.attribute(*sides, curvature, LAMBDA, score=form)
            close(found.values, formed(form, g, q, inverse), 1e-8)
            assert found.record["score"] == form
        if form != "influence":
            own = np.diag(g @ inverse @ g.T) / N
            close(found.samples["self_influence"], own, 1e-8)
    both = gradscope.attribute(train, train, curvature, LAMBDA, score="cosine")
    close(np.diag(both.values), np.ones(N), 1e-7)
    assert np.abs(both.values).max() < 1 + 1e-7


@pytest.mark.parametrize(("damping", "raised"), [(LAMBDA, False), (1e-4, True)])
def test_the_share_of_ekfac_rises_with_the_directions(
    place: Place, damping: float, raised: bool
) -> None:
    """More directions than samples: EK-FAC's share of the mean is more than 0.4."""
    train, query = place.result("train"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    inverse = inverse_of("mean", place, damping)
    for form in FORMS:
        found = gradscope.attribute(train, query, "mean", damping, score=form)
        close(found.values, formed(form, g, q, inverse), 1e-7)
        assert (found.record["checkpoints"][0]["share"] > 0.42) == raised


@pytest.mark.parametrize("curvature", ["fisher", "blockfisher"])
@pytest.mark.parametrize("form", ["relative", "cosine"])
def test_forms_of_short_rows_and_of_projections(place: Place, form: Any, curvature: Any) -> None:
    """Rows shorter than the number of samples are inverted by their moments."""
    chain = "project:dim=6,kind=rademacher,per=parameter"
    train, query = place.result("train", chain), place.result("query", chain)
    g, q = rows_of(train), rows_of(query)
    layers = [list(g)] if curvature == "fisher" else [list(g)[:2], list(g)[2:]]
    rows = [np.concatenate([g[k] for k in layer], 1) for layer in layers]
    inverse = damped([r.T @ r / N for r in rows], LAMBDA, N)
    found = gradscope.attribute(train, query, curvature, LAMBDA, score=form)
    close(found.values, formed(form, whole(g), whole(q), inverse))


class Waves(nn.Module):
    """Samples (n, 3) -> (n, 2), by one complex and one real parameter."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.complex = nn.Parameter(torch.randn(3, generator=draw, dtype=torch.cdouble))
        self.real = nn.Parameter(torch.randn(2, generator=draw, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        wave = (x * self.complex).sum(1)
        return torch.stack([wave.real + self.real[0], wave.abs() * self.real[1]], 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("curvature", ["fisher", "blockfisher"])
def test_short_rows_of_complex_parameters(curvature: Any, form: Any) -> None:
    """A complex entry counts as two real ones, in the Fisher as in the products."""
    x, y = (torch.randn(30, k, dtype=torch.double) for k in (3, 2))
    scope = gradscope.Scope(Waves(), "mse")
    pair, single = scope.per_sample_gradients(x, y).values()
    blocks = [torch.view_as_real(pair).flatten(1).numpy(), single.numpy()]
    g = np.concatenate(blocks, 1)
    blocks = [g] if curvature == "fisher" else blocks
    inverse = damped([b.T @ b / 30 for b in blocks], LAMBDA, 30)
    train, query = (scope, x, y), (scope, x[:4], y[:4])
    found = gradscope.attribute(train, query, curvature, LAMBDA, score=form)
    close(found.values, formed(form, g, g[:4], inverse))


def test_without_damping_the_cosine_is_of_the_pseudo_inverse(place: Place) -> None:
    few = {k: v[:6] for k, v in np.load(place.folder / "train.npz").items()}
    np.savez(place.folder / "few.npz", **few)
    train, query = place.result("few"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    inverse = np.linalg.pinv(g.T @ g / len(g), rcond=1e-12)
    found = gradscope.attribute(train, query, "fisher", 0.0, score="cosine")
    close(found.values, formed("cosine", g, q, inverse), 1e-6)


def test_shards_have_the_scores_of_the_whole(place: Place, command: Gradscope) -> None:
    run, query = place.run_file("train", batch=5), place.result("query")
    merged = place.folder / "merged.h5"
    for k in (0, 1):
        words = ["compute", "--config", run, "--shard", f"{k}/2", "-o", merged]
        assert command(*words).code == 0
    shards = sorted(place.folder.glob("merged.shard-*.h5"))
    assert command("merge", *shards, "-o", merged).code == 0
    wanted = gradscope.attribute(place.result("train"), query, "ekfac", LAMBDA, score="cosine")
    found = gradscope.attribute(merged, query, "ekfac", LAMBDA, score="cosine")
    close(found.values, wanted.values[...], 1e-9)


@pytest.mark.parametrize("curvature", ["identity", "fisher", "shrunk", "ekfac", "diagonal"])
@pytest.mark.parametrize("form", ["relative", "cosine"])
def test_a_zero_gradient_has_the_score_zero_and_a_tiny_one_keeps_its_cosine(
    form: Any, curvature: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    train, query = torch.randn(40, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    train[3] = query[1] = 0  # (p - y) xᵀ is zero
    train[5], train[6] = 1e-9 * train[4], 0 * train[4]
    sides = [
        (gradscope.Scope(model, "mse"), x, torch.ones(len(x), 3).double()) for x in (train, query)
    ]
    found = gradscope.attribute(*sides, curvature, LAMBDA, score=form)
    assert not found.values[:, [3, 6]].any() and not found.values[1].any()
    assert np.isfinite(found.values).all()
    small = found.values[[0, 2, 3, 4]]
    assert (small[:, [4, 5]] != 0).all()
    own = gradscope.attribute(sides[0], sides[0], curvature, LAMBDA, score="cosine").values
    assert own[5, 5] == pytest.approx(1, abs=1e-5) and own[4, 4] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("curvature", ["identity", "ekfac", "diagonal", "shrunk"])
def test_float32_does_not_round_small_gradients_to_zero(curvature: Any) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 3, bias=False), torch.randn(10, 4)
    inputs[1] = 1e-25 * inputs[0]
    side = gradscope.Scope(model, "cross_entropy"), inputs, torch.randint(3, (10,))
    found = gradscope.attribute(side, side, curvature, LAMBDA, score="cosine")
    np.testing.assert_allclose(np.diag(found.values), 1, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_are_normalised_one_by_one_and_then_added_up(place: Place, form: Any) -> None:
    weights = [0.3, -0.7]
    wanted = np.zeros((M, N))
    for k, weight in enumerate(weights):
        rows = [
            whole(rows_of(place.result(side, weights=f"w{k}", name=f"{side}{k}")))
            for side in ("train", "query")
        ]
        wanted += weight * formed(form, *rows, np.eye(rows[0].shape[1]))
    runs = [place.run_file("train", weights=f"w{k}") for k in (0, 1)]
    how: dict[str, Any] = {"checkpoints": runs[1:], "weights": weights, "score": form}
    found = gradscope.attribute(runs[0], place.folder / "query.npz", "identity", **how)
    close(found.values, wanted)


@pytest.mark.parametrize("form", ["relative", "cosine"])
def test_refined_scores_have_the_form(place: Place, form: Any) -> None:
    chain = "project:dim=12,kind=rademacher"
    sides = [place.result(side, chain, name="short") for side in ("train", "query")]
    found = gradscope.attribute(*sides, "kfac", LAMBDA, refine=4, score=form)
    full = gradscope.attribute(
        place.result("train"), place.result("query"), "kfac", LAMBDA, score=form
    )
    for q in range(M):
        exact = full.row(q)[found.refined["places"][q]]
        np.testing.assert_allclose(found.refined["scores"][q], exact, rtol=1e-7)


def test_a_sample_without_a_finite_gradient_has_no_score(place: Place) -> None:
    data = dict(np.load(place.folder / "train.npz"))
    kept = np.arange(N) != 4
    np.savez(place.folder / "clean.npz", **{k: v[kept] for k, v in data.items()})
    data["inputs"][4] = np.nan
    np.savez(place.folder / "train.npz", **data)
    query = place.result("query")
    for curvature in ("identity", "fisher", "ekfac"):
        how: Any = (query, curvature, LAMBDA)
        wanted = gradscope.attribute(place.result("clean"), *how, score="cosine")
        found = gradscope.attribute(place.result("train"), *how, score="cosine")
        close(found.values[:, kept], wanted.values, 1e-8)
        assert np.isnan(found.values[:, 4]).all()


def gradients_of(place: Place, measure: Callable[[Tensor, Tensor], Tensor]) -> Rows:
    """The gradients (M, P) of a measurement of single queries, by a loop over autograd."""
    model = prepare(load(place.run_file("train"))).session.problem.model
    data = np.load(place.folder / "query.npz")
    inputs, targets = torch.tensor(data["inputs"]), torch.tensor(data["targets"])
    rows = []
    for k in range(M):
        value = measure(model(inputs[k : k + 1])[0], targets[k])
        each = torch.autograd.grad(value, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in each]))
    return torch.stack(rows).numpy()


def less_the_margin(z: Tensor, y: Tensor) -> Tensor:
    others = torch.cat([z[:y], z[y + 1 :]])
    return others.logsumexp(0) - z[y]


def less_the_probability(z: Tensor, y: Tensor) -> Tensor:
    return -z.softmax(0)[y]


MEASURED = [("margin", less_the_margin), ("measures.py:true_probability", less_the_probability)]


@pytest.mark.parametrize(("name", "measure"), MEASURED)
@pytest.mark.parametrize(("curvature", "form"), [("identity", "influence"), ("fisher", "cosine")])
def test_queries_are_measured_by_their_own_loss(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    measure: Any,
    curvature: Any,
    form: Any,
) -> None:
    monkeypatch.chdir(place.folder)
    train = place.result("train")
    g, q = whole(rows_of(train)), gradients_of(place, measure)
    wanted = formed(form, g, q, inverse_of(curvature, place))
    how: dict[str, Any] = {"score": form, "query_loss": name}
    for query in (place.folder / "query.npz", place.run_file("query", batch=3)):
        for side in (train, place.run_file("train")):
            found = gradscope.attribute(side, query, curvature, LAMBDA, **how)
            close(found.values, wanted)
            assert found.record["query"]["loss"]["name"].endswith(name)
            assert found.record["train"]["loss"]["name"] == "cross_entropy"


def test_scopes_measure_queries_by_a_function(place: Place) -> None:
    model = prepare(load(place.run_file("train"))).session.problem.model
    scope = gradscope.Scope(model, "cross_entropy", backend="vmap", seed=3)
    data = [np.load(place.folder / f"{name}.npz") for name in ("train", "query")]
    sides = [(scope, torch.tensor(d["inputs"]), torch.tensor(d["targets"])) for d in data]

    def true_probability(outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.softmax(1).gather(1, targets[:, None])[:, 0]

    g = whole(rows_of(place.result("train")))
    for loss, (_, measure) in zip(("margin", true_probability), MEASURED, strict=True):
        found = gradscope.attribute(*sides, "identity", query_loss=loss)
        close(found.values, gradients_of(place, measure) @ g.T / N)
    other = scope.with_loss("margin")
    assert other.session.settings == scope.session.settings
    assert scope.problem.loss is not other.problem.loss


def test_a_sample_with_a_positive_score_lowers_the_measurement(place: Place) -> None:
    """A small step against a training sample's gradient changes the margin by minus the product."""
    train, query = place.run_file("train"), place.folder / "query.npz"
    found = gradscope.attribute(train, query, "identity", query_loss="margin")
    model = prepare(load(train)).session.problem.model
    data = {k: np.load(place.folder / f"{k}.npz") for k in ("train", "query")}
    best = found.helpful(0, 1)
    inputs, targets = (torch.tensor(data["train"][k][best.places]) for k in ("inputs", "targets"))
    z, y = torch.tensor(data["query"]["inputs"][:1]), int(data["query"]["targets"][0])
    before = less_the_margin(model(z)[0], torch.tensor(y)).item()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-4 * parameter.grad
    after = less_the_margin(model(z)[0], torch.tensor(y)).item()
    assert best.scores[0] > 0 and before - after == pytest.approx(
        1e-4 * N * best.scores[0], rel=1e-2
    )


def test_the_command_gives_the_numbers_of_python_and_says_what_they_are(
    place: Place, command: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("COLUMNS", "400")
    train = place.result("train")
    options = ["--curvature", "ekfac", "--damping", LAMBDA, "--score", "cosine"]
    measured = ["--query-loss", "measures.py:true_probability"]
    how: dict[str, Any] = {"score": "cosine", "query_loss": measured[1]}
    wanted = gradscope.attribute(train, "query.npz", "ekfac", LAMBDA, **how)
    for more in ([], ["--stream"]):
        path = f"scores{len(more)}.h5"
        done = command("attribute", train, "query.npz", *options, *measured, *more, "-o", path)
        assert done.code == 0, done.err
        with gradscope.open(path) as file:
            close(file.chains[0]["scores"], wanted.values, 1e-9)
    shown = " ".join(command("stats", "scores0.h5").out.split())
    assert (
        "unit the cosine, from -1 to 1, of the gradients of the query and of the training sample, "
        "in the metric of the inverse curvature: positive helps, negative harms" in shown
    )
    assert "query loss measures.py:true_probability, not the training loss cross_entropy" in shown
    document = json.loads(command("stats", "scores0.h5", "--json").out)
    assert document["record"]["score"] == "cosine"
    page = place.folder / "view.html"
    query = place.result("query")
    assert command("view", query, "--scores", "scores0.h5", "-o", page).code == 0
    assert "the cosine, from -1 to 1" in page.read_text()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--score", "cos"], 2,
         "error: --score: found 'cos'\nAccepted: influence, relative or cosine.\n"),
        (["--query-loss", "margin:ignore=1"], 2,
         "error: loss: 'margin' has no argument 'ignore'\n  margin:ignore=1\n  ^\n"
         "Did you mean 'ignore_index'? Supported: ignore_index, per_sample.\n"),
        (["--query-loss", "measures.py:none"], 3,
         "error: loss {folder}/measures.py:none: there is no 'none' in it\n"
         "Supported: true_probability.\n"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_error(
    place: Place,
    command: Gradscope,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    told: str,
) -> None:
    monkeypatch.chdir(place.folder)
    found = command("attribute", place.result("train"), "query.npz", *words)
    assert (found.code, found.err) == (code, told.format(folder=place.folder))


def test_what_does_not_go_together_is_refused(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (query, {"score": "cos"},
         "unknown score 'cos'\nDid you mean 'cosine'? Supported: influence, relative, cosine."),
        (query, {"query_loss": "margin"},
         f"{query}: `query_loss` does not apply to a result file, whose gradients are computed\n"
         "Leave `query_loss` out, or give the data or a run file of the queries."),
        (place.folder / "query.npz", {"query_loss": less_the_margin},
         f"{place.folder}/query.npz: `query_loss` is a function, and the queries are in a file\n"
         "Name the function as FILE.py:FUNCTION, or give (scope, inputs, targets)."),
    ]  # fmt: skip
    for other, how, told in wrong:
        with pytest.raises(GradscopeError) as caught:
            gradscope.attribute(train, other, "identity", **how)
        assert str(caught.value) == told


def test_a_stopped_attribution_of_another_form_is_not_resumed(place: Place) -> None:
    from gradscope.attribution import AttributionSettings, Scoring, open_sources, writing_scores

    train, query, path = place.result("train"), place.result("query"), place.folder / "s.h5"
    with open_sources(train, query) as pairs:
        for form, resume in (("cosine", False), ("relative", True)):
            asked = AttributionSettings("identity", memory=1, score=form)  # type: ignore[arg-type]
            scoring = Scoring(pairs, asked)
            if resume:
                with (
                    pytest.raises(OutputError, match="score"),
                    writing_scores(scoring, path, resume=True),
                ):
                    pass
            else:
                with writing_scores(scoring, path) as writer:
                    next(writer.remaining())
