"""The documentation is true: its code runs, its commands run as printed, its names exist.

A fenced block may have an HTML comment on the line before it:

    <!-- file: NAME -->             the block is written to a file first
    <!-- output -->                 what the Python block before it prints
    <!-- output of: COMMAND -->     lines that the command prints on stdout
    <!-- errors of: COMMAND -->     likewise on stderr

A command may say how it ends: `# exit code 5`.
"""

import html
import io
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from gradscope.backends import backends
from gradscope.backends.hooks.rules import node_rules
from gradscope.cli import main
from gradscope.cli.app import app
from gradscope.core.registry import Registry
from gradscope.core.spec import RunSpec
from gradscope.losses import losses
from gradscope.reducers import reducers
from gradscope.sources import checkpoint_readers, dataset_readers
from gradscope.transforms import transforms

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = ROOT / "docs" / "guide.md"
LISTED: dict[str, list[Registry[Any]]] = {
    "backends": [backends],
    "transforms": [transforms],
    "reducers": [reducers],
    "losses": [losses],
    "formats": [checkpoint_readers, dataset_readers],
}
REGISTRIES = [node_rules, *(r for group in LISTED.values() for r in group)]

_FENCE = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?")


@dataclass
class Page:
    """What has been run of a page so far."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str = ""
    commands: dict[str, tuple[str, str]] = field(default_factory=dict)


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
    generator = torch.random.get_rng_state()
    yield tmp_path
    torch.random.set_rng_state(generator)
    for name in set(sys.modules) - known:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if "sample_models" in origin or str(tmp_path) in origin:
            del sys.modules[name]


def run(path: Path) -> Page:
    """Run a page from top to bottom in the working directory."""
    page = Page()
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        note, language, body = match["note"] or "", match["language"], match["text"]
        kind, _, rest = note.partition(":")
        if kind == "file":
            Path(rest.strip()).write_text(body, encoding="utf-8")
        elif language == "python":
            where = "\n" * text.count("\n", 0, match.start("text")) + body  # lines as in the page
            with redirect_stdout(io.StringIO()) as out:
                exec(compile(where, str(path), "exec"), page.names)
            page.printed = out.getvalue()
        elif language == "sh":
            for line in body.splitlines():
                command(line, page)
        elif kind == "output":
            assert_alike(body, page.printed)
        elif kind in ("output of", "errors of"):
            printed = page.commands[rest.strip()][kind == "errors of"]
            assert_lines_of(body, printed)
    return page


def command(line: str, page: Page) -> None:
    """Run one command line of a page; of `make`, check that there is such a target."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "mkdir":
        Path(words[-1]).mkdir(exist_ok=True)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets)
    else:
        assert words[0] == "gradscope", f"the test cannot run {words[0]!r}"
        said = re.search(r"# exit code (\d+)", line)
        code, out, err = gradscope(words)
        assert code == (int(said[1]) if said else 0), f"{line}\nexit code {code}\n{err}"
        page.commands[line.partition("#")[0].strip()] = (out, err)


def gradscope(words: list[str]) -> tuple[int, str, str]:
    """Run the installed command in this process."""
    before, sys.argv = sys.argv, words
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                main()
                code: Any = 0
            except SystemExit as stop:
                code = stop.code or 0
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def assert_alike(expected: str, found: str) -> None:
    """The same words, and the same numbers to within one unit of the last digit printed."""
    assert _words(expected) == _words(found)
    for wanted, got in zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=True):
        assert abs(_value(wanted) - _value(got)) <= 1.01 * _unit(wanted), f"{wanted} is {got}"


def assert_lines_of(expected: str, printed: str) -> None:
    """Each line is one of those printed."""
    lines = printed.splitlines()
    for line in filter(None, map(str.strip, expected.splitlines())):
        near = [other for other in lines if _words(other) == _words(line)]
        assert near, f"not printed: {line!r} in\n{printed}"
        assert any(_close(line, other) for other in near), f"{line!r} is {near}"


def _close(line: str, other: str) -> bool:
    try:
        assert_alike(line, other)
    except AssertionError:
        return False
    return True


