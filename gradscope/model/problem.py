"""A problem: a model, an unreduced loss, and the parameters to differentiate by.

The model is the user's own object. Nothing is attached to it; buffers that a forward pass changes
(running statistics, power-iteration vectors) are copies, and what else it changes is put back, so
every evaluation starts from the same state and the model is left as it was found.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce, update_wrapper
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gradscope.core.batch import (
    Batch,
    Tokens,
    WholeInputs,
    arguments,
    call,
    map_tensors,
    output,
    token_losses,
    whole_of,
)
from gradscope.core.precision import cast, double
from gradscope.core.texts import listed
from gradscope.errors import ModelError, RefusedError, SpecError, UnsupportedError
from gradscope.model.copies import deep_copy, graph_leaves
from gradscope.model.locate import PACKED, shapes_of, user_code
from gradscope.model.randomness import FixedRandomness, forked, switched_off
from gradscope.model.ranks import ModelParallel, Ranks, alone, ranks_of
from gradscope.model.reach import reachable
from gradscope.model.state import ModelState
from gradscope.process.shortage import is_machine_error
from gradscope.process.stops import require_time

T = TypeVar("T")
Loss = Callable[..., Tensor]
RowKind = Literal["sample", "token"]
Seen = Callable[[Loss, Any, Any, Tensor], None]  # loss, outputs, targets, losses


class Predictive(NamedTuple):
    """How a model's outputs give a distribution over labels."""

    probabilities: Callable[[Tensor], Tensor]  # from outputs to (n, *positions, c)
    # from classes (n, *positions), the data's targets and the loss's options to targets
    targets: Callable[[Tensor, Any, dict[str, Any]], Tensor]


class Gaussian(NamedTuple):
    """Labels y ~ N(μ, std²) of every entry by itself, the outputs being μ: a squared error's."""

    std: float


class BoundLoss:
    """A loss, and what is known of it: `(outputs, targets) -> (n,)`, or a model loss.

    Attributes:
        function: Takes outputs and targets (a model loss: model, inputs and targets), then options.
        options: Those that are set.
        predictive: The distribution over labels that the loss stands for, if it stands for one.
        of_model: Whether it is a model loss.
        takes_whole: Whether a model loss accepts inputs that are `Whole`.
    """

    takes_whole = False

    def __init__(
        self,
        function: Loss,
        options: dict[str, Any] | None = None,
        predictive: Predictive | Gaussian | None = None,
        *,
        of_model: bool = False,
    ) -> None:
        update_wrapper(self, function)  # name, help and signature
        self.function, self.options, self.predictive = function, options or {}, predictive
        self.of_model = of_model or is_model_loss(function)

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        """Return the losses (n,)."""
        return self.function(*given, **(self.options | options))


