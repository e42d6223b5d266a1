"""Wrong per-sample gradients that can be computed from the model, to explain a disagreement.

A wrong implementation often computes something else exactly: one use of a layer instead of all, a
hook's first call, the batch in training mode. This module computes such alternatives in float64. It
runs the model on each sample and stores what hooks see of each layer: its inputs and the gradients
at its output. An alternative is reported only if it equals the found gradients within rounding, up
to one factor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from gradscope.backends.loop import by_autograd, one_sample
from gradscope.comparison.agreement import VAGUE, Oracle
from gradscope.comparison.formulas import Call, Change, copied, features, pulled, variants
from gradscope.comparison.mistakes import GradientPair, Mistake, besides, number
from gradscope.core.batch import Batch, Tokens, map_tensors, tensors
from gradscope.core.texts import count, listed
from gradscope.errors import GradscopeError
from gradscope.model.problem import Problem
from gradscope.process.shortage import is_machine_error

EXPLAINED = VAGUE | {
    "factor",
    "not_zero",
    "offset",
    "row_factors",
}  # kinds that an alternative may explain
MODAL = (_NormBase, _DropoutNd)  # layers whose output differs in training mode
_SAMPLES = 32  # the most samples for which alternatives are computed
_BYTES = 2**30  # the most bytes of stored layer data, if there are more than two samples
_NEAR = 6  # layers before and after, whose inputs and outputs may have been used by mistake
_USES = 12  # the most uses of a parameter that are distinguished
_FEW = 8  # a factor often fits fewer numbers by chance

Row = Callable[[int], Tensor]  # the alternative gradient (*shape) of one sample
Alternative = tuple[str, str, Row]  # a word for programs, a text for people, and the gradients


Calls = dict[str, list[Call]]  # by the layer's name


class _Detached(TorchFunctionMode):
    """Makes results of torch.autograd.grad constants in the graph of the loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return map_tensors(Tensor.detach, found) if func is torch.autograd.grad else found


def captured(problem: Problem, batch: Batch) -> Calls:
    """Return the calls of every layer on a batch, with the gradients of the summed loss."""
    calls: Calls = {}

    def hook(name: str) -> Callable[..., None]:
        def after(_: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            inputs, keywords, kept = map_tensors(copied, (inputs, keywords, output))
            call = Call(inputs, keywords, kept)
            calls.setdefault(name, []).append(call)
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda g: call.gradients.append(copied(g))
            )

        return after

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in problem.model.named_modules()
        if module._parameters or not module._modules or not name
    ]
    try:
        with problem.state.restoring():  # inside, because it removes hooks
            losses = problem.losses(batch)
            for call in (call for several in calls.values() for call in several):
                call.inner = len(call.gradients)
            by_autograd(problem, losses)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@dataclass(eq=False)
