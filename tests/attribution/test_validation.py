"""`gradscope validate` against ridge regressions in closed form, killed, shared and misused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

import gradscope
from gradscope.attribution import Validation, ValidationRun, ValidationSettings, validate
from gradscope.attribution.retraining import subset
from gradscope.errors import GradscopeError, ModelError, NonFiniteError, OutputError, SpecError
from tests.cli.conftest import Gradscope

N, M, D, RIDGE = 40, 6, 5, 0.5
MODEL = """
from torch import nn
def build():
    return nn.Linear(5, 1, bias=False).double()
"""
RUN = """
version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "w.safetensors"
[dataset]
path = "train.npz"
[loss]
name = "mse"
"""
FIT = f"""
import os, time
from pathlib import Path
import numpy as np, torch
from model import build
HERE = Path(__file__).parent

def fit(indices, seed):
    log = HERE / "log.txt"
    time.sleep(float(os.environ.get("SLOW", 0)))
    if log.exists() and len(log.read_text().splitlines()) >= int(os.environ.get("HELD", 99)):
        time.sleep(600)
    (HERE / f"{{os.getpid()}}.here").touch()
    while len(list(HERE.glob("*.here"))) < int(os.environ.get("TOGETHER", 1)):
        time.sleep(0.01)
    with log.open("a") as lines:
        print(len(indices), seed, os.getpid(), file=lines)
    with np.load(HERE / "train.npz") as data:
        x, y = data["inputs"][indices], data["targets"][indices]
    model = build()
    solved = np.linalg.solve(x.T @ x + {RIDGE} * np.eye({D}), x.T @ y)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(solved.T))
    return model.eval()

def raises(indices, seed): raise RuntimeError("no more GPUs")
def nothing(indices, seed): pass
def leaves(indices, seed): os._exit(3)
def other(indices, seed): return torch.nn.Linear(4, 1, bias=False)
def diverged(indices, seed):
    model = fit(indices, seed)
    with torch.no_grad():
        model.weight.fill_(np.nan)
    return model
"""


class Ridge:
    """A folder with a ridge regression, its scores, and what is true of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, draw = folder, np.random.default_rng(5)
        truth = draw.normal(size=(D, 1))
        self.data = {}
        for name, n in (("train", N), ("query", M)):
            x = draw.normal(size=(n, D))
            y = x @ truth + draw.normal(size=(n, 1)) * draw.exponential(size=(n, 1))
            np.savez(folder / f"{name}.npz", inputs=x, targets=y)
            self.data[name] = x, y
        (folder / "model.py").write_text(MODEL)
        (folder / "fit.py").write_text(FIT)
        (folder / "run.toml").write_text(RUN)
        weight = torch.from_numpy(self.solved(np.ones(N, dtype=bool)).T.copy())
        save_file({"weight": weight}, folder / "w.safetensors")
        self.scores = folder / "scores.h5"
        self.fit = f"{folder / 'fit.py'}:fit"
        run, query = folder / "run.toml", folder / "query.npz"
        gradscope.attribute(run, query, "fisher", 0.1, output=self.scores).close()

    def solved(self, kept: np.ndarray) -> np.ndarray:
        x, y = (part[kept] for part in self.data["train"])
        return np.linalg.solve(x.T @ x + RIDGE * np.eye(D), x.T @ y)

    def losses(self, kept: np.ndarray) -> np.ndarray:
        """The loss of each query (M,) after training on some samples."""
        x, y = self.data["query"]
        return np.square(x @ self.solved(kept) - y)[:, 0]

    @property
    def calls(self) -> list[str]:
        """A line for each training that was done."""
        log = self.folder / "log.txt"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def kept(self) -> Path:
        """The folder of the retrainings."""
        return self.folder / "scores.validation"

    def files(self) -> dict[str, bytes]:
        """What the retrainings have left."""
        return {path.name: path.read_bytes() for path in sorted(self.kept.iterdir())}


@pytest.fixture
def ridge(tmp_path: Path) -> Ridge:
    return Ridge(tmp_path)


def asked(**more: Any) -> ValidationSettings:
    return ValidationSettings(**{"retrainings": 12, **more})


