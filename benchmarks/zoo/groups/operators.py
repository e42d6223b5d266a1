"""The operators of torch's test table `op_db`, each with its sample inputs and a parameter.

A case is an operator and one of its sample inputs. In `NAME/k` the operator is applied to one
sample at a time; in `NAME/k:batch` to a tensor of all of them, whose first axis counts samples.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.zoo.groups.inputs import quiet, runnable
from benchmarks.zoo.libraries import load_testing
from benchmarks.zoo.subject import NotBuiltError, Subject, parts

EACH = 5  # sample inputs of an operator
_LARGEST = 20_000  # numbers of an input


@cache
def _operators() -> dict[str, Any]:
    table = load_testing("common_methods_invocations").op_db
    wanted = [
        op for op in table if op.supports_autograd and op.supports_dtype(torch.float64, "cpu")
    ]
    return {
        f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name}": op for op in wanted
    }


def _samples(op: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    with quiet():
        yield from islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), EACH)


def names(heads: bool = False, wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return operators with the numbers of their sample inputs, alone and as a batch."""
    found = []
    for name, op in _operators().items():
        possible = [f"{name}/{k}{how}" for k in range(EACH) for how in ("", ":batch")]
        if not any(map(wanted, possible)):
            continue
        try:
            count = sum(1 for _ in _samples(op))
        except Exception:  # an operator that needs a library or device
            continue
        found += possible[: 2 * count]
    return found


class Operator(nn.Module):
    """An operator whose first tensor is scaled by the input and a parameter.

    The other tensors that are differentiable are parameters themselves.
    """

    def __init__(self, function: Any, first: Tensor, rest: list[Any], form: Any) -> None:
        super().__init__()
        self.function, self.form = function, form
        self.start = [first]  # no buffer, as Opacus refuses layers with parameters and buffers
        self.scale = nn.Parameter(torch.ones_like(first))
        self.rest = list(rest)
        for k, value in enumerate(rest):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.rest[k] = None
                self.register_parameter(f"other{k}", nn.Parameter(value))

    def scaled(self, x: Tensor) -> Tensor:
        """Return the operator's first tensor, of samples x (n, *shape)."""
        return self.start[0].to(x.dtype) * (0.95 + 0.05 * (x * self.scale).tanh())

    def applied(self, first: Tensor) -> Any:
        """Return what the operator makes of it and the other arguments."""
        others = [getattr(self, f"other{k}", value) for k, value in enumerate(self.rest)]
        input, args, kwargs = pytree.tree_unflatten([first, *others], self.form)
        return self.function(input, *args, **kwargs)


class Alone(Operator):
    """An operator that is applied to one sample at a time."""

    def forward(self, x: Tensor) -> Any:
        """Map (n, *shape) to the outputs, stacked."""
        found = [list(parts(self.applied(self.scaled(row))).values()) for row in x.unbind(0)]
        kept = [
            t for t in zip(*found, strict=True) if t[0].is_floating_point() or t[0].is_complex()
        ]
        return _one_or_all([torch.stack(t) for t in kept])


class Together(Operator):
    """An operator that is applied to all samples at once."""

    def forward(self, x: Tensor) -> Any:
        """Map (n, *shape) to the outputs."""
        return _one_or_all(list(parts(self.applied(self.scaled(x))).values()))


def _one_or_all(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def build(name: str) -> Subject:
    """Return the operator as a module with parameters, in float64."""
    title, _, how = name.partition(":")
    operator, _, number = title.rpartition("/")
    op = _operators()[operator]
    sample = next(islice(_samples(op), int(number), None))
    leaves, form = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    first = leaves[0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or not first.numel():
        raise NotBuiltError("its first argument is no tensor of real numbers")
    if first.numel() > _LARGEST:
        raise NotBuiltError(f"its input has {first.numel()} numbers")
    kind = Together if how else Alone
    model = kind(op.op, first.detach(), leaves[1:], form).double()

    def inputs(seed: int, n: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        size = (n, *first.shape)
        return torch.rand(size, generator=generator, dtype=torch.float64) + 0.5

    return Subject(model.eval(), runnable(model, [inputs]), torch.float64)