class Explanation:
    """Explains the gradients of an implementation by alternatives.

    Attributes:
        problem: A float64 copy that may be changed.
        batch: The samples.
        oracle: The right gradients.
        found: {name: (n, *shape)}, the real gradients of parameters that disagree.
        tolerances: {name: the largest relative error that agrees}.
    """

    problem: Problem
    batch: Batch
    oracle: Oracle
    found: Mapping[str, Tensor]
    tolerances: Mapping[str, float]
    _constant: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False)

    def of(self, kinds: Mapping[str, str]) -> dict[str, Mistake]:
        """Return {name: mistake} for parameters {name: vague kind} that can be explained."""
        mistakes: dict[str, Mistake] = {}
        if any(call.inner for calls in self._one_sample[0].values() for call in calls):
            for name in kinds:
                if (found := self._first(name, self._detached(name))) is None:
                    break
                mistakes[name] = found
            else:
                return mistakes
            mistakes.clear()
        for name, kind in kinds.items():
            if kind == "factor":
                found = self._counted(name)
            else:
                found = self._first(name, self._of_layers(name))
            if found is not None:
                mistakes[name] = found
        left = [name for name, kind in kinds.items() if name not in mistakes and kind != "factor"]
        for alternatives in self._of_model() if left else ():
            for name in left:
                if name not in mistakes and (found := self._first(name, alternatives(name))):
                    mistakes[name] = found
        return mistakes

    # comparison with the found gradients

    @cached_property
    def _m(self) -> int:
        """The number of samples for which alternatives are computed."""
        held = [c for several in self._one_sample[0].values() for c in several]
        every = tensors([[c.inputs, c.keywords, c.output, c.gradients] for c in held])
        size = sum(t.numel() * t.element_size() for t in every)
        return min(len(self.batch), _SAMPLES, max(2, _BYTES // max(size, 1)))

    def _pair(self, name: str, alternative: Tensor, rows: slice) -> GradientPair:
        found = self.found[name][rows]
        samples = torch.arange(len(self.batch), device=found.device)[rows]
        return GradientPair(
            found=found,
            loop=alternative.to(found),
            errors=torch.zeros(len(found)),
            samples=samples,
            n=len(self.batch),
            tolerance=self.tolerances[name],
            noun=self.oracle.noun,
        )

    def _first(self, name: str, alternatives: Iterable[Alternative]) -> Mistake | None:
        """Return the first alternative that equals the gradients of a parameter."""
        left = iter(alternatives)
        while True:
            try:
                kind, text, row = next(left)
                more = self._equals(name, row)
            except StopIteration:
                return None
            except (RuntimeError, IndexError, TypeError, ValueError, GradscopeError) as error:
                if is_machine_error(error):
                    raise
                continue  # this model has no such alternative: shapes, arguments, transforms
            if more is not None:
                return Mistake(kind, text + more)

    def _equals(self, name: str, row: Row) -> str | None:
        """Return a text on the factor if the found rows equal an alternative, else None."""
        found = self.found[name]
        shape = found.shape[1:]
        k = self._probe(name)
        if shape.numel() >= _FEW:
            first = self._pair(name, row(k).reshape(1, *shape), slice(k, k + 1))
            if first.multiple(first.found, first.loop) is None:
                return None
        rows = torch.stack([row(i).reshape(shape) for i in range(self._m)])
        pair = self._pair(name, rows, slice(self._m))
        c = pair.multiple(pair.found, pair.loop)
        right = self.oracle.gradients[name][: self._m].to(pair.loop)
        if bool(right.any()) and pair.multiple(pair.loop, right) is not None:
            return None  # the alternative is right up to a factor: it explains nothing
        usual = (1.0, float(pair.n), 1.0 / pair.n)
        if c is None or (found.numel() < _FEW and not any(pair.near(abs(c), k) for k in usual)):
            return None
        more = besides(c, pair)
        return f".{more}" if more else ""

    def _probe(self, name: str) -> int:
        """Return the sample with the largest gradient, which is tested first."""
        return int(self.found[name][: self._m].flatten(1).norm(dim=1).argmax())

    # alternatives of a layer

    @cached_property
    def _one_sample(self) -> list[Calls]:
        """The calls on the first sample alone."""
        return [captured(self.problem, self.batch.one(0))]

    @cached_property
    def _samples(self) -> list[Calls]:
        """The calls on each sample alone."""
        rest = [captured(self.problem, self.batch.one(i)) for i in range(1, self._m)]
        return self._one_sample + rest

    def _owners(self, name: str) -> list[str]:
        """Return the layers that hold a parameter and were called, in the order of the model."""
        p = self.problem.parameters[name]
        layers = self.problem.model.named_modules()
        own = [k for k, m in layers if any(q is p for q in m._parameters.values())]
        return [k for k in own if any(k in calls for calls in self._samples)]

    def _layer(self, name: str) -> nn.Module:
        return self.problem.model.get_submodule(name)

    def _called(self, name: str) -> str:
        return f"layer {name!r} ({type(self._layer(name)).__name__})"

    def _pulled(
        self, i: int, layer: str, j: int, g: int, parameter: str, of: int | None = None
    ) -> Tensor:
        """Return sample i's gradient from call j of a layer and gradient g at its output.

        The gradient is taken from the call `of`, by default from call j.
        """
        p = self.problem.parameters[parameter]
        calls = self._samples[i].get(layer, [])
        source = j if of is None else of
        if j >= len(calls) or source >= len(calls):
            return torch.zeros_like(p)
        gradients = calls[source].gradients
        if g >= len(gradients) or -g > len(gradients):
            return torch.zeros_like(p)
        if g == -1 and len(gradients) == calls[source].inner:  # the loss's pass did not reach it
            return torch.zeros_like(p)
        return pulled(self._layer(layer), calls[j], gradients[g], p)

    def _of_layers(self, name: str) -> Iterator[Alternative]:
        """Yield alternatives of hooks on the layers that hold a parameter."""
        owners = self._owners(name)
        calls = self._samples[self._probe(name)]
        uses = [(layer, j) for layer in owners for j in range(len(calls.get(layer, [])))]
        if not uses:
            return
        if any(call.inner for layer in owners for call in calls.get(layer, [])):
            yield from self._inner_passes(name, uses, calls)
        elif len(uses) <= _USES:
            yield from self._some_uses(name, owners, uses)
            if len(owners) == 1 < len(uses):
                yield from self._wrong_pairs(name, owners[0], len(uses))
        for text, change in variants(self._layer(owners[0]), name):
            yield "formula", text, self._changed(name, owners, change)
        if len(uses) == 1:
            yield from self._other_places(name, owners[0], calls)
        yield from self._rows_by_position(name, owners[0], calls)

    def _inner_passes(
        self, name: str, uses: list[tuple[str, int]], calls: Calls
    ) -> Iterator[Alternative]:
        layer = uses[0][0]
        call = calls[layer][0]
        total, inner = len(call.gradients), call.inner
        own = total - inner
        which = [f"derivative {k + 1} inside the loss" for k in range(inner)]
        which += ["the backward pass of the loss"] * own
        fires = (
            "the loss calls torch.autograd.grad, so a hook on the layer fires "
            f"{count(total, 'time')} for each {self.oracle.noun}: {count(inner, 'time')} inside "
            f"the loss and {own or 'never'} in its backward pass."
        )
        fix = (
            "Through derivatives, a weight has uses that hooks on layers do not see. Compute each "
            f"{self.oracle.noun}'s gradient with torch.autograd.grad of its own loss, or with "
            "torch.func.vmap(torch.func.grad(...))"
        )

        def held(chosen: Callable[[int, int], Iterable[int]]) -> Row:
            def row(i: int) -> Tensor:
                found = torch.zeros_like(self.problem.parameters[name])
                for one, j in uses:
                    every = self._samples[i].get(one, [])
                    if j < len(every):
                        for g in chosen(len(every[j].gradients), every[j].inner):
                            p = self.problem.parameters[name]
                            found += pulled(self._layer(one), every[j], every[j].gradients[g], p)
                return found

            return row

        for k in range(total):
            yield (
                "inner_passes",
                f"{fires} Only the {_nth(k, total)} was kept ({which[k]}), with the layer's input. "
                f"{fix}",
                held(lambda size, _, k=k: [k] if k < size else []),  # type: ignore[misc]
            )
        sums = {
            "The gradients of all times were summed": lambda size, _: range(size),
            "The gradients inside the loss were summed": lambda _, inner: range(inner),
        }
        for what, chosen in sums.items():
            yield "inner_passes", f"{fires} {what}, with the layer's input. {fix}", held(chosen)

    def _some_uses(
        self, name: str, owners: list[str], uses: list[tuple[str, int]]
    ) -> Iterator[Alternative]:
        """Yield the sum over some uses of a parameter, found by a least-squares fit."""
        parts = [
            torch.stack([self._pulled(i, layer, j, -1, name) for i in range(self._m)])
            for layer, j in uses
        ]
        right = self.oracle.gradients[name][: self._m].to(parts[0])
        rest = right - sum(parts)
        outside = bool(rest.norm() > 1e-9 * right.norm())
        if outside:
            parts.append(rest)
        if len(parts) == 1:
            return
        basis = torch.stack([part.reshape(-1) for part in parts], 1)
        found = self.found[name][: self._m].to(basis).reshape(-1)
        gram = basis.T @ basis
        scale = gram.diagonal().sqrt().clamp_min(1e-300)
        gram = gram / scale / scale[:, None]
        if bool(torch.linalg.eigvalsh(gram)[0] < 1e-9):  # uses cannot be distinguished
            fits = [torch.eye(len(parts), dtype=basis.dtype)[k] for k in range(len(parts))]
        else:
            fits = [torch.linalg.solve(gram, basis.T @ found / scale) / scale]
        names = [self._use(layer, j, owners) for layer, j in uses]
        names += ["the use outside of layers"] * outside
        for c in fits:
            largest = float(c.abs().max())
            taken = [k for k, value in enumerate(c) if abs(float(value)) > 1e-4 * largest]
            if not largest or len(taken) == len(names) > 2:
                continue
            weights = [float(c[k]) for k in taken]
            one = all(abs(w - weights[0]) <= 1e-4 * abs(weights[0]) for w in weights)
            lost = [names[k] for k in range(len(names)) if k not in taken]
            kept = [names[k] for k in taken]
            if one and not lost:
                continue
            texts = kept if one else [f"{number(float(c[k]))} x {names[k]}" for k in taken]
            where = f"is used by {listed([self._called(k) for k in owners])}"
            if len(uses) > len(owners):
                where += f" in {len(uses)} calls for each {self.oracle.noun}"
            if outside:
                where += " and outside of layers (as in functional.linear(x, weight))"
            missing = (
                f"; {_joined(lost)} {'is' if len(lost) == 1 else 'are'} missing" if lost else ""
            )
            fix = (
                "Add the contributions of all layers that share the parameter"
                if len(owners) > 1 or outside
                else "A hook overwrites what its previous call stored: keep a list of inputs, pair "
                "it with the gradients in reverse order, and sum"
            )
            unit = c / weights[0] if one else c
            yield (
                "uses",
                f"the parameter {where}; only {_joined(texts)} was counted{missing}. {fix}"
                if lost
                else f"the parameter {where}; they were weighted: {listed(texts)}. {fix}",
                lambda i, unit=unit: sum(  # type: ignore[misc]
                    float(w) * part[i] for w, part in zip(unit, parts, strict=True)
                ),
            )

    def _use(self, layer: str, j: int, owners: list[str]) -> str:
        several = max(len(calls.get(layer, [])) for calls in self._samples) > 1
        text = f"layer {layer!r}" if len(owners) > 1 or not several else ""
        return f"{text}{' ' * bool(text)}call {j + 1}" if several else text

    def _wrong_pairs(self, name: str, layer: str, uses: int) -> Iterator[Alternative]:
        """Yield sums over wrong pairs of inputs and gradients of calls."""
        pairs = {
            "the input of the last call was combined with the gradients of all calls": [
                (uses - 1, j) for j in range(uses)
            ],
            "the input of the first call was combined with the gradients of all calls": [
                (0, j) for j in range(uses)
            ],
            "the inputs of all calls were combined with the gradient of the last call": [
                (j, uses - 1) for j in range(uses)
            ],
            "the inputs of all calls were combined with the gradient of the first call": [
                (j, 0) for j in range(uses)
            ],
            "inputs and gradients were paired in the wrong order (the backward pass runs through "
            "the calls in reverse)": [(j, uses - 1 - j) for j in range(uses)],
            "the sum of the inputs was combined with the sum of the gradients": [
                (j, k) for j in range(uses) for k in range(uses)
            ],
            "the input of the first call was combined with the gradient of the last call": [
                (0, uses - 1)
            ],
            "the input of the last call was combined with the gradient of the first call": [
                (uses - 1, 0)
            ],
        }
        for what, chosen in pairs.items():
            yield (
                "uses",
                f"{self._called(layer)} is called {count(uses, 'time')} for each "
                f"{self.oracle.noun}; {what}. Combine the input of each call with the gradient at "
                "the output of the same call, and sum",
                lambda i, chosen=chosen: sum(  # type: ignore[misc]
                    self._pulled(i, layer, j, -1, name, of=k) for j, k in chosen
                ),
            )

    def _changed(self, name: str, owners: list[str], change: Change) -> Row:
        def row(i: int) -> Tensor:
            p = self.problem.parameters[name]
            found = torch.zeros_like(p)
            for layer in owners:
                for call in self._samples[i].get(layer, []):
                    if len(call.gradients) > call.inner:
                        found += change(self._layer(layer), call, call.gradients[-1], p)
            return found

        return row

    def _other_places(self, name: str, layer: str, calls: Calls) -> Iterator[Alternative]:
        """Yield the layer's formula with the input or the gradient of a different layer."""
        own = calls[layer][0]
        p, here = self.problem.parameters[name], self._called(layer)
        module = self._layer(layer)
        order = list(calls)
        at = order.index(layer)
        near = {k: calls[k] for k in order[max(0, at - _NEAR) : at + _NEAR + 1]}
        for other, several in near.items():
            if other in (layer, "") or len(several) != 1 or not several[0].gradients:
                continue
            if several[0].output.shape == own.output.shape:
                yield (
                    "wrong_place",
                    f"the gradient was taken at the output of {self._called(other)} instead of at "
                    f"the output of {here}: the hook is on the wrong layer",
                    lambda i, other=other: pulled(  # type: ignore[misc]
                        module,
                        self._samples[i][layer][0],
                        self._samples[i][other][0].gradients[-1],
                        p,
                    ),
                )
        if len(own.inputs) != 1 or not own.gradients or not isinstance(own.inputs[0], Tensor):
            return
        for other, several in near.items():
            for what, place in (("output", "output"), ("input", "inputs")):
                if not other or (other, what) == (layer, "input") or len(several) != 1:
                    continue
                held = tensors(getattr(several[0], place))
                if len(held) != 1 or held[0].shape != own.inputs[0].shape:
                    continue

                def row(i: int, other: str = other, place: str = place) -> Tensor:
                    call = self._samples[i][layer][0]
                    inputs = (tensors(getattr(self._samples[i][other][0], place))[0],)
                    return pulled(module, Call(inputs, {}, call.output), call.gradients[-1], p)

                yield (
                    "wrong_place",
                    f"the {what} of {self._called(other)} was used instead of the input of {here}",
                    row,
                )

    def _rows_by_position(self, name: str, layer: str, calls: Calls) -> Iterator[Alternative]:
        """Yield rows by position, summed over samples, if both axes have the same size."""
        call, n, p = calls[layer][0], len(self.batch), self.problem.parameters[name]
        if call.output.dim() < 3 or call.output.shape[1] != n or n > self._m:
            return

        def row(t: int) -> Tensor:
            found = torch.zeros_like(p)
            for calls in self._samples:
                for one in calls.get(layer, []):
                    gradient = torch.zeros_like(one.output)
                    gradient[:, t] = one.gradients[-1][:, t]
                    found += pulled(self._layer(layer), one, gradient, p)
            return found

        yield (
            "axis",
            f"row t is the gradient of position t, summed over all {self.oracle.noun}s: the sums "
            "over the sample axis and the position axis were exchanged",
            row,
        )

    def _counted(self, name: str) -> Mistake | None:
        """Return a mistake that says which size is k, if every gradient is wrong by k or 1/k."""
        found, loop = self.found[name], self.oracle.gradients[name]
        pair = self._pair(name, loop, slice(len(self.batch)))
        c = abs(pair.multiple(found, loop.to(found)) or 1.0)
        k = round(max(c, 1 / c))
        n, noun = len(self.batch), self.oracle.noun
        owners = self._owners(name)
        calls = self._samples[self._probe(name)]
        sizes: list[tuple[int, str]] = []
        for layer in owners:
            for call in calls.get(layer, [])[:1]:
                positions = call.output.numel() // features(self._layer(layer), call.output)
                sizes.append((positions, "the number of positions of the layer's output"))
                uses = len(calls[layer])
                sizes.append((uses, f"the number of calls of the layer for each {noun}"))
        if "" in calls:
            last = calls[""][-1].output
            sizes.append((last[0].numel(), f"the size of a {noun}'s output"))
            sizes.append((last.shape[-1], "the length of the output's last axis (classes)"))
            if last.dim() > 2:
                sizes.append((last.shape[1], "the number of positions of the output"))
        labels = [t for t in tensors(self.batch.targets) if t.dim()]
        if len(labels) == 1 and not isinstance(self.batch, Tokens):
            sizes.append((labels[0][0].numel(), f"the number of targets of a {noun}"))
            if labels[0].dtype == torch.int64:
                kept = int((labels[0] != -100).sum())
                sizes.append((kept, "the number of targets of the batch (without -100)"))
        sizes += [(n * size, f"{n} {noun}s times {what}") for size, what in sizes]
        fits = dict.fromkeys(what for size, what in sizes if size == k > 1)
        if not fits or not pair.near(max(c, 1 / c), k):
            return None
        what = f"k = {k}, which is {' or '.join(list(fits)[:2])}"
        if c < 1:
            text = f"c = 1/k with {what}: a mean instead of a sum; multiply by k"
        else:
            text = f"c = k with {what}: a sum instead of a mean; divide by k"
        return Mistake("factor", text)

    # alternatives of the whole model

    def _of_model(self) -> Iterator[Callable[[str], Iterator[Alternative]]]:
        for words, flags in self._modes():
            yield self._in_mode(words, flags)

    def _detached(self, name: str) -> Iterator[Alternative]:
        """Yield the gradients of a loss whose inner derivatives are constants."""
        text = (
            "the loss calls torch.autograd.grad, and its result was treated as a constant: call it "
            "with create_graph=True"
        )
        yield "detached", text, lambda i: self._without_inner(i)[name]

    def _without_inner(self, i: int) -> dict[str, Tensor]:
        if i not in self._constant:
            with self.problem.state.restoring():
                with _Detached():
                    losses = self.problem.losses(self.batch.one(i))
                self._constant[i] = by_autograd(self.problem, losses)
        return self._constant[i]

    def _modes(self) -> Iterator[tuple[str, dict[nn.Module, bool]]]:
        """Yield modes of the model's layers, in words, that differ from the present mode."""
        modules = list(self.problem.model.modules())
        now = {m: m.training for m in modules}
        norms = {m: isinstance(m, _NormBase) or now[m] for m in modules}
        drops = {m: isinstance(m, _DropoutNd) or now[m] for m in modules}
        settings = [
            ("", now),
            ("training mode", dict.fromkeys(modules, True)),
            ("eval mode", dict.fromkeys(modules, False)),
            (f"training mode for {_kinds(modules, _NormBase)} only", norms),
            (f"training mode for {_kinds(modules, _DropoutNd)} only", drops),
        ]
        seen: list[dict[nn.Module, bool]] = [] if self.oracle.coupled else [now]
        for words, flags in settings:
            if flags not in seen:
                seen.append(flags)
                yield words, flags

    def _in_mode(
        self, words: str, flags: dict[nn.Module, bool]
    ) -> Callable[[str], Iterator[Alternative]]:
        """Return alternatives in a mode: samples one at a time, in the batch, by hooks."""
        problem, batch, noun = self.problem, self.batch, self.oracle.noun
        before = {m: m.training for m in flags}
        layers = [k for k, m in problem.model.named_modules() if isinstance(m, _NormBase)]
        layers = [k for k in layers if flags[problem.model.get_submodule(k)]]
        what = f"the gradients of the model in {words}" if words else "the gradients of the batch"
        fix = "Put the model in the same mode in both: model.eval() or model.train()"
        couples = ""
        if layers:
            names = listed([self._called(k) for k in layers], 3)
            couples = (
                f", where {names} {'computes' if len(layers) == 1 else 'compute'} batch statistics"
                f"{'' if words else ' (BatchNorm in training mode)'}, which couple the {noun}s"
            )
            fix = (
                "Call model.eval() first, or replace these layers by ones without batch "
                "statistics (GroupNorm, LayerNorm)"
            )

        @contextmanager
        def mode() -> Iterator[None]:
            try:
                for m, flag in flags.items():
                    m.training = flag
                yield
            finally:
                for m, flag in before.items():
                    m.training = flag

        @cache
        def alone(i: int) -> dict[str, Tensor]:
            with mode(), problem.state.restoring():
                return one_sample(problem, batch.one(i))[1]

        @cache
        def losses() -> Tensor:
            return problem.losses(batch)

        @cache
        def in_batch(i: int) -> dict[str, Tensor]:
            with mode(), problem.state.restoring():
                pick = torch.zeros_like(losses())
                pick[i] = 1.0
                return by_autograd(problem, losses(), pick)

        @cache
        def calls() -> Calls:
            return captured(problem, batch)

        def by_hooks(i: int, name: str) -> Tensor:
            p = problem.parameters[name]
            found = torch.zeros_like(p)
            with mode():
                for layer in self._owners(name):
                    for call in calls().get(layer, []):
                        gradient = torch.zeros_like(call.gradients[-1])
                        gradient[i] = call.gradients[-1][i]
                        found += pulled(problem.model.get_submodule(layer), call, gradient, p)
            return found

        def alternatives(name: str) -> Iterator[Alternative]:
            if words:
                text = f"these are {what}, one {noun} at a time. {fix}"
                yield "mode", text, lambda i: alone(i)[name]
            text = f"row i is the gradient of {noun} i's loss within the batch"
            yield "mode", f"these are {what}{couples}: {text}. {fix}", lambda i: in_batch(i)[name]
            if not (layers or self.oracle.coupled):
                return
            text = (
                f"row i is what {noun} i's activations contribute to the gradient of the summed "
                f"loss, which includes the losses of other {noun}s"
            )
            yield (
                "mode",
                f"these are {what}{couples}: {text}. {fix}",
                lambda i: by_hooks(i, name),
            )

        return alternatives


def _joined(names: list[str]) -> str:
    """Return "layer 'a', layer 'b'", or "calls 1, 2"."""
    calls = [name.removeprefix("call ") for name in names if name.startswith("call ")]
    if len(calls) == len(names) > 1:
        return f"calls {listed(calls)}"
    return listed(names)


def _nth(k: int, total: int) -> str:
    if total == 1:
        return "only time"
    return "last" if k == total - 1 else ("first", "second", "third")[k] if k < 3 else f"{k + 1}th"


def _kinds(modules: Iterable[nn.Module], kind: type) -> str:
    names = {type(m).__name__: None for m in modules if isinstance(m, kind)}
    return listed(list(names)) or "no layer"


def explain(
    problem: Problem,
    batch: Batch,
    oracle: Oracle,
    found: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    tolerances: Mapping[str, float],
) -> dict[str, Mistake]:
    """Return {name: mistake} for gradients that an alternative explains.

    Args:
        problem: The float64 problem, which is not changed.
        batch: The samples, in float64.
        oracle: The right gradients.
        found: {name: (n, *shape)} of the parameters to explain.
        kinds: {name: the kind of mistake so far}.
        tolerances: {name: the largest relative error that agrees}.
    """
    copy = problem.converted(None)
    if isinstance(batch, Tokens):
        copy, batch = copy.of_single_tokens, batch.as_samples()
    return Explanation(copy, batch, oracle, found, tolerances).of(kinds)
