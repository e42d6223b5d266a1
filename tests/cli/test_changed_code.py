"""A run that goes on, or is merged, with other code than it began with is refused by its name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.forked import Forked

FILES = {
    "model.py": """
import os
from torch import nn
from parts.layers import Linear
def build(): return Linear(4, 3)
""",
    "parts/layers.py": """
import os
from torch import nn
class Linear(nn.Linear):
    seen = 0
    def forward(self, x):
        Linear.seen += 1
        if os.environ.get("STOP") and Linear.seen == 12: os.kill(os.getpid(), 15)
        return super().forward(x)
""",
    "loss.py": """
def loss(outputs, targets):
    from gs_loss_of import value
    return value(outputs)
""",
    "gs_loss_of.py": "def value(outputs): return outputs.square().sum(1)\n",
    "stages.py": """
import gradscope, gs_levels
@gradscope.transform("elementwise")
def shrunk(g): return g * gs_levels.FACTOR
@gradscope.reducer
def total():
    return (lambda g: {k: b.to(__import__("torch").float64).weighted_sum() for k, b in g.items()},
            lambda a, b: {k: a[k] + b[k] for k in a}, lambda state: state)
""",
    "gs_levels.py": "FACTOR = 0.5\n",
    "data.py": "from gs_rows import Rows\ndef data(): return Rows()\n",
    "gs_rows.py": """
import torch
class Rows:
    def __len__(self): return 12
    def __getitem__(self, k): return torch.full((4,), float(k)), k % 3
""",
    "gs_unrelated.py": "",
}
HELPERS = {
    "parts/layers.py": "model.parts/layers.py has changed",
    "gs_loss_of.py": "loss.gs_loss_of.py has changed",
    "gs_levels.py": "stages.gs_levels.py has changed",
    "gs_rows.py": "dataset_code.gs_rows.py has changed",
}
RUN = ["compute", "w.pt", "data.py:data", "--model", "model.py:build", "--loss", "loss.py:loss"]
RUN += ["-t", "stages.py:shrunk", "-t", "stages.py:total", "--batch-size", "1", "-o", "out.h5"]
RUN += ["--verify", "never"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", inputs=np.ones((6, 4), "float32"), targets=np.arange(6) % 3)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@contextmanager
def changed(path: Path) -> Iterator[None]:
    """Change a file in the body."""
    text = path.read_text()
    path.write_text(f"{text}\n# changed\n")
    yield
    path.write_text(text)


def test_a_stopped_run_goes_on_with_its_own_code_only(forked: Forked, folder: Path) -> None:
    stopped = forked.run(*RUN, cwd=folder, STOP="1")
    assert stopped.code == 143 and "--resume" in stopped.err, stopped.err
    for name, told in HELPERS.items():
        with changed(folder / name):
            refused = forked.run(*RUN, "--resume", cwd=folder)
        assert refused.code == 6, refused.err
        assert told in refused.err
        assert refused.err.count("has changed") == 1 + (name == "gs_rows.py")  # the data with it
    with changed(folder / "gs_unrelated.py"):
        assert forked.run(*RUN, "--resume", cwd=folder).code == 0


@pytest.mark.full
def test_shards_of_other_code_are_not_merged(forked: Forked, folder: Path) -> None:
    merge = ("merge", folder, "-o", "out.h5", "--code", "stages.py")
    last = (*RUN, "--shard", "1/2", "--overwrite")
    assert forked.run(*RUN, "--shard", "0/2", cwd=folder).code == 0
    for name, told in HELPERS.items():
        with changed(folder / name):
            assert forked.run(*last, cwd=folder).code == 0
        refused = forked.run(*merge, cwd=folder)
        assert refused.code == 3, refused.err
        assert told in refused.err
    assert forked.run(*last, cwd=folder).code == 0
    with changed(folder / "gs_levels.py"):  # the reducer is run by merge itself
        refused = forked.run(*merge, cwd=folder)
    assert refused.code == 4
    assert "gs_levels.py has changed" in refused.err
    assert not (folder / "out.h5").exists()
    assert forked.run(*merge, cwd=folder).code == 0
