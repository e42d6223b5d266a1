"""SIGTERM and Ctrl-C at any moment: a word and 143 or 130, or the result of a run that is done."""

import os
import signal
import subprocess
import sys
import textwrap
from itertools import cycle
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cli.conftest import LINEAR, words
from tests.cli.forked import Forked, Outcome


def alone(folder: Path, *arguments: object) -> Outcome:
    """Run a command in a process of its own, to the end of the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "gradscope", *map(str, arguments)], cwd=folder, text=True,
        capture_output=True, check=False, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def model(folder: Path, code: str) -> None:
    (folder / "model.py").write_text(f"import os, signal, sys\n{LINEAR}{textwrap.dedent(code)}")


LATE = {
    "thread": """
import threading, time
def late():
    threading.main_thread().join()
    time.sleep(0.2); os.write(2, b'sent\\n'); os.kill(os.getpid(), 2); time.sleep(40)
threading.Thread(target=late).start()
""",
    "teardown": """
class Late:
    def __del__(self, write=os.write, kill=os.kill, own=os.getpid()):
        write(2, b'sent\\n'); kill(own, 15)
sys.modules["late"] = Late()
""",
}


@pytest.mark.full
@pytest.mark.parametrize("when", LATE)
def test_a_signal_after_the_end_changes_nothing(folder: Path, when: str) -> None:
    """While the interpreter waits for threads, and while it shuts down."""
    model(folder, LATE[when])
    done = alone(folder, *words("-q"))
    assert "sent" in done.err
    assert done.code == 0, done
    assert (folder / "out.h5").exists()


@pytest.mark.full
def test_a_failed_command_keeps_its_code_when_it_is_stopped_afterwards(folder: Path) -> None:
    model(folder, "import atexit; atexit.register(lambda: os.kill(os.getpid(), 15))\n1 / 0")
    done = alone(folder, *words("-q"))
    assert done.code == 3
    assert "ZeroDivisionError" in done.err


@pytest.mark.parametrize(
    ("command", "number", "word"),
    [
        ("compute", signal.SIGTERM, "stopped before the first batch was finished; nothing was "),
        ("compute", signal.SIGINT, "stopped before the first batch was finished; nothing was "),
        ("check", signal.SIGTERM, "stopped"),
        ("compare", signal.SIGINT, "stopped"),
    ],
)
def test_a_stop_in_the_users_code(
    forked: Forked, folder: Path, command: str, number: int, word: str
) -> None:
    model(folder, f"def build(): os.kill(os.getpid(), {int(number)}); os.read(0, 1)")
    done = forked.run(*words(command=command), cwd=folder)
    assert (done.code, done.out) == (128 + number, "")
    assert done.err.startswith(word) and done.err.count("\n") == 1
    assert not list(folder.glob("out*"))


STOPPING = """
class Slow(nn.Linear):
    def forward(self, x):
        with open("calls", "a") as file:  # what a model changes in itself is undone
            calls = file.write("x") and file.tell()
        if calls == 40:
            os.kill(os.getpid(), 2)
            os.getpid()
        return super().forward(x)
def build(): return Slow(4, 3)
"""


def test_a_stopped_run_goes_on(forked: Forked, folder: Path) -> None:
    """The file is that of a run that was never stopped, and the message says how to go on."""
    inputs = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
    np.savez(folder / "data.npz", inputs=inputs, targets=np.arange(60) % 3)
    run = words("-t", "identity", "-t", "var", "--batch-size", "1", "--backend", "loop")
    run += ["--verify", "first"]
    model(folder, STOPPING)
    done = forked.run(*run, cwd=folder)
    assert done.code == 130, done.err
    assert not (folder / "out.h5").exists()
    assert "samples; continue with\n  gradscope compute" in done.err and "--resume" in done.err
    assert "Traceback" not in done.err
    assert forked.run(*run, "-q", "--resume", cwd=folder).code == 0
    assert forked.run(*run, "-q", "-o", "whole.h5", cwd=folder).code == 0
    with h5py.File(folder / "whole.h5") as a, h5py.File(folder / "out.h5") as b:
        for name in ("chains/0/weight", "chains/0/bias", "chains/1/weight", "samples/norm"):
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.full
def test_a_stop_before_there_is_anything_to_keep(folder: Path) -> None:
    """Modules that are half imported are left as they are."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "gradscope", *map(str, words())], cwd=folder,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # each module is named when it is imported
        if line.split("|")[-1].strip() == "torch.fx":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "stopped before" in err
    assert not list(folder.glob("out*"))


def test_a_stop_while_the_result_is_told(forked: Forked, folder: Path) -> None:
    code = f"""
    import gradscope.report.screens as told
    def stop(*_): os.kill(os.getpid(), {int(signal.SIGTERM)})
    told.print_table = stop
    """
    model(folder, code)
    done = forked.run(*words(), cwd=folder)
    assert done.code == 143
    assert done.err.endswith("stopped; out.h5 is complete\n")
    assert forked.run("stats", "out.h5", cwd=folder).code == 0


SWALLOWING = """
class Deaf(nn.Linear):
    seen = 0
    def forward(self, x):
        Deaf.seen += 1
        if Deaf.seen == 5:
            try:
                os.kill(os.getpid(), 15)
                os.getpid()
            except:
                {answer}
        return super().forward(x)
def build(): return Deaf(4, 3)
"""


