"""Other releases of torch: what is said, what is refused, and what is a bug of ours."""

import inspect
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.backends import compiled
from gradscope.backends.hooks.graph import internals
from gradscope.cli.app import _code
from gradscope.errors import ModelError, UnsupportedError
from gradscope.model import releases
from gradscope.sources.code import blamed
from tests import oracle

INPUTS = torch.linspace(-1, 1, 12).reshape(4, 3)
TARGETS = torch.linspace(0, 1, 8).reshape(4, 2)
READERS = [
    name
    for name, value in vars(internals).items()
    if inspect.isfunction(value) and value.__module__ == internals.__name__ and name[0] != "_"
]


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    releases._failure.cache_clear()
    yield
    releases._failure.cache_clear()


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def lost(*given: object) -> None:
    raise AttributeError("'AddmmBackward0' object has no attribute '_input_metadata'")


def scope(
    model: nn.Module | None = None, backend: str = "auto", loss: Any = "mse", **settings: Any
) -> gradscope.Scope:
    model = nn.Linear(3, 2) if model is None else model
    return gradscope.Scope(model, loss, backend=backend, **settings)


def require_right(one: gradscope.Scope, *, rows: int = 1) -> None:
    """Hold gradients, of which a sample has so many rows, against the loop in float64."""
    found = one.per_sample_gradients(INPUTS, TARGETS)
    _, wanted = oracle.per_sample_gradients(one.problem.model, mse, INPUTS, TARGETS)
    for name, value in wanted.items():
        mean = found[name].double().unflatten(0, (len(value), rows)).mean(1)
        torch.testing.assert_close(mean, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0+cpu", "2.15.1"])
def test_nothing_is_said_of_a_release_that_was_tested(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert scope().notes == []


@pytest.mark.parametrize("version", ["2.7.1", "2.16.0a0+git12", "3.0.0"])
def test_another_release_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    (note,) = scope().notes
    assert "torch 2.8 to 2.15" in note and version in note


@pytest.mark.parametrize("name", [name for name in READERS if name != "probe"])
def test_the_probe_uses_all_that_reads_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.probe()
    monkeypatch.setattr(internals, name, lost)
    with pytest.raises(AttributeError, match="_input_metadata"):
        internals.probe()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_probe_that_fails_goes_to_the_next_backend_loudly(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "outputs", lost)
    tokens = {"loss": lambda o, t: (o - t).square(), "rows": "token"} if rows == 2 else {}
    with scope(**tokens) as one:
        require_right(one, rows=rows)
        assert one.backend in ("vmap", "expand", "loop")  # the fastest on this machine
        note = one.notes[0]
    assert "hooks refused" in note and "_input_metadata" in note and "2.8 to 2.15" in note
    with pytest.raises(UnsupportedError, match=r"tested with torch 2\.8 to 2\.15"):
        scope(backend="hooks", **tokens).per_sample_gradients(INPUTS, TARGETS)


class Padded(nn.Module):
    """A convolution over the inputs' entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.unsqueeze(1)).square().mean(2)
        return found


@pytest.mark.parametrize(("name", "times"), [("pads", 1), ("padding", 2)])
def test_what_an_operation_keeps_under_another_name_or_meaning(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = internals.saved

    def other(node: Any, asked: str) -> Any:
        return read(node, asked) if asked != "padding" else times * read(node, name)

    monkeypatch.setattr(internals, "saved", other)
    with scope(Padded()) as one:
        require_right(one)
        assert one.backend in ("vmap", "expand", "loop")  # the fastest on this machine
        note = one.notes[0]
    assert "hooks refused" in note
    if times == 1:
        assert "ConvolutionBackward0 has no _saved_pads" in note and "2.8 to 2.15" in note


def test_a_second_derivative_reads_the_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "edges", lost)
    with pytest.raises(UnsupportedError, match=r"hvp does not support torch .* 2\.8 to 2\.15"):
        scope(backend="loop").expectation("hvp | mean", INPUTS, TARGETS)


def test_fixed_random_numbers_have_a_probe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch")
    with pytest.raises(UnsupportedError, match="randomness fixed does not support torch"):
        scope(randomness="fixed")


def test_a_bug_on_another_release_says_which_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with pytest.raises(KeyError) as caught:
        _code(KeyError("what torch 3 has not"), {})
    (note,) = caught.value.__notes__
    assert "2.8 to 2.15" in note


def test_expand_has_a_probe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scope(backend="expand").per_sample_gradients(INPUTS, TARGETS)
    releases._failure.cache_clear()
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch")
    with pytest.raises(UnsupportedError, match="_DisableTorchDispatch"):
        scope(backend="expand").per_sample_gradients(INPUTS, TARGETS)


def test_a_name_that_our_files_miss_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(internals, "FUSED_RECURRENT")
    with pytest.raises(AttributeError, match="FUSED_RECURRENT") as caught:
        scope().per_sample_gradients(INPUTS, TARGETS)
    assert blamed(caught.value) is None  # the command line ends with exit code 1


class Asking(nn.Module):
    """Asks for what is not there."""

    def __init__(self, whom: str) -> None:
        super().__init__()
        self.layer, self.whom = nn.Linear(3, 2), whom

    def forward(self, x: Tensor) -> object:
        if self.whom == "model":
            return self.missing
        return gradscope.missing if self.whom == "gradscope" else self.layer(x).missing


@pytest.mark.parametrize("whom", ["model", "gradscope", "tensor"])
@pytest.mark.parametrize("backend", ["auto", "hooks", "vmap", "expand", "loop"])
def test_a_name_that_the_model_misses_is_the_users(whom: str, backend: str) -> None:
    with pytest.raises(ModelError, match="raised AttributeError") as caught:
        scope(Asking(whom), backend).per_sample_gradients(INPUTS, TARGETS)
    assert __file__ in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("home", "name"),
    [("torch.nn.attention", "SDPBackend"), ("torch", "iinfo"), ("torch.nn.attention", "")],
)
def test_a_name_that_a_module_of_ours_imports_no_more(
    home: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an import, as an attribute, as a module: told in words, unless this torch was tested."""
    if name:
        monkeypatch.delattr(sys.modules[home], name)
    else:
        monkeypatch.setitem(sys.modules, home, None)
    spec = spec_from_file_location("loaded_anew", compiled.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises((ImportError, AttributeError)) as caught:
        spec.loader.exec_module(module_from_spec(spec))
    with pytest.raises((ImportError, AttributeError)):
        _code(caught.value, {})
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    assert _code(caught.value, {}) == 4
    told = capsys.readouterr().err
    assert told.startswith("error: gradscope does not support torch 3.1.0")
    assert (name or home) in told
