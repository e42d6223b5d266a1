"""Two processes with gloo: FSDP2, DistributedDataParallel, errors, a process that is killed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gradscope
from gradscope.attribution import open_scores
from gradscope.errors import SpecError
from gradscope.run.model_parallel import processes
from gradscope.training import read_history
from tests.ranks_worker import CHAINS, OWN

ROOT = Path(__file__).parents[1]
LIMIT = 120  # seconds after which it counts as hanging


def launched(place: Path, *command: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in two processes by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*torchrun, "--nproc-per-node=2", f"--max-restarts={restarts}", *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def found(place: Path, kind: str) -> list[Any]:
    """Return what both processes found."""
    ran = launched(place, "-m", "tests.ranks_worker", str(place), kind)
    told = [line for line in ran.stderr.splitlines() if line.startswith("[rank")]
    assert ran.returncode == 0, "\n".join(told[-60:])
    return [json.loads((place / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.full
def test_a_divided_model_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    every = found(tmp_path, "numbers")
    for own in every:
        for name in ("", "kept"):
            for what in ("norms", "rows", *CHAINS[: 5 if name == "" else 2]):
                assert own[f"{what} {name}"] < 1e-9, what
            for parameter, gradient in own[f"places {name}"]:
                assert gradient == parameter + 1  # behind the samples
        assert own["lengths"] < 1e-9
        assert own["training"] == [0, 0]
        assert own["nonfinite"]
        assert own["finite"] < 1e-9
        assert max(own["checkpointed"].values()) < 1e-12
        assert "passed" in own["proof"]
        assert own["alive"] < 5  # of 8 layers
        assert own["rounded"] < 1e-5
        assert any("computes in float32" in note for note in own["notes"])
        assert own["kinked"] < 1e-5
        assert own["put back"] == 0
        for error in own["mistaken"]:
            assert "parameter 'last.bias'" in error, error
            assert "failed the proof" in error, error
        assert own["bfloat16"] < 1e-2
        assert {*own["dtypes"]} == {"torch.float32"}
        assert own["policy"] == "bfloat16"
    assert sum(own["parts "] for own in every) == every[0]["whole "]
    assert max(own["parts "] for own in every) < 0.7 * every[0]["whole "]


@pytest.mark.full
def test_an_error_on_one_process_is_one_on_both(tmp_path: Path) -> None:
    first, second = found(tmp_path, "errors")
    for name, words in {
        "target": "Target 7",
        "index": "index out of range",
        "empty": "no sample",
    }.items():
        assert first[name].startswith("OtherProcessError: process 1 failed"), name
        assert words in first[name]
        assert words in second[name]
    assert "process 1 failed" in first["parallel"]
    assert "Target 7" in second["parallel"]
    failed = 0
    for one, two in zip(first["passes"], second["passes"], strict=True):
        if "nothing" not in (one, two):  # in a first look at the model an error is no matter
            failed += 1
            assert "process 1 failed" in one
            assert "on purpose" in two
        else:
            assert one == two
    assert failed >= 4
    assert first["alone"].startswith("RefusedError: process 1 failed")
    assert second["alone"].startswith("UnsupportedError")
    for own in (first, second):
        assert "make different requests" in own["other"]
        assert "'clip' needs whole gradients" in own["after"]
        assert "cannot be sharded as the parameter is" in own["quantile"]
        assert "backend 'vmap'" in own["vmap"]
        assert own["coupled"].startswith(("UnsupportedError", "CoupledSamplesError"))
        assert own["leaking"].startswith("CoupledSamplesError")
        assert "when other samples are replaced" in own["leaking"]
        assert "tensor parallel" in own["tensor parallel"]
        assert own["right"]


@pytest.mark.full
def test_later_batches_are_audited_by_all_processes_in_step(tmp_path: Path) -> None:
    first, second = found(tmp_path, "later")
    for case in ("last", "chosen", "always"):
        assert second[case].startswith("CoupledSamplesError"), second[case]
        assert first[case].startswith("RefusedError: process 1 failed"), first[case]
    for own, samples in zip((first, second), OWN, strict=True):
        assert own["first"] == own["right"] == "nothing"
        assert [own[f"proved first {k}"] for k in range(3)] == [True, False, False]
        audit = own["audited audit 3"]  # the first, and the last on leaving the scope
        assert (audit["batches"], audit["proved"]) == (4, 2)
        assert audit["audited"] == [[0, samples - 1], [200, 199 + samples]]
        assert 0 < audit["error"] < 1e-12
        assert [own[f"proved audit {k}"] for k in range(3)] == [True, False, False]


@pytest.mark.full
def test_a_divided_training_is_measured_by_all_its_processes(tmp_path: Path) -> None:
    first, second = found(tmp_path, "monitored")
    for own in (first, second):
        assert own["weights answers"] == own["weights fails"] == 0
        assert own["all"]["samples"] == 8
        close(own["all"], first["one"])
        close(own["trainer"], [first["one"][k] for k in ("samples", "loss", "norm_mean")])
        for times, other in zip(own["clocks"], first["clocks"], strict=True):
            assert times["steps"] == other["steps"] and len(times["steps"]) > 2
            assert times["share"] <= 0.3
    assert (first["logs"], second["logs"]) == ([1, 2, 4, 5], [])
    assert len(first["warned"]) == 1
    assert "no longer measured: process 1 failed" in first["warned"][0]
    assert second["warned"] == []
    history = read_history(tmp_path / "answers.jsonl")
    assert [step.step for step in history.steps] == [1, 2, 4, 5]
    assert history.end is not None and history.end.reason is None
    assert "process 1 failed" in (tmp_path / "fails.jsonl").read_text()


def close(found: Any, right: Any) -> None:
    """Hold numbers in plain data against others."""
    if isinstance(right, dict | list):
        assert len(found) == len(right)
        for key in right if isinstance(right, dict) else range(len(right)):
            close(found[key], right[key])
    else:
        assert (
            found == pytest.approx(right, rel=1e-12) if isinstance(right, float) else found == right
        )


@pytest.mark.full
def test_data_parallel_models_share_expectations_alone(tmp_path: Path) -> None:
    first, second = found(tmp_path, "parallel")
    assert first["norms"] < 1e-9
    assert first["samples"] == OWN[0]
    for chain in (*CHAINS, "center | clip:max_norm=0.3 | mean", "quantile:q=0.5"):
        assert first[chain] < 1e-9, chain
        assert second[chain] == first[chain]
    for own in (first, second):
        assert own["one without"] < 1e-9
        assert own["none"] == 0
        assert "the batch is empty" in own["mean of none"]
    assert second["late"].startswith("CertificateError: ")  # and is not begun again by itself
    assert first["late"].startswith("RefusedError: process 1 failed")


def test_a_single_process_divides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SpecError, match="only one is running"), processes(None):
        pass


@pytest.mark.parametrize(
    ("device", "there", "told"),
    [
        ("cuda:1", 1, "no device 'cuda:1'; the number of CUDA devices is 1"),
        ("cuda", 1, "LOCAL_RANK"),
        ("cuda", 0, "CUDA devices is 0"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, there: int, told: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    with pytest.raises(SpecError, match=told), processes(device):
        pass


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("killed", "another process of the group has ended"),
        ("failed", "process 1 failed: ZeroDivisionError"),
    ],
)
def test_a_process_that_ends_in_a_backward_pass_ends_the_others(
    kind: str, words: str, tmp_path: Path
) -> None:
    ran = launched(tmp_path, "-m", "tests.ranks_worker", str(tmp_path), kind)
    assert ran.returncode != 0
    assert words in json.loads((tmp_path / "0.json").read_text())


PROJECT = """
    import os, pathlib, signal, sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("scale", torch.full((6,), 1.5), persistent=False)

        def forward(self, x):
            hidden = self.table(x)
            for block in self.blocks:
                hidden = torch.tanh(block(hidden)) * self.scale
            return self.head(hidden.mean(1))

    class Last:
        def __del__(self, write=os.write):  # when the interpreter shuts down: gloo's threads
            write(2, b"shut down")  # do not survive that

    if "RANK" in os.environ:
        sys.left_over = Last()

    def build():
        return Net()

    def loss(outputs, targets):
        said = pathlib.Path(__file__).with_name("killed")
        if os.environ.get("RANK") == "1" and list(pathlib.Path().glob("*1-of-2*")):
            if (told := said.read_text()) == "now":
                said.write_text("done")
                os.kill(os.getpid(), signal.SIGKILL)
            said.write_text({"": "later", "later": "now"}.get(told, told))
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
OPTIONS = "weights.safetensors data.npz --model model.py:build --loss model.py:loss --batch-size 3"
ASKED = ("-t", "identity", "-t", "clip:max_norm=0.5 | mean", "-t", "var", "--dtype", "float64")


