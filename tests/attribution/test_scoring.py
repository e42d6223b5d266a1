"""Scores against dense inverses in float64, from rows, projections, runs and scopes."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gradscope
from gradscope.attribution import (
    AttributionSettings,
    Scores,
    Scoring,
    open_sources,
    sources,
    writing_scores,
)
from gradscope.attribution.curvature import Moments, along, ekfac_curvature
from gradscope.attribution.methods import Form, Method, layers_of
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import load
from gradscope.engine.session import Session
from gradscope.errors import GradscopeError, OutputError, ResultFileError, SpecError
from gradscope.run import compute, prepare

N, M, LAMBDA = 30, 7, 0.3
MODEL = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
"""
RUN = """
version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "{weights}.safetensors"
[dataset]
path = "{data}.npz"
[loss]
name = "cross_entropy"
[compute]
batch_size = {batch}
transform = {chains}
"""
Rows = np.ndarray[Any, Any]


class Place:
    """A folder with a model, two checkpoints, training samples and queries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        draw = np.random.default_rng(3)
        for name, n in (("train", N), ("query", M)):
            inputs, targets = draw.normal(size=(n, 5)), draw.integers(0, 3, n)
            np.savez(folder / f"{name}.npz", inputs=inputs, targets=targets)
        for k in (0, 1):
            torch.manual_seed(k)
            model = torch.nn.Sequential(
                torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
            ).double()
            save_file(model.state_dict(), folder / f"w{k}.safetensors")

    def run_file(
        self, data: str, *chains: str, weights: str = "w0", batch: int = 8, name: str = "run"
    ) -> Path:
        path = self.folder / f"{name}-{data}-{weights}-{batch}.toml"
        path.write_text(
            RUN.format(data=data, weights=weights, batch=batch, chains=list(chains or ["identity"]))
        )
        return path

    def result(self, data: str, *chains: str, name: str = "rows", **how: Any) -> Path:
        path = self.folder / f"{name}-{data}.h5"
        compute(prepare(load(self.run_file(data, *chains, **how))), path, overwrite=True)
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def rows_of(path: Path, chain: int = 0) -> dict[str, Rows]:
    with gradscope.open(path) as file:
        return {k: v[...].reshape(file.n, -1) for k, v in file.chains[chain].items()}


def whole(rows: dict[str, Rows]) -> Rows:
    return np.concatenate(list(rows.values()), 1)


def solved(train: Rows, query: Rows, relative: float) -> Rows:
    """(1/N) q (F + λ)⁻¹ Gᵀ by a dense inverse, λ relative to trace(F) / min(N, P)."""
    n = len(train)
    fisher = train.T @ train / n
    damping = relative * np.trace(fisher) / min(n, len(fisher))
    return query @ np.linalg.solve(fisher + damping * np.eye(len(fisher)), train.T) / n


def close(found: Any, wanted: Rows, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(found[...], wanted, rtol=0, atol=rtol * np.abs(wanted).max())


def test_identity_and_fisher_against_dense_inverses(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    close(gradscope.attribute(train, query, "identity").values, q @ g.T / N)
    found = gradscope.attribute(train, query, "fisher", LAMBDA)
    close(found.values, solved(g, q, LAMBDA))
    own = np.diag(solved(g, g, LAMBDA))
    close(found.samples["self_influence"], own)


def test_automatic_damping_keeps_the_newton_step_within_the_noise(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    found = gradscope.attribute(train, query, "fisher")
    relative = found.record["checkpoints"][0]["damping"]
    close(found.values, solved(g, q, relative), 1e-7)
    fisher, damping = g.T @ g / N, relative * np.trace(g.T @ g) / N**2
    step = np.linalg.solve(fisher + damping * np.eye(len(fisher)), g.mean(0))
    values = np.linalg.eigvalsh(g @ g.T / N)
    noise = np.square(values / (values + 0.5 * values.mean())).sum() / N
    assert relative > 0.5  # the model is not trained
    assert step @ fisher @ step == pytest.approx(2 * noise, rel=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac", "diagonal"])
def test_automatic_damping_is_the_same_from_files_and_runs(place: Place, curvature: Any) -> None:
    data = dict(np.load(place.folder / "train.npz"))
    data["targets"][:] = 1  # all gradients point one way
    np.savez(place.folder / "train.npz", **data)
    query = place.result("query")
    sides = (place.result("train"), place.run_file("train"), place.run_file("train", batch=11))
    each = [gradscope.attribute(train, query, curvature) for train in sides]
    for found in each:
        assert found.record["checkpoints"][0]["damping"] > 0.1
        close(found.values, each[0].values[...], 1e-7)


def test_a_fisher_of_each_layer_is_the_sum_over_layers(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    g, q = rows_of(train), rows_of(query)
    assert layers_of(g) == {
        "0.weight": "0.weight", "0.bias": "0.weight", "2.weight": "2.weight", "2.bias": "2.weight"
    }  # fmt: skip
    wanted = sum(
        solved(*(np.concatenate([r[f"{k}.weight"], r[f"{k}.bias"]], 1) for r in (g, q)), LAMBDA)
        for k in (0, 2)
    )
    close(gradscope.attribute(train, query, "blockfisher", LAMBDA).values, wanted)


def test_shrunk_is_between_fisher_and_ekfac(place: Place) -> None:
    """H = (1 − ρ) F + ρ T with T = EK-FAC + λ, as dense matrices in the parameters' order."""
    train, query = place.result("train", "identity", "ekfac"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    found = gradscope.attribute(train, query, "shrunk", LAMBDA)
    (record,) = found.record["checkpoints"]
    shapes = prepare(load(place.run_file("train"))).shapes
    with gradscope.open(train) as file:
        moments = {k: torch.tensor(v[...]) for k, v in file.chains[1].items()}
    eye = torch.eye(g.shape[1], dtype=torch.float64)
    rows = zip(shapes.items(), eye.split([np.prod(s) for s in shapes.values()], 1), strict=True)
    units = Gradients({k: DenseBlock(v.reshape(-1, *shape)) for (k, shape), v in rows})
    applied = ekfac_curvature(moments, LAMBDA).apply(units, torch.float64)
    inverse = torch.cat([v.flatten(1) for v in applied.values()], 1).numpy()
    share = record["share"]
    h = (1 - share) * g.T @ g / N + share * np.linalg.inv(inverse)
    close(found.values, q @ np.linalg.solve(h, g.T) / N, 1e-8)
    close(found.samples["self_influence"], np.diag(g @ np.linalg.solve(h, g.T)) / N, 1e-8)


@pytest.mark.parametrize("per", ["sample", "parameter"])
def test_projections_are_inverted_as_they_are(place: Place, per: str) -> None:
    chain = f"project:dim=6,kind=rademacher,per={per}"
    train, query = place.result("train", chain), place.result("query", chain)
    g, q = rows_of(train), rows_of(query)
    wanted = solved(whole(g), whole(q), LAMBDA)
    close(gradscope.attribute(train, query, "fisher", LAMBDA).values, wanted)
    if per == "parameter":
        layers = layers_of(g)
        apart = [
            [np.concatenate([r[k] for k in g if layers[k] == one], 1) for r in (g, q)]
            for one in dict.fromkeys(layers.values())
        ]
        by_layer = sum(solved(a, b, LAMBDA) for a, b in apart)
        close(gradscope.attribute(train, query, "blockfisher", LAMBDA).values, by_layer)


def test_a_small_model_with_many_samples_is_inverted_as_a_whole(place: Place) -> None:
    data = np.load(place.folder / "train.npz")
    np.savez(
        place.folder / "many.npz",
        **{k: np.concatenate([v, v[::-1] * 2 % 3]) for k, v in data.items()},
    )
    train, query = place.result("many"), place.result("query")
    g, q = whole(rows_of(train)), whole(rows_of(query))
    assert g.shape[0] > g.shape[1]
    found = gradscope.attribute(train, query, "fisher", LAMBDA)
    close(found.values, solved(g, q, LAMBDA))
    close(found.samples["self_influence"], np.diag(solved(g, g, LAMBDA)))


@pytest.mark.sampled
@pytest.mark.parametrize("curvature", ["identity", "fisher", "blockfisher", "kfac", "ekfac"])
def test_files_runs_data_and_scopes_agree(place: Place, curvature: Any) -> None:
    train, query = place.result("train"), place.result("query")
    wanted = gradscope.attribute(train, query, curvature, LAMBDA).values
    sides: list[tuple[Any, Any]] = [
        (place.run_file("train"), query),
        (place.run_file("train", batch=11), place.run_file("query", batch=2)),
        (train, place.folder / "query.npz"),
        (place.run_file("train"), place.folder / "query.npz"),
    ]
    for one, other in sides:
        close(gradscope.attribute(one, other, curvature, LAMBDA).values, wanted, 1e-8)


def test_scopes(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    model = prepare(load(place.run_file("train"))).session.problem.model
    scope = gradscope.Scope(model, "cross_entropy")
    data = [np.load(place.folder / f"{name}.npz") for name in ("train", "query")]
    sides = [(scope, torch.tensor(d["inputs"]), torch.tensor(d["targets"])) for d in data]
    found = gradscope.attribute(sides[0], sides[1], "fisher", LAMBDA)
    close(found.values, gradscope.attribute(train, query, "fisher", LAMBDA).values[...])


@pytest.mark.parametrize("curvature", ["identity", "fisher", "ekfac"])
def test_tiles_change_nothing(place: Place, curvature: Any) -> None:
    train, query = place.result("train"), place.result("query")
    wanted = gradscope.attribute(train, query, curvature, LAMBDA).values
    with open_sources(train, query) as pairs:
        scoring = Scoring(pairs, AttributionSettings(curvature, LAMBDA, memory=2500))
        assert 1 <= scoring.step < M
        found = torch.cat([rows for _, rows in scoring.rows()])
    close(found, wanted)


def test_checkpoints_are_added_up_by_their_weights(place: Place) -> None:
    trains = [place.result("train", weights=f"w{k}", name=f"t{k}") for k in (0, 1)]
    queries = [place.result("query", weights=f"w{k}", name=f"q{k}") for k in (0, 1)]
    each = [
        gradscope.attribute(t, q, "identity").values for t, q in zip(trains, queries, strict=True)
    ]
    how: dict[str, Any] = {"checkpoints": [trains[1]], "weights": [0.1, 0.7]}
    data = place.folder / "query.npz"
    found = gradscope.attribute(trains[0], data, "identity", **how)
    close(found.values, 0.1 * each[0] + 0.7 * each[1])
    mean = gradscope.attribute(trains[0], data, "identity", checkpoints=[trains[1]])
    close(mean.values, (each[0] + each[1]) / 2)


def test_samples_that_are_not_finite_are_left_out(place: Place) -> None:
    data = dict(np.load(place.folder / "train.npz"))
    kept = np.arange(N) != 4
    np.savez(place.folder / "clean.npz", **{k: v[kept] for k, v in data.items()})
    data["inputs"][4] = np.nan
    np.savez(place.folder / "train.npz", **data)
    query = place.result("query")
    for curvature in ("identity", "fisher", "ekfac"):
        wanted = gradscope.attribute(place.result("clean"), query, curvature, LAMBDA)  # type: ignore[arg-type]
        for train in (place.result("train"), place.run_file("train")):
            found = gradscope.attribute(train, query, curvature, LAMBDA)  # type: ignore[arg-type]
            close(found.values[:, kept], wanted.values, 1e-8)
            assert np.isnan(found.values[:, 4]).all()
            assert 4 not in found.helpful(0, N).places


def test_what_a_file_keeps_and_ranks(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    memory = gradscope.attribute(train, query, "fisher", LAMBDA)
    path = place.folder / "scores.h5"
    with gradscope.attribute(train, query, "fisher", LAMBDA, output=path) as stored:
        close(stored.values, memory.values, 1e-15)
        assert stored.record["checkpoints"] == memory.record["checkpoints"]
        for name, column in memory.samples.items():
            np.testing.assert_allclose(stored.samples[name], column)
        best = stored.helpful(2, 3)
        order = np.argsort(-memory.values[2], kind="stable")[:3]
        assert best.places.tolist() == order.tolist()
        assert stored.harmful(2, 1).places[0] == memory.values[2].argmin()
        classes, sums = stored.sums("target")
        target = memory.samples["target"]
        wanted = np.stack([memory.values[:, target == c].sum(1) for c in classes], 1)
        close(sums, wanted)
    with pytest.raises(OutputError, match="exists"):
        gradscope.attribute(train, query, "fisher", LAMBDA, output=path)


def test_a_stopped_attribution_goes_on_and_gives_the_same_bytes(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    paths = [place.folder / f"{name}.h5" for name in ("once", "twice")]
    asked = AttributionSettings("fisher", LAMBDA, memory=3000)

    def scored(path: Path, stop_after: int, *, resume: bool = False) -> None:
        with (
            open_sources(train, query) as pairs,
            writing_scores(Scoring(pairs, asked), path, resume=resume) as writer,
        ):
            for k, _ in enumerate(writer.remaining(), 1):
                if k == stop_after:
                    return
            writer.finish()

    scored(paths[0], 99)
    scored(paths[1], 1)
    assert not paths[1].exists()
    scored(paths[1], 99, resume=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_going_on_with_tiles_of_another_size_gives_the_same_scores(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    paths = [place.folder / f"{name}.h5" for name in ("once", "twice")]

    def scored(path: Path, memory: int | None, *, stop: bool = False, resume: bool = False) -> int:
        asked = AttributionSettings("fisher", LAMBDA, memory=memory)
        with open_sources(train, query) as pairs:
            scoring = Scoring(pairs, asked)
            with writing_scores(scoring, path, resume=resume) as writer:
                for _ in writer.remaining():
                    if stop:
                        return scoring.step
                writer.finish()
        return scoring.step

    scored(paths[0], None)
    sizes = scored(paths[1], 1600, stop=True), scored(paths[1], 2500, resume=True)
    assert sizes[0] < sizes[1] < M
    assert sizes[0] % sizes[1]  # the second's tiles begin elsewhere
    with gradscope.open(paths[0]) as once, gradscope.open(paths[1]) as twice:
        close(twice.chains[0]["scores"], once.chains[0]["scores"][...], 1e-12)
        assert twice.samples["index"].tolist() == once.samples["index"].tolist()


def test_automatic_damping_is_the_same_by_pairs_and_by_moments(place: Place) -> None:
    """A Fisher has one spectrum, whichever side it is inverted from."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 6, generator=draw, dtype=torch.float64) + 1.5
    gradients = Gradients({"w": DenseBlock(rows)})
    moments = Moments({"w": ""})
    moments.add(gradients)
    ((values, squares),) = moments.spectra()
    others, projected = along(rows @ rows.T / 40, 40)
    torch.testing.assert_close(values, others[-6:])
    torch.testing.assert_close(squares, projected[-6:])
    close(squares.sum(), rows.mean(0).square().sum().numpy()[None])


def wrong() -> Iterator[Any]:
    def other_checkpoint(p: Place) -> tuple[Any, Any]:
        return p.result("train"), p.result("query", weights="w1")

    def other_chain(p: Place) -> tuple[Any, Any]:
        return p.result("train"), p.result("query", "project:dim=4")

    def no_rows(p: Place) -> tuple[Any, Any]:
        return p.result("train", "mean"), p.result("query")

    def other_model(p: Place) -> tuple[Any, Any]:
        train = p.result("train")
        (p.folder / "model.py").write_text(MODEL + "# changed\n")
        return train, p.result("query")

    def no_file(p: Place) -> tuple[Any, Any]:
        return p.folder / "none.h5", p.folder / "query.npz"

    def scores(p: Place) -> tuple[Any, Any]:
        train, query = p.result("train"), p.result("query")
        gradscope.attribute(train, query, "identity", output=p.folder / "s.h5").close()
        return p.folder / "s.h5", query

    yield pytest.param(other_checkpoint, SpecError, "checkpoint differs", id="checkpoint")
    yield pytest.param(other_chain, SpecError, "no chain 'identity'", id="chain")
    yield pytest.param(no_rows, SpecError, "no chain with rows", id="no rows")
    yield pytest.param(other_model, SpecError, "model differs", id="model")
    yield pytest.param(no_file, ResultFileError, "no such file", id="file")
    yield pytest.param(scores, SpecError, "holds scores, not gradients", id="scores")


@pytest.mark.parametrize(("made", "error", "text"), [*wrong()])
def test_wrong_inputs(
    place: Place,
    made: Callable[[Place], tuple[Any, Any]],
    error: type[GradscopeError],
    text: str,
) -> None:
    train, query = made(place)
    with pytest.raises(error, match=text):
        gradscope.attribute(train, query, "identity")


def test_rows_of_adam_steps_are_scored_by_gradients_of_queries(place: Place) -> None:
    """LESS: the training sample's step, the query's gradient."""
    model = prepare(load(place.run_file("train"))).session.problem.model
    optimiser = torch.optim.Adam(model.parameters())
    data = np.load(place.folder / "train.npz")
    inputs, targets = torch.tensor(data["inputs"]), torch.tensor(data["targets"])
    for rows in (slice(0, 10), slice(10, 20)):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    torch.save(optimiser.state_dict(), place.folder / "adam.pt")
    train = place.result("train", f"adam:state={place.folder}/adam.pt,form=step", name="steps")
    query = place.result("query")
    wanted = whole(rows_of(query)) @ whole(rows_of(train)).T / N
    close(gradscope.attribute(train, query, "identity").values, wanted)
    close(gradscope.attribute(train, place.folder / "query.npz", "identity").values, wanted)


def test_factors_from_another_file(place: Place) -> None:
    train, query = place.result("train"), place.result("query")
    factors = place.result("train", "ekfac", name="factors")
    found = gradscope.attribute(train, query, "ekfac", LAMBDA, factors=factors)
    close(found.values, gradscope.attribute(train, query, "ekfac", LAMBDA).values)
    other = place.result("train", "ekfac", name="other", weights="w1")
    with pytest.raises(SpecError, match="checkpoint of the factors differs"):
        gradscope.attribute(train, query, "ekfac", factors=other)
    with pytest.raises(SpecError, match="no chain 'ekfac'"):
        gradscope.attribute(train, query, "ekfac", factors=query)


def test_a_curvature_of_parameters_wants_gradients_as_they_are(place: Place) -> None:
    train = place.result("train", "project:dim=6")
    with pytest.raises(SpecError, match="curvature ekfac needs full gradients"):
        gradscope.attribute(train, place.folder / "query.npz", "ekfac")


def test_files_alone_are_enough_for_auto(place: Place) -> None:
    """Where the model is not to be had, the exact Fisher of the rows is taken, and said."""
    train, query = place.result("train"), place.result("query")
    (place.folder / "model.py").unlink()
    found = gradscope.attribute(train, query)
    (record,) = found.record["checkpoints"]
    assert record["curvature"] == "fisher"
    assert "model.py" in record["without"]
    close(found.values, gradscope.attribute(train, query, "fisher").values)
    with pytest.raises(GradscopeError, match=r"model\.py"):
        gradscope.attribute(train, query, "ekfac")


@pytest.mark.sampled
@pytest.mark.parametrize("curvature", [*get_args(Method)])
def test_tokens_that_never_meet_are_scored_as_samples_are(curvature: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.mT, targets, reduction="none")

    sides = [(torch.randn(n, 4, 5, dtype=torch.float64), torch.randint(3, (n, 4))) for n in (9, 2)]
    tokens, plain = (
        gradscope.Scope(model, loss, rows="token"),
        gradscope.Scope(model, "cross_entropy"),
    )
    found, wanted = (
        gradscope.attribute(*((scope, *map(form, side)) for side in sides), curvature)
        for scope, form in ((tokens, Tensor.clone), (plain, partial(Tensor.flatten, end_dim=1)))
    )
    close(found.values, wanted.values)
    for table, n in ((found.samples, 9), (found.queries, 2)):
        assert table["sample"].tolist() == np.repeat(np.arange(n), 4).tolist()
        assert table["position"].tolist() == [*range(4)] * n
    assert "training token" in found.record["unit"] and "sample" not in found.record["unit"]


def test_scores_is_public() -> None:
    assert gradscope.Scores is Scores


@pytest.mark.parametrize("form", ["influence", "cosine"])
def test_batches_that_fit_into_memory_give_the_same_scores(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    train, query = (
        (torch.randn(n, 4, 6, dtype=torch.float64), torch.randn(n, 4, 3, dtype=torch.float64))
        for n in (11, 5)
    )

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum((1, 2))

    def scores() -> Any:
        scope = gradscope.Scope(model, loss)
        return gradscope.attribute((scope, *train), (scope, *query), "ekfac", score=form).values

    wanted = scores()[...]
    monkeypatch.setattr(sources, "_busy", lambda session: 1)
    sizes = []
    evaluate = Session.evaluate

    def counted(self: Session, batch: Any, *args: Any, **how: Any) -> Any:
        sizes.append(len(batch))
        return evaluate(self, batch, *args, **how)

    monkeypatch.setattr(Session, "evaluate", counted)
    close(scores(), wanted)
    assert max(sizes) == 2
    walks = {"influence": 3, "cosine": 4}[form]  # the table takes no further walk
    assert sum(sizes) == walks * 11 + 5
