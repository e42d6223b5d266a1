"""`gradscope compute` from the outside: files, numbers, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.cli.conftest import SAMPLES, Gradscope
from tests.oracle import per_sample_gradients


def loaded(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, torch.Tensor]]:
    folder = SAMPLES / name
    with np.load(folder / "data.npz") as data:
        images, labels = (data[k] for k in data.files)
    return images, labels, load_file(folder / "weights.safetensors")


def digits_rows(n: int) -> dict[str, np.ndarray]:
    """The first rows by the oracle, from the files alone: a ReLU or tanh MLP on scaled images."""
    import importlib.util

    images, labels, weights = loaded("digits_mlp")
    spec = importlib.util.spec_from_file_location("digits", SAMPLES / "digits_mlp" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build()
    model.load_state_dict(weights)
    inputs = torch.from_numpy(images[:n]).double() * 0.0625
    targets = torch.from_numpy(labels[:n]).long()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    _, rows = per_sample_gradients(model.eval(), loss, inputs, targets)
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


def test_json_is_one_document_and_nothing_else(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.h5"
    done = gradscope("compute", "--config", digits, "--samples", ":20", "-o", out, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["schema"] == "gradscope.compute"
    assert document["samples"] == 20
    assert document["certificate"]["verified"] is True


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


def test_positional_arguments_do_without_a_run_file(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    images, labels, _ = loaded("digits_mlp")
    data, out = tmp_path / "data.npz", tmp_path / "out.h5"
    inputs = (images[:25] * 0.0625).astype(np.float32)
    np.savez(data, inputs=inputs, targets=labels[:25].astype(np.int64))
    folder = digits.parent
    done = gradscope(
        "compute", folder / "weights.safetensors", data, "--model", f"{folder}/model.py:build",
        "--loss", "cross_entropy", "-o", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    with h5py.File(out) as file:
        first = next(iter(digits_rows(25)))
        np.testing.assert_allclose(
            file[f"chains/0/{first}"], digits_rows(25)[first], rtol=1e-4, atol=1e-6
        )


def test_a_dry_run_writes_nothing(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    done = gradscope("compute", "--config", digits, "-o", tmp_path / "out.h5", "--dry-run")
    assert done.code == 0
    assert "nothing was written" in done.out
    assert not list(tmp_path.iterdir())


def test_a_sample_that_is_not_finite_is_flagged(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    images, labels, _ = loaded("digits_mlp")
    inputs = (images[:25] * 0.0625).astype(np.float32)
    inputs[7, 3] = np.nan
    data, out = tmp_path / "data.npz", tmp_path / "out.h5"
    np.savez(data, inputs=inputs, targets=labels[:25].astype(np.int64))
    folder = digits.parent
    arguments = [folder / "weights.safetensors", data, "--model", f"{folder}/model.py:build"]
    done = gradscope("compute", *arguments, "--loss", "cross_entropy", "-t", "mean", "-o", out)
    assert done.code == 7
    keep = np.arange(25) != 7
    with h5py.File(out) as file:
        assert list(np.flatnonzero(~file["samples/finite"][:].astype(bool))) == [7]
        for name, g in digits_rows(25).items():
            np.testing.assert_allclose(file[f"chains/0/{name}"], g[keep].mean(0), atol=1e-6)


BAD = {
    "no checkpoint": (["missing.pt", "--config", "RUN"], 3, "missing.pt"),
    "no run file": (["--config", "missing.toml"], 2, "missing.toml"),
    "unknown backend": (["--config", "RUN", "--backend", "hook"], 2, "hooks"),
    "unknown transform": (["--config", "RUN", "-t", "klip | mean"], 2, "clip"),
    "unknown loss": (["--config", "RUN", "--loss", "crossentropy"], 2, "cross_entropy"),
    "unknown argument": (["--config", "RUN", "-t", "clip:norm=1|mean"], 2, "max_norm"),
    "two reducers": (["--config", "RUN", "-t", "mean | var"], 2, "second reducer"),
    "no such factory": (["--config", "RUN", "--model", "MODEL:biuld"], 3, "build"),
    "no model file": (["--config", "RUN", "--model", "nowhere.py:build"], 3, "nowhere.py"),
    "another model's weights": (["CNN", "--config", "RUN"], 3, "weights.pt"),
    "sample out of range": (["--config", "RUN", "--samples", "0:99999"], 3, "1797"),
    "no such parameter": (["--config", "RUN", "--parameters", "conv*"], 2, "conv*"),
    "nothing to write to": (["--config", "RUN", "-o", "nowhere/out.h5"], 6, "nowhere"),
    "contradiction": (["--config", "RUN", "--resume", "--overwrite"], 2, "--resume"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str, gradscope: Gradscope, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, code, mentioned = BAD[name]
    words = {
        "RUN": str(digits),
        "CNN": str(SAMPLES / "digits_cnn" / "weights.pt"),
    }
    given = [words.get(w, w).replace("MODEL", str(digits.parent / "model.py")) for w in arguments]
    done = gradscope("compute", "-o", tmp_path / "out.h5", *given)
    assert done.code == code, done.err
    assert done.out == ""
    assert done.err.count("error") >= 1
    assert mentioned in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["weights.safetensors", "data.npz", "model.py"])
def test_an_input_is_not_overwritten_even_if_asked(
    gradscope: Gradscope, digits: Path, tmp_path: Path, what: str
) -> None:
    folder = Path(shutil.copytree(digits.parent, tmp_path / "copy"))
    before = (folder / what).read_bytes()
    config = ["--config", folder / "run.toml", "--samples", ":4", "-q"]
    refused = gradscope("compute", *config, "--overwrite", "-o", folder / what)
    assert refused.code == 6
    assert what in refused.err
    assert (folder / what).read_bytes() == before
    assert not list(folder.glob("*.part*"))


def test_an_existing_file_is_not_overwritten_unasked(
    gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.h5"
    arguments = ["compute", "--config", digits, "--samples", ":20", "-q", "-o", out]
    assert gradscope(*arguments).code == 0
    before = out.read_bytes()
    refused = gradscope(*arguments)
    assert refused.code == 6
    assert "--overwrite" in refused.err
    assert out.read_bytes() == before
    assert gradscope(*arguments, "--overwrite").code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_goes_on(
    number: signal.Signals, code: int, gradscope: Gradscope, digits: Path, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole.h5", tmp_path / "stopped.h5"
    run = ["compute", "--config", str(digits), "-t", "identity", "-t", "var", "--batch-size", "1"]
    run += ["--backend", "loop", "--verify", "always"]
    assert gradscope(*run, "-o", whole, "-q").code == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "gradscope", *run, "-o", str(stopped)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    progress = tmp_path / "stopped.h5.part.progress"
    while not progress.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert not stopped.exists()
    assert "--resume" in err
    assert "Traceback" not in err
    assert gradscope(*run, "-o", stopped, "--resume", "-q").code == 0
    with h5py.File(whole) as a, h5py.File(stopped) as b:
        for name in ("0", "1"):
            for key in a[f"chains/{name}"]:
                x, y = a[f"chains/{name}/{key}"], b[f"chains/{name}/{key}"]
                if isinstance(x, h5py.Dataset):
                    np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(a["samples/norm"], b["samples/norm"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_there_is_anything_to_keep(
    number: signal.Signals, digits: Path, tmp_path: Path
) -> None:
    """Modules that are half imported are left as they are."""
    run = [sys.executable, "-X", "importtime", "-m", "gradscope", "compute", "--config", digits]
    for module in ("numpy.linalg", "torch.fx", "torch", "gradscope.scope"):
        process = subprocess.Popen(
            [*run, "-o", str(tmp_path / "o.h5")], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:  # each module is named when it is imported
            if line.split("|")[-1].strip() == module:
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err
        assert "stopped before" in err
        assert not list(tmp_path.iterdir())


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


def test_a_chain_that_overflows_is_told(gradscope: Gradscope, digits: Path, tmp_path: Path) -> None:
    run = ["compute", "--config", digits, "--samples", ":40", "--dtype", "float32"]
    run += ["-t", "scale:by=1e300 | mean", "-t", "mean", "--batch-size", "20"]
    done = gradscope(*run, "-o", tmp_path / "out.h5")
    assert done.code == 7
    assert "6,570 numbers of scale:by=1e300 | mean" in done.out
    assert done.out.count("numbers of") == 1
    again = gradscope(*run, "-o", tmp_path / "out.h5", "--resume", "--json")
    assert again.code == 7
    assert json.loads(again.out)["chains_nonfinite"] == [6570, 0]
    for k in range(2):  # the others wait for a shard
        assert gradscope(*run, "-o", tmp_path / "s.h5", "--shard", f"{k}/2", "-q").code == 0
    merged = gradscope("merge", tmp_path, "-o", tmp_path / "merged.h5")
    assert merged.code == 7
    assert "6,570 numbers of scale:by=1e300 | mean" in merged.out