@pytest.mark.full
def test_one_file_of_a_model_divided_over_processes_one_of_which_is_killed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(PROJECT))
    space: dict[str, Any] = {}
    exec(textwrap.dedent(PROJECT), space)
    torch.manual_seed(0)
    weights = space["build"]().state_dict()
    save_file({k: v.clone() for k, v in weights.items()}, tmp_path / "weights.safetensors")
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 11, (20, 4)), draw.integers(0, 11, 20)
    np.savez(tmp_path / "data.npz", inputs=x, targets=y)
    command = ("-m", "gradscope", "compute", *OPTIONS.split(), *ASKED)
    (tmp_path / "killed").write_text("")
    first = launched(tmp_path, *command, "--sharded", "-o", "out.h5")
    assert first.returncode != 0
    assert (tmp_path / "killed").read_text() == "done"
    assert "SIGKILL" in first.stderr  # torchrun says so, and ends the other one
    assert not (tmp_path / "out.h5").exists()
    (tmp_path / "out.shard-0-of-3.h5.part").touch()
    (tmp_path / "killed").write_text("")  # once more: torchrun starts both again
    second = launched(tmp_path, *command, "--sharded", "-o", "out.h5", restarts=1)
    assert (tmp_path / "killed").read_text() == "done"
    assert second.returncode == 0, second.stderr[-3000:]
    assert "remain: out.shard-0-of-3.h5.part" in " ".join(second.stdout.split())
    assert "shut down" not in second.stderr
    assert not list(tmp_path.glob("*-of-2*"))
    alone = [sys.executable, *command, "--backend", "loop", "-o", "alone.h5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(alone, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with (
        gradscope.open(tmp_path / "out.h5") as found,
        gradscope.open(tmp_path / "alone.h5") as right,
    ):
        np.testing.assert_allclose(found.samples["norm"], right.samples["norm"], rtol=1e-9)
        audit = found.certificate["audit"]  # each process' first batch, and its last
        assert (audit["batches"], audit["proved"]) == (7, 4)
        assert audit["audited"] == [[0, 2], [6, 11], [18, 19]]
        for own, other in zip(found.chains, right.chains, strict=True):
            assert own.text == other.text
            for name in other:
                np.testing.assert_allclose(own[name][:], other[name][:], rtol=1e-9, atol=1e-12)


