"""The interpreter: it runs every operator of the model, the loss and the backward pass.

One rule covers elementwise operators, and `views` has the rules of views. Other operators have
their own rules, or run sample by sample.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.backends.expand.facts import OperatorFacts, aten, facts_of, rules
from gradscope.backends.expand.tensor import (
    Expansion,
    PerSample,
    SharedWrite,
    WriteScope,
    leaves,
    refuse,
    same_as,
    tensors_of,
)
from gradscope.backends.expand.views import reshape_in_place, view
from gradscope.errors import UnsupportedError
from gradscope.model.randomness import FixedRandomness, states
from gradscope.model.releases import expect

_INTEGERS = frozenset((torch.int64, torch.int32))


class Interpreter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator on `PerSample` tensors, below autograd.

    Args:
        n: The number of samples.
        own: Which tensors are per sample; a write to a shared tensor raises `SharedWrite`.
        fixed: Draws each sample's random numbers.
    """

    def __init__(self, n: int, own: WriteScope, fixed: FixedRandomness | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = Expansion(n)
        self.own, self.randomness = own, fixed
        self.refusal: UnsupportedError | None = None  # kept in case the model's code catches it

    def interpret(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` for all samples; raise if it draws random numbers."""
        facts, kwargs = facts_of(func), kwargs or {}
        try:
            if not facts.random:
                return self._run(facts, func, args, kwargs)
            if self.randomness is not None:
                with self:
                    result = self.randomness.draw(func, args, kwargs, PerSample)
                if result is not NotImplemented:
                    return result
            devices = {t.device for t in tensors_of(args, kwargs)} | {torch.device("cpu")}
            if kwargs.get("device") is not None:
                devices.add(torch.device(kwargs["device"]))
            before = _generators(devices)
            result = self._run(facts, func, args, kwargs)
            if not all(map(torch.equal, before, _generators(devices))):
                refuse(
                    f"it draws random numbers ({facts.name}), and they would differ from those of "
                    "single samples",
                    "Put the model in eval mode, fix the numbers for each sample "
                    '(randomness="fixed"), or draw them outside and pass them as inputs.',
                )
            return result
        except UnsupportedError as error:
            self.refusal = error
            raise

    def _run(self, facts: OperatorFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        n, shared, found = self.samples.n, True, False
        for t in tensors_of(args, kwargs) if kwargs or facts.nested else args:
            if isinstance(t, PerSample):
                found, shared = True, shared and t.shared
                if t.raw.shape[0] != n:
                    refuse(
                        "it uses a tensor from an earlier evaluation",
                        "Do not keep tensors between calls of the model.",
                    )
        if not found:
            return self._constant(facts, func, args, kwargs)
        if facts.view:
            return view(facts.key, func, args, kwargs)
        if facts.reshapes_in_place:
            return reshape_in_place(facts.name, func, args, kwargs)
        if facts.may_write and (targets := facts.targets(args, kwargs)):
            self._check(targets, facts)
        elif shared and self.own < WriteScope.RESULTS and not facts.makes_new:
            # arguments that are equal for all samples: run once; the result is shared
            one, named = leaves(
                lambda t: t.physical[0] if isinstance(t, PerSample) else t, (args, kwargs)
            )
            return leaves(lambda t: PerSample(self.samples.expanded(t)), func(*one, **named))
        result = NotImplemented
        if (rule := rules.find(facts.key)) is not None:
            result = rule(self.samples, *args, **kwargs)
        elif facts.pointwise:
            result = pointwise(facts, func, args, kwargs)
        if result is NotImplemented:
            result = sample_by_sample(self.samples, func, args, kwargs)
        if not facts.returns_any_written:
            if type(result) is Tensor and result.dim() and result.shape[0] == n:
                return PerSample(result)
            return leaves(self.samples.wrap, result)
        several, bound = isinstance(result, tuple), facts.bind(args, kwargs)
        parts = [  # return the written arguments themselves
            leaves(self.samples.wrap, part) if name is None else bound[name]
            for name, part in zip(
                facts.returns_written, result if several else (result,), strict=True
            )
        ]
        return tuple(parts) if several else parts[0]

    def _constant(self, facts: OperatorFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator without per-sample arguments."""
        result = func(*args, **kwargs)
        if self.own < WriteScope.EVERYTHING or facts.view or facts.may_write:
            return result
        if facts.key == "empty.memory_format" and result.dtype in _INTEGERS:
            return result  # torch's own code makes such tables and writes to their memory
        return leaves(lambda t: PerSample(self.samples.expanded(t).contiguous()), result)

    def _check(self, targets: list[Tensor], facts: OperatorFacts) -> None:
        """Raise if a written tensor does not have one value per sample."""
        if facts.overload.endswith("out") and not facts.pointwise:
            refuse(
                f"{facts.name} is called with out=", "Assign the result instead of passing out=."
            )
        for target in targets:
            if isinstance(target, PerSample) and not target.shared and not target.lazy:
                continue
            needed = WriteScope.RESULTS if isinstance(target, PerSample) else WriteScope.EVERYTHING
            if self.own < needed and not target.is_conj():
                raise SharedWrite(needed)
            refuse(
                f"{facts.name} writes per-sample values to a parameter, a conjugate, or a tensor "
                "made outside the forward pass",
                "Register the tensor as a buffer, create it in forward, or do not write to it.",
            )


# Torch wraps a method of this name in the class body, to turn off torch.compile for each operator.
# The wrapper takes longer than many operators, and it loads dynamo, which takes seconds. It is not
# needed: `ModelState.restoring` runs compiled code as written.
Interpreter.__torch_dispatch__ = Interpreter.interpret  # type: ignore


def _generators(devices: set[torch.device]) -> list[Tensor]:
    """Return the states of the random generators."""
    return [read() for d in sorted(devices, key=str) for read in states(d)]


# the last argument of these must be a tensor without axes
_NUMBERS = frozenset(f"{name}.Tensor" for name in ("fill", "fill_", "masked_fill", "masked_fill_"))


def pointwise(facts: OperatorFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply `func` to the physical tensors, with logical axes aligned from the right.

    The rule does not apply if dtypes differ and a tensor has no logical axes: the sample axis would
    change dtype promotion.
    """
    if kwargs or facts.nested:
        found = tensors_of(args, kwargs)
    else:
        found = [t for t in args if isinstance(t, Tensor)]
    if facts.key in _NUMBERS and isinstance(args[-1], PerSample):
        return NotImplemented
    ranks = [t.dim() for t in found]
    width = max(ranks)
    if (
        0 in ranks
        and len({t.dtype for t in found}) > 1
        and any(t.dim() == 0 and isinstance(t, PerSample) for t in found)
    ):
        return NotImplemented
    if kwargs:
        kwargs = _layout(args, kwargs)

    def aligned(t: Tensor) -> Tensor:
        if not isinstance(t, PerSample):
            return t
        physical = t.physical if t.lazy else t.raw
        missing = width + 1 - physical.dim()
        return physical[(slice(None), *[None] * missing)] if missing else physical

    if kwargs or facts.nested:
        mine, kwargs = leaves(aligned, (args, kwargs))
        return func(*mine, **kwargs)
    mine = [aligned(t) if isinstance(t, Tensor) else t for t in args]
    return _NATIVE.get(facts.key, func)(*mine)


# frequent operators: functions that torch calls faster than its operators
_NATIVE: dict[str, Any] = {
    "add.Tensor": torch.add,
    "sub.Tensor": torch.sub,
    "mul.Tensor": torch.mul,
    "div.Tensor": torch.div,
    "neg.default": torch.neg,
    "exp.default": torch.exp,
    "tanh.default": torch.tanh,
    "sigmoid.default": torch.sigmoid,
}


def _layout(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` for tensors with a sample axis; raise if out= has another shape."""
    out, layout = kwargs.get("out"), kwargs.get("memory_format")
    if isinstance(out, Tensor):
        shapes = [t.shape for t in tensors_of(args, {})]
        if out.shape != np.broadcast_shapes(*shapes):
            what = "the shape of an argument out= differs from the shape of the result"
            refuse(what, "Assign the result instead of passing out=.")
    if layout in (torch.channels_last, torch.channels_last_3d):  # these formats need rank 4 or 5
        return {**kwargs, "memory_format": torch.preserve_format}
    return kwargs


def sample_by_sample(s: Expansion, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply any operator to each sample, and stack the physical results.

    Writes go through slices. Raises `SamplesDiverge` if samples have results of different shapes,
    or different Python values.
    """

    def of_sample(i: int) -> Any:
        return leaves(lambda t: t.physical[i] if isinstance(t, PerSample) else t, (args, kwargs))

    return _stacked([func(*mine, **named) for mine, named in map(of_sample, range(s.n))])


def _stacked(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        same_as([f"{r.shape} {r.dtype}" for r in results])
        return torch.stack(results)
    if isinstance(first, tuple | list):
        same_as([str(len(r)) for r in results])
        return type(first)(_stacked(list(parts)) for parts in zip(*results, strict=True))
    same_as([repr(r) for r in results])
    return first


def probe() -> None:
    """Test torch's internal ways to make and mark tensor subclasses, on two samples.

    Raises:
        Exception: This torch release behaves differently.
    """
    raw = torch.zeros(2, 3, 4, dtype=torch.complex64, device="cpu")
    with Interpreter(2, WriteScope.NOTHING) as mode:
        x = PerSample(raw, requires_grad=True)
        y = (x + 1).t_().conj()
        (gradient,) = torch.autograd.grad(y.real.sum(), x)
        expect(
            {
                "the shape of a sample's tensor": (y.shape, (4, 3)),
                "its memory": (mode.samples.of(y).shape, (2, 4, 3)),
                "its mark as a conjugate": (y.is_conj(), True),
                "its gradient": (mode.samples.of(gradient).shape, raw.shape),
                "what operators write": (facts_of(aten.add_.Tensor).returns_written, ("self",)),
            }
        )
