"""Imports go down only, siblings keep apart, and heavy libraries have one home each."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gradscope"

# The layers, lowest first: a room imports only from rooms in lines above its own.
LAYERS = (
    ("errors", "version"),
    ("process",),
    ("core",),
    ("markup", "model"),
    ("config", "derivatives"),
    ("blocks",),
    ("backends", "sources", "storage"),
    ("stages", "stats"),
    ("engine",),
    ("scope",),
    ("comparison",),
    ("extend",),
    ("run", "training"),
    ("attribution",),
    ("report", "view"),
    ("cli",),
    ("__main__",),
)
FLOORS = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}

HOMES = {
    "h5py": {"storage", "sources"},  # result files; and data of the user's, in data_hdf5
    "rich": {"report"},
    "typer": {"cli"},
    "matplotlib": {"report"},
    "quanda": {"attribution"},
    "safetensors": {"sources"},
    "opacus": {"comparison"},
    "backpack": {"comparison"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The part of the package a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_used(path: Path) -> set[str]:
    """The parts of the package that a file imports."""
    found = {n.split(".")[1] for n in imported(path) if n.startswith("gradscope.")}
    return found & FLOORS.keys()


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in FILES} - {"__init__"} == FLOORS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return  # the public face re-exports from every floor
    upward = {r for r in rooms_used(path) if r != here and FLOORS[r] >= FLOORS[here]}
    assert not upward


def test_stages_open_no_files() -> None:
    """Code, vectors and states of optimisers are read above, and handed in."""
    stages = [path for path in FILES if room(path) == "stages"]
    assert not [path for path in stages if rooms_used(path) & {"sources", "storage"}]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_has_one_home(library: str) -> None:
    users = {room(p) for p in FILES if library in {n.split(".")[0] for n in imported(p)}}
    assert users == HOMES[library]


@pytest.mark.parametrize("backend", ["vmap", "expand"])
def test_the_checking_backends_are_independent(backend: str) -> None:
    own = [p for p in FILES if p.relative_to(PACKAGE).parts[:1] == ("backends",)]
    mine = [p for p in own if p.relative_to(PACKAGE).parts[1].split(".")[0].startswith(backend)]
    others = {"hooks", "vmap", "expand", "loop"} - {backend}
    assert mine
    for path in mine:
        used = {n.split(".")[2] for n in imported(path) if n.startswith("gradscope.backends.")}
        assert not used & others


@pytest.mark.parametrize("arguments", [["--help"], ["compute", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys, gradscope.cli\n"
        f"sys.argv = ['gradscope', *{arguments!r}]\n"
        "try:\n"
        "    gradscope.cli.main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'h5py'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
