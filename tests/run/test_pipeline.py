"""Jobs and runs as a library: order of checks, batch sizes, resuming, what a file records."""

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from gradscope.blocks import variants
from gradscope.config import RunSpec, resolve
from gradscope.engine.audit import Auditor
from gradscope.errors import OutputError, SpecError
from gradscope.run import compute, prepare, start
from gradscope.storage import open_file
from tests.run import project

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"
CHAINS = ["identity", "clip:max_norm=0.5 | mean", "square | mean", "var:ddof=0", "norm"]


def spec(name: str = "digits_mlp", **options: Any) -> RunSpec:
    settings = {"transform": CHAINS, "samples": ":100", "dtype": "float64"}
    return resolve(SAMPLES / name / "run.toml", {"compute": settings | options})


def contents(path: Path) -> dict[str, np.ndarray]:
    with open_file(path) as file:
        found = {f"samples/{k}": v for k, v in file.samples.items()}
        found |= {f"norms/{k}": v for k, v in file.norms.items()}
        for k, chain in enumerate(file.chains):
            found |= {f"chains/{k}/{name}": array[:] for name, array in chain.items()}
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "whole.h5"
    compute(prepare(spec()), path)
    return path


@pytest.fixture(scope="module")
def whole(file: Path) -> dict[str, np.ndarray]:
    return contents(file)