def test_it_is_the_rank_correlation_with_models_that_numpy_has_trained(ridge: Ridge) -> None:
    found = validate(ridge.scores, ridge.fit, asked(retrainings=25, seed=4))
    with gradscope.attribution.open_scores(ridge.scores) as scores:
        own = np.stack([scores.row(q) for q in range(M)])
        loss = scores.samples["loss"]
    kept = np.stack([subset(4, k, N, 0.5).kept for k in range(25)])
    assert set(kept.sum(1)) == {N // 2}
    losses = np.stack([ridge.losses(row) for row in kept])
    inputs = ridge.data["query"][0] @ ridge.data["train"][0].T
    for row, scored in (("the file's", own), ("inner products of inputs", inputs)):
        expected = [stats.spearmanr(-(kept @ scored[q]), losses[:, q]).statistic for q in range(M)]
        (known,) = (r for r in found.rows if r.scores == row)
        assert known.lds == pytest.approx(np.mean(expected), abs=1e-12)
        assert known.interval.low <= known.lds <= known.interval.high
        if row == "the file's":
            assert [q.lds for q in found.by_query] == pytest.approx(expected, abs=1e-12)
            width = known.interval.high - known.interval.low
            assert found.needed == int(np.ceil(25 * (width / found.width) ** 2))
    by_loss = [stats.spearmanr(-(kept @ loss), losses[:, q]).statistic for q in range(M)]
    assert next(r.lds for r in found.rows if r.scores == "training loss") == pytest.approx(
        np.mean(by_loss)
    )


def test_scores_that_are_right_predict_and_random_ones_do_not(ridge: Ridge) -> None:
    found = validate(ridge.scores, ridge.fit, asked(retrainings=60))
    rows = {row.scores: row for row in found.rows}
    assert rows["the file's"].interval.low > 0.6
    random = rows["random"]  # by chance within two 95% intervals of nothing
    assert abs(random.lds) < random.interval.high - random.interval.low < 0.4
    assert Validation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_removals_are_those_of_the_closed_form(ridge: Ridge) -> None:
    found = validate(ridge.scores, ridge.fit, asked(removal=8))
    whole = ridge.losses(np.ones(N, dtype=bool))
    assert [row.k for row in found.removal] == [2, 4, 8] * 3
    assert {row.index for row in found.removal} == {0, 2, 5}
    with gradscope.attribution.open_scores(ridge.scores) as scores:
        for row in found.removal:
            kept = np.ones(N, dtype=bool)
            kept[np.argsort(-scores.row(row.index))[: row.k]] = False
            rise = ridge.losses(kept)[row.index] - whole[row.index]
            assert row.helpful == pytest.approx([rise] * 3, rel=1e-9)
            assert row.predicted == pytest.approx(np.sort(scores.row(row.index))[-row.k :].sum())
            assert np.mean(row.helpful) > np.mean(row.drawn)
            assert len(set(row.drawn)) == 3  # each seed draws others


def test_scores_of_another_loss_are_compared_with_that_loss(ridge: Ridge) -> None:
    run, query = ridge.folder / "run.toml", ridge.folder / "query.npz"
    how: Any = {"score": "cosine", "query_loss": "l1", "output": ridge.scores, "overwrite": True}
    with gradscope.attribute(run, query, "fisher", 0.1, **how) as scores:
        own = np.stack([scores.row(q) for q in range(M)])
    found = validate(ridge.scores, ridge.fit, asked())
    kept = np.stack([subset(0, k, N, 0.5).kept for k in range(12)])
    losses = np.sqrt(np.stack([ridge.losses(row) for row in kept]))
    expected = [stats.spearmanr(-(kept @ own[q]), losses[:, q]).statistic for q in range(M)]
    assert [q.lds for q in found.by_query] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(SpecError) as caught:
        ValidationRun(ridge.scores, ridge.fit, asked(removal=8))
    assert str(caught.value) == (
        "--removal: the scores are cosine, which do not predict the size of a change of the loss\n"
        "Leave --removal out, or score with gradscope attribute --score influence."
    )


def test_what_is_done_is_not_done_again(ridge: Ridge) -> None:
    first = validate(ridge.scores, ridge.fit, asked())
    assert len(ridge.calls) == 12
    again = validate(ridge.scores, ridge.fit, asked())
    more = validate(ridge.scores, ridge.fit, asked(retrainings=15))
    assert (again, len(ridge.calls)) == (first, 15)
    assert more.retrainings == 15
    assert len({line.split()[1] for line in ridge.calls}) == 15  # each has its own seed
    (ridge.kept / "subset-0003.npy").unlink()
    assert validate(ridge.scores, ridge.fit, asked()) == first


@pytest.mark.full
def test_workers_share_the_work_and_find_the_same(
    ridge: Ridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOGETHER", "2")
    together = validate(ridge.scores, ridge.fit, asked(), workers=2)
    assert len(ridge.calls) == 12
    processes = {line.split()[2] for line in ridge.calls}
    assert len(processes) == 2 and str(os.getpid()) not in processes
    files = ridge.files()
    monkeypatch.delenv("TOGETHER")
    alone = ValidationRun(ridge.scores, ridge.fit, asked(), overwrite=True)
    assert len(list(alone.remaining())) == 12
    assert (alone.finish(), ridge.files()) == (together, files)


def start(
    ridge: Ridge, *more: str, slow: float = 0, held: int = 99, together: int = 1
) -> subprocess.Popen[str]:
    words = [
        "validate",
        "scores.h5",
        "--train",
        "fit.py:fit",
        "--retrainings",
        "8",
        "--json",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "gradscope", *words], cwd=ridge.folder, text=True,
        env=os.environ
        | {"SLOW": str(slow), "HELD": str(held), "TOGETHER": str(together), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(ridge: Ridge, process: subprocess.Popen[str], count: int) -> None:
    while process.poll() is None:
        if len(list((ridge.kept).glob("*.npy"))) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_process_loses_its_current_training_only(
    ridge: Ridge, number: signal.Signals
) -> None:
    with start(ridge, held=3) as process:
        wait_for(ridge, process, 3)
        process.send_signal(number)
        _, told = process.communicate()
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), told
    done = len(list((ridge.kept).glob("*.npy")))
    assert done == 3
    before = len(ridge.calls)
    again = validate(ridge.scores, ridge.fit, asked(retrainings=8))
    assert len(ridge.calls) == before + 8 - done
    assert not list((ridge.kept).glob("*.part"))
    kept, work = (
        ridge.files(),
        ValidationRun(ridge.scores, ridge.fit, asked(retrainings=8), overwrite=True),
    )
    assert len(list(work.remaining())) == 8
    assert (work.finish(), ridge.files()) == (again, kept)


@pytest.mark.full
def test_two_commands_at_once_share_the_work(ridge: Ridge) -> None:
    with start(ridge, "--json", together=2) as one, start(ridge, "--json", together=2) as other:
        told = [process.communicate() for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert len(ridge.calls) == 8
    assert len({line.split()[2] for line in ridge.calls}) == 2


@pytest.mark.full
def test_stopping_the_command_stops_its_workers(ridge: Ridge) -> None:
    with start(ridge, "--workers", "2", slow=0.5) as process:
        wait_for(ridge, process, 1)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert (process.returncode, "to continue" in told) == (143, True)
    before = ridge.files()
    time.sleep(1.2)
    assert ridge.files() == before


WRONG: dict[str, tuple[type[GradscopeError], str]] = {
    "raises": (ModelError, "no more GPUs"),
    "nothing": (ModelError, "returned None"),
    "other": (ModelError, "weight: .1, 4., but .1, 5. in the run"),
    "diverged": (NonFiniteError, "6 of 6 queries are not finite"),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 1) for name in WRONG), pytest.param("raises", 2, marks=pytest.mark.full)],
)
def test_what_is_wrong_with_a_fit_is_told(ridge: Ridge, name: str, workers: int) -> None:
    kind, text = WRONG[name]
    with pytest.raises(kind, match=text) as caught:
        validate(ridge.scores, ridge.fit.replace(":fit", f":{name}"), asked(), workers=workers)
    assert f"fit.py:{name}, retraining subset-" in str(caught.value)
    assert list(ridge.files()) == ["plan.json"]


