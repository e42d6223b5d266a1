"""Bad models and run files through the command line: one clear error, and nothing written."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.forked import Forked, Outcome

GOOD = "from torch import nn\ndef build(): return nn.Linear(4, 3)\n"
MADE = """
from torch import nn
class Made(nn.Linear):
    def forward(self, x):
        {}
def build(): return Made(4, 3)
"""
MODELS: dict[str, tuple[str | None, int, str]] = {
    "no file": (None, 3, "model.py: cannot be read"),
    "raises on import": ("1 / 0", 3, "ZeroDivisionError: division by zero"),
    "leaves": ("import os; os._exit(0)", 3, "your code called sys.exit(0)"),
    "raises beyond Exception": (
        "class Odd(BaseException): pass\nraise Odd('x')",
        3,
        "your code raised Odd: x",
    ),
    "needs arguments": ("def build(width): pass", 3, "missing a required argument: 'width'"),
    "raises in forward": (
        MADE.format("raise OSError('no table')"),
        3,
        "raised OSError: no table",
    ),
    "exits in forward": (MADE.format("raise SystemExit(0)"), 3, "called sys.exit(0)"),
    "is cut off": (
        MADE.format("return nn.Linear.forward(self, x).detach()"),
        3,
        "are cut off from",
    ),
    "prints": (f"print('hello')\n{GOOD}", 0, "hello"),
}


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", inputs=np.ones((6, 4), "float32"), targets=np.arange(6) % 3)
    (tmp_path / "model.py").write_text(GOOD)
    return tmp_path


def compute(forked: Forked, folder: Path, *more: str) -> Outcome:
    words = ["compute", "w.pt", "d.npz", "--model", "model.py:build", "--loss", "cross_entropy"]
    return forked.run(*words, "-o", "out.h5", *more, cwd=folder)


def assert_clear(done: Outcome, code: int, words: str, folder: Path) -> None:
    assert done.code == code, done.err
    assert words in done.err.replace("\n", ". ")
    assert "gradscope/" not in done.err  # none of our own frames
    if code:
        assert done.err.startswith("error: ")
        assert not done.out
        assert not (folder / "out.h5").exists()


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_file(forked: Forked, folder: Path, name: str) -> None:
    content, code, words = MODELS[name]
    path = folder / "model.py"
    path.unlink() if content is None else path.write_text(content)
    assert_clear(compute(forked, folder), code, words, folder)


def test_an_error_in_forward_says_where(forked: Forked, folder: Path) -> None:
    (folder / "model.py").write_text(MADE.format("raise OSError('no table')"))
    lines = compute(forked, folder).err.splitlines()
    assert f'  File "{folder}/model.py", line 5, in forward' in lines
    assert not any("torch/nn/modules" in line for line in lines)


def test_a_model_file_that_would_be_waited_for(forked: Forked, folder: Path) -> None:
    (folder / "model.py").unlink()
    os.mkfifo(folder / "model.py")
    assert_clear(compute(forked, folder), 3, "no regular file", folder)


def test_the_result_goes_where_it_was_asked_for(forked: Forked, folder: Path) -> None:
    """Even if the user's code goes elsewhere."""
    (folder / "elsewhere").mkdir()
    (folder / "model.py").write_text(f"import os; os.chdir('elsewhere')\n{GOOD}")
    words = ["compute", "w.pt", folder / "d.npz", "--model", "model.py:build"]
    done = forked.run(*words, "--loss", "cross_entropy", "-o", "out.h5", cwd=folder)
    assert done.code == 0, done.err
    assert (folder / "out.h5").exists()


def test_a_loss_of_no_fractions(forked: Forked, folder: Path) -> None:
    (folder / "loss.py").write_text(
        "def hits(outputs, targets): return outputs.argmax(1) == targets"
    )
    done = compute(forked, folder, "--loss", "loss.py:hits")
    assert_clear(done, 2, "must return floating-point numbers, not torch.bool", folder)


