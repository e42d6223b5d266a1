"""What a forward pass leaves behind is found to the last bit, and put back."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.errors import UnsupportedError
from gradscope.model.locate import is_installed
from gradscope.model.state import ModelState


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(9, dtype=torch.uint8), torch.tensor([0] * 8 + [1], dtype=torch.uint8)),
        (torch.zeros(3), torch.tensor([0.0, 0.0, -0.0])),  # equal numbers, other bits
        (torch.randn(2, 3).T, torch.randn(3, 2)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
        (torch.tensor(True), torch.tensor(False)),
    ],
)
def test_a_change_in_place_is_found_and_put_back(before: Tensor, after: Tensor) -> None:
    model = nn.Linear(1, 1)
    model.held = before.clone()
    state = ModelState(model, None)
    with state.restoring(), state.watching():
        pass
    assert state.change_count == 0
    with state.restoring(), state.watching():
        model.held.copy_(after)
    assert state.change_count > 0
    sign = (torch.signbit(t.real if t.is_complex() else t).tolist() for t in (model.held, before))
    assert torch.equal(model.held, before) and next(sign) == next(sign)


def test_what_is_not_a_number_has_not_changed() -> None:
    model = nn.Linear(1, 1)
    model.held = torch.full((3,), float("nan"))
    state = ModelState(model, None)
    with state.restoring(), state.watching():
        model.held.clone()
    assert state.change_count == 0


class Nameless:
    """Has no module's name, as some wrappers of compiled code."""

    __module__ = property(lambda self: "somewhere")  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls = [0]


def test_an_object_whose_class_names_no_module_is_looked_into() -> None:
    model = nn.Linear(1, 1)
    model.held = Nameless()
    state = ModelState(model, None)
    with state.restoring(), state.watching():
        model.held.calls[0] += 1
    assert state.change_count > 0
    assert model.held.calls == [0]


