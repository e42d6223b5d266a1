"""`gradscope compute` from the outside: files, numbers, exit codes, and what its options do."""

import json
import runpy
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import SAMPLES, Gradscope
from tests.oracle import cross_entropy, per_sample_gradients
from tests.run import project
from tests.run.test_audits import SAMPLES as AUDITED


def digits_rows(n: int) -> dict[str, np.ndarray]:
    """The first rows by the oracle, from the files alone: a ReLU or tanh MLP on scaled images."""
    folder = SAMPLES / "digits_mlp"
    with np.load(folder / "data.npz") as data:
        images, labels = (data[k] for k in data.files)
    model = runpy.run_path(str(folder / "model.py"))["build"]()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    inputs = torch.from_numpy(images[:n]).double() * 0.0625
    targets = torch.from_numpy(labels[:n]).long()
    _, rows = per_sample_gradients(model.eval(), cross_entropy, inputs, targets)
    return {name: g.numpy() for name, g in rows.items()}


CHAINS = ("clip:max_norm=1 | mean", "mean | clip:max_norm=1", "identity")


def test_the_main_job(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    chains = [word for chain in CHAINS for word in ("-t", chain)]
    done = gradscope("compute", "--config", digits, *chains, "--samples", "0:300", "-o", out)
    assert done.code == 0, done.err
    rows = digits_rows(300)
    norms = np.sqrt(sum((g.reshape(300, -1) ** 2).sum(1) for g in rows.values()))
    with h5py.File(out) as file:
        assert file.attrs["status"] == "complete"
        assert list(file["samples/index"]) == list(range(300))
        np.testing.assert_allclose(file["samples/norm"], norms, rtol=1e-5)
        mean = {name: g.mean(0) for name, g in rows.items()}
        factors = np.minimum(1, 1 / norms)
        total = np.sqrt(sum((g**2).sum() for g in mean.values()))
        for name, g in rows.items():
            stored = file[f"chains/2/{name}"][:]
            error = np.linalg.norm((stored - g).reshape(300, -1), axis=1)
            assert (error <= 1e-5 * np.linalg.norm(g.reshape(300, -1), axis=1) + 1e-7).all()
            clipped = np.tensordot(factors, g, 1) / 300
            np.testing.assert_allclose(file[f"chains/0/{name}"], clipped, rtol=1e-4, atol=1e-8)
            np.testing.assert_allclose(
                file[f"chains/1/{name}"], mean[name] * min(1, 1 / total), rtol=1e-4, atol=1e-8
            )
    assert not list(tmp_path.glob("*.part"))


def test_flags_win_over_the_run_file(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    flags = ["-t", "norm", "--backend", "vmap", "--dtype", "float64", "--samples", "10:30"]
    assert gradscope("compute", "--config", digits, *flags, "-o", out, "-q").code == 0
    with h5py.File(out) as file:
        run = json.loads(file.attrs["run"])
        certificate = json.loads(file.attrs["certificate"])
        assert run["dtype"] == "float64"
        assert certificate["backend"] == "vmap"
        np.testing.assert_allclose(file["chains/0/norm"], file["samples/norm"], rtol=1e-12)
        assert file["samples/index"][0] == 10


def test_complex_parameters_in_double_precision(gradscope: Gradscope, tmp_path: Path) -> None:
    """Which model.to(torch.float64) makes real ones."""
    (tmp_path / "model.py").write_text(COMPLEX)
    build = runpy.run_path(str(tmp_path / "model.py"))["build"]
    torch.manual_seed(0)
    model = build()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    np.savez(tmp_path / "data.npz", inputs=x, targets=y)
    files = [tmp_path / name for name in ("weights.pt", "data.npz")]
    flags = ["--model", f"{tmp_path}/model.py:build", "--loss", "mse:per_sample=sum"]
    out = ["-o", tmp_path / "out.h5"]
    done = gradscope("compute", *files, *flags, "--dtype", "float64", *out)
    assert done.code == 0, done.err
    w, x, y = model.w.detach().numpy().astype(complex), x.astype(float), y.astype(float)
    with h5py.File(tmp_path / "out.h5") as file:  # of (|w|² x - y)² by w: 2 (|w|² x - y) x · 2 w
        right = 4 * (abs(w) ** 2 * x - y) * x * w
        np.testing.assert_allclose(file["chains/0/w"][:], right, rtol=1e-12)


COMPLEX = """
import torch
from torch import nn


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.same = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.same.weight)

    def forward(self, x):
        return self.same(x) * (self.w * self.w.conj()).real


def build():
    return Power()
"""


def test_a_chain_that_overflows_is_told(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    run = ["compute", "--config", digits, "--samples", ":40", "--dtype", "float32"]
    run += ["-t", "scale:by=1e300 | mean", "-t", "mean", "--batch-size", "20"]
    done = gradscope(*run, "-o", tmp_path / "out.h5")
    assert done.code == 7
    assert "6,570 numbers in the result of scale:by=1e300 | mean" in done.out
    assert done.out.count("numbers in the result of") == 1
    again = gradscope(*run, "-o", tmp_path / "out.h5", "--resume", "--json")
    assert again.code == 7
    assert json.loads(again.out)["chains_nonfinite"] == [6570, 0]
    for k in range(2):  # the others wait for a shard
        assert gradscope(*run, "-o", tmp_path / "s.h5", "--shard", f"{k}/2", "-q").code == 0
    merged = gradscope("merge", tmp_path, "-o", tmp_path / "merged.h5")
    assert merged.code == 7
    assert "6,570 numbers in the result of scale:by=1e300 | mean" in merged.out


@pytest.mark.parametrize(("coupling", "code"), [("refuse", 4), ("own-loss", 0), ("frozen", 0)])
def test_coupled_samples(gradscope: Gradscope, tmp_path: Path, coupling: str, code: int) -> None:
    config = SAMPLES / "digits_batchnorm" / "run.toml"
    done = gradscope(
        "compute", "--config", config, "--mode", "train", "--samples", ":20",
        "--coupling", coupling, "-o", tmp_path / "out.h5",
    )  # fmt: skip
    assert done.code == code, done.err
    assert (tmp_path / "out.h5").exists() == (code == 0)
    if code:
        assert "BatchNorm2d" in done.err
        assert "two meanings" in done.err
        assert "--coupling" in done.err


def test_compressed_rows_are_the_same(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    run = ["compute", "--config", digits, "--samples", ":20", "-q", "-t", "identity", "-t", "mean"]
    assert gradscope(*run, "-o", tmp_path / "plain.h5").code == 0
    done = gradscope(*run, "-o", tmp_path / "o.h5", "--compression", "zstd:2")
    assert done.code == 0, done.err
    with h5py.File(tmp_path / "plain.h5") as a, h5py.File(tmp_path / "o.h5") as b:
        for chain in ("0", "1"):
            for name in a[f"chains/{chain}"]:
                path = f"chains/{chain}/{name}"
                np.testing.assert_array_equal(a[path], b[path])
        spec = json.loads(b.attrs["run"])["spec"]
        assert spec["compute"]["compression"] == "zstd:2"
    assert gradscope("stats", tmp_path / "o.h5").code == 0
    assert gradscope("export", tmp_path / "o.h5", "-o", tmp_path / "rows.safetensors").code == 0


def test_a_library_that_is_not_there(
    gradscope: Gradscope, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before anything is loaded."""
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    run = ["compute", "missing.pt", "--config", digits, "-o", tmp_path / "o.h5"]
    done = gradscope(*run, "--compression", "zstd")
    assert (done.code, done.out) == (2, "")
    assert "gradscope[compression]" in done.err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small(tmp_path: Path) -> list[object]:
    """A model whose run takes next to nothing beside what is loaded when it first runs."""
    folder = project.write(tmp_path)
    names = [folder / "weights.pt", folder / "data.npz", "--model", f"{folder}/model.py:build"]
    return ["compute", *names, "--loss", f"{folder}/model.py:loss"]


def test_the_batch_size_follows_from_the_memory(
    gradscope: Gradscope, small: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "out.h5"
    done = gradscope(*small, "--memory", "2 GB", "-o", out)
    assert done.code == 0, done.err
    assert "of the allowed" in " ".join(done.out.split())
    with h5py.File(out) as file:
        run = json.loads(file.attrs["run"])
    assert run["batch_size"] == project.SAMPLES
    assert run["spec"]["compute"]["memory"] == "2 GB"
    resumed = gradscope(*small, "--memory", "1GB", "-o", out, "--resume")
    assert resumed.code == 0, resumed.err  # how much is computed at a time is no other run


@pytest.mark.full
def test_a_plan_tells_bytes_memory_and_with_verbose_the_kernels(
    gradscope: Gradscope, small: list[object], tmp_path: Path
) -> None:
    done = gradscope(*small, "--dry-run", "--json", "-o", tmp_path / "out.h5")
    assert (done.code, done.err) == (0, "")
    plan = json.loads(done.out)
    assert plan["schema"] == "gradscope.plan"
    assert 0 < plan["memory"] < plan["available"]
    shown = gradscope(*small, "--dry-run", "--compression", "gzip").out
    for text in ("nothing was written", "before compression", "in addition to model", "available"):
        assert text in shown
    config = ["--config", SAMPLES / "digits_cnn" / "run.toml", "--samples", ":256"]
    kernels = gradscope("compute", *config, "--dry-run", "--verbose").out
    assert "Kernels" in kernels and "Kernels" not in shown
    assert not list(tmp_path.glob("out*"))


def test_compilation_is_asked_for_or_not(gradscope: Gradscope, small: list[object]) -> None:
    """What --compile, or the run file, asks for is taken back by --no-compile."""
    run = [*small, "--backend", "hooks", "--dry-run", "--json", "--compile"]
    told = [json.loads(gradscope(*run, *more).out)["notes"] for more in ([], ["--no-compile"])]
    assert [any("hooks has no compiled form" in note for note in notes) for notes in told] == [
        True,
        False,
    ]


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def large(small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A run whose file counts as large."""
    import gradscope.run  # noqa: F401

    monkeypatch.setattr(sys.modules["gradscope.run.inspection"], "LARGE", 0)
    project.write(tmp_path, samples=2000)
    return [*small, "-o", tmp_path / "o.h5"]


def test_a_full_disk_is_refused_beforehand(
    gradscope: Gradscope, large: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 15_000))
    done = gradscope(*large)
    assert (done.code, done.out) == (6, "")
    assert "the file needs" in done.err and "free" in done.err and "another disk" in done.err
    plan = gradscope(*large, "--dry-run", "--json")
    assert plan.code == 6
    assert json.loads(plan.out)["fits"] is False
    assert not list(tmp_path.glob("o.h5*"))


def test_a_large_run_says_so_on_stderr(gradscope: Gradscope, large: list[object]) -> None:
    done = gradscope(*large)
    assert done.code == 0, done.err
    assert all(word in done.err for word in ("in the dense layout", "free", "time"))
    assert "in the dense layout" not in done.out
    quiet = gradscope(*large, "--overwrite", "-q")
    assert (quiet.code, quiet.err) == (0, "")


@pytest.fixture
def audited(tmp_path: Path) -> list[str]:
    folder = project.write(tmp_path, AUDITED)
    return [
        *("compute", f"{folder}/weights.pt", f"{folder}/data.npz", "--dtype", "float64"),
        *("--model", f"{folder}/model.py:build", "--loss", f"{folder}/model.py:loss"),
        *("--batch-size", "2", "-o", f"{folder}/o.h5"),
    ]


def test_compute_and_stats_tell_of_audits(
    gradscope: Gradscope, audited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = gradscope(*audited)
    assert done.code == 0
    assert "of 130 batches audited" in " ".join(done.out.split())
    told = gradscope("stats", audited[-1], "--full").out
    assert all(len(line) <= 40 for line in told.splitlines()[1:])
    proof = json.loads(gradscope("stats", audited[-1], "--json").out)["file"]["proof"]
    assert f"{proof['proved']} of 130 batches audited: samples 0 to 1," in " ".join(told.split())
    assert proof["audited"][-1][1] == AUDITED - 1
    never = [*audited, "--overwrite", "--verify", "never"]
    assert "NOT VERIFIED" in gradscope(*never).out
    assert "audited" not in gradscope("stats", audited[-1], "--full").out