def test_names_with_odd_characters_are_shown_not_obeyed(forked: Forked, folder: Path) -> None:
    (folder / "model.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_module('[bold] a\\x1b[31m/b|c', nn.Linear(4, 3))\n"
        "    def forward(self, x): return next(iter(self.children()))(x)\n"
        "def build(): return Net()\n"
    )
    weights = {f"[bold] a\x1b[31m/b|c.{k}": v for k, v in nn.Linear(4, 3).state_dict().items()}
    torch.save(weights, folder / "w.pt")
    done = compute(forked, folder)
    assert done.code in (0, 6), done.err  # stored, or refused for its name
    assert "\x1b" not in done.out + done.err
    assert "[bold] a\\x1b[31m/b|c" in done.out + done.err


RUN = """
[model]
factory = "model.py:build"
[checkpoint]
path = "w.pt"
[dataset]
path = "d.npz"
[loss]
name = "cross_entropy"
"""

RUNS: dict[str, tuple[bytes, str]] = {
    "not TOML": (b"{'a': 1}", "run.toml: not valid TOML"),
    "not text": (bytes(range(256)), "run.toml: not"),
    "100 MB": (b"# nothing here\n" * 7_000_000, "larger than 1,000,000 bytes"),
    "unknown key": (f"{RUN}[compute]\nbatchsize = 3".encode(), "Did you mean 'batch_size'?"),
    "wrong word": (f"{RUN}[compute]\nverify = 'no'".encode(), "first, always or never"),
    "unknown backend": (f"{RUN}[compute]\nbackend = 'hook'".encode(), "Did you mean 'hooks'"),
    "unknown stage": (f"{RUN}[compute]\ntransform = ['meen']".encode(), "Did you mean 'mean'"),
    "trust as text": (
        RUN.replace('"w.pt"', '"w.pt"\nunsafe_pickle = "yes"').encode(),
        "checkpoint.unsafe_pickle: found 'yes'. Accepted: true or false",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_bad_run_file(forked: Forked, folder: Path, name: str) -> None:
    content, words = RUNS[name]
    (folder / "run.toml").write_bytes(content)
    done = forked.run("compute", "--config", "run.toml", "-o", "out.h5", cwd=folder)
    assert_clear(done, 2, words, folder)
    assert "run.toml" in done.err


def test_forms_and_names_are_told_at_once(forked: Forked, folder: Path) -> None:
    (folder / "loss.py").write_text("open('executed', 'w')")
    (folder / "run.toml").write_text(
        RUN.replace('"cross_entropy"', '"loss.py:f"')
        + "[compute]\nbackend = 'hoks'\ntransform = ['meen', 'mean']\nbatch_size = -1\nsede = 1\n"
        + "[compare]\nbackends = ['vamp']\n"
    )
    done = forked.run("compute", "--config", "run.toml", "-o", "out.h5", cwd=folder)
    assert_clear(done, 2, "5 settings are wrong", folder)
    for words in ("batch_size: found -1", "sede: unknown", "'hoks'", "[0]: unknown", "'vamp'"):
        assert words in done.err
    assert done.err.count("run.toml: ") == 5
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--resume", "--overwrite"), "contradict each other"),
        (("--labels", "exact", "--loss", "mse"), "labels"),
        (("--coupling", "own-loss", "--backend", "hooks"), "own-loss"),
        (("--backend", "hook"), "Did you mean 'hooks'?"),
        (("-t", "clip:max_nrm=1 | mean"), "Did you mean 'max_norm'?"),
        (("-t", "mean | mean"), "mean"),
        (("--parameters", "none.*"), "no trainable parameter matches 'none.*'"),
        (("--device", "cuda:99"), "there is no device 'cuda:99'"),
        (("--batch-size", "0"), "compute.batch_size: found 0"),
        (("--mode", "test"), "Accepted: eval or train"),
        (("--loss", "cross_entropy:label_smoothing=2"), "from 0 to 1"),
    ],
)
def test_options_that_contradict_or_do_not_exist(
    forked: Forked, folder: Path, options: tuple[str, ...], words: str
) -> None:
    assert_clear(compute(forked, folder, *options), 2, words, folder)
