"""The user's files: imported once, hiding nothing, their errors shown as theirs."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradscope.errors import ModelError, SpecError
from gradscope.sources import code
from gradscope.sources.code import code_digests, load_function, load_value, user_file
from gradscope.sources.models import build
from tests.cli.forked import apart


def write(folder: Path, text: str, name: str = "model.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def failure(reference: str, error: type[ModelError] | type[SpecError] = ModelError) -> str:
    with pytest.raises(error) as caught:
        load_function(reference, "model factory")
    return str(caught.value)


def test_a_function_of_a_file_and_of_a_module(tmp_path: Path) -> None:
    file = write(tmp_path, "class Nets:\n    @staticmethod\n    def small(): return 3\n")
    assert load_function(f"{file}:Nets.small", "model factory")() == 3
    assert load_function("json:dumps", "loss") is json.dumps
    assert load_function("os.path:join", "loss")("a", "b") == "a/b"


def test_an_interrupt_is_not_swallowed_and_stdout_is_for_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_function(f"{file}:build", "x")
    load_function(write(tmp_path, "print('hello')\ndef f(): pass\n") + ":f", "x")
    assert capsys.readouterr() == ("", "hello\n")


def test_two_functions_of_a_file_share_one_import(tmp_path: Path) -> None:
    file = write(tmp_path, "class A: pass\ndef one(): return A\ndef two(): return A\n")
    assert load_function(f"{file}:one", "x")() is load_function(f"{file}:two", "x")()
    assert load_function(f"{file}:one", "x")() is load_function(f"{file}:A", "x")
    write(tmp_path, "def one(): return 'new'\n")  # a changed file is another one
    assert load_function(f"{file}:one", "x")() == "new"


def test_dataclasses_work_and_the_file_does_not_hide_a_module(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
from dataclasses import dataclass, fields
@dataclass
class Sizes:
    width: int = 3
def f(): return Sizes().width
"""
    file = write(tmp_path, text, "json.py")
    assert load_function(f"{file}:f", "x")() == 3
    assert sys.modules["json"] is json


def test_files_beside_it_can_be_imported_also_later_and_of_two_folders(tmp_path: Path) -> None:
    path = list(sys.path)
    functions = []
    for name in ("one", "two"):
        write(tmp_path / name, f"NAME = {name!r}\n", "gs_utils.py")
        write(tmp_path / name, f"NAME = 'late {name}'\n", f"gs_late_{name}.py")
        text = (
            "import gs_utils\n"
            "def now(): return gs_utils.NAME\n"
            f"def late():\n    import gs_late_{name} as m\n    return m.NAME\n"
        )
        file = write(tmp_path / name, text)
        functions.append([load_function(f"{file}:{f}", "x") for f in ("now", "late")])
    found = [[f() for f in pair] for pair in functions]
    assert found == [["one", "late one"], ["two", "late two"]]
    assert sys.path[: len(path)] == path  # what was found before is found as before
    del sys.path[len(path) :]


def test_a_package_above_the_file_that_the_script_appends_to_sys_path(tmp_path: Path) -> None:
    path = list(sys.path)
    text = "import sys\nsys.path.append('../../')\nfrom gs_net.shared import SIZE\n"
    write(tmp_path / "gs_net", "SIZE = 5\n", "shared.py")
    (tmp_path / "gs_net" / "__init__.py").touch()
    text += "def f(): return SIZE\n"
    file = write(tmp_path / "gs_net" / "task", text)  # run elsewhere, "../../" is another folder
    assert load_function(f"{file}:f", "x")() == 5
    sys.path[:] = path


def test_a_file_or_module_or_function_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "from math import sin\ndef build(): pass\nsize = 3\n")
    assert "No such file" in failure(f"{tmp_path}/none.py:build")
    (tmp_path / "d.py").mkdir()
    assert "directory" in failure(f"{tmp_path / 'd.py'}:build")
    assert "Did you mean 'build'? Supported: build." in failure(f"{file}:biuld")
    assert "'size' is an int, not a function" in failure(f"{file}:size")
    assert "no such module" in failure("gs_not_there.inner:build")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import gs_not_there_either\n", "gs_here.py")
    assert "your code raised ModuleNotFoundError" in failure("gs_here:build")
    assert "Did you mean" not in failure("os.path:zzz")
    assert "this file trains nothing when it is run" in failure(file)
    assert "It has: build" in failure(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\nraise ValueError('my fault')\n", ["your code raised ValueError: my fault", "line 3"]),
        ("def f(:\n", ["your code raised SyntaxError", "line 1"]),
        ("import sys\nsys.exit(3)\n", ["your code called sys.exit(3)", "line 2"]),
        ("import gs_nowhere\n", ["ModuleNotFoundError", "gs_nowhere", "line 1"]),
        ("from .util import C\n", ["ModuleNotFoundError", ".util", "line 1"]),
        ("def f(): g()\ndef g(): 1 / 0\nf()\n", ["ZeroDivisionError", "in f", "in g"]),
        (
            "raise AssertionError('Torch not compiled with CUDA enabled')\n",
            ["This machine has no CUDA device", 'argv = ["ARGUMENT"]', "line 1"],
        ),
        ("a = 1\0\n", ["your code raised", "null bytes"]),
        ("raise ExceptionGroup('many', [ValueError(1)])", ["ExceptionGroup"]),
    ],
)
def test_what_the_file_raises_is_shown_as_the_users(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    file = write(tmp_path, text)
    told = failure(f"{file}:build")
    for part in [*expected, file]:
        assert part in told
    assert "Traceback" not in told
    assert str(Path(load_function.__code__.co_filename)) not in told  # none of our own frames
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    assert file not in files  # the next attempt imports it anew


CUDA = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 2, device="cuda"))
        self.other = nn.Linear(2, 2).to(torch.device("cuda:0"))
        self.last = torch.zeros(3, requires_grad=True).to("cuda", torch.float64).cuda()
