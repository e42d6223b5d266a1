"""Transforms and reducers in a user's own file."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import resolve
from gradscope.engine.chains import bind
from gradscope.errors import GradscopeError, ModelError, SpecError
from gradscope.run import prepare
from gradscope.stages.transforms.base import transforms
from tests.cli.conftest import gradscope as cli  # noqa: F401
from tests.stages.examples import accumulated

SAMPLES = Path(__file__).parent.parent / "sample_models"

MINE = """
import torch
import gradscope

@gradscope.transform("elementwise")
def soft_threshold(g, level: float = 0.1):
    return g.sign() * (g.abs() - level).clamp_min(0)

@gradscope.transform("factor")
def damped(norms, gamma=0.5):
    if gamma <= 0:
        raise ValueError(f"gamma must be positive, not {gamma}")
    return 1 / (norms + gamma)

@gradscope.transform("vector")
def by_parameter(rows, p: int = 2, suffix: str = ""):
    return {k + suffix: v.flatten(1).norm(p, dim=1) for k, v in rows.items()}

@gradscope.transform("linear")
def doubled(rows):
    return {name: value.mul_(2) for name, value in rows.items()}

@gradscope.reducer
def root_mean_square(floor: float = 0.0):
    def start(gradients):
        squares = {k: block.to(torch.float64).squared_sum() for k, block in gradients.items()}
        return {"n": torch.tensor(float(gradients.n)), **squares}

    def merge(a, b):
        return {key: value + b[key] for key, value in a.items()}

    def result(state):
        return {k: (v / state["n"]).sqrt() + floor for k, v in state.items() if k != "n"}

    return gradscope.Reducer(start, merge, result)

@gradscope.reducer
def largest():
    def start(gradients):
        return {"norm": gradients.norms.max()}

    def merge(a, b):
        return {"norm": torch.maximum(a["norm"], b["norm"])}

    return start, merge, lambda state: state
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "bad.py"
    path.write_text("import torch\nimport gradscope\n" + textwrap.dedent(text))
    return str(path)


def gradients(dtype=torch.float64):
    g = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return Gradients({"w": DenseBlock(draw(6, 3, 4)), "b": DenseBlock(draw(6, 4))})


def matrix(grads):
    return np.concatenate([v.double().numpy().reshape(6, -1) for v in grads.dense().values()], 1)


def softened(rows, level):
    return np.sign(rows) * np.maximum(np.abs(rows) - level, 0)


def norms_of(rows, p):
    return np.c_[np.linalg.norm(rows[:, :12], p, 1), np.linalg.norm(rows[:, 12:], p, 1)]


@pytest.mark.parametrize(
    ("stage", "right"),
    [
        ("soft_threshold:level=0.5", lambda rows: softened(rows, 0.5)),
        ("soft_threshold", lambda rows: softened(rows, 0.1)),
        ("damped:gamma=0.25", lambda rows: rows / (np.linalg.norm(rows, axis=1)[:, None] + 0.25)),
        ("by_parameter:p=1,suffix=.l1", lambda rows: norms_of(rows, 1)),
    ],
)
def test_a_transform_and_its_arguments(mine, stage, right):
    grads = gradients()
    found = bind(f"{mine}:{stage}").rows(grads)
    np.testing.assert_allclose(matrix(found), right(matrix(grads)), rtol=1e-12)
    names = ["w.l1", "b.l1"] if "suffix" in stage else ["w", "b"]
    assert list(found.dense()) == names


def test_what_writes_into_its_rows_leaves_the_gradients_alone(mine):
    grads = gradients()
    before = matrix(grads)
    np.testing.assert_array_equal(matrix(bind(f"{mine}:doubled").rows(grads)), 2 * before)
    np.testing.assert_array_equal(matrix(grads), before)


def test_reducers(mine):
    grads = gradients()
    rows = matrix(grads)
    for text, floor in (("", 0.0), (":floor=2", 2.0)):
        chain = bind(f"{mine}:root_mean_square{text}")
        made = accumulated(chain, [(grads.select(part),) for part in (slice(0, 2), slice(2, 6))])
        found = np.concatenate([v.numpy().ravel() for v in made.values()])
        np.testing.assert_allclose(found, np.sqrt((rows**2).mean(0)) + floor, rtol=1e-12)
    chain = bind(f"{mine}:largest")
    found = accumulated(chain, [(grads,)])["norm"]
    assert float(found) == pytest.approx(np.linalg.norm(rows, axis=1).max(), rel=1e-12)


def test_after_a_reducer_and_in_half_precision(mine):
    rows = matrix(gradients())
    chain = bind(f"mean | {mine}:soft_threshold:level=0.2")
    found = accumulated(chain, [(gradients(),)])
    found = np.concatenate([v.numpy().ravel() for v in found.values()])
    np.testing.assert_allclose(found, softened(rows.mean(0), 0.2), rtol=1e-12, atol=1e-15)
    half = bind(f"{mine}:soft_threshold").rows(gradients(torch.bfloat16))
    assert half["w"].dense().dtype == torch.float32


def test_a_declared_transform_is_an_entry_of_the_registry(monkeypatch):
    """As an entry point's object is; the function itself stays within reach."""

    @gradscope.transform("elementwise")
    def cubed(g, times: int = 1):
        """T(g) = times · g³."""
        return times * g**3

    assert cubed.function(torch.tensor(2.0), times=2) == 16
    assert (cubed.__name__, cubed.__doc__) == ("cubed", "T(g) = times · g³.")
    monkeypatch.setitem(transforms._entries, "cubed", cubed)
    grads = gradients()
    found = matrix(bind("cubed:times=3").rows(grads))
    np.testing.assert_allclose(found, 3 * matrix(grads) ** 3, rtol=1e-12)
    assert transforms.summary("cubed") == "T(g) = times · g³."