def test_the_chains_follow_from_the_rows(whole: dict[str, np.ndarray]) -> None:
    norms = whole["samples/norm"]
    np.testing.assert_allclose(whole["chains/4/norm"], norms, rtol=1e-12)
    total = np.zeros(100)
    for key in [k for k in whole if k.startswith("chains/0/")]:
        name = key.removeprefix("chains/0/")
        rows = whole[key]
        squares = (rows.reshape(100, -1) ** 2).sum(1)
        total += squares
        np.testing.assert_allclose(whole[f"norms/{name}"], np.sqrt(squares), rtol=1e-12)
        clipped = np.tensordot(np.minimum(1, 0.5 / norms), rows, 1) / 100
        np.testing.assert_allclose(whole[f"chains/1/{name}"], clipped, rtol=1e-10, atol=1e-15)
        np.testing.assert_allclose(whole[f"chains/2/{name}"], (rows**2).mean(0), rtol=1e-10)
        np.testing.assert_allclose(whole[f"chains/3/{name}"], rows.var(0), rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(np.sqrt(total), norms, rtol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("batch_size", "backend"),
    [(1, "hooks"), (7, "hooks"), (64, "vmap"), (7, "expand"), (64, "loop")],
)
def test_batch_size_and_backend_change_nothing(
    whole: dict[str, np.ndarray], tmp_path: Path, batch_size: int, backend: str
) -> None:
    job = prepare(spec(batch_size=batch_size, backend=backend))
    compute(job, tmp_path / "other.h5")
    for key, value in contents(tmp_path / "other.h5").items():
        np.testing.assert_allclose(value, whole[key], rtol=1e-8, atol=1e-13, err_msg=key)


@pytest.mark.parametrize("layout", ["auto", "factored"])
def test_layouts_hold_the_same_rows(
    file: Path, whole: dict[str, np.ndarray], tmp_path: Path, layout: str
) -> None:
    path = tmp_path / "other.h5"
    report = compute(prepare(spec(layout=layout)), path)
    with open_file(path) as opened:
        assert any(array.representation == "factored" for array in opened.chains[0].values())
    assert report.bytes is not None
    assert report.bytes < file.stat().st_size / 3
    for key, value in contents(path).items():
        np.testing.assert_allclose(value, whole[key], rtol=1e-12, atol=1e-15, err_msg=key)


def test_the_same_run_gives_the_same_file(file: Path, tmp_path: Path) -> None:
    compute(prepare(spec()), tmp_path / "again.h5")
    assert file.read_bytes() == (tmp_path / "again.h5").read_bytes()


def test_a_run_keeps_its_batch_size_when_it_goes_on(tmp_path: Path) -> None:
    """Another amount of memory may be free by then."""
    path, free = tmp_path / "o.h5", spec()
    compute = free.compute.model_copy(update={"batch_size": None})
    free = free.model_copy(update={"compute": compute})
    for settings in (spec(batch_size=7), free):
        with suppress(ZeroDivisionError), start(prepare(settings), path, resume=True) as run:
            assert run.size.samples == 7
            run.add(next(run.remaining()))
            raise ZeroDivisionError
    with start(prepare(spec(batch_size=3)), path, resume=True) as run:
        assert (run.writer.completed, run.size.samples) == (14, 3)


def test_a_broken_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "broken.h5"
    job = prepare(spec(batch_size=9))
    compute(job, tmp_path / "straight.h5")
    with pytest.raises(ZeroDivisionError), start(job, path) as run:
        for count, batch in enumerate(run.remaining()):
            run.add(batch)
            if count == 4:
                raise ZeroDivisionError
    assert not path.exists()
    with start(prepare(spec(batch_size=9)), path, resume=True) as run:
        assert run.writer.completed == 45
        for batch in run.remaining():
            run.add(batch)
        run.finish()
    assert path.read_bytes() == (tmp_path / "straight.h5").read_bytes()


def test_a_reducer_of_two_passes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With drawn labels, which belong to the samples; and any batch size has the same result."""
    options = {"transform": ["ekfac", "kfac:bias=column"], "labels": "sampled", "samples": ":60"}
    straight, path = tmp_path / "straight.h5", tmp_path / "broken.h5"
    compute(prepare(spec(batch_size=9, **options)), straight)
    with suppress(ZeroDivisionError), start(prepare(spec(batch_size=9, **options)), path) as run:
        for count, batch in enumerate(run.remaining()):
            run.add(batch)
            if count == 2:
                raise ZeroDivisionError
    compute(prepare(spec(batch_size=9, **options)), path, resume=True)
    assert path.read_bytes() == straight.read_bytes()
    found = contents(straight)
    total = sum(v.sum() for k, v in found.items() if k.startswith("chains/0/") and "values" in k)
    np.testing.assert_allclose(total, (found["samples/norm"] ** 2).mean(), rtol=1e-12)
    for size in (1, 60):
        compute(prepare(spec(batch_size=size, **options)), tmp_path / f"{size}.h5")
        again = contents(tmp_path / f"{size}.h5")
        for key, values in found.items():
            if key.startswith("chains/1/") or key.endswith(".eigenvalues"):
                least = 1e-9 * np.abs(values).max()
                np.testing.assert_allclose(again[key], values, rtol=1e-6, atol=least, err_msg=key)


def test_eigenvectors_are_found_once_however_often_a_run_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, sizes = torch.linalg.eigh, []

    def counted(matrices: torch.Tensor) -> Any:
        sizes.append(matrices.shape[-1])
        return found(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    settings = {"memory": "2GB", "batch_size": None, "samples": ":60", "verify": "never"}
    compute(prepare(spec(transform=["ekfac"], **settings)), tmp_path / "o.h5")
    assert sizes == [65, 64, 65, 32, 33, 10]


def test_rows_take_no_factors_from_kfac(tmp_path: Path) -> None:
    both = [["kfac", "identity"], ["identity"], ["kfac"]]
    for k, chains in enumerate(both):
        asked = spec("text_transformer", transform=chains, samples=":16")
        compute(prepare(asked), tmp_path / f"{k}.h5")
    together, rows, factors = (contents(tmp_path / f"{k}.h5") for k in range(3))
    for key, values in together.items():
        kind, number, *name = key.split("/")
        alone = factors if number == "0" else rows
        right = alone["/".join([kind, "0", *name])] if kind == "chains" else rows[key]
        np.testing.assert_allclose(values, right, rtol=1e-9, atol=1e-13, err_msg=key)


def test_kernels_are_measured_once_and_a_run_keeps_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, chains = tmp_path / "cache", ["clip:max_norm=1.0 | mean"]
    monkeypatch.setenv("GRADSCOPE_CACHE", str(cache))
    monkeypatch.setattr(variants, "_steady", bool)  # however busy the machine is
    asked = spec("digits_cnn", transform=chains, samples=":600", dtype="float32", batch_size=200)

    def kernels(path: Path) -> dict[str, str]:
        with open_file(path) as file:
            return dict(file.run["kernels"])

    straight, again, broken, without = (tmp_path / f"{name}.h5" for name in "sabw")
    compute(prepare(asked), straight)
    facts = [json.loads(file.read_text("utf-8")) for file in cache.rglob("*.json")]
    measured = {fact["name"]: fact["fact"]["way"] for fact in facts}
    assert kernels(straight) and kernels(straight).items() <= measured.items()
    compute(prepare(asked), again)
    assert straight.read_bytes() == again.read_bytes()

    with suppress(ZeroDivisionError), start(prepare(asked), broken) as run:
        run.add(next(run.remaining()))
        raise ZeroDivisionError
    for file in cache.rglob("*.json"):  # another day: the other kernel is faster
        fact = json.loads(file.read_text("utf-8"))
        others = fact["fact"]["seconds"].keys() - {fact["fact"]["way"]}
        fact["fact"]["way"] = min(others)
        file.write_text(json.dumps(fact), encoding="utf-8")
    compute(prepare(asked), broken, resume=True)
    assert straight.read_bytes() == broken.read_bytes()

    compute(prepare(asked.computing(cache=False)), without)
    assert kernels(without) == {}
    right = contents(straight)
    for key, value in contents(without).items():
        np.testing.assert_allclose(value, right[key], rtol=1e-3, atol=1e-6, err_msg=key)


@pytest.mark.sampled
@pytest.mark.parametrize("transform", ["identity", "clip:max_norm=1.0 | mean"])
@pytest.mark.parametrize("name", ["digits_cnn", "text_transformer"])
def test_audits_for_which_there_was_time_change_no_byte(
    tmp_path: Path, name: str, transform: str
) -> None:
    asked = spec(name, transform=[transform], samples=":24", dtype="float32", batch_size=8)
    looked = []
    for hours in (0, 1):
        job, readings = prepare(asked), count(1)

        def clock(hours: int = hours, readings: Iterator[int] = readings) -> float:
            return 3600.0 * hours * (next(readings) // 3)  # while a batch is evaluated

        job.session.auditor = Auditor(0, clock=clock)
        compute(job, tmp_path / f"{hours}.h5")
        looked.append(job.session.auditor.audits.more)
    assert looked == [0, 1]  # of three batches, the first and the last are proved in any case
    assert (tmp_path / "0.h5").read_bytes() == (tmp_path / "1.h5").read_bytes()


@pytest.mark.parametrize("change", [{"transform": ["mean"]}, {"dtype": "float32"}, {"seed": 1}])
def test_another_run_is_not_resumed(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "broken.h5"
    with pytest.raises(ZeroDivisionError), start(prepare(spec(batch_size=9)), path) as run:
        for batch in run.remaining():
            run.add(batch)
            raise ZeroDivisionError
    changed = prepare(spec(**{"batch_size": 9} | change))
    with pytest.raises(OutputError) as refusal, start(changed, path, resume=True):
        pass
    word = {"transform": "chains"}.get(next(iter(change)), next(iter(change)))
    assert word in str(refusal.value)


def test_a_sample_that_is_another_now_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken.h5"
    with pytest.raises(ZeroDivisionError), start(prepare(spec(batch_size=9)), path) as run:
        run.add(next(run.remaining()))
        raise ZeroDivisionError
    found = run.progress.first
    assert found is not None
    losses = [*found[0][:2], float("nan"), *found[0][3:]]
    monkeypatch.setattr(
        import_module("gradscope.run.start"), "first_of", lambda rows: (losses, found[1])
    )
    with (
        pytest.raises(OutputError, match=r"loss of sample 2 was .* and is nan now"),
        start(prepare(spec(batch_size=9)), path, resume=True),
    ):
        pass


def test_the_batch_size_belongs_to_a_run_whose_rows_depend_on_it(tmp_path: Path) -> None:
    path = tmp_path / "broken.h5"
    coupled = {"coupling": "own-loss", "transform": ["identity"]}
    with (
        pytest.raises(ZeroDivisionError),
        start(prepare(spec("digits_batchnorm", batch_size=9, **coupled)), path) as run,
    ):
        for batch in run.remaining():
            run.add(batch)
            raise ZeroDivisionError
    changed = prepare(spec("digits_batchnorm", batch_size=8, **coupled))
    with pytest.raises(OutputError, match="batch_size"), start(changed, path, resume=True):
        pass


def test_the_file_explains_itself(file: Path) -> None:
    with open_file(file) as opened:
        run, certificate = opened.run, opened.certificate
    assert run["chains"] == CHAINS
    assert run["spec"]["loss"]["name"] == "cross_entropy"
    assert len(run["digests"]["checkpoint"]) == len(run["digests"]["dataset"]) == 64
    assert run["versions"]["torch"].startswith("2.")
    assert certificate["verified"] is True
    assert certificate["agreement"]["error"] < 1e-12
    json.dumps(run)


@pytest.mark.parametrize(
    "options", [{"transform": ["nonsense"]}, {"backend": "nonsense"}, {"transform": ["clip"]}]
)
def test_names_are_checked_before_anything_is_loaded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """There is nothing to load in the folder, which would be an error of its own."""
    with pytest.raises(SpecError):
        prepare(project.spec(tmp_path, **options))


@pytest.mark.parametrize("name", sorted(p.parent.name for p in SAMPLES.glob("*/run.toml")))
def test_every_sample_model_runs_and_is_proved(name: str, tmp_path: Path) -> None:
    settings = resolve(SAMPLES / name / "run.toml", {"compute": {"samples": ":12"}})
    report = compute(prepare(settings), tmp_path / "out.h5")
    assert report.certificate["verified"] is True
    assert report.backend == "hooks"
    assert report.samples == 12
    assert report.nonfinite == 0


def test_sums_that_chains_share_are_carried_apart(tmp_path: Path) -> None:
    """The mean gradient, and one chain asked for twice: each batch is added to each once."""
    chains = ["identity", "mean", "mean", "sum", "second_moment"]
    compute(prepare(spec(transform=chains, batch_size=7)), tmp_path / "o.h5")
    with h5py.File(tmp_path / "o.h5") as plain:
        told = {k: v.attrs["mean_gradient_norm"] for k, v in plain["norms"].items()}
    with open_file(tmp_path / "o.h5") as file:
        for name in file.norms:
            rows = file.chains[0][name][:]
            for k, expected in enumerate((rows.mean(0), rows.mean(0), rows.sum(0)), start=1):
                np.testing.assert_allclose(file.chains[k][name][:], expected, rtol=1e-9, atol=1e-15)
            squares = (rows**2).mean(0)
            np.testing.assert_allclose(file.chains[4][name][:], squares, rtol=1e-9, atol=1e-15)
            assert told[name] == pytest.approx(np.linalg.norm(rows.mean(0)))
