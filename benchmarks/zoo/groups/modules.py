"""The modules of torch's test table `module_db`, behind a layer with a parameter."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.groups.inputs import quiet, runnable
from benchmarks.zoo.libraries import load_testing
from benchmarks.zoo.subject import NotBuiltError, Subject, shaken

EACH = 4  # inputs of a module


@cache
def _modules() -> dict[str, Any]:
    return {
        info.name.removeprefix("nn."): info for info in load_testing("common_modules").module_db
    }


def _samples(info: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    with quiet():
        found = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=False
        )
    yield from islice(found, EACH)


def names(heads: bool = False, wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return modules with the numbers of their inputs."""
    found = []
    for name, info in _modules().items():
        if not any(wanted(f"{name}/{k}") for k in range(EACH)):
            continue
        try:
            count = sum(1 for _ in _samples(info))
        except Exception:  # a module that needs another device
            continue
        found += [f"{name}/{k}" for k in range(count)]
    return found


class Between(nn.Module):
    """A module whose first floating-point input is scaled by a parameter.

    Args:
        module: The module.
        first: Its first input, a sample of which gives the parameter's shape.
        at: Which of the inputs this is.
        keys: Names of the last inputs, which the module takes by keyword.
    """

    def __init__(self, module: nn.Module, first: Tensor, at: int, keys: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(first.shape[1:], dtype=first.dtype))
        self.at, self.keys = at, list(keys)

    def forward(self, *args: Any) -> Any:
        """Apply the module."""
        given = list(args)
        given[self.at] = given[self.at] * self.scale
        count = len(given) - len(self.keys)
        named = dict(zip(self.keys, given[count:], strict=True))
        return self.module(*given[:count], **named)


def build(name: str) -> Subject:
    """Return the module in float64, its batch of the shape that the table gives."""
    title, _, number = name.rpartition("/")
    info = _modules()[title]
    sample = next(islice(_samples(info), int(number), None))
    torch.manual_seed(0)
    made, given = sample.constructor_input, sample.forward_input
    if given is None:
        raise NotBuiltError("it has no inputs")
    module = info.module_cls(*made.args, **made.kwargs).double()
    if getattr(module, "reduction", None) in ("mean", "sum"):
        module.reduction = "none"
    args = [*given.args, *given.kwargs.values()]
    real = [k for k, v in enumerate(args) if isinstance(v, Tensor) and v.is_floating_point()]
    if not real or args[real[0]].dim() == 0:
        raise NotBuiltError("it has no input of real numbers with a sample axis")
    model = shaken(Between(module, args[real[0]], real[0], list(given.kwargs)))

    def inputs(seed: int, n: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return tuple(_batch(v, n, generator) for v in args)

    return Subject(model, runnable(model, [inputs]), torch.float64)


def _batch(value: Any, n: int, generator: torch.Generator) -> Any:
    """Return n samples: random samples of the table's input, scaled by random factors near 1."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    rows = value[torch.randint(0, len(value), (n,), generator=generator)]
    if not value.is_floating_point():
        return rows
    return rows * (0.9 + 0.1 * torch.rand(rows.shape, generator=generator, dtype=rows.dtype))
