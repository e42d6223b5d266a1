"""The best by projections, scored again with full gradients: against scores of full rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradscope
from gradscope.attribution import (
    AttributionSettings,
    Scoring,
    open_scores,
    open_sources,
    writing_scores,
)
from gradscope.errors import GradscopeError, OutputError, SpecError
from tests.attribution.test_scoring import M, N, Place
from tests.cli.conftest import Gradscope

PROJECTION = "project:dim=12,kind=rademacher"
K = 4


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def sides(place: Place) -> tuple[Path, Path]:
    return tuple(place.result(side, PROJECTION, name="short") for side in ("train", "query"))  # type: ignore


@pytest.mark.sampled
@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac", "diagonal", "adam", "identity"])
def test_they_are_the_scores_of_full_rows(place: Place, curvature: Any) -> None:
    train, query = sides(place)
    damping = "auto" if curvature == "auto" else 0.3
    found = gradscope.attribute(train, query, curvature, damping, refine=K)
    method: Any = "ekfac" if curvature == "auto" else curvature
    full = gradscope.attribute(place.result("train"), place.result("query"), method, damping)
    cheap: Any = "identity" if curvature == "identity" else "fisher"
    first = gradscope.attribute(train, query, cheap, damping)
    np.testing.assert_allclose(found.values, first.values, rtol=1e-9, atol=1e-12)
    for q in range(M):
        order = np.argsort(-first.row(q))
        candidates = [*order[:K], *order[-K:]]
        assert sorted(found.refined["places"][q]) == sorted(candidates)
        exact = full.row(q)[found.refined["places"][q]]
        np.testing.assert_allclose(found.refined["scores"][q], exact, rtol=1e-7)
        ranked = sorted(candidates, key=lambda i: -full.row(q)[i])
        assert list(found.helpful(q, K).places) == ranked[:K]
        assert list(found.harmful(q, 3).places) == ranked[::-1][:3]
        np.testing.assert_allclose(
            found.helpful(q, 3).scores, sorted(exact, reverse=True)[:3], rtol=1e-7
        )
        assert len(found.helpful(q, 3 * K).places) == K
    assert found.record["refined"]["checkpoints"][0]["curvature"] == method


def test_from_runs_and_data_and_several_checkpoints(place: Place) -> None:
    queries = place.folder / "query.npz"
    chain = "project:dim=12,kind=rademacher,per=parameter"
    runs = [place.run_file("train", chain, weights=f"w{k}", batch=7) for k in (0, 1)]
    how: dict[str, Any] = {"weights": [0.3, 0.7]}
    found = gradscope.attribute(runs[0], queries, "identity", checkpoints=runs[1:], refine=N, **how)
    full = [place.run_file("train", weights=f"w{k}", name="full") for k in (0, 1)]
    wanted = gradscope.attribute(full[0], queries, "identity", checkpoints=full[1:], **how)
    assert found.refined["places"].shape == (M, 2 * N)  # more than there are
    assert (np.sort(found.refined["places"], 1)[:, N:] == np.arange(N)).all()
    assert np.isnan(found.refined["scores"][found.refined["places"] < 0]).all()
    for q in range(M):
        known = found.refined["places"][q] >= 0
        exact = wanted.row(q)[found.refined["places"][q][known]]
        np.testing.assert_allclose(found.refined["scores"][q][known], exact, rtol=1e-9)


def test_small_tiles_and_a_selection_of_the_data_change_nothing(place: Place) -> None:
    train, query = sides(place)
    with open_sources(train, query) as pairs:
        whole = Scoring(pairs, AttributionSettings("kfac", 0.3, refine=K))
        rows = dict(enumerate(scores for _, scores in whole.rows()))
        expected = whole.refining.of(slice(0, M), rows[0])  # type: ignore[union-attr]
        little = Scoring(pairs, AttributionSettings("kfac", 0.3, memory=1, refine=K))
        assert little.step == 1
        for part, scores in little.rows():
            found = little.refining.of(part, scores)  # type: ignore[union-attr]
            assert (found["places"] == expected["places"][part]).all()
            np.testing.assert_allclose(found["scores"], expected["scores"][part], rtol=1e-9)
    chosen = [*range(3, N, 2)]
    spec = place.folder / "dataset.toml"
    spec.write_text(f'path = "train.npz"\nselect = {chosen}\n')
    run = place.run_file("train", PROJECTION, name="some")
    run.write_text(run.read_text().replace('path = "train.npz"', 'spec = "dataset.toml"'))
    some = gradscope.attribute(run, query, "identity", refine=2)
    full = gradscope.attribute(place.result("train"), place.result("query"), "identity")
    for q in range(M):
        exact = full.row(q)[np.array(chosen)[some.refined["places"][q]]] * N / len(chosen)
        np.testing.assert_allclose(some.refined["scores"][q], exact, rtol=1e-9)


def test_a_file_keeps_them_and_a_stopped_one_goes_on(place: Place) -> None:
    train, query = sides(place)
    path, other = place.folder / "scores.h5", place.folder / "other.h5"
    memory = gradscope.attribute(train, query, "ekfac", refine=K)
    with gradscope.attribute(train, query, "ekfac", refine=K, output=path) as stored:
        for name in ("places", "scores"):
            np.testing.assert_array_equal(stored.refined[name][...], memory.refined[name])
        for q in range(M):
            for one, another in (
                (stored.helpful(q, 3), memory.helpful(q, 3)),
                (stored.harmful(q, 3), memory.harmful(q, 3)),
            ):
                assert list(one.places) == list(another.places)
    with open_sources(train, query) as pairs:
        asked = AttributionSettings("ekfac", memory=1, refine=K)
        with writing_scores(Scoring(pairs, asked), other) as writer:
            next(writer.remaining())
        changed = AttributionSettings("ekfac", memory=1, refine=K + 1)
        with (
            pytest.raises(OutputError, match="refine"),
            writing_scores(Scoring(pairs, changed), other, resume=True),
        ):
            pass
        with writing_scores(Scoring(pairs, asked), other, resume=True) as writer:
            assert len(list(writer.remaining())) == M - 1
            writer.finish()
    with open_scores(other) as resumed:
        np.testing.assert_array_equal(resumed.refined["places"][...], memory.refined["places"])
        np.testing.assert_allclose(resumed.refined["scores"][...], memory.refined["scores"])


def test_candidates_without_a_finite_gradient_are_none(place: Place) -> None:
    data = dict(np.load(place.folder / "train.npz"))
    data["inputs"][5] = np.nan
    np.savez(place.folder / "train.npz", **data)
    train, query = sides(place)
    found = gradscope.attribute(train, query, "identity", refine=N)
    assert not (found.refined["places"] == 5).any()
    assert (np.isfinite(found.refined["scores"]).sum(1) == N - 1).all()
    full = gradscope.attribute(place.result("train"), place.result("query"), "identity")
    best = found.helpful(0, 1)
    assert best.scores[0] == pytest.approx(np.nanmax(full.row(0)))


def test_what_cannot_be_refined_is_refused(place: Place) -> None:
    train, query = sides(place)
    for curvature in ("fisher", "blockfisher", "shrunk"):
        with pytest.raises(SpecError, match="gradients of all training samples"):
            gradscope.attribute(train, query, curvature, refine=K)
    with pytest.raises(SpecError, match="full gradients"):
        gradscope.attribute(place.result("train"), place.result("query"), refine=K)
    clipped = f"clip:max_norm=1.0 | {PROJECTION}"
    others = (place.result(side, clipped, name="clipped") for side in ("train", "query"))
    with pytest.raises(SpecError, match="needs rows of a projection alone"):
        gradscope.attribute(*others, refine=K)
    with pytest.raises(SpecError, match="found -1"):
        gradscope.attribute(train, query, refine=-1)
    data = dict(np.load(place.folder / "train.npz"))
    np.savez(place.folder / "train.npz", **{k: v[::-1] for k, v in data.items()})
    with pytest.raises(GradscopeError, match="the dataset changed"):
        gradscope.attribute(train, query, refine=K)


def test_the_command_says_what_was_refined(
    place: Place, command: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    train, query = sides(place)
    shown = command("attribute", train, query, "--refine", K, "--curvature", "kfac")
    assert shown.code == 0, shown
    assert "with full gradients" in " ".join(shown.out.split())
    document = json.loads(
        command("attribute", train, query, "--refine", K, "--top", 2, "--json").out
    )
    expected = gradscope.attribute(train, query, refine=K)
    assert document["record"]["refined"]["k"] == K
    for q, row in enumerate(document["rows"]):
        assert [s["index"] for s in row["helpful"]] == list(expected.helpful(q, 2).places)
    assert command("attribute", train, query, "--refine", K, "--curvature", "shrunk").code == 2