def _words(text: str) -> list[str]:
    return _NUMBER.sub(" # ", text).split()


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _unit(number: str) -> float:
    """One unit of the last digit; whole numbers must be equal."""
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals else 0.0


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_runs_as_printed(path: Path, workplace: Path) -> None:
    run(path)


def test_the_contributed_rule_is_what_computes(workplace: Path) -> None:
    """A wrong rule in its place is found out, so the right one was in use."""
    names = run(ROOT / "CONTRIBUTING.md").names
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
    found: dict[str, set[str]] = {}
    for name, each in {"": root, **root.commands}.items():
        with each.make_context(name or "gradscope", [], resilient_parsing=True) as context:
            for parameter in each.get_params(context):
                for option in parameter.opts:
                    if option.startswith("-"):
                        found.setdefault(option, set()).add(name)
    return found


def test_every_command_and_option_is_in_the_table_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`-[^|]*(?:\\\|[^|]*)*) \| ([^|]*) \|", text, re.M)
    said: dict[str, str] = {}
    for options, commands in rows:
        said |= dict.fromkeys(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", options), commands.strip())
    found = _options()
    assert set(said) == set(found)
    every = {name for names in found.values() for name in names if name}
    for option, commands in said.items():
        if option in ("-h", "--help", "--version") or option.endswith("completion"):
            continue
        stated = every if commands == "all" else set(commands.split(", "))
        assert stated == found[option], option
    for name in every:
        assert f"| `gradscope {name} " in text, name


def test_no_page_names_an_option_that_does_not_exist() -> None:
    known = set(_options())
    for path in PAGES:
        for option in re.findall(
            r"(?<![\w`-]-)`(--[a-z][a-z-]*)", path.read_text(encoding="utf-8")
        ):
            assert option in known, f"{path.name}: {option}"


def test_the_guide_lists_what_there_is() -> None:
    kept = re.search(r"<!-- generated: .*?-->\n(.*?)<!-- end -->", GUIDE.read_text("utf-8"), re.S)
    assert kept is not None
    expected = _reference()
    assert kept[1] == expected, f"put this between the marks in docs/guide.md:\n{expected}"


def _reference() -> str:
    parts = []
    for kind, registries in LISTED.items():
        lines = [f"- `{n}`: {r.summary(n)}" for r in registries for n in r.names()]
        if kind == "backends":
            lines.insert(0, "- `auto`: The first of them that is exact and proved.")
        parts.append(f"**{kind}**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(["", *parts, ""])


def test_the_run_file_of_the_guide_has_every_key() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = [m["text"] for m in _FENCE.finditer(text) if m["note"] == "file: mine.toml"]
    document = tomllib.loads(blocks[0])
    assert set(document) == set(RunSpec.model_fields)
    for name, section in RunSpec.model_fields.items():
        if name != "version":
            keys: Any = section.annotation
            assert set(document[name]) == set(keys.model_fields), name


def test_the_entry_points_of_the_page_are_those_of_the_registries() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = [m["text"] for m in _FENCE.finditer(text) if m["language"] == "toml"]
    groups = tomllib.loads(blocks[0])["project"]["entry-points"]
    assert set(groups) == {registry.group for registry in REGISTRIES}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads]
            assert anchor in slugs, link


def test_the_pictures_show_what_is_printed_today(tmp_path: Path) -> None:
    """Words only: times differ from run to run."""
    runpy.run_path(str(ROOT / "docs" / "make_images.py"))["main"](tmp_path)
    kept = ROOT / "docs" / "images"
    assert {p.name for p in kept.iterdir()} == {p.name for p in tmp_path.iterdir()}
    for made in tmp_path.iterdir():
        stale = f"{made.name} is stale: run python docs/make_images.py"
        assert _shown(made) == _shown(kept / made.name), stale
        assert "url(http" not in (kept / made.name).read_text(encoding="utf-8")


def _shown(path: Path) -> list[str]:
    texts = re.findall(r">([^<]*)</text>", path.read_text(encoding="utf-8"))
    return re.findall(r"[A-Za-z_]{4,}", html.unescape(" ".join(texts)))


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