@pytest.mark.parametrize("answer", ["pass", "raise RuntimeError('hm')"])
def test_a_stop_that_the_users_code_swallows(forked: Forked, folder: Path, answer: str) -> None:
    model(folder, SWALLOWING.format(answer=answer))
    done = forked.run(*words("--batch-size", "1", "--verify", "never"), cwd=folder)
    assert done.code == 143, done.err
    assert "stopped" in done.err
    assert "Traceback" not in done.err


def test_a_second_signal_ends_at_once(forked: Forked, folder: Path) -> None:
    code = """
    import time
    def build():
        for _ in range(40):
            try:
                os.kill(os.getpid(), 2)
                time.sleep(0.05)
            except BaseException:
                pass
    """
    model(folder, code)
    done = forked.run(*words(), cwd=folder)
    assert (done.code, done.err) == (130, "stopped at once\n")


RAISED = {
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit": "GeneratorExit",
    "SystemExit(0)": "sys.exit(0)",
    "type('Odd', (BaseException,), {})('x')": "Odd: x",
}
PLACES = {
    "import": "raise {}",
    "factory": "def build(): raise {}",
    "forward": "class M(nn.Linear):\n def forward(self, x): raise {}\ndef build(): return M(4, 3)",
    "backward": """
import torch
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise {}
class M(nn.Linear):
    def forward(self, x): return F.apply(super().forward(x))
def build(): return M(4, 3)
""",
    "train": "class M(nn.Linear):\n def train(self, mode): raise {}\ndef build(): return M(4, 3)",
    "to": "class M(nn.Linear):\n def to(self, **_): raise {}\ndef build(): return M(4, 3)",
    "loss": "def loss(outputs, targets): raise {}",
    "data set": "def data(): raise {}",
    "samples": """
class Data:
    def __len__(self): return 6
    def __getitem__(self, k):
        import torch
        if k > 3: raise {}
        return torch.ones(4), k % 3
def data(): return Data()
""",
    "iterated": """
class Data:
    def __len__(self): return 6
    def __iter__(self):
        import torch
        yield torch.ones(4), 1
        raise {}
def data(): return Data()
""",
    "length": "class Data(list):\n def __len__(self): raise {}\ndef data(): return Data()",
    "transform": """
import gradscope
@gradscope.transform("vector")
def stage(rows): raise {}
""",
    "tried": """
import gradscope
@gradscope.transform("elementwise")
def stage(g): raise {}
""",
    "reducer": """
import gradscope
@gradscope.reducer
def stage(): raise {}
""",
    "start": """
import gradscope
def start(g): raise {}
@gradscope.reducer
def stage(): return start, max, dict
""",
    "result": """
import gradscope
def result(state): raise {}
@gradscope.reducer
def stage(): return (lambda g: {{"n": g.norms.sum()}}), (lambda a, b: a), result
""",
}


@pytest.mark.sampled
@pytest.mark.parametrize(("place", "raised"), [*zip(PLACES, cycle(RAISED), strict=False)])
def test_what_the_users_code_raises_is_theirs(
    forked: Forked, folder: Path, place: str, raised: str
) -> None:
    code = PLACES[place].format(raised)
    (folder / "mine.py").write_text(f"{LINEAR}{code}")
    run = words("--model", "mine.py:build")
    for name, option in (("loss", "--loss"), ("stage", "-t")):
        if f"def {name}(" in code:
            run += [option, f"mine.py:{name}"]
    if "def data(" in code:
        run[2] = "mine.py:data"
    done = forked.run(*run, cwd=folder)
    assert done.code == 3, done.err
    assert RAISED[raised] in done.err
    assert "mine.py" in done.err
    assert "Traceback" not in done.err and "stopped" not in done.err
    assert not done.out and not (folder / "out.h5").exists()


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "SystemExit(0)"])
def test_what_an_implementation_of_ones_own_raises(
    forked: Forked, folder: Path, raised: str
) -> None:
    (folder / "mine.py").write_text(f"def mine(model, loss, inputs, targets): raise {raised}")
    done = forked.run(
        *words("--against", "mine.py:mine", "--backends", "hooks", command="compare"), cwd=folder
    )
    assert done.code == 5
    assert "1 FAILED" in done.out


@pytest.mark.parametrize(
    "option", ["--nonsense", pytest.param("--model=gs_beside:build", marks=pytest.mark.full)]
)
def test_a_command_and_the_module_are_the_same(folder: Path, option: str) -> None:
    """Also where a file of the working directory is called as a library is."""
    (folder / "typer.py").write_text("raise RuntimeError('not the library')")
    (folder / "gs_beside.py").write_text(LINEAR)
    found = []
    for command in (
        [Path(sys.executable).with_name("gradscope")],
        [sys.executable, "-m", "gradscope"],
    ):
        run = [*map(str, (*command, *words("-q", option)))]
        done = subprocess.run(run, cwd=folder, capture_output=True, check=False)
        found.append((done.returncode, done.stdout, done.stderr))
        assert (folder / "out.h5").exists() == (done.returncode == 0)
        (folder / "out.h5").unlink(missing_ok=True)
    assert found[0] == found[1]
    assert (found[0][0] == 0) == ("gs_beside" in option)