@pytest.mark.full
def test_a_worker_that_leaves_without_a_word_is_told(ridge: Ridge) -> None:
    with pytest.raises(ModelError, match="a worker process has ended with code 3"):
        validate(ridge.scores, ridge.fit.replace(":fit", ":leaves"), asked(), workers=2)


def test_other_code_seeds_and_data_are_refused(ridge: Ridge) -> None:
    first = validate(ridge.scores, ridge.fit, asked())
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        validate(ridge.scores, ridge.fit, asked(seed=1))
    with pytest.raises(OutputError, match="fit is 'fit' there, 'other' here"):
        validate(ridge.scores, ridge.fit.replace(":fit", ":other"), asked())
    own = ridge.folder / "fit.py"
    own.write_text(FIT + "# a word more\n")
    with pytest.raises(OutputError, match=r"fit\.py has changed"):
        validate(ridge.scores, ridge.fit, asked())
    own.write_text(FIT)
    assert validate(ridge.scores, ridge.fit, asked()) == first


def test_other_scores_of_the_same_samples_take_the_retrainings_that_are_there(
    ridge: Ridge,
) -> None:
    first = validate(ridge.scores, ridge.fit, asked())
    other = ridge.folder / "other.h5"
    run, query = ridge.folder / "run.toml", ridge.folder / "query.npz"
    gradscope.attribute(run, query, "identity", output=other).close()
    folder = ridge.kept
    work = ValidationRun(other, ridge.fit, asked(), folder)
    assert len(list(work.remaining())) == len(ridge.calls) == 12
    assert work.finish().rows[1:] == first.rows[1:]
    np.savez(query, inputs=ridge.data["query"][0][:4], targets=ridge.data["query"][1][:4])
    gradscope.attribute(run, query, output=ridge.folder / "few.h5").close()
    with pytest.raises(OutputError, match=r"queries\.count is 6 there, 4 here"):
        ValidationRun(ridge.folder / "few.h5", ridge.fit, asked(), folder)
    with pytest.raises(GradscopeError, match="queries' data have changed"):
        ValidationRun(ridge.scores, ridge.fit, asked())


