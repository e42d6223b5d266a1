"""The interpreter: every operator of the model, the loss and their backward passes comes here.

Views have one rule, since a view is no more than shape, strides and offset; operators that act
entry by entry have another; the rest has rules of its own, or runs sample by sample.
"""

from typing import Any

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
from gradscope.errors import UnsupportedError
from gradscope.model.randomness import FixedRandomness, states
from gradscope.model.releases import expect

_INTEGERS = frozenset((torch.int64, torch.int32))


class Interpreter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every operator its meaning on `PerSample` tensors, below autograd.

    Args:
        n: The number of samples.
        own: What is each sample's own; writing to what is shared raises `SharedWrite`.
        fixed: Draws each sample's random numbers.
    """

    def __init__(self, n: int, own: WriteScope, fixed: FixedRandomness | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = Expansion(n)
        self.own, self.randomness = own, fixed
        self.refusal: UnsupportedError | None = None  # kept, should the model's code catch it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` for all samples, and refuse it if it draws random numbers."""
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
                    f"it draws random numbers ({facts.name}), which are not the same for each "
                    "sample",
                    "Put the model in eval mode, fix the numbers for each sample "
                    '(randomness="fixed"), or draw them outside and pass them as inputs.',
                )
            return result
        except UnsupportedError as error:
            self.refusal = error
            raise

    def _run(self, facts: OperatorFacts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = [t for t in tensors_of(args, kwargs) if isinstance(t, PerSample)]
        if not found:
            return self._constant(facts, func, args, kwargs)
        for t in found:
            self.samples.check(t)
        if facts.reshapes_in_place:
            return reshape_in_place(facts.name, func, args, kwargs)
        if facts.view:
            return view(facts.name, func, args, kwargs)
        if targets := facts.targets(args, kwargs):
            self._check(targets, facts)
        elif self.own < WriteScope.RESULTS and all(t.shared for t in found) and not facts.makes_new:
            # once what has the same arguments for all samples; the result is shared too
            one, named = leaves(
                lambda t: t.physical[0] if isinstance(t, PerSample) else t, (args, kwargs)
            )
            return leaves(lambda t: PerSample(self.samples.expanded(t)), func(*one, **named))
        result = NotImplemented
        if (rule := rules.find(facts.key)) is not None:
            result = rule(self.samples, *args, **kwargs)
        elif facts.pointwise:
            result = pointwise(func, args, kwargs)
        if result is NotImplemented:
            result = sample_by_sample(self.samples, func, args, kwargs)
        if not any(facts.returns_written):
            return leaves(self.samples.wrap, result)
        several, bound = isinstance(result, tuple), facts.bind(args, kwargs)
        parts = [  # the written arguments themselves where the operator returns them
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
        """See that what is written to holds one value a sample."""
        if facts.overload.endswith("out") and not facts.pointwise:
            refuse(f"{facts.name} has an argument out=", "Assign the result instead.")
        for target in targets:
            if isinstance(target, PerSample) and not target.shared and not target.lazy:
                continue
            needed = WriteScope.RESULTS if isinstance(target, PerSample) else WriteScope.EVERYTHING
            if self.own < needed and not target.is_conj():
                raise SharedWrite(needed)
            refuse(
                f"{facts.name} writes per-sample values into a parameter, a conjugate, or a tensor "
                "made outside the forward pass",
                "Register the tensor as a buffer, make it in forward, or do not write to it.",
            )


def _generators(devices: set[torch.device]) -> list[Tensor]:
    """Return the states of the random generators."""
    return [read() for d in sorted(devices, key=str) for read in states(d)]


# They change what an entry is, and leave leading axes alone.
_REINTERPRET = frozenset(("view_as_real", "view_as_complex"))


def view(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the view, wrapped: the first sample's, repeated at the stride over samples.

    The result shares memory with the argument, so later writes in place are seen by both.
    """
    base, *rest = args
    if not isinstance(base, PerSample):
        refuse(f"it has no rule for {name} of a constant, and a copy would not be a view")
    raw = base.raw
    if name in ("_conj", "_neg_view", "detach", "alias"):
        first: Any = raw[0]
    elif name in _REINTERPRET:
        return PerSample(func(raw, *rest, **kwargs)).marked(False, base.is_neg())
    else:
        first = func(raw[0], *rest, **kwargs)

    def repeated(view: Tensor) -> PerSample:
        if view.dtype != raw.dtype:
            refuse(f"{name} reads the memory as {view.dtype}")
        whole = raw.as_strided(
            (raw.shape[0], *view.shape), (raw.stride(0), *view.stride()), view.storage_offset()
        )
        return PerSample(whole).marked(
            base.is_conj() != (name == "_conj"), base.is_neg() != (name == "_neg_view")
        )

    return leaves(repeated, first)


def reshape_in_place(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change a tensor's shape in place: take the view, and let the wrapper become it."""
    target, *rest = args
    # the operator without the underscore that takes what `func` takes
    packet = getattr(aten, name.removesuffix("_"), None)
    overloads = [getattr(packet, each) for each in (packet.overloads() if packet else ())]
    alike = (f for f in overloads if _types(f) == _types(func))
    functional = next(alike, None)
    if functional is None or not isinstance(target, PerSample):
        refuse(f"{name} changes a tensor's shape or memory in place", "Write it out of place.")
    made = view(functional._schema.name.partition("::")[2], functional, args, kwargs)
    with torch._C._DisableTorchDispatch():
        func(target, *rest, **kwargs)  # the wrapper's own shape and strides
    target.raw = made.raw
    return target


def _types(func: Any) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments]


# Their last argument must be a tensor without axes.
_NUMBERS = frozenset(
    f"aten.{name}.Tensor" for name in ("fill", "fill_", "masked_fill", "masked_fill_")
)


def pointwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply `func` to the physical tensors, their logical axes aligned from the right.

    Where dtypes differ and a tensor has no logical axes, the sample axis would change the
    promotion of dtypes, and the rule does not apply.
    """
    found = tensors_of(args, kwargs)
    if str(func) in _NUMBERS and isinstance(args[-1], PerSample):
        return NotImplemented
    if len({t.dtype for t in found}) > 1 and any(
        t.dim() == 0 and isinstance(t, PerSample) for t in found
    ):
        return NotImplemented
    width = max(t.dim() for t in found)
    out, layout = kwargs.get("out"), kwargs.get("memory_format")
    if isinstance(out, Tensor):
        shapes = [t.shape for t in tensors_of(args, {})]
        if out.shape != torch.broadcast_shapes(*shapes):  # type: ignore[no-untyped-call]
            what = "an argument out= has another shape than the result"
            refuse(what, "Assign the result instead.")
    if layout in (torch.channels_last, torch.channels_last_3d):  # which are about ranks 4 and 5
        kwargs = {**kwargs, "memory_format": torch.preserve_format}

    def aligned(t: Tensor) -> Tensor:
        if not isinstance(t, PerSample):
            return t
        missing = width - t.dim()
        return t.physical[(slice(None), *[None] * missing)] if missing else t.physical

    mine, named = leaves(aligned, (args, kwargs))
    return func(*mine, **named)


def sample_by_sample(s: Expansion, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the physical results of any operator, applied to each sample and stacked.

    What it writes to is written through slices. Raises `SamplesDiverge` where samples have
    results of different shapes, or different answers.
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
    """Do to a tensor of two samples what needs torch's own ways to make and mark subclasses.

    Raises:
        Exception: This torch has other ways.
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
