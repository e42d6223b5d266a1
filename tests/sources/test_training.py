"""The analysis of what trains in scripts that import each other."""

import ast
from pathlib import Path

import pytest

from gradscope.sources.training import Known, training_in, unordered_line, without_training

# each file is imported by another file of the cycle
FILES = {
    "a": "import b, c\nfrom c import step as one\ndef first(): b.second()\ndef reads(): one\n",
    "b": "import a as other\nfrom d import anything\ndef second(): other.c.third()\n",
    "c": "from a import first\nimport b\ndef third(): loss.backward()\ndef step(): return first\n",
    "d": "import a\ndef plain(): return a.missing()\nclass Net:\n    def fit(self): a.first()\n",
}
TRAINS = {"a": ["first", "reads"], "b": ["second"], "c": ["third", "step"], "d": []}


@pytest.mark.parametrize("order", ["abcd", "dcba", "bdac"])
def test_files_that_import_each_other(tmp_path: Path, order: str) -> None:
    """The result does not depend on the file that is analysed first."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    known: Known = {}
    for name in order:
        path = tmp_path / f"{name}.py"
        tree = ast.parse(path.read_text())
        for shared in (known, None):
            trains = training_in(tree, path, shared)
            own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and trains(n)]
            assert [n.name for n in own] == TRAINS[name]
    for lines in ("from a import reads\nreads()", "import b\nb.other.first()"):
        assert without_training(ast.parse(lines), tmp_path / "use.py", known)[1] == 2
    lines = "import a, d\nx = d.plain()\nd.Net().fit()\ny = a.missing()"
    assert without_training(ast.parse(lines), tmp_path / "use.py", known)[1] is None


def test_names_of_an_imported_script(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "steps.py").write_text("def fit(net): net.loss().backward()\n")
    (tmp_path / "use.py").write_text("import pkg.steps\nfrom pkg import steps as s\n")
    for line, at in (("pkg.steps.fit(1)", 3), ("s.fit(1)", 3), ("s.other(1)", None)):
        tree = ast.parse(f"import pkg.steps\nfrom pkg import steps as s\n{line}\n")
        assert without_training(tree, tmp_path / "use.py")[1] == at
    tree = ast.parse("import use\nx = 1\nuse.s.fit(1)\n")
    assert without_training(tree, tmp_path / "main.py")[1] == 3


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = 1\nwords = list(set(texts))", 2),
        ("vocab = set(texts)\nids = {w: k for k, w in enumerate(vocab)}", 2),
        ("names = {t for t in texts}\nfor n in names:\n    ids[n] = len(ids)", 2),
        ("words = sorted(set(texts))\nn = len(list(set(texts)))", None),
        ("for n in set(texts):\n    print(n)", None),
        ("ids = [k for k in sorted(set(texts))]\nfound = set(x for x in {1, 2})", None),
    ],
)
def test_the_order_of_a_set(code: str, line: int | None) -> None:
    assert unordered_line(ast.parse(code).body) == line
