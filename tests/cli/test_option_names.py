"""Messages name options as Python has them; the command line shows them as its flags."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn
from typer.main import get_command

import gradscope as library
from gradscope.cli import options
from gradscope.cli.app import app
from gradscope.config import run_options
from gradscope.errors import CoupledSamplesError, GradscopeError, SpecError, UnsupportedError
from tests import reach

HERE = Path(library.__file__).parent
# reached from Python: there a flag would be a word from elsewhere
FROM_PYTHON = ("backends", "blocks", "comparison", "core", "engine", "stages")
FLAGS = {name: options.flags_of(command) for name, command in get_command(app).commands.items()}
NAMED = re.compile(r'(?<![\w.:,])([a-z_]+)=("[^"]*"|True)|`([a-z_]+)`')


@cache
def messages():
    """Return every string of the program that is no docstring, with its file and line."""
    found = []
    for path in sorted(HERE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            (path.relative_to(HERE), node.lineno, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
        ]
    return found


def test_what_python_can_raise_names_no_flag():
    found = [
        (str(path), line, text)
        for path, line, text in messages()
        if path.parts[0] in FROM_PYTHON and re.search(r"(?<!-)--[a-z]", text)
    ]
    assert found == []


def test_each_option_that_a_message_names_is_one_and_takes_the_value():
    matches = {
        match.group(): match
        for path, _, text in messages()
        if path.parts[0] not in ("cli", "config", "report")
        for match in NAMED.finditer(text)
        if (match[1] or match[3]) in FLAGS["compute"] | FLAGS["attribute"]
    }
    assert {'coupling="own-loss"', 'randomness="fixed"', "overwrite=True", "`damping`"} < {*matches}
    for said, match in matches.items():
        name, value, bare = match.groups()
        command = "compute" if (name or bare) in FLAGS["compute"] else "attribute"
        shown = options.as_flags(f"Use {said}.", FLAGS[command])
        flag, _, given = shown.removeprefix("Use ").removesuffix(".").partition(" ")
        assert flag == FLAGS[command][name or bare], said
        assert given == ("" if value in (None, "True") else value.strip('"')), said
        setting = next((s for s in run_options() if s.parameter == name), None)
        if setting is not None and "Literal" in str(get_origin(setting.type)):
            assert given in get_args(setting.type), said


def text_of(node):
    """Return the text of a string expression, with {} for what is put in; None of any other."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(node.left), text_of(node.right)]
        return None if sides == [None, None] else "".join(side or "{}" for side in sides)
    return None


def texts(node):
    """Yield the text of every string expression below a node, each as long as it is."""
    text = text_of(node)
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if text is not None:
        yield text
    for below in () if text is not None or docstring else ast.iter_child_nodes(node):
        yield from texts(below)


def options_named(text):
    """Yield each option that a message names, and the command of which it names it, if it does.

    An option behind `gradscope COMMAND` is that command's. One in Python's words is a flag of the
    command or, if it is a setting of a run, a key of the run file.
    """
    keys = {setting.parameter for setting in run_options()}
    known = set().union(*FLAGS.values())
    # in quotes, it is an argument of a user's script: argv = ["--width", "64"]
    for match in re.finditer(r"(?<![-\w\"])--[a-z][a-z-]*", text):
        programs = re.findall(r"gradscope ([a-z]+)|(torchrun) ", text[: match.start()])
        command, other = programs[-1] if programs else (None, None)
        if not other:
            yield match.group(), command
    for match in NAMED.finditer(text):
        name = match[1] or match[3]
        if name in known - keys:
            yield name, None


def test_each_option_that_a_message_names_is_one_of_the_command_that_prints_it():
    taken = {
        name: {"--help"}
        | {flag for p in command.params for flag in (*p.opts, *p.secondary_opts, p.name)}
        for name, command in reach.COMMANDS.items()
    }
    # the options themselves, and attributes of SVG
    described = {"gradscope.config.spec", "gradscope.config.commands", "gradscope.markup"}
    seen, wrong = 0, []
    for module in sorted(reach.DEFINED.keys() - described):
        for name, statements in reach.DEFINED[module].items():
            printing = [each for each in taken if (module, name) in reach.reached(each)]
            for text in (text for statement in statements for text in texts(statement)):
                for option, command in options_named(text):
                    of = printing if command is None else [command]
                    seen += bool(of)
                    wrong += [(module, each, text) for each in of if option not in taken[each]]
    assert not wrong
    assert seen > 80