def test_scores_of_models_in_memory_are_refused(ridge: Ridge) -> None:
    model = torch.nn.Linear(D, 1, bias=False).double()
    x, y = map(torch.from_numpy, ridge.data["train"])
    with gradscope.Scope(model, "mse") as scope:
        output = ridge.folder / "memory.h5"
        gradscope.attribute((scope, x, y), (scope, x[:3], y[:3]), output=output).close()
    with pytest.raises(GradscopeError, match="a model in memory"):
        validate(output, ridge.fit, asked())


def test_nothing_of_others_is_overwritten(ridge: Ridge) -> None:
    mine = ridge.folder / "mine"
    mine.mkdir()
    for name in ("subset-0000.npy", "weights.npy"):
        (mine / name).write_bytes(b"mine")
    for content in (None, b"{", b'{"schema": "another"}'):
        if content is not None:
            (mine / "plan.json").write_bytes(content)
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=r"is not empty and has no plan\.json"):
                ValidationRun(ridge.scores, ridge.fit, asked(), mine, overwrite=overwrite)
    assert {path.name for path in mine.iterdir()} == {"subset-0000.npy", "weights.npy", "plan.json"}
    first = validate(ridge.scores, ridge.fit, asked(removal=2))
    (ridge.kept / "notes.txt").write_text("mine")
    ValidationRun(ridge.scores, ridge.fit, asked(seed=1), overwrite=True)
    assert sorted(ridge.files()) == ["notes.txt", "plan.json"]
    again = validate(ridge.scores, ridge.fit, asked(seed=1), folder=ridge.kept)
    assert again.rows != first.rows


def test_a_damaged_retraining_is_told(ridge: Ridge) -> None:
    validate(ridge.scores, ridge.fit, asked())
    (ridge.kept / "subset-0002.npy").write_bytes(b"short")
    with pytest.raises(GradscopeError, match=r"subset-0002\.npy: the file is damaged"):
        validate(ridge.scores, ridge.fit, asked())


@pytest.mark.parametrize(
    "more", [{"fraction": 0.0}, {"fraction": 1.0}, {"retrainings": 2}, {"width": 0}, {"removal": N}]
)
def test_options_that_do_not_fit_are_told(ridge: Ridge, more: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        validate(ridge.scores, ridge.fit, asked(**more))
    assert not (ridge.kept).exists()


def test_samples_without_scores_count_as_nothing(ridge: Ridge) -> None:
    x, y = ridge.data["train"][0].copy(), ridge.data["train"][1]
    x[7] = 1e200  # its gradient is infinite; FIT has its own data
    np.savez(ridge.folder / "bad.npz", inputs=x, targets=y)
    run = ridge.folder / "bad.toml"
    run.write_text(RUN.replace("train.npz", "bad.npz"))
    gradscope.attribute(run, ridge.folder / "query.npz", output=ridge.folder / "bad.h5").close()
    found = validate(ridge.folder / "bad.h5", ridge.fit, asked())
    assert any("1 training sample without scores" in note for note in found.notes)
    kept = np.stack([subset(0, k, N, 0.5).kept for k in range(12)])
    losses = np.stack([ridge.losses(row) for row in kept])
    with gradscope.attribution.open_scores(ridge.folder / "bad.h5") as scores:
        own = np.stack([scores.row(q) for q in range(M)])
    assert np.isnan(own[:, 7]).all()
    own[:, 7] = 0
    expected = [stats.spearmanr(-(kept @ own[q]), losses[:, q]).statistic for q in range(M)]
    assert [q.lds for q in found.by_query] == pytest.approx(expected)


def test_the_command_prints_a_table_or_a_document(
    ridge: Ridge, command: Gradscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ridge.folder)
    monkeypatch.setenv("COLUMNS", "100")
    words = "validate", "scores.h5", "--train", "fit.py:fit", "--retrainings", "6", "--removal", "3"
    shown = command(*words)
    assert shown.code == 0, shown
    for text in ("Rank correlation", "inner products of inputs", "Removing", "needs about"):
        assert text in shown.out
    document = json.loads(command(*words, "--json").out)
    assert document["schema"] == "gradscope.validate"
    assert [row["scores"] for row in document["rows"]] == [
        "the file's", "random", "training loss", "inner products of inputs"
    ]  # fmt: skip
    assert len(document["removal"]) == 9
    assert command(*words[:3], "fit.py:raises", "--overwrite").code == 3
    assert command(*words[:3], "fit.py:diverged", "--overwrite").code == 7
    assert command(*words, "--seed", "9").code == 6
    assert command("validate", "train.npz", *words[2:]).code == 3
