"""`compare`, `stats` and `list` from the outside."""

import json
from pathlib import Path

import numpy as np
import pytest

from gradscope.backends import backends
from gradscope.stages.losses import losses
from gradscope.stages.reducers import reducers
from gradscope.stages.transforms import transforms
from tests.cli.conftest import SAMPLES, Gradscope

MODELS = (
    "digits_mlp",
    "digits_cnn",
    "digits_batchnorm",
    "sunspots_lstm",
    "text_transformer",
    "poisson_pinn",
)

MINE = """
import torch

def right(model, loss, inputs, targets):
    parameters = dict(model.named_parameters())
    losses = loss(model(inputs), targets)
    rows = [torch.autograd.grad(l, list(parameters.values()), retain_graph=True) for l in losses]
    return {name: torch.stack(g) for name, g in zip(parameters, zip(*rows))}

def averaged(model, loss, inputs, targets):
    return {name: g / len(g) for name, g in right(model, loss, inputs, targets).items()}
"""


@pytest.mark.parametrize("name", MODELS)
def test_all_backends_agree_on_the_sample_models(gradscope: Gradscope, name: str) -> None:
    config = SAMPLES / name / "run.toml"
    done = gradscope("compare", "--config", config, "--samples", "3:9", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["agrees"] is True
    status = {row["backend"]: row["status"] for row in document["rows"]}
    assert set(status) == {"loop", "hooks", "vmap", "expand"}
    assert status["loop"] == status["hooks"] == "agrees"
    for row in document["rows"]:
        assert row["status"] == "agrees" or (row["reason"] and row["remedy"])


def test_ones_own_implementation_is_judged(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    run = ["compare", "--config", digits, "--samples", ":8", "--backends", "hooks", "--json"]
    right = gradscope(*run, "--against", f"{mine}:right")
    assert right.code == 0, right.err
    wrong = gradscope(*run, "--against", f"{mine}:averaged")
    assert wrong.code == 5
    row = next(r for r in json.loads(wrong.out)["rows"] if r["backend"].endswith("averaged"))
    assert row["status"] == "disagrees"
    assert "mean" in json.dumps(row)
    assert row["parameters"][0]["factor"] == pytest.approx(1 / 8)
    code = json.loads(wrong.out)["digests"]
    assert set(code[f"{mine}:averaged"]) == {"mine.py"} and set(code["model"]) == {"model.py"}


def test_a_stored_result_is_judged(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    options = ["--config", digits, "--samples", ":12"]
    assert gradscope("compute", *options, "-t", "identity", "-o", out, "-q").code == 0
    done = gradscope("compare", *options, "--backends", "hooks", "--against", out, "--json")
    assert done.code == 0, done.err
    assert {r["status"] for r in json.loads(done.out)["rows"]} == {"agrees"}


def test_compare_speaks_to_people(gradscope: Gradscope, digits: Path) -> None:
    done = gradscope("compare", "--config", digits, "--samples", ":6")
    assert done.code == 0
    assert all(name in done.out for name in ("loop", "hooks", "vmap", "expand", "agrees"))


@pytest.fixture
def result(gradscope: Gradscope, digits: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out.h5"
    options = ["--config", digits, "--samples", ":60", "-q"]
    assert gradscope("compute", *options, "-t", "identity", "-o", out).code == 0
    return out


def test_stats_tell_the_same_numbers_twice(gradscope: Gradscope, result: Path) -> None:
    import h5py

    document = json.loads(gradscope("stats", result, "--json").out)
    with h5py.File(result) as file:
        norms = file["samples/norm"][:].astype(np.float64)
    assert document["schema"] == "gradscope.stats"
    assert document["norm"]["mean"] == pytest.approx(norms.mean())
    largest = [row["index"] for row in document["samples"]]
    assert largest == list(np.argsort(-norms)[:10])
    shown = gradscope("stats", result)
    assert shown.code == 0
    assert all(str(index) in shown.out for index in largest)


def test_stats_draw_and_write_a_page(gradscope: Gradscope, result: Path, tmp_path: Path) -> None:
    plot, page = tmp_path / "plot.png", tmp_path / "page.html"
    assert gradscope("stats", result, "--plot", plot, "--html", page).code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "</html>" in page.read_text()


@pytest.mark.parametrize(
    "content", [None, b"", b"not HDF5 at all", b"\x89HDF\r\n\x1a\n" + b"0" * 64]
)
def test_stats_of_what_is_no_result(
    gradscope: Gradscope, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "bad.h5"
    if content is not None:
        path.write_bytes(content)
    done = gradscope("stats", path)
    assert done.code == 3
    assert "bad.h5" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("kind", ["backends", "transforms", "reducers", "losses", "formats"])
def test_list_shows_every_name_with_a_summary(gradscope: Gradscope, kind: str) -> None:
    document = json.loads(gradscope("list", kind, "--json").out)
    shown = {row["name"]: row["summary"] for row in document["entries"]}
    assert all(shown.values())
    known = {"backends": backends, "transforms": transforms, "reducers": reducers, "losses": losses}
    if kind in known:
        assert set(known[kind].names()) <= set(shown)
    assert all(name in gradscope("list", kind).out for name in shown)


@pytest.mark.parametrize("arguments", [["list", "nothing"], ["compute", "--nonsense"], ["plot"]])
def test_usage_errors(gradscope: Gradscope, arguments: list[str]) -> None:
    done = gradscope(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err