SCORED = """
    import os
    import signal
    from pathlib import Path

    import torch
    from torch import nn

    HERE = Path(__file__).parent

    def build():
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def loss(outputs, targets):
        said = HERE / "said"  # how many calls process 1 survives
        if os.environ.get("RANK") == "1" and said.exists():
            left = int(said.read_text())
            said.write_text(str(left - 1))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
ATTRIBUTED = """
version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.safetensors"
[dataset]
path = "train.npz"
[loss]
name = "model.py:loss"
[compute]
batch_size = 4
"""


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """A folder with a run of 41 samples, and 5 queries; all gradients point one way."""
    (tmp_path / "model.py").write_text(textwrap.dedent(SCORED))
    for name, n in (("train", 41), ("query", 5)):
        (tmp_path / f"{name}.toml").write_text(ATTRIBUTED.replace("train.npz", f"{name}.npz"))
        x, y = np.random.default_rng(n).normal(size=(n, 5)), np.ones(n, np.int64)
        np.savez(tmp_path / f"{name}.npz", inputs=x, targets=y)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    save_file(model.double().state_dict(), tmp_path / "weights.safetensors")
    alone(tmp_path, *EKFAC, "train.toml", "query.npz", "-o", "alone.h5")
    return tmp_path


EKFAC = ("attribute", "--curvature", "ekfac")


def alone(place: Path, *words: str) -> None:
    """Run gradscope in one process."""
    command = [sys.executable, "-m", "gradscope", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True)


def assert_same_scores(place: Path) -> None:
    with open_scores(place / "s.h5") as found, open_scores(place / "alone.h5") as right:
        np.testing.assert_allclose(found.values[...], right.values[...], rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(found.samples["index"], np.arange(41))
        damping = [r.record["checkpoints"][0]["damping"] for r in (found, right)]
    assert damping[0] == pytest.approx(damping[1]) and damping[0] > 0.1


@pytest.mark.full
@pytest.mark.parametrize("calls", [4, 60])
def test_workers_score_together_and_one_is_killed(scored: Path, calls: int) -> None:
    """Killed while factors are computed, or later; restarted, and the same as one process."""
    (scored / "said").write_text(str(calls))
    words = ("-m", "gradscope", *EKFAC, "train.toml", "query.npz", "-o", "s.h5")
    ran = launched(scored, *words, restarts=1)
    assert ran.returncode == 0, ran.stderr[-3000:]
    # torchrun names the worker that ended first: the killed one, or the one that missed it
    assert int((scored / "said").read_text()) < 0 and "exitcode: " in ran.stderr
    shards = [f"s.shard-{k}-of-2.h5" for k in (0, 1)]
    alone(scored, "merge", *shards, "-o", "s.h5")
    assert_same_scores(scored)
    made = {"alone.h5", "s.h5", "s.factors-ekfac.h5", "s.factors-kfac.h5", *shards}
    assert {path.name for path in scored.glob("*.h5")} == made


@pytest.mark.full
def test_scores_of_a_model_that_is_in_no_process(scored: Path) -> None:
    """Rows and factors of a sharded model; scores need the files only."""
    kfac = ("-t", "kfac:bias=column,full=512")
    for words in (
        ("train.toml", "-t", "identity", *kfac, "-t", "mean", "-o", "rows.h5"),
        ("train.toml", "-t", "ekfac:with=rows.h5:1", "-t", "mean", "-o", "factors.h5"),
        ("query.toml", "-t", "identity", "-o", "query.h5"),
    ):
        ran = launched(scored, "-m", "gradscope", "compute", "--sharded", "--config", *words)
        assert ran.returncode == 0, ran.stderr[-3000:]
    (scored / "weights.safetensors").unlink()
    alone(scored, *EKFAC, "rows.h5", "query.h5", "--factors", "factors.h5", "-o", "s.h5")
    assert_same_scores(scored)