@pytest.mark.parametrize(
    ("scope", "body", "chain", "words"),
    [
        ("elementwise", "(g): return g / g.norm()", "f", "its own entry only"),
        ("elementwise", "(g): return g + torch.rand_like(g)", "f", "must not be random"),
        ("elementwise", "(g): return g * torch.arange(g.numel()).view_as(g)", "f", "own entry"),
        ("elementwise", "(g): return g.sum()", "f", "tensor of the same shape"),
        ("elementwise", "(g): return g > 0", "f", "torch.bool"),
        ("elementwise", "(g): return g.abs_()", "f", "in place"),
        ("elementwise", "(g): return g.nothing()", "f", "AttributeError"),
        ("factor", "(norms): return norms / norms.sum()", "f", "its own sample only"),
        ("factor", "(norms): return 2.0", "f", "float"),
        ("factor", "(norms, c: float): assert c > 0, 'c < 0'", "f:c=-1", "c < 0"),
        ("factor", "(norms, c: float): return norms", "f", "needs c"),
        ("factor", "(norms, c=1): return norms", "f:c=x", "int"),
        ("factor", "(norms, c=1): return norms", "f:d=1", "'d'"),
        ("whole", "(g): return g", "f", "unknown scope"),
    ],
)
def test_what_does_not_bind(tmp_path, scope, body, chain, words):
    path = written(tmp_path, f'@gradscope.transform("{scope}")\ndef f{body}')
    assert words in refusal(f"{path}:{chain}")


def refusal(chain):
    with pytest.raises(GradscopeError) as caught:
        bind(chain)
    return str(caught.value)


def test_what_is_no_stage(tmp_path):
    for code, words in (
        ("def f(g): return g", "@gradscope.transform"),
        ("@gradscope.transform\ndef f(g): return g", "unknown scope"),
        ("@gradscope.reducer\ndef f(): return 3", "int, not a reducer"),
    ):
        assert words in refusal(f"{written(tmp_path, code)}:f")


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("def f(rows): return rows['w']", SpecError, "returned Tensor"),
        ("def f(rows): return {}", SpecError, "returned dict"),
        ("def f(rows): return {k: v.sum(0) for k, v in rows.items()}", SpecError, "(3, 4)"),
        ("def f(rows): return {k: v - v.mean(0) for k, v in rows.items()}", SpecError, "reducer"),
        ("def f(rows): return rows['v']", ModelError, "KeyError: 'v'"),
    ],
)
def test_rows_that_are_none(tmp_path, body, error, words):
    chain = bind(f"""{written(tmp_path, '@gradscope.transform("vector")' + chr(10) + body)}:f""")
    with pytest.raises(error) as caught:
        chain.rows(gradients())
    assert words in str(caught.value)


def test_a_state_that_cannot_be_stored(tmp_path):
    body = "@gradscope.reducer\ndef f(): return (lambda g: {'n': 1}, max, dict)"
    chain = bind(f"{written(tmp_path, body)}:f")
    with pytest.raises(SpecError, match="dict of tensors"):
        chain.start(gradients())


def test_from_the_command_line(cli, tmp_path, mine):  # noqa: F811
    folder = SAMPLES / "digits_mlp"
    out = tmp_path / "out.h5"
    chains = [f"{mine}:soft_threshold:level=0.01 | mean", f"{mine}:damped | sum", "identity"]
    chains.append(f"{mine}:by_parameter")
    words = [word for chain in chains for word in ("-t", chain)]
    done = cli("compute", "--config", folder / "run.toml", *words, "--samples", ":50", "-o", out)
    assert done.code == 0, done.err
    with gradscope.open(out) as file:
        for name, rows in file.chains[2].items():
            rows = np.asarray(rows[:], dtype=np.float64)
            soft = softened(rows, 0.01).mean(0)
            np.testing.assert_allclose(file.chains[0][name][:], soft, atol=1e-7)
            factors = 1 / (file.samples["norm"] + 0.5)
            scaled = np.tensordot(factors, rows, 1)
            np.testing.assert_allclose(file.chains[1][name][:], scaled, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(file.chains[3][name][:], file.norms[name][:], rtol=1e-5)
    plain = written(tmp_path, "def plain(g): return g")
    failed = cli("compute", "--config", folder / "run.toml", "-t", f"{plain}:plain", "--dry-run")
    assert failed.code == 2 and "@gradscope.transform" in failed.err
    assert "Traceback" not in failed.err


def test_changed_code_is_another_run(tmp_path, mine):
    def fingerprint():
        chains = {"transform": [f"{mine}:soft_threshold | mean"], "samples": ":10"}
        return prepare(
            resolve(SAMPLES / "digits_mlp" / "run.toml", {"compute": chains})
        ).fingerprint()

    before = fingerprint()
    assert before == fingerprint() and before["digests"]["stages"]
    json.dumps(before)
    Path(mine).write_text(MINE + "\n# another\n")
    assert fingerprint() != before
    spec = resolve(SAMPLES / "digits_mlp" / "run.toml", {"compute": {"samples": ":10"}})
    assert prepare(spec).digests["stages"] == {}


def test_in_python(mine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = torch.randn(8, 4).double(), torch.randint(3, (8,))
    rows = gradscope.per_sample_gradients(model, "cross_entropy", inputs, targets)
    chain = f"{mine}:soft_threshold:level=0.05"
    found = gradscope.expectation(model, "cross_entropy", chain, inputs, targets)
    for name, value in rows.items():
        right = (value.sign() * (value.abs() - 0.05).clamp_min(0)).mean(0)
        torch.testing.assert_close(found[name], right, rtol=1e-12, atol=1e-15)