class Builder(OrderedDict[str, type]):
    """Makes what is looked up, as the table of activations in transformers."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)(name, "without an argument that it needs")

    def clear(self) -> None:
        raise AssertionError("called")


class Counts(dict[str, int]):
    def __getitem__(self, name: str) -> int:
        raise AssertionError("called")

    items = update = keys = clear = __setitem__ = __getitem__  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Builder, Counts])
def test_methods_of_a_users_table_are_not_called(kind: Any) -> None:
    held = kind([("a", int), ("b", str), ("c", float)])
    if kind is Builder:
        held.move_to_end("a")
    order = list(held)
    model = nn.Linear(1, 1)
    model.held = held
    state = ModelState(model, None)
    with state.restoring(), state.watching():
        pass
    assert state.change_count == 0
    base: Any = kind.__base__
    with state.restoring(), state.watching():
        base.pop(held, "b")
        base.__setitem__(held, "a", bytes)
        base.__setitem__(held, "d", bytes)
    assert state.change_count > 0
    assert list(held) == order
    assert dict(base.items(held)) == {"a": int, "b": str, "c": float}


def test_a_package_in_a_folder_of_its_own_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pip install --target FOLDER`, beside the user's own script."""
    (tmp_path / "thing-1.0.dist-info").mkdir()
    record = "../../bin/thing,,\nthing/__init__.py,sha256=x,1\nsingle.py,,\n"
    (tmp_path / "thing-1.0.dist-info" / "RECORD").write_text(record)
    files = [tmp_path / name for name in ("thing/part/a.py", "single.py", "train.py", "other/b.py")]
    assert not any(map(is_installed, files))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [is_installed(file) for file in files] == [True, True, False, False]
    assert not is_installed(tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_model_may_hold_a_sparse_matrix(layout: torch.layout) -> None:
    """Of which torch does not tell the bytes; a graph's neighbours are kept so."""

    class Spread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = (self.near @ super().forward(x).transpose(0, 1).flatten(1)).cos()
            return out.view(3, len(x), -1).transpose(0, 1).flatten(1)

    near = torch.tensor([[0, 1, 0.5], [1, 0, 0], [0, 2, 0]])
    model, x, y = Spread(4, 2), torch.randn(5, 3, 4), torch.randn(5, 6)
    model.near = near
    right = gradscope.per_sample_gradients(model, "mse", x, y, backend="loop")
    model.near = near.to_sparse(layout=layout)
    for backend in ("auto", "hooks", "loop"):
        found = gradscope.per_sample_gradients(model, "mse", x, y, backend=backend)
        torch.testing.assert_close(found, right)


def test_parameters_beyond_the_room_are_not_copied_and_still_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of every parameter would be a model more; its fingerprint tells as well."""

    class Grows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.add_(1.0)  # by which no version is raised
            return super().forward(x)

    for room, left in ((2**20, 0.0), (3, None)):
        monkeypatch.setattr("gradscope.model.state._ROOM", room)
        model = Grows(3, 2)
        before = model.weight.detach().clone()
        with pytest.raises(UnsupportedError, match="weight"):
            gradscope.norms(model, "mse", torch.ones(4, 3), torch.ones(4, 2))
        moved = float((model.weight - before).detach().abs().max())
        assert moved == left if left is not None else moved > 0


def test_hooks_that_a_forward_pass_registers_are_not_there_twice() -> None:
    """As in transformers: a flag says that they are there, and is put back too."""

    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen, self.hooked = nn.Linear(2, 1), [], False

        def forward(self, x: Tensor) -> Tensor:
            if not self.hooked:
                self.inner.register_forward_hook(lambda *call: self.seen.append(call[-1]))
                self.hooked = True
            self.seen.clear()
            self.inner(x)
            return torch.stack(self.seen).sum(0)

    model, x = Recorded(), torch.randn(3, 2)
    expected = model.inner(x)
    state = ModelState(model, None)
    for _ in range(2):
        with state.restoring():
            torch.testing.assert_close(model(x), expected)
            with state.restoring():
                torch.testing.assert_close(model(x), expected)
        assert not model.inner._forward_hooks
    errors = (expected - 1).detach()
    by_hand = 2 * errors.abs().squeeze(1) * (1 + x.square().sum(1)).sqrt()
    torch.testing.assert_close(gradscope.norms(model, "mse", x, torch.ones(3, 1)), by_hand)


LATE = """
import sys, torch, gradscope
from torch import nn

class Late(nn.Linear):
    def part(self, x):
        out = super().forward(x)
        return out.detach() if torch.compiler.is_compiling() else out

    def forward(self, x):
        return torch.compile(self.part, backend="eager")(x)

own, model = torch.compile, Late(4, 3)
assert "torch._dynamo" not in sys.modules
scope = gradscope.Scope(model, "cross_entropy")
scope.norms(torch.randn(5, 4), torch.arange(5) % 3)
assert scope.backend == "hooks", scope.notes
assert torch.compile is own
assert torch._dynamo.eval_frame._stance.stance == "default"
"""


@pytest.mark.full
def test_what_a_forward_pass_is_the_first_to_compile_runs_as_it_is_written() -> None:
    """There was nothing compiled when it began; afterwards there is."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-1000:]


def test_a_checkpointed_part_that_fails_holds_on_to_nothing() -> None:
    """Before torch 2.13 it takes what others save, until its error is forgotten."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

        def part(self, x: Tensor) -> Tensor:
            if x.requires_grad:  # as `hooks` asks first
                raise ValueError("no leaf, please")
            return self.inner(x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(checkpoint(self.part, x, use_reentrant=False))
            return out

    model, x, y = Picky().double(), torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    found = gradscope.norms(model, "cross_entropy", x, y, backend="hooks")
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    right = gradscope.norms(model, "cross_entropy", x, y, backend="loop")
    torch.testing.assert_close(found, right)