class _ModelLoss(BoundLoss):
    """A declared model loss, which may be a method.

    A class of its own, as compilers of torch up to 2.10 call `__get__` of an instance's attribute.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Loss:
        """Return the loss as a method of `instance`."""
        return self if instance is None else model_loss(MethodType(self.function, instance))


def model_loss(fn: Loss) -> BoundLoss:
    """Declare a loss of the form `(model, inputs, targets) -> (n,)`.

    For losses that need more than the outputs: a Laplacian of the network, a gradient penalty,
    weight decay inside the loss. From then on `fn` itself is known as a model loss, too.
    """
    with suppress(TypeError):  # an object of the user's that cannot be referred to weakly
        _model_losses.add(fn)
    return _ModelLoss(fn, of_model=True)


def _at_position(loss: Loss) -> BoundLoss:
    """Return the loss of one position each, (..., (targets, position (n,))) -> (n,)."""

    def picked(*given: Any) -> Tensor:
        *first, (targets, position) = given
        found = loss(*first, targets)
        values, _ = token_losses(found, len(position), getattr(loss, "__name__", "loss"))
        return values.gather(1, position.to(values.device).unsqueeze(1)).squeeze(1)

    return BoundLoss(picked, of_model=is_model_loss(loss))


def losses_of_model(loss: Loss, model: nn.Module, inputs: Any, targets: Any) -> Any:
    """Return the losses of a model loss, which takes inputs as the model does.

    Raises:
        SpecError: All inputs are whole, so that the loss is not told which samples are meant.
    """
    if getattr(loss, "takes_whole", False):
        return loss(model, inputs, targets)
    if isinstance(inputs, WholeInputs):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise SpecError(
            f"all inputs are whole, and the loss {name!r} takes (model, inputs, targets), so it "
            "does not know which rows of the model's answer are its samples",
            where="loss",
            remedy="Give the positions of the samples, torch.arange(n), as an input that is not "
            "whole, and select these rows of the answer in the loss.",
        )
    return loss(model, arguments(inputs), targets)


def is_model_loss(loss: Loss) -> bool:
    """Whether `loss` takes `(model, inputs, targets)` rather than `(outputs, targets)`."""
    if isinstance(loss, BoundLoss):
        return loss.of_model
    try:
        return loss in _model_losses
    except TypeError:
        return False


_model_losses: WeakSet[Loss] = WeakSet()  # a registry: the functions given to `model_loss`


@dataclass(eq=False)
class Problem:
    """What is differentiated, by what; `state` is what model and loss carry from call to call."""

    model: nn.Module  # the user's, in the mode it is in
    loss: Loss  # `(outputs, targets) -> (n,)`, or a `model_loss`
    parameters: dict[str, nn.Parameter]  # the selected ones; tied ones under their first name
    running_statistics: bool = False  # normalisation layers use these, whatever their mode
    state: ModelState = None  # type: ignore[assignment]  # made when it is not given
    seen: Seen | None = None  # is told of each forward pass whose outputs are left as they were
    ranks: Ranks | None = None  # the processes that train the model together, if there are several
    # what has a row of its own; of tokens the loss returns (n, t), and batches are `Tokens`
    rows: RowKind = "sample"
    original: "Problem | None" = None  # of which this one has a copy of the model
    of_model: bool = field(init=False)  # known once: compilers cannot ask the registry

    def __post_init__(self) -> None:
        self.of_model = is_model_loss(self.loss)
        if self.state is None:
            self.state = ModelState(self.model, self.function)

    @classmethod
    def of(
        cls, model: nn.Module, loss: Loss, parameters: str | list[str] | None = None
    ) -> "Problem":
        """Select the trainable parameters whose names match one of the globs `parameters`."""
        trainable = {k: p for k, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise _untrainable(model)
        globs = [parameters] if isinstance(parameters, str) else parameters or ["*"]
        for glob in globs:
            if not fnmatch.filter(trainable, glob):
                raise SpecError(
                    f"no trainable parameter matches {glob!r}",
                    remedy=f"Trainable: {', '.join(list(trainable)[:20])}.",
                )
        chosen = {
            k: p for k, p in trainable.items() if any(fnmatch.fnmatchcase(k, g) for g in globs)
        }
        for name, p in chosen.items():
            _require_ordinary(name, p)
        ranks = ranks_of(model)
        if isinstance(ranks, ModelParallel):  # the graph knows them as the forward pass uses them
            chosen = {k: ranks.whole.get(k, p) for k, p in chosen.items()}
        return cls(model, loss, chosen, ranks=ranks)

    @property
    def model_parallel(self) -> ModelParallel | None:
        """How the model's parameters are sharded over processes, None where they are not."""
        return self.ranks if isinstance(self.ranks, ModelParallel) else None

    def any(self, flag: bool) -> bool:
        """Whether it is so on any of the processes of a sharded model."""
        return flag if self.model_parallel is None else self.model_parallel.any(flag)

    def fixed(self, fixed: FixedRandomness | None) -> "Problem":
        """Return the same problem with its random numbers drawn by `fixed`."""
        return replace(self, state=ModelState(self.model, self.function, fixed))

    @property
    def function(self) -> Loss:
        """What the loss's author wrote, which may hold a state; `BoundLoss` holds none."""
        return self.loss.function if isinstance(self.loss, BoundLoss) else self.loss

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the selected parameters."""
        return reduce(torch.promote_types, {p.dtype for p in self.parameters.values()})

    @property
    def precision(self) -> torch.dtype:
        """The narrowest real dtype of the model's parameters: numbers are no more precise.

        Of a sharded model, what it was found to round to counts as well.
        """
        every = (*self.parameters.values(), *self.model.parameters())
        found = {p.dtype.to_real() for p in every if p.is_floating_point() or p.is_complex()}
        found |= set() if self.model_parallel is None else {self.model_parallel.rounds_to}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def device(self) -> torch.device:
        """The device of the first selected parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def of_single_tokens(self) -> "Problem":
        """What gives a token's row as an ordinary sample's, of batches `Tokens.as_samples`."""
        return replace(self, loss=_at_position(self.loss), rows="sample")

    def losses(self, batch: Batch, *, graph: bool = True) -> Tensor:
        """Return the losses (n,), with their graph or none; buffers and generators stay alone.

        With rows of tokens it is one for each row of `Tokens`, and (n, t) of any other batch.
        """
        return self.drawn(batch, partial(self._evaluated, batch, graph=graph))

    def counted(self, batch: Batch) -> tuple[Tensor, bool]:
        """Return which positions of samples count, (n, t) bool, and whether the loss says so."""
        return self.drawn(batch, partial(self._counted, batch))

    def drawn(self, batch: Batch, evaluate: Callable[[], T], *, single: bool = False) -> T:
        """Return what `evaluate` does to a batch, random numbers fixed if that was asked for.

        Args:
            batch: The samples.
            evaluate: Runs the model on them.
            single: The model sees a batch of one, though there are all samples.
        """
        fixed = self.state.fixed
        if fixed is None:
            return evaluate()
        losses = replace(self, seen=None)._of_samples
        return fixed.over(self.model, whole_of(batch), evaluate, losses, single=single)

    def _evaluated(self, batch: Batch, *, graph: bool = True) -> Tensor:
        try:
            with self._guarded(batch, graph=graph):
                losses = self._checked(self._raw(batch, self.seen), batch)
        except ModelError as error:  # such as of another dtype than the copy
            if names := self._held():
                raise _shared(names) from error
            raise
        self._require_own(losses)
        return losses

    def _of_samples(self, batch: Batch) -> Tensor:
        losses = self._evaluated(batch)
        return losses if losses.dim() == 1 else losses.sum(1)

    def _counted(self, batch: Batch) -> tuple[Tensor, bool]:
        with self._guarded(batch, graph=False):
            values, counted = token_losses(self._raw(batch), len(batch), self._loss_name)
            if counted is None:
                return torch.ones(values.shape, dtype=torch.bool), False
            return counted, True

    def _differentiable(self) -> AbstractContextManager[None]:
        """Keep recurrent layers in eval mode from cuDNN, which has no backward pass for them."""
        evaluates = self.device.type != "cpu" and any(
            isinstance(m, nn.RNNBase) and not m.training for m in self.model.modules()
        )
        return switched_off(torch.backends.cudnn) if evaluates else nullcontext()

    @contextmanager
    def _guarded(self, batch: Batch, *, graph: bool) -> Iterator[None]:
        with (
            self.state.kept(),
            self._differentiable(),
            self._scratch_buffers(),
            self._frozen_statistics(),
            torch.set_grad_enabled(graph),
            nullcontext() if self.model_parallel is None else self.model_parallel.forward(),
            user_code(self.model, batch),
        ):
            yield

    def functional_losses(self, values: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the losses (n,) with `values` in the parameters' place, buffers copied.

        Tensors are exchanged by identity, wherever the model holds them. torch's functional_call
        goes by name and does not put the parameters of a module with two names back.
        """
        given = {id(p): values[k] for k, p in self.parameters.items() if k in values}
        given |= {id(b): b.clone() for b in self.model.buffers()}
        modules = list(self.model.modules())
        tables: list[Any] = [t for m in modules for t in (m._parameters, m._buffers)]
        # recurrent layers list their weights too, and make the list anew when they find others
        lists = [(m, m._flat_weights) for m in modules if isinstance(m, nn.RNNBase)]
        places = [
            (t, k, v) for t in tables for k, v in t.items() if v is not None and id(v) in given
        ]  # compilers of torch up to 2.10 know no id of None
        try:
            for table, key, own in places:
                table[key] = given[id(own)]
            with self._frozen_statistics():
                return self._checked(self._raw(batch), batch)
        finally:
            for table, key, own in places:
                table[key] = own
            for module, weights in lists:
                module._flat_weights = weights

    def converted(self, dtype: torch.dtype | None) -> "Problem":
        """Return the same problem on a deep copy of the model with floating-point tensors cast.

        For float64 the copy is on the CPU where the model's device has none.
        """
        try:
            with torch.no_grad():  # TorchScript copies parameters by an operation that is recorded
                leaves = dtype == torch.float64 and double(self.device) != dtype
                model, copies = deep_copy(self.model, _hosted(self.model) if leaves else {})
        except RefusedError:
            raise
        except Exception as error:  # deepcopy runs the user's code
            if is_machine_error(error):
                raise
            raise RefusedError(
                f"the model cannot be copied for a cross-check: {error}",
                remedy="Give the model a working __deepcopy__, or switch verification off.",
            ) from error
        for p, own in zip(model.parameters(), self.model.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
            p.grad = None
        if dtype is not None:
            model = cast(model, dtype)
            registered = set(model.modules())
            for module in copies.modules:
                if module not in registered:  # such as one in a list
                    cast(module, dtype)
        named = dict(model.named_parameters())
        parameters = {k: named[k] for k in self.parameters}
        loss = copies.of(self.loss)
        loss = model_loss(loss) if self.of_model and not is_model_loss(loss) else loss
        made = replace(self, model=model, loss=loss, parameters=parameters, original=self)
        return replace(made, state=ModelState(model, made.function, self.state.fixed))

    def _require_own(self, losses: Tensor) -> None:
        """Refuse losses of a copied model that are computed with the original's parameters."""
        if self.original is None or not losses.requires_grad:
            return
        others = {id(p): name for name, p in self.original.model.named_parameters()}
        names = sorted({others[id(leaf)] for leaf in graph_leaves(losses) if id(leaf) in others})
        if names:
            raise _shared(names)

    def _held(self) -> list[str]:
        """Return which modules and parameters of the original a copied model still leads to."""
        if self.original is None:
            return []
        model = self.original.model
        every = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        others = {id(part): name for name, part in every}
        own = (*self.model.parameters(), *self.model.buffers())
        tables = (table for _, table in reachable([(self.model, "the model")], own))
        found = {id(value) for table in tables for value in table.read().values()}
        return sorted(others[k] or "the model" for k in found & others.keys())

    @contextmanager
    def _frozen_statistics(self) -> Iterator[None]:
        """Put layers that have running statistics in eval mode, if that was asked for."""
        layers = [
            m
            for m in (self.model.modules() if self.running_statistics else ())
            if m.training and getattr(m, "running_mean", None) is not None
        ]
        try:
            for layer in layers:
                layer.training = False
            yield
        finally:
            for layer in layers:
                layer.training = True

    def _raw(self, batch: Batch, seen: Seen | None = None) -> Any:
        if not torch.compiler.is_compiling():
            require_time(self.any)
        # a forward pass may write into its arguments: it gets copies, all laid out alike, so that
        # any selection of samples runs the same program
        own = batch.map(lambda t: t.clone(memory_format=torch.contiguous_format))
        with alone(self.model):
            return self._of_copies(own, batch, seen)

    def _of_copies(self, own: Batch, batch: Batch, seen: Seen | None) -> Any:
        if self.of_model:
            return losses_of_model(self.loss, self.model, own.inputs, own.targets)
        outputs = call(self.model, own.inputs)
        told = output(outputs)
        if seen is None or type(told) is not Tensor or told.is_inference():
            return self.loss(outputs, own.targets)
        version = told._version
        losses = self.loss(outputs, own.targets)
        if told._version == version and isinstance(losses, Tensor):
            seen(self.loss, told, batch.targets, losses)
        return losses

    @property
    def _loss_name(self) -> str:
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def _checked(self, losses: Any, batch: Batch) -> Tensor:
        if self.rows == "token":
            return self._of_tokens(losses, batch)
        name, n = self._loss_name, len(batch)
        if isinstance(losses, Tensor) and tuple(losses.shape) == (n,):
            if losses.is_floating_point():
                return losses
            raise SpecError(
                f"the loss {name!r} must return floating-point numbers, not {losses.dtype}",
                where="loss",
                remedy="Return the loss itself, not a label or a count; of a complex one, its "
                "real part or its square.",
            )
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(type(losses))
        scalar = isinstance(losses, Tensor) and losses.dim() == 0
        rows = isinstance(losses, Tensor) and losses.dim() == 1
        raise SpecError(
            f"the loss {name!r} must return one number a sample, shape ({n},); it returned {found}",
            where="loss",
            remedy=(
                "A scalar loss has already been summed or averaged over the batch, and a mean "
                "scales every gradient by 1/n. Use reduction='none', and reduce over all axes but "
                "the first. A mean over all tokens of a batch: each sample's sum over its tokens, "
                "divided by a constant."
                if scalar
                else f"Model and loss were given {shapes_of(batch)}. {PACKED}"
                if rows
                else "Reduce over all axes but the first, the sample axis. For a row for each "
                'position of (n, t), use rows="token".'
            ),
        )

    def _of_tokens(self, found: Any, batch: Batch) -> Tensor:
        """Return the losses (m,) of rows; of a batch that is not of tokens, (n, t)."""
        rows = batch if isinstance(batch, Tokens) else None
        n = len(batch) if rows is None else len(rows.held)
        values, _ = token_losses(found, n, self._loss_name)
        if rows is None:
            return values
        if values.shape[1] != rows.positions:
            raise SpecError(
                f"the loss {self._loss_name!r} has {values.shape[1]} positions here, and had "
                f"{rows.positions} before",
                where="rows token",
                remedy="Pad all samples to one length, and let the loss say which positions count.",
            )
        return values[rows.sample.to(values.device), rows.position.to(values.device)]

    @contextmanager
    def _scratch_buffers(self) -> Iterator[None]:
        """Let the forward pass write to copies of the buffers and draw from a forked generator."""
        owners = [(m, dict(m._buffers)) for m in self.model.modules() if m._buffers]
        copies: dict[int, Tensor] = {}  # a buffer shared by two modules stays shared
        try:
            for module, buffers in owners:
                for key, value in buffers.items():
                    if value is not None:
                        module._buffers[key] = copies.setdefault(id(value), value.clone())
            with forked(self.device), self.state.noticing(self.device):
                yield
        finally:
            for module, buffers in owners:
                for key, value in buffers.items():  # a TorchScript module's table has no update
                    module._buffers[key] = value


def require_module(model: Any) -> None:
    """Raise `SpecError` of a model that is no module, and say how it is made one."""
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    remedy = "Wrap it in an nn.Module that holds its tensors as parameters."
    if isinstance(model, torch.export.ExportedProgram):
        remedy = "Give program.module(), exported with a dynamic batch axis."
    raise SpecError(
        f"a model is a torch.nn.Module, not {kind}",
        where="model",
        remedy=remedy,
    )


_FROM_FLOATS = "Give the model as it was before, with weights in floating point"


def _untrainable(model: nn.Module) -> SpecError:
    """Return the error of a model without a trainable parameter, and what was made of them."""
    fixed = dict(model.named_parameters())
    whole = {k: p for k, p in fixed.items() if not (p.is_floating_point() or p.is_complex())}
    layers = ((k, m) for k, m in model.named_modules() if "quantized" in type(m).__module__)
    quantized = next((f"layer {k!r} ({type(m).__name__})" for k, m in layers), None)
    what = "the model has no trainable parameter"
    if len(whole) < len(fixed):
        names = listed(k for k in fixed if k not in whole)
        return SpecError(
            f"{what}: none of {names} requires a gradient",
            remedy="Set requires_grad on the parameters whose gradients you want.",
        )
    if whole or quantized:
        where, dtype = quantized, "quantized"
        if whole:
            name, p = next(iter(whole.items()))
            where, dtype = f"parameter {name!r}", str(p.dtype).removeprefix("torch.")
        return SpecError(
            f"{what}: its weights are {dtype}, and whole numbers have no gradient",
            where=where,
            remedy=f"{_FROM_FLOATS}; or add layers that are (an adapter such as LoRA).",
        )
    if isinstance(model, torch.jit.ScriptModule):
        return SpecError(
            f"{what}: torch.jit.freeze makes constants of the weights",
            remedy=f"{_FROM_FLOATS}: torch.jit.script or torch.jit.trace of it, without freeze.",
        )
    return SpecError(
        "the model has no parameter",
        remedy="Register what is to be differentiated by as nn.Parameter.",
    )


def _require_ordinary(name: str, p: Tensor) -> None:
    """Refuse a parameter without a shape, made from others, or hooked on its accumulation."""
    if nn.parameter.is_lazy(p):
        what = "the parameter has no shape yet"
        remedy = "Run the model once: lazy layers take their shapes from the first batch."
    elif p.is_meta:
        what = "the parameter is on the device meta, where it has no value"
        remedy = "Load the weights: model.to_empty(device=...), then load_state_dict."
    elif not p.is_leaf:
        what = "the parameter is computed from other tensors, so it is no parameter of its own"
        remedy = (
            "Register what it is computed from as the parameter, and compute it in forward "
            "(torch.nn.utils.parametrize does so)."
        )
    elif getattr(p, "_post_accumulate_grad_hooks", None):
        what = (
            "the parameter has a hook that runs when its gradient has been accumulated, which no "
            "gradient of a single sample ever is"
        )
        remedy = "Remove the hook (register_post_accumulate_grad_hook returns its handle)."
    else:
        return
    raise UnsupportedError(what, where=f"parameter {name!r}", remedy=remedy)


def _shared(names: list[str]) -> RefusedError:
    return RefusedError(
        f"a copy of the model, made for a cross-check, computes with {listed(names)} of the model "
        "itself, which a global variable or a class holds",
        where=names[0],
        remedy="Let modules be attributes of the module that calls them, and reach them by self.",
    )


def _hosted(model: nn.Module) -> dict[int, Any]:
    """Return what `deepcopy` is to take for parameters and buffers: copies on the CPU."""
    parameters = {id(p): nn.Parameter(p.detach().cpu(), False) for p in model.parameters()}
    return parameters | {id(b): b.detach().cpu() for b in model.buffers()}


def summed(losses: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Σᵢ wᵢ Lᵢ of losses (n,) with its graph, also where the caller is under no_grad.

    Given a vector and `grad_outputs` instead, torch first imports its symbolic shapes, which takes
    a third of a second.
    """
    with torch.enable_grad():
        return losses.sum() if weights is None else (losses * weights).sum()


def slopes(
    losses: Tensor, by: Iterable[Tensor], weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return ∇ Σᵢ wᵢ Lᵢ of losses (n,) by each tensor: zeros where it is not reached."""
    inputs = list(by)
    if not losses.requires_grad:
        return tuple(map(torch.zeros_like, inputs))
    return torch.autograd.grad(
        summed(losses, weights),
        inputs,
        retain_graph=True,  # a part of the graph may be the model's own, and be needed again
        allow_unused=True,
        materialize_grads=True,
    )


def unfused() -> AbstractContextManager[None]:
    """Run recurrent layers step by step: fused kernels hide the steps and have one derivative."""
    return switched_off(torch.backends.mkldnn, torch.backends.cudnn)


@contextmanager
def double_precision() -> Iterator[None]:
    """Let tensors that a forward pass makes itself be float64, as its inputs are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def differentiable_inputs(batch: Batch) -> Batch:
    """Return the batch with floating-point inputs that require a gradient.

    The caller's tensors are left alone; the model gets copies, which are not leaves, so it may
    write into them in place.
    """

    def leaf(t: Tensor) -> Tensor:
        differentiable = t.is_floating_point() or t.is_complex()
        return t.detach().requires_grad_(True) if differentiable else t

    return replace(batch, inputs=map_tensors(leaf, batch.inputs))
