"""torch's own list of modules: every one with parameters, every sample input with a batch axis."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():  # torch's test helpers are not free of warnings of their own
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db

from gradscope.backends.base import backends
from gradscope.core.batch import map_tensors, tensors
from gradscope.errors import RefusedError
from tests import oracle
from tests.backends.outcomes import mistakes, run
from tests.cases import Setup

# torch's helpers forbid, for the whole process, to set backends' flags, which other libraries do
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

# modules that have parameters and sample inputs with a batch axis; a later torch may add to them
COVERED = (
    "BatchNorm1d BatchNorm2d BatchNorm3d Bilinear Conv1d Conv2d Conv3d ConvTranspose1d "
    "ConvTranspose2d ConvTranspose3d Embedding GroupNorm InstanceNorm1d InstanceNorm2d "
    "InstanceNorm3d LayerNorm LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d "
    "LazyConvTranspose2d LazyConvTranspose3d Linear LinearCrossEntropyLoss PReLU RMSNorm "
    "Transformer TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer"
)

# what a backend may refuse: a custom Function without a vmap rule that writes by out=
REFUSED = {"vmap": {"nn.LinearCrossEntropyLoss"}, "expand": {"nn.LinearCrossEntropyLoss"}}

MOST = 5  # about so many variants of one module, spread over its options


class Positional(nn.Module):
    """A module whose tensors, wherever they are among its arguments, come one by one.

    The sample axis of the tensors given is the first; `axis` is where the module has it.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, axis: int) -> None:
        super().__init__()
        self.module, self.axis = module, axis
        self.tree = (args, kwargs)

    def forward(self, *given: Tensor) -> Any:
        each = iter(given)
        args, kwargs = map_tensors(lambda _: next(each).movedim(0, self.axis), self.tree)
        out = self.module(*args, **kwargs)
        return map_tensors(lambda t: t.movedim(self.axis, 0) if t.dim() > self.axis else t, out)


def uneven(outputs: Any, targets: Tensor) -> Tensor:
    """A smooth loss in which no two entries of the outputs count alike."""
    total = torch.zeros_like(targets)
    for out in tensors(outputs):
        if out.is_floating_point():
            rows = out.reshape(targets.shape[0], -1)
            weights = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)
            total = total + (weights * (1.3 * rows + 0.2).tanh() + 0.1 * rows * rows).sum(1)
    return total * targets


def setups(name: str) -> tuple[Setup, ...]:
    """All sample inputs of a module for which a batch of one has an answer."""
    info = next(m for m in module_db if m.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = [s for axis in (0, 1) for s in _candidates(info, axis)]
        usable = [s for s in found if _independent(s)]
        return tuple(usable[:: 1 + len(usable) // MOST])


def _parametrised(name: str) -> bool:
    """Whether this release of torch lists an example of the module that has parameters."""
    info = next(m for m in module_db if m.name == name)
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=False, training=False
    )
    options = [example.constructor_input for example in made]
    return any(list(info.module_cls(*o.args, **o.kwargs).parameters()) for o in options)


def _candidates(info: Any, axis: int) -> Iterator[Setup]:
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=False, training=False
    )
    for example in made:
        given = example.forward_input
        if given is None:
            continue
        flat = tensors((list(given.args), given.kwargs))
        sizes = {t.shape[axis] if t.dim() > axis else 0 for t in flat}
        if len(sizes) != 1 or max(sizes) < 2:
            continue
        options = example.constructor_input
        module = info.module_cls(*options.args, **options.kwargs).double().eval()
        if any(p.requires_grad for p in module.parameters()):
            model = Positional(module, list(given.args), given.kwargs, axis)
            inputs = tuple(t.movedim(axis, 0) for t in flat)
            yield Setup(model, uneven, inputs, torch.linspace(0.7, 1.9, max(sizes)).double())


def _independent(setup: Setup) -> bool:
    """Whether the axis tried is a sample axis: every loss is the same alone."""
    model, loss, inputs, targets = setup
    try:
        together = loss(model(*inputs), targets)
        alone = [
            loss(model(*(t[i : i + 1] for t in inputs)), targets[i : i + 1])
            for i in range(len(targets))
        ]
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return bool(together.requires_grad and torch.allclose(together, torch.cat(alone)))


NAMES = sorted({info.name for info in module_db})


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_every_module(name: str) -> None:
    found = setups(name)
    assert found or name.removeprefix("nn.") not in COVERED.split() or not _parametrised(name)
    for setup in found:
        answer = oracle.per_sample_gradients(*setup)
        for backend in backends.names():
            try:
                evaluation = run(backend, setup)
            except RefusedError:
                assert name in REFUSED.get(backend, set()), backend
            else:
                assert not mistakes(evaluation, *answer), backend