def test_what_commands_reach():
    computing = {name for name in FLAGS if ("gradscope.run.job", "prepare") in reach.reached(name)}
    assert computing == {"check", "compute", "merge", "compare", "attribute", "validate"}
    written = ("gradscope.storage.write.writer", "open_writer")
    assert [n for n in FLAGS if written in reach.reached(n)] == ["compute", "attribute"]


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        ("compute", 'use coupling="own-loss". Or', "use --coupling own-loss. Or"),
        ("compute", '(randomness="fixed")', "(--randomness fixed)"),
        ("compute", "Run without `compile`.", "Run without --compile."),
        ("compute", 'loss="cross_entropy:weight=a b"', "--loss 'cross_entropy:weight=a b'"),
        ("check", 'coupling="frozen"', "--coupling frozen"),
        ("merge", 'coupling="frozen"', 'coupling = "frozen" under [compute] of a run file'),
        ("attribute", "give overwrite=True.", "give --overwrite."),
        ("compute", "project:dim=64,seed=True", "project:dim=64,seed=True"),
        ("compute", 'Scope.rows="token", `nothing`', 'Scope.rows="token", `nothing`'),
        ("check", 'loss="mse"', "--loss mse"),
        ("export", 'loss="mse"', 'name = "mse" under [loss] of a run file'),
        (
            "attribute",
            "a smaller `batch_size`",
            "a smaller `batch_size` under [compute] of a run file",
        ),
        ("list", 'weight_norm(name="weight")', 'weight_norm(name="weight")'),
    ],
)
def test_options_as_flags(command, text, shown):
    assert options.as_flags(text, FLAGS[command]) == shown


def test_the_code_of_the_user_stays_as_it_is():
    code = '\nIt came from:\n  File "m.py", line 1, in f\n    interpolate(x, mode="train")'
    error = GradscopeError("what", where="`rows`", remedy=f'Use rows="token".{code}')
    shown = options.naming_flags(error, FLAGS["compute"])
    assert str(shown) == f"--rows: what\nUse --rows token.{code}"


COUPLED = nn.BatchNorm1d(3)
MODEL = "import torch\ndef build():\n    return torch.nn.BatchNorm1d(3)\n"


def test_the_same_refusal_in_python_and_on_the_command_line(tmp_path, gradscope, monkeypatch):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(CoupledSamplesError) as caught:
        library.norms(COUPLED, "mse", x, torch.zeros(6, 3))
    assert 'use coupling="own-loss"' in caught.value.remedy
    assert "--" not in str(caught.value)
    assert len(library.norms(COUPLED, "mse", x, torch.zeros(6, 3), coupling="own-loss")) == 6
    monkeypatch.chdir(tmp_path)
    torch.save(COUPLED.state_dict(), "w.pt")
    np.savez("d.npz", inputs=x.numpy(), targets=np.zeros((6, 3), np.float32))
    Path("m.py").write_text(MODEL)
    words = ["w.pt", "d.npz", "--model", "m.py:build", "--loss", "mse", "--mode", "train"]
    refused = gradscope("compute", *words, "-o", "o.h5")
    assert refused.code == 4
    assert "use --coupling own-loss" in refused.err
    assert 'coupling="' not in refused.err
    refused = gradscope("check", *words)
    assert "use --coupling own-loss" in refused.err
    assert gradscope("check", *words, "--coupling", "own-loss").code == 0


def test_init_check_and_compute_take_the_same_settings_of_a_run():
    settings = {s.parameter for s in run_options() if "compute" in s.commands}
    for command in ("init", "check", "compute"):
        assert settings <= {p.name for p in reach.COMMANDS[command].params}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"rows": "token"}, CoupledSamplesError, 'use coupling="own-loss"'),
        ({"model": nn.Dropout()}, UnsupportedError, 'Or use randomness="fixed"'),
        ({"loss": "l1", "labels": "exact"}, SpecError, 'or use labels="data"'),
    ],
)
def test_refusals_in_python_name_keywords(given, error, said):
    model = nn.Sequential(nn.Linear(3, 3), given.pop("model", nn.BatchNorm1d(4)))
    x, loss = torch.randn(6, 4, 3), given.pop("loss", lambda o, t: (o - t).square().sum(2))
    if given.get("rows") != "token" and callable(loss):
        loss = "mse"
    with pytest.raises(error) as caught:
        library.norms(model, loss, x, torch.zeros(6, 4, 3), **given)
    assert said in caught.value.remedy
    assert "--" not in str(caught.value)
