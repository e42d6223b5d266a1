"""The interpreter: every operator of the model, the loss and their backward passes comes here."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.backends.expand.facts import Facts, facts_of
from gradscope.backends.expand.fallback import sample_by_sample
from gradscope.backends.expand.pointwise import pointwise
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.signals import Own, SharedWrite, refuse
from gradscope.backends.expand.tensor import PerSample, Samples, leaves, tensors_of
from gradscope.backends.expand.views import reshape_in_place, view
from gradscope.errors import UnsupportedError

_INTEGERS = frozenset((torch.int64, torch.int32))


class Interpreter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every operator its meaning on `PerSample` tensors, below autograd.

    Args:
        n: The number of samples.
        own: What is each sample's own; writing to what is shared raises `SharedWrite`.
    """

    def __init__(self, n: int, own: Own) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = Samples(n)
        self.own = own
        self.refusal: UnsupportedError | None = None  # kept, should the model's code catch it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` for all samples."""
        try:
            return self._watched(facts_of(func), func, args, kwargs or {})
        except UnsupportedError as error:
            self.refusal = error
            raise

    def _watched(self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and refuse it if it draws random numbers."""
        if not facts.random:
            return self._run(facts, func, args, kwargs)
        devices = {t.device for t in tensors_of(args, kwargs)} | {torch.device("cpu")}
        if "device" in kwargs and kwargs["device"] is not None:
            devices.add(torch.device(kwargs["device"]))
        before = _generators(devices)
        result = self._run(facts, func, args, kwargs)
        if any(not a.equal(b) for a, b in zip(before, _generators(devices), strict=True)):
            refuse(
                f"it draws random numbers ({facts.name}), which are not the same for each sample",
                "Put the model in eval mode, or draw the numbers outside and pass them as inputs.",
            )
        return result

    def _run(self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
        elif self.own < Own.RESULTS and not _makes_new(facts) and all(t.shared for t in found):
            return self._once(func, args, kwargs)
        result = self._physical(facts, func, args, kwargs)
        if not any(facts.returns_written):
            return leaves(self.samples.wrap, result)
        return self._with_targets(facts, args, kwargs, result)

    def _physical(self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Try the rules from the special to the general."""
        result = NotImplemented
        if (rule := rules.find(facts.key)) is not None:
            result = rule(self.samples, *args, **kwargs)
        elif facts.pointwise:
            result = pointwise(func, args, kwargs)
        if result is NotImplemented:
            result = sample_by_sample(self.samples, func, args, kwargs)
        return result

    def _constant(self, facts: Facts, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator without per-sample arguments."""
        result = func(*args, **kwargs)
        if self.own < Own.EVERYTHING or facts.view or facts.may_write:
            return result
        if facts.key == "empty.memory_format" and result.dtype in _INTEGERS:
            return result  # torch's own code makes such tables and writes to their memory
        return leaves(lambda t: PerSample(self.samples.expanded(t).contiguous()), result)

    def _once(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run once what has the same arguments for all samples; the result is shared too."""
        one, named = leaves(
            lambda t: t.physical[0] if isinstance(t, PerSample) else t, (args, kwargs)
        )
        return leaves(lambda t: PerSample(self.samples.expanded(t)), func(*one, **named))

    def _check(self, targets: list[Tensor], facts: Facts) -> None:
        """See that what is written to holds one value a sample."""
        if facts.overload.endswith("out") and not facts.pointwise:
            refuse(f"{facts.name} has an argument out=", "Assign the result instead.")
        for target in targets:
            if isinstance(target, PerSample) and not target.shared and not target.lazy:
                continue
            needed = Own.RESULTS if isinstance(target, PerSample) else Own.EVERYTHING
            if self.own < needed and not target.is_conj():
                raise SharedWrite(needed)
            refuse(
                f"{facts.name} writes per-sample values into a parameter, a conjugate, or a tensor "
                "made outside the forward pass",
                "Register the tensor as a buffer, make it in forward, or do not write to it.",
            )

    def _with_targets(self, facts: Facts, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the written arguments themselves where the operator returns them."""
        bound = facts.bind(args, kwargs)
        several = isinstance(result, tuple)
        parts = [
            leaves(self.samples.wrap, part) if name is None else bound[name]
            for name, part in zip(
                facts.returns_written, result if several else (result,), strict=True
            )
        ]
        return tuple(parts) if several else parts[0]


def _makes_new(facts: Facts) -> bool:
    """Whether the result is fresh memory, likely to be written to."""
    return facts.name.startswith("new_") or facts.name.endswith("_like")


def _generators(devices: set[torch.device]) -> list[Tensor]:
    """Return the states of the random generators."""
    return [
        torch.cuda.get_rng_state(d) if d.type == "cuda" else torch.get_rng_state()
        for d in sorted(devices, key=str)
        if d.type in ("cpu", "cuda")
    ]
