"""The documentation is true: its code runs, its commands run as printed, its names exist."""

import html
import inspect
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import gradscope
from gradscope.backends.base import backends, own_loss_backends
from gradscope.backends.hooks.rules import node_rules
from gradscope.cli.app import app
from gradscope.cli.before import AUTO_SUMMARY
from gradscope.config import RunSpec
from gradscope.core.registry import Registry
from gradscope.sources.formats import checkpoint_readers, dataset_readers
from gradscope.stages.losses import losses
from gradscope.stages.losses import options as options_of
from gradscope.stages.reducers.base import reducers
from gradscope.stages.transforms.base import transforms
from gradscope.stats import statistics
from tests.pages import (
    FENCE,
    ROOT,
    assert_alike,
    assert_lines_of,
    run,
    run_notebook,
    slow_options,
)

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
RECIPES = runpy.run_path(str(ROOT / "docs" / "make_recipes.py"))
GUIDE = ROOT / "docs" / "guide.md"
CHAINS = ROOT / "docs" / "chains.md"
LISTED: dict[str, list[Registry[Any]]] = {
    "backends": [backends],
    "transforms": [transforms],
    "reducers": [reducers],
    "losses": [losses],
    "formats": [checkpoint_readers, dataset_readers],
}
REGISTRIES = [
    node_rules,
    own_loss_backends,
    statistics,
    *(r for group in LISTED.values() for r in group),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the sample models, 80 columns, and registries that forget what is added."""
    (tmp_path / "sample_models").symlink_to(ROOT / "sample_models")
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for registry in REGISTRIES:
        registry.names()  # plugins first
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    known = set(sys.modules)
    generator, threads = torch.random.get_rng_state(), torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.random.set_rng_state(generator)
    for name in set(sys.modules) - known:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if "sample_models" in origin or str(tmp_path) in origin:
            del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem == "data" else [pytest.mark.full])
        for p in PAGES
        if p != CONTRIBUTING
    ],
)
def test_a_page_runs_as_printed(path: Path, workplace: Path) -> None:
    names = run(path).names
    if path.parent.name == "recipes":  # its figure, from the same numbers
        made = RECIPES["draw"](path.stem, names, workplace)
        stale = f"{path.stem}.svg is stale: run python docs/make_recipes.py"
        assert _shown(made) == _shown(path.with_suffix(".svg")), stale


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_prints_its_stored_outputs(path: Path, workplace: Path) -> None:
    run_notebook(path)


@pytest.mark.full
def test_contributing_runs_as_printed_and_the_rule_of_the_page_is_used(workplace: Path) -> None:
    """A wrong rule in its place gives wrong gradients, so the right one was in use."""
    names = run(CONTRIBUTING).names
    right = names["maximum"]
    node_rules._entries["MaximumBackward0"] = lambda site: right(site).scale(2 * torch.ones(site.n))
    assert names["result"].agrees
    arguments = (names["floored"], "mse", names["inputs"].float(), names["wanted"].float())
    assert not names["gradscope"].compare(*arguments, backends=["hooks"]).agrees


def test_the_checker_sees_differences() -> None:
    assert_alike("0.22 and  1,797 of 0.weight\n", "0.221 and 1,797\nof 0.weight")
    for expected, found in (("0.22", "0.24"), ("35 of 50", "36 of 50"), ("a 1", "b 1")):
        with pytest.raises(AssertionError):
            assert_alike(expected, found)
    with pytest.raises(AssertionError):
        assert_lines_of("x 1\ny 2", "x 1\ny 3")


def _options() -> dict[str, set[str]]:
    """{option: the commands that have it}, the root being ""."""
    root: Any = typer.main.get_command(app)
    above = root.make_context("gradscope", [], resilient_parsing=True)
    found: dict[str, set[str]] = {}
    for name, each in {"": root, **root.commands}.items():
        with each.make_context(name, [], parent=above, resilient_parsing=True) as context:
            for parameter in each.get_params(context):
                for option in parameter.opts:
                    if option.startswith("-"):
                        found.setdefault(option, set()).add(name)
    return found


@pytest.mark.parametrize(
    ("page", "module"),
    [("python", gradscope), ("python", gradscope.training), ("extend", gradscope.extend)],
)
def test_the_reference_of_python_has_everything_public(page: str, module: Any) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    missing = {name for name in module.__all__ if not re.search(rf"\b{name}\b", text)}
    assert missing <= {"__version__"}


def test_there_is_a_reason_for_each_dependency() -> None:
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    table = text.partition("## Dependencies")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["plot"]):
        name = re.split(r"[<>=]", requirement)[0]
        assert re.search(rf"^\| [^|]*\b{name}\b[^|]*\| \w", table, re.M), name


def test_no_page_names_an_option_that_does_not_exist() -> None:
    known = set(_options()) | slow_options()
    for path in PAGES:
        for option in re.findall(
            r"(?<![\w`-]-)`(--[a-z][a-z-]*)", path.read_text(encoding="utf-8")
        ):
            assert option in known, f"{path.name}: {option}"


@pytest.mark.parametrize("path", [GUIDE, CHAINS], ids=lambda p: p.stem)
def test_a_page_lists_what_there_is(path: Path) -> None:
    kept = re.search(r"<!-- generated: .*?-->\n(.*?)<!-- end -->", path.read_text("utf-8"), re.S)
    assert kept is not None
    expected = _reference() if path == GUIDE else _stages()
    assert kept[1] == expected, f"put this between the marks in {path.name}:\n{expected}"


def _reference() -> str:
    parts = []
    for kind in ("backends", "losses", "formats"):
        lines = [
            f"- `{n}`: {r.summary(n)}{_loss_options(r.get(n)) if kind == 'losses' else ''}"
            for r in LISTED[kind]
            for n in r.names()
        ]
        if kind == "backends":
            lines.insert(0, f"- `auto`: {AUTO_SUMMARY}")
        parts.append(f"**{kind}**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(["", *parts, ""])


def _loss_options(loss: Any) -> str:
    found = [_written(k, v) for k, v in options_of(loss).items()]
    return f" Options: `{','.join(found)}`."


def _stages() -> str:
    """One table of all transforms and one of all reducers, with their arguments."""
    lines = ["", "| transform | acts on | T(g) |", "|---|---|---|"]
    for name in transforms.names():
        factory: Any = transforms.get(name)
        lines.append(f"| {_signature(name, factory)} | {factory.scope} | {_cell(transforms, name)}")
    lines += ["", "| reducer | gives |", "|---|---|"]
    for name in reducers.names():
        lines.append(f"| {_signature(name, reducers.get(name))} | {_cell(reducers, name)}")
    return "\n".join([*lines, "", ""])


def _signature(name: str, factory: Any) -> str:
    parameters = inspect.signature(factory).parameters.values()
    found = [_written(p.name.rstrip("_"), p.default) for p in parameters]
    return f"`{name}:{','.join(found)}`" if found else f"`{name}`"


def _written(key: str, default: Any) -> str:
    """An argument that must be given as `key=`, one that need not as `[key]`."""
    if default is inspect.Parameter.empty:
        return f"{key}="
    if isinstance(default, bool):
        default = str(default).lower()
    number = isinstance(default, float)
    return f"[{key}]" if default is None else f"{key}={default:g}" if number else f"{key}={default}"


def _cell(registry: Registry[Any], name: str) -> str:
    return registry.summary(name).removeprefix("T(g) = ").replace("|", r"\|") + " |"


def test_the_run_file_of_the_guide_has_every_key() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = [m["text"] for m in FENCE.finditer(text) if m["note"] == "file: mine.toml"]
    document = tomllib.loads(blocks[0])
    assert set(document) == set(RunSpec.model_fields)
    for name, section in RunSpec.model_fields.items():
        if name != "version":
            keys: Any = section.annotation
            instead = {"compute": {"memory"}, "dataset": {"group"}}.get(name, set())  # in a comment
            assert set(document[name]) | instead == set(keys.model_fields), name
            assert all(f"or: {key} =" in blocks[0] for key in instead)


def test_the_entry_points_of_the_page_are_those_of_the_registries() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    blocks = [m["text"] for m in FENCE.finditer(text) if m["language"] == "toml"]
    groups = tomllib.loads(blocks[0])["project"]["entry-points"]
    assert set(groups) == {registry.group for registry in REGISTRIES}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r'(?:\]\(|src=")([^)"\s]+)[)"]', text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads]
            assert anchor in slugs, link


@pytest.mark.full
def test_the_pictures_show_what_is_printed_today(tmp_path: Path) -> None:
    """Words only: times differ from run to run, and roundings from machine to machine."""
    runpy.run_path(str(ROOT / "docs" / "make_images.py"))["main"](tmp_path)
    kept = ROOT / "docs" / "images"
    assert {p.name for p in kept.iterdir()} == {p.name for p in tmp_path.iterdir()}
    for made in tmp_path.iterdir():
        stale = f"{made.name} is stale: run python docs/make_images.py"
        assert _shown(made) == _shown(kept / made.name), stale
        assert "url(http" not in (kept / made.name).read_text(encoding="utf-8")


def _shown(path: Path) -> list[str]:
    texts = re.findall(r">([^<]*)</text>", path.read_text(encoding="utf-8"))
    shown = re.sub(r"largest\serror\s\S+\sin\s\S+", "", html.unescape(" ".join(texts)))
    return re.findall(r"[A-Za-z_]{4,}", shown)


def test_no_file_names_a_place_on_some_machine() -> None:
    places = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|tmp|opt|mnt|data)/[\w.]")
    suffixes = {".py", ".md", ".toml", ".txt", ".svg", ".yaml", ".json"}
    folders = ("gradscope", "docs", "tests", "sample_models", "benchmarks", ".ci")
    files = [p for name in folders for p in (ROOT / name).rglob("*") if p.suffix in suffixes]
    files += [p for p in ROOT.iterdir() if p.suffix in suffixes or p.name == "Makefile"]
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in places.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