top = nn.Linear(2, 2).cuda()
with torch.random.fork_rng():  # asks torch for the functions of its devices
    torch.manual_seed(0)
def build(): return Net().cuda()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a CUDA device")
def test_cuda_in_a_script_is_the_cpu_on_a_machine_without_cuda(tmp_path: Path) -> None:
    file = write(tmp_path, CUDA)
    model = build(f"{file}:build", {})
    top = load_value(f"{file}:top", "model", lambda found: True)
    for tensor in (*model.parameters(), model.last, *top.parameters()):
        assert tensor.device.type == "cpu"
    assert model.last.dtype == torch.float64
    with pytest.raises((AssertionError, RuntimeError)):  # only while the script is loaded
        torch.ones(1, device="cuda")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


PROJECT = {
    "model.py": """
import importlib
import json, gs_plain
from gs_pack import inner as other
from gs_pack.deep.last import f
def build():
    from gs_late import g
    return importlib.import_module("gs_named")
dynamic = importlib.import_module("gs_" + "dynamic")
""",
    "gs_plain.py": "import gs_again\n",
    "gs_again.py": "import gs_plain, torch\n",
    "gs_pack/__init__.py": "",
    "gs_pack/inner.py": "from . import beside\nfrom .deep import last\n",
    "gs_pack/beside.py": "def later():\n    from . import hidden\n    import gs_broken\n",
    "gs_pack/hidden.py": "# never run\n",
    "gs_pack/deep/__init__.py": "",
    "gs_pack/deep/last.py": "from ..unpacked import space\ndef f(): pass\n",
    **dict.fromkeys(["gs_pack/unpacked/space.py", "gs_late.py", "gs_named.py"], ""),
    "gs_dynamic.py": "import gs_of_dynamic\n",
    "gs_of_dynamic.py": "",
    "gs_broken.py": "this is no Python",
}
UNRELATED = {
    "json.py": "raise RuntimeError('not the library')",
    "gs_unrelated.py": "",
    "gs_pack/unrelated.py": "",
    "gs_table.csv": "a,b\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in (PROJECT | UNRELATED).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def told(folder: Path, cwd: Path) -> dict[str, str]:
    """What a new process finds."""

    def body() -> None:
        os.chdir(cwd)
        sys.dont_write_bytecode = False
        found = code_digests(f"{folder}/model.py:build", "model factory")
        os.write(1, json.dumps(found).encode())

    done = apart(body)
    assert done.code == 0, done.err
    found: dict[str, str] = json.loads(done.out)
    return found


def test_the_code_of_a_file_is_that_of_all_it_imports(project: Path, tmp_path: Path) -> None:
    found = told(project, project)
    assert found == {name: digest(text) for name, text in PROJECT.items()}
    # the second time compiled modules are there, and other files have changed and come
    assert list(project.rglob("*.pyc"))
    (project / "gs_more.py").write_text("")
    (project / "gs_unrelated.py").write_text("changed")
    assert told(project, tmp_path) == found
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    changed = [name for k, name in enumerate(PROJECT) if k % 2]
    for name in changed:
        (copy / name).write_text(f"{PROJECT[name]}\n# changed\n")
    other = told(copy, tmp_path)
    assert [name for name in PROJECT if other[name] != found[name]] == changed


def test_a_module_of_a_package_is_not_told_to_be_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gs_top").mkdir()
    write(tmp_path / "gs_top", "from ..above import f\n", "inner.py")
    monkeypatch.syspath_prepend(tmp_path)
    told = failure("gs_top.inner:f")
    assert "beyond top-level package" in told and "has no package" not in told


def test_the_code_of_a_module_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs_modules").mkdir()
    write(tmp_path / "gs_modules", "from . import nets\ndef f(): pass\n", "__init__.py")
    write(tmp_path / "gs_modules", "import gs_beside_it\n", "nets.py")
    write(tmp_path, "", "gs_beside_it.py")
    monkeypatch.chdir(tmp_path)
    found = code_digests("gs_modules:f", "x")
    assert set(found) == {"gs_modules/__init__.py", "gs_modules/nets.py", "gs_beside_it.py"}
    assert set(code_digests("json:dumps", "x")) == {"json/__init__.py"}
    assert code_digests("sys:intern", "x") == {}


def test_code_from_elsewhere_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of PYTHONPATH, or a package that is worked on; not what was installed."""
    library = tmp_path / "library" / "gs_library"
    library.mkdir(parents=True)
    write(library, "from .inner import f\n", "__init__.py")
    write(library, "import torch\ndef f(): pass\n", "inner.py")
    monkeypatch.syspath_prepend(str(library.parent))
    file = write(tmp_path / "own", "import torch, gs_library\nf = gs_library.f\n")
    assert set(code_digests(f"{file}:f", "x")) == {"model.py", "gs_library", "gs_library.inner"}


def test_what_the_factory_loads_counts_too(tmp_path: Path) -> None:
    write(tmp_path / "gs_zoo", "from torch import nn\nNet = nn.Linear\n", "gs_small.py")
    text = """
import importlib, os, sys
def build(name):
    sys.path.append(os.path.join(os.path.dirname(__file__), "gs_zoo"))
    return importlib.import_module("gs_" + name).Net(2, 2)
"""
    file = write(tmp_path, text)
    build(f"{file}:build", {"name": "small"})
    assert set(code_digests(f"{file}:build", "x")) == {"model.py", "gs_zoo/gs_small.py"}


def test_a_module_that_looks_its_names_up_by_code_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, "def __getattr__(name):\n    raise RuntimeError('no ' + name)\n")
    assert "your code raised RuntimeError: no build" in failure(f"{file}:build")


ARGUMENTS = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()
def build(): return args.batch_size, list(sys.argv), parser.parse_args().batch_size
"""


def test_a_script_has_none_of_the_arguments_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["gradscope", "check", "--config", "run.toml"]
    monkeypatch.setattr(sys, "argv", given)
    file = write(tmp_path, ARGUMENTS)
    build_ = load_function(f"{file}:build", "model factory")
    with user_file("model factory"):
        size, arguments, again = build_()
    assert (size, again) == (64, 64)
    assert len(arguments) == 1 and sys.argv is given
    shown = write(tmp_path, "import sys\nseen = list(sys.argv)\ndef build(): return seen\n", "b.py")
    assert load_function(f"{shown}:build", "model factory")() == [shown]


def test_required_arguments_are_named(tmp_path: Path) -> None:
    text = ARGUMENTS.replace("default=64", "required=True")
    told = failure(write(tmp_path, text) + ":build")
    assert "--batch-size" in told and "parse_args()" in told and "sys.exit" not in told


def test_a_script_that_trains_when_it_is_imported_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code, "_SLOW", 0.2)
    trains = "import time\ndef train(): time.sleep(0.6)\ndef build(): pass\n\ntrain()\n"
    slow = write(tmp_path, trains)
    load_function(f"{slow}:build", "model factory")
    (note,) = code.import_notes(f"{slow}:build", "model factory")
    assert "line 5" in note and "train()" in note and "__main__" in note
    assert "line 5 is still running" in capsys.readouterr().err
    write(tmp_path, "import time\ntime.sleep(0.6)\n", "library.py")
    imports = write(tmp_path, "import library\ndef build(): pass\n", "quick.py")
    load_function(f"{imports}:build", "model factory")
    assert code.import_notes(f"{imports}:build", "model factory") == ()


@pytest.mark.full
def test_the_script_that_runs_is_not_run_again(tmp_path: Path) -> None:
    """`FILE.py:NAME` of the very script, and of a module that it has imported."""
    write(
        tmp_path,
        "print('module')\ndef halved(g): return {k: v / 2 for k, v in g.items()}\n",
        "own.py",
    )
    script = write(
        tmp_path,
        "print('script')\n"
        "import own, sys\n"
        "from gradscope.sources.code import code_digests, load_function\n"
        "def doubled(g): return {k: 2 * v for k, v in g.items()}\n"
        "here = __file__\n"
        "assert load_function(f'{here}:doubled', 'stage') is doubled\n"
        "assert load_function(own.__file__ + ':halved', 'stage') is own.halved\n"
        "assert list(code_digests(own.__file__ + ':halved', 'stage')) == ['own.py']\n",
        "train.py",
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["script", "module"]
