"""A problem: a model, an unreduced loss, and the parameters to differentiate by.

The model is the user's own object. Nothing is attached to it. Forward passes change only copies of
buffers (running statistics, power-iteration vectors), and all other changes are undone. So every
evaluation starts from the same state, and the model is left unchanged.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce, update_wrapper
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
)
from gradscope.core.precision import cast, double
from gradscope.core.texts import article, listed
from gradscope.errors import ModelError, RefusedError, SpecError, UnsupportedError
from gradscope.model.copies import deep_copy, graph_leaves
from gradscope.model.locate import PACKED, shapes_of, user_code
from gradscope.model.quantised import require_fixed_weights
from gradscope.model.randomness import FixedRandomness, switched_off
from gradscope.model.ranks import ModelParallel, Ranks, parallel, ranks_of, without_ddp
from gradscope.model.reach import every_module, reachable
from gradscope.model.state import ModelState
from gradscope.process.shortage import is_machine_error

T = TypeVar("T")
Loss = Callable[..., Tensor]
RowKind = Literal["sample", "token"]
OutputObserver = Callable[[Loss, Any, Any, Tensor], None]  # loss, outputs, targets, losses


class Predictive(NamedTuple):
    """The distribution over labels that a model's outputs determine."""

    probabilities: Callable[[Tensor], Tensor]  # maps outputs to (n, *positions, c)
    # maps classes (n, *positions), the data's targets and the loss's options to targets
    targets: Callable[[Tensor, Any, dict[str, Any]], Tensor]
    of_loss: bool = True  # whether the loss is its negative log-likelihood


class Gaussian(NamedTuple):
    """Labels y ~ N(μ, std²), independent for every entry, with outputs μ: for a squared error."""

    std: float


class BoundLoss:
    """A loss with known properties: `(outputs, targets) -> (n,)`, or a model loss.

    Attributes:
        function: Takes outputs and targets (a model loss: model, inputs and targets), then options.
        options: The options that are set.
        predictive: The distribution over labels that belongs to the loss, or None.
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
        update_wrapper(self, function)  # copies name, docstring and signature
        self.function, self.options, self.predictive = function, options or {}, predictive
        self.of_model = of_model or is_model_loss(function)

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        """Return the losses (n,)."""
        return self.function(*given, **(self.options | options))


class _ModelLoss(BoundLoss):
    """A declared model loss, which may be a method.

    It is a separate class because torch's compilers up to 2.10 call `__get__` of an instance's
    attribute.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Loss:
        """Return the loss as a method of `instance`."""
        return self if instance is None else model_loss(MethodType(self.function, instance))


def model_loss(fn: Loss) -> BoundLoss:
    """Declare a loss of the form `(model, inputs, targets) -> (n,)`.

    Use it for losses that need more than the outputs: a Laplacian of the network, a gradient
    penalty, weight decay inside the loss. Afterwards `fn` itself also counts as a model loss.
    """
    with suppress(TypeError):  # a user's object without weak references
        _model_losses.add(fn)
    return _ModelLoss(fn, of_model=True)


def _at_position(loss: Loss) -> BoundLoss:
    """Return the loss of one position per sample, (..., (targets, position (n,))) -> (n,)."""

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
    """Whether `loss` takes `(model, inputs, targets)` instead of `(outputs, targets)`."""
    if isinstance(loss, BoundLoss):
        return loss.of_model
    try:
        return loss in _model_losses
    except TypeError:
        return False


_model_losses: WeakSet[Loss] = WeakSet()  # a registry: functions passed to `model_loss`


@dataclass(eq=False)
class Problem:
    """A model, a loss and parameters; `state` is the state of model and loss between calls."""

    model: nn.Module  # the user's model, in its current mode
    loss: Loss  # `(outputs, targets) -> (n,)`, or a `model_loss`
    # the selected parameters; tied parameters under their first name
    parameters: dict[str, nn.Parameter]
    # whether normalisation layers use running statistics in any mode
    running_statistics: bool = False
    state: ModelState = None  # type: ignore[assignment]  # created if not given
    observer: OutputObserver | None = (
        None  # called after forward passes that leave their outputs unchanged
    )
    ranks: Ranks | None = None  # the processes that train the model together, or None
    # the kind of rows; with tokens, the loss returns (n, t) and batches are `Tokens`
    rows: RowKind = "sample"
    original: "Problem | None" = None  # the problem whose model was copied for this one
    of_model: bool = field(init=False)  # stored, because compilers cannot read the registry

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
                    where="`parameters`",
                    remedy=f"Trainable: {', '.join(list(trainable)[:20])}.",
                )
        chosen = {
            k: p for k, p in trainable.items() if any(fnmatch.fnmatchcase(k, g) for g in globs)
        }
        for name, p in chosen.items():
            _require_ordinary(name, p)
        require_fixed_weights(model)
        ranks = ranks_of(model)
        # the graph contains them in the form of the forward pass
        if isinstance(ranks, ModelParallel):
            chosen = {k: ranks.unsharded.get(k, p) for k, p in chosen.items()}
        return cls(model, loss, chosen, ranks=ranks)

    @property
    def model_parallel(self) -> ModelParallel | None:
        """The processes and shards of a sharded model, or None."""
        return self.ranks if isinstance(self.ranks, ModelParallel) else None

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any process of a sharded model."""
        return flag if self.model_parallel is None else self.model_parallel.any(flag)

    def with_fixed_randomness(self, fixed: FixedRandomness | None) -> "Problem":
        """Return the same problem with random numbers drawn by `fixed`."""
        return replace(self, state=ModelState(self.model, self.function, fixed))

    @property
    def function(self) -> Loss:
        """The loss as its author wrote it, which may have state, without `BoundLoss`."""
        return self.loss.function if isinstance(self.loss, BoundLoss) else self.loss

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the selected parameters."""
        return reduce(torch.promote_types, {p.dtype for p in self.parameters.values()})

    @property
    def precision(self) -> torch.dtype:
        """The narrowest real dtype of the parameters, which limits the precision of results.

        For a sharded model, this includes the narrowest dtype found in its forward pass.
        """
        more = [] if self.model_parallel is None else [self.model_parallel.rounds_to]
        return max([self._narrowest, *more], key=lambda dtype: torch.finfo(dtype).eps)

    @cached_property
    def _names(self) -> dict[int, str]:
        """The names of the model's parameters by id."""
        return {id(p): name for name, p in self.model.named_parameters()}

    @cached_property
    def _wrapped(self) -> list[Any]:
        """The modules that are wrapped in DistributedDataParallel."""
        return parallel(self.model)

    @cached_property
    def _narrowest(self) -> torch.dtype:
        """The narrowest real dtype of the parameters."""
        every = (*self.parameters.values(), *self.model.parameters())
        found = {p.dtype for p in every}
        real = {dtype.to_real() for dtype in found if dtype.is_floating_point or dtype.is_complex}
        return max(real, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def device(self) -> torch.device:
        """The device of the first selected parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def of_single_tokens(self) -> "Problem":
        """The same problem with each token as a sample, for batches of `Tokens.as_samples`."""
        return replace(self, loss=_at_position(self.loss), rows="sample")

    def losses(self, batch: Batch, *, graph: bool = True) -> Tensor:
        """Return the losses (n,); buffers and random generators stay unchanged.

        For `Tokens`, the result has one loss per row. For other batches with rows="token", it is
        (n, t).
        """
        return self.with_randomness(batch, partial(self._evaluate, batch, graph=graph))

    def position_mask(self, batch: Batch) -> tuple[Tensor, bool]:
        """Return which positions of samples count, (n, t) bool, and whether the loss decides it."""
        return self.with_randomness(batch, partial(self._find_positions, batch))

    def with_randomness(
        self, batch: Batch, evaluate: Callable[[], T], *, single: bool = False
    ) -> T:
        """Return the result of `evaluate`, with fixed random numbers if the problem has them.

        Args:
            batch: The samples.
            evaluate: Runs the model on the samples.
            single: Whether the model sees a batch of one that represents all samples.
        """
        fixed = self.state.randomness
        if fixed is None:
            return evaluate()
        losses = replace(self, observer=None)._of_samples
        return fixed.evaluate_batch(self.model, batch.sample_batch, evaluate, losses, single=single)

    def _evaluate(self, batch: Batch, *, graph: bool = True) -> Tensor:
        try:
            with self._evaluating(batch, graph=graph):
                losses = self._check_losses(self._raw(batch, self.observer), batch)
        except ModelError as error:  # for example, because the dtype differs from the copy's
            if names := self._original_names():
                raise _sharing_error(names) from error
            raise
        self._require_own(losses)
        return losses

    def _of_samples(self, batch: Batch) -> Tensor:
        losses = self._evaluate(batch)
        return losses if losses.dim() == 1 else losses.sum(1)

    def _find_positions(self, batch: Batch) -> tuple[Tensor, bool]:
        with self._evaluating(batch, graph=False):
            values, counted = token_losses(self._raw(batch), len(batch), self._loss_name)
            if counted is None:
                return torch.ones(values.shape, dtype=torch.bool), False
            return counted, True

    def _differentiable(self) -> AbstractContextManager[None]:
        """Avoid cuDNN for recurrent layers in eval mode, where it has no backward pass."""
        evaluates = self.device.type != "cpu" and any(
            isinstance(m, nn.RNNBase) and not m.training for m in self.model.modules()
        )
        return switched_off(torch.backends.cudnn) if evaluates else nullcontext()

    @contextmanager
    def _evaluating(self, batch: Batch, *, graph: bool) -> Iterator[None]:
        with (
            self.state.restoring(),
            self._differentiable(),
            self._scratch_buffers(),
            self._frozen_statistics(),
            torch.set_grad_enabled(graph),
            nullcontext() if self.model_parallel is None else self.model_parallel.forward(),
            user_code(self.model, batch),
        ):
            yield

    def functional_losses(self, values: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the losses (n,) with `values` instead of the parameters, and with copied buffers.

        Tensors are exchanged by identity, wherever the model stores them. torch's functional_call
        works by name and does not restore the parameters of a module that has two names.
        """
        given = {id(p): values[k] for k, p in self.parameters.items() if k in values}
        given |= {id(b): b.clone() for b in self.model.buffers()}
        modules = list(self.model.modules())
        tables: list[Any] = [t for m in modules for t in (m._parameters, m._buffers)]
        # recurrent layers also store their weights in a list, and rebuild it if weights change
        lists = [(m, m._flat_weights) for m in modules if isinstance(m, nn.RNNBase)]
        places = [
            (t, k, v) for t in tables for k, v in t.items() if v is not None and id(v) in given
        ]  # torch's compilers up to 2.10 do not support id(None)
        try:
            for table, key, own in places:
                table[key] = given[id(own)]
            with self._frozen_statistics():
                return self._check_losses(self._raw(batch), batch)
        finally:
            for table, key, own in places:
                table[key] = own
            for module, weights in lists:
                module._flat_weights = weights

    def converted(self, dtype: torch.dtype | None) -> "Problem":
        """Return the same problem on a deep copy of the model, with floating-point tensors cast.

        A float64 copy is on the CPU if the model's device has no float64.
        """
        try:
            with torch.no_grad():  # TorchScript copies parameters with a recorded operation
                leaves = dtype == torch.float64 and double(self.device) != dtype
                model, copies = deep_copy(self.model, _cpu_copies(self.model) if leaves else {})
        except RefusedError:
            raise
        except Exception as error:  # deepcopy runs the user's code
            if is_machine_error(error):
                raise
            raise RefusedError(
                f"the model cannot be copied for a cross-check: {error}",
                remedy="Give the model a working __deepcopy__, or turn verification off.",
            ) from error
        for p, own in zip(model.parameters(), self.model.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
            p.grad = None
        if dtype is not None:
            model = cast(model, dtype)
            registered = set(model.modules())
            for module in copies.modules:
                if module not in registered:  # for example a module in a list
                    cast(module, dtype)
        named = dict(model.named_parameters())
        parameters = {k: named[k] for k in self.parameters}
        loss = copies.of(self.loss)
        loss = model_loss(loss) if self.of_model and not is_model_loss(loss) else loss
        made = replace(self, model=model, loss=loss, parameters=parameters, original=self)
        return replace(made, state=ModelState(model, made.function, self.state.randomness))

    def _require_own(self, losses: Tensor) -> None:
        """Raise if losses of a copied model are computed with the original's parameters."""
        if self.original is None or not losses.requires_grad:
            return
        others = self.original._names
        names = sorted({others[id(leaf)] for leaf in graph_leaves(losses) if id(leaf) in others})
        if names:
            raise _sharing_error(names)

    def _original_names(self) -> list[str]:
        """Return the original's modules and parameters to which a copied model still refers."""
        if self.original is None:
            return []
        model = self.original.model
        every = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        others = {id(part): name for name, part in every}
        own = (*self.model.parameters(), *self.model.buffers())
        tables = (table for _, table in reachable([(self.model, "the model")], own))
        found = {id(value) for table in tables for value in table.read().values()}
        return sorted(others[k] or "the model" for k in found & others.keys())

    def _frozen_statistics(self) -> AbstractContextManager[None]:
        """Put layers with running statistics in eval mode, if `running_statistics` is set."""
        return _frozen(self.model) if self.running_statistics else nullcontext()

    def _raw(self, batch: Batch, observer: OutputObserver | None = None) -> Any:
        # a forward pass may write to its arguments, so it gets copies; all have the same layout:
        # then any selection of samples runs the same program
        own = batch.map(lambda t: t.clone(memory_format=torch.contiguous_format))
        with without_ddp(self._wrapped) if self._wrapped else nullcontext():
            return self._of_copies(own, batch, observer)

    def _of_copies(self, own: Batch, batch: Batch, observer: OutputObserver | None) -> Any:
        if self.of_model:
            return losses_of_model(self.loss, self.model, own.inputs, own.targets)
        outputs = call(self.model, own.inputs)
        tensor = output(outputs)
        if observer is None or type(tensor) is not Tensor or tensor.is_inference():
            return self.loss(outputs, own.targets)
        version = tensor._version
        losses = self.loss(outputs, own.targets)
        if tensor._version == version and isinstance(losses, Tensor):
            observer(self.loss, tensor, batch.targets, losses)
        return losses

    @property
    def _loss_name(self) -> str:
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def _check_losses(self, losses: Any, batch: Batch) -> Tensor:
        if self.rows == "token":
            return self._of_tokens(losses, batch)
        name, n = self._loss_name, len(batch)
        ones = (1,) * (losses.dim() - 1) if isinstance(losses, Tensor) else ()
        if isinstance(losses, Tensor) and tuple(losses.shape) == (n, *ones):
            if losses.is_floating_point():
                return losses.flatten() if ones else losses
            raise SpecError(
                f"the loss {name!r} must return floating-point numbers, not {losses.dtype}",
                where="loss",
                remedy="Return the loss itself, not a label or a count. For a complex loss, "
                "return its real part or its square.",
            )
        kind = "None" if losses is None else article(type(losses).__name__)
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else kind
        scalar = isinstance(losses, Tensor) and losses.dim() == 0
        rows = isinstance(losses, Tensor) and losses.dim() == 1
        raise SpecError(
            f"the loss {name!r} must return one number per sample, shape ({n},); it returned "
            f"{found}",
            where="loss",
            remedy=(
                "A scalar loss is already summed or averaged over the batch, and a mean scales "
                "every gradient by 1/n. Use reduction='none', and reduce over all axes but the "
                f"first. Or return torch.stack([{_one_loss(batch, self.of_model)}]), where one is "
                "this loss. Instead of a mean over all tokens of a batch, return each sample's sum "
                "over its tokens, divided by a constant."
                if scalar
                else f"The model and the loss were called with {shapes_of(batch)}. {PACKED}"
                if rows
                else "Return the tensor of losses: no `return` gives None, .item() a float, and "
                "numpy leaves the graph."
                if not isinstance(losses, Tensor)
                else f"If the outputs are {(n, 1)} and the targets {(n,)}, they broadcast to "
                f"{(n, n)}: use outputs.squeeze(1)."
                if losses.shape == (n, n)
                else "Reduce over all axes but the first, the sample axis. For one row per "
                'position of (n, t), use rows="token".'
            ),
        )

    def _of_tokens(self, found: Any, batch: Batch) -> Tensor:
        """Return the losses (m,) of token rows; for other batches, (n, t)."""
        rows = batch if isinstance(batch, Tokens) else None
        n = len(batch) if rows is None else len(rows.sample_index)
        values, _ = token_losses(found, n, self._loss_name)
        if rows is None:
            return values
        if values.shape[1] != rows.positions:
            raise SpecError(
                f"the loss {self._loss_name!r} returned {values.shape[1]} positions, but "
                f"{rows.positions} before",
                where="rows token",
                remedy="Pad all samples to one length, and return (losses, counted) from the loss.",
            )
        return values[rows.sample.to(values.device), rows.position.to(values.device)]

    @contextmanager
    def _scratch_buffers(self) -> Iterator[None]:
        """Give the forward pass copies of the buffers, and a forked random generator."""
        owners = [(m, dict(m._buffers)) for m in every_module(self.model) if m._buffers]
        copies: dict[int, Tensor] = {}  # a buffer shared by two modules stays shared
        try:
            for module, buffers in owners:
                for key, value in buffers.items():
                    if value is not None:
                        module._buffers[key] = copies.setdefault(id(value), value.clone())
            with self.state.noticing(self.device):
                yield
        finally:
            for module, buffers in owners:
                for key, value in buffers.items():  # a TorchScript module's table has no update
                    module._buffers[key] = value


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Put layers with running statistics in eval mode."""
    layers = [
        m for m in model.modules() if m.training and getattr(m, "running_mean", None) is not None
    ]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


def _one_loss(batch: Batch, of_model: bool) -> str:
    """Return the code that calls a scalar loss `one` for each sample of a batch."""
    given = {"inputs": batch.inputs, "targets": batch.targets}
    if not of_model:
        given["outputs"] = batch.index  # usually a tensor (n, ...)

    def part(name: str) -> str:
        if isinstance(given[name], tuple):
            return f"tuple(t[i : i + 1] for t in {name})"
        if isinstance(given[name], Mapping):
            return f"{{k: t[i : i + 1] for k, t in {name}.items()}}"
        return "None" if given[name] is None else f"{name}[i : i + 1]"

    counted = "targets" if given["targets"] is not None else "inputs" if of_model else "outputs"
    if isinstance(given[counted], tuple):
        counted += "[0]"
    elif isinstance(given[counted], Mapping):
        counted = f"next(iter({counted}.values()))"
    first = f"model, {part('inputs')}" if of_model else part("outputs")
    return f"one({first}, {part('targets')}) for i in range(len({counted}))"


def require_module(model: Any) -> None:
    """Raise `SpecError` if a model is not an nn.Module, with advice."""
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    remedy = "Wrap it in an nn.Module, with its tensors as parameters."
    if isinstance(model, type) and issubclass(model, nn.Module):
        kind, remedy = f"the class {model.__name__}", f"Create the model: {model.__name__}(...)."
    elif isinstance(model, dict):
        remedy = "If this is a state dict, create the model, and call model.load_state_dict(...)."
    elif isinstance(model, torch.export.ExportedProgram):
        remedy = "Pass program.module(), exported with a dynamic batch axis."
    raise SpecError(
        f"the model must be a torch.nn.Module, not {kind}",
        where="model",
        remedy=remedy,
    )


_FROM_FLOATS = "Pass the original model with floating-point weights"


def _untrainable(model: nn.Module) -> SpecError:
    """Return the error for a model without trainable parameters, with the reason."""
    fixed = dict(model.named_parameters())
    whole = {k: p for k, p in fixed.items() if not (p.is_floating_point() or p.is_complex())}
    layers = ((k, m) for k, m in model.named_modules() if "quantized" in type(m).__module__)
    quantized = next((f"layer {k!r} ({type(m).__name__})" for k, m in layers), None)
    what = "the model has no trainable parameter"
    if len(whole) < len(fixed):
        names = listed(k for k in fixed if k not in whole)
        return SpecError(
            f"{what}: none of {names} requires a gradient",
            remedy="Call requires_grad_() on the parameters whose gradients you want.",
        )
    if whole or quantized:
        where, dtype = quantized, "quantized"
        if whole:
            name, p = next(iter(whole.items()))
            where, dtype = f"parameter {name!r}", str(p.dtype).removeprefix("torch.")
        return SpecError(
            f"{what}: its weights are {dtype}, and integers have no gradient",
            where=where,
            remedy=f"{_FROM_FLOATS}, or add trainable layers (an adapter such as LoRA).",
        )
    if isinstance(model, torch.jit.ScriptModule):
        return SpecError(
            f"{what}: torch.jit.freeze has turned the weights into constants",
            remedy=f"{_FROM_FLOATS}: torch.jit.script or torch.jit.trace of it, without freeze.",
        )
    return SpecError(
        "the model has no parameter",
        remedy="Register the tensors whose gradients you want as nn.Parameter.",
    )


def _require_ordinary(name: str, p: Tensor) -> None:
    """Raise for a parameter without a shape, computed from others, or with an accumulation hook."""
    if nn.parameter.is_lazy(p):
        what = "the parameter has no shape yet"
        remedy = "Run the model once: lazy layers take their shapes from the first batch."
    elif p.is_meta:
        what = "the parameter is on the device meta, so it has no value"
        remedy = "Load the weights: model.to_empty(device=...), then load_state_dict."
    elif not p.is_leaf:
        what = "the parameter is computed from other tensors, so it is not a leaf"
        remedy = (
            "Register the tensors it is computed from as parameters, and compute it in forward "
            "(torch.nn.utils.parametrize does that)."
        )
    elif getattr(p, "_post_accumulate_grad_hooks", None):
        what = (
            "the parameter has a hook for accumulated gradients, but the gradient of a single "
            "sample is never accumulated"
        )
        remedy = "Remove the hook (register_post_accumulate_grad_hook returns its handle)."
    else:
        return
    raise UnsupportedError(what, where=f"parameter {name!r}", remedy=remedy)


def _sharing_error(names: list[str]) -> RefusedError:
    return RefusedError(
        f"a copy of the model, made for a cross-check, uses {listed(names)} of the original model, "
        "through a global variable or a class attribute",
        where=names[0],
        remedy="Store modules as attributes of the module that calls them, and access them "
        "through self.",
    )


def _cpu_copies(model: nn.Module) -> dict[int, Any]:
    """Return copies on the CPU for `deepcopy` to use instead of parameters and buffers, by id."""
    parameters = {id(p): nn.Parameter(p.detach().cpu(), False) for p in model.parameters()}
    return parameters | {id(b): b.detach().cpu() for b in model.buffers()}


def summed(losses: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Σᵢ wᵢ Lᵢ of losses (n,) with its graph, even under no_grad.

    With a vector and `grad_outputs` instead, torch first imports its symbolic shapes, which takes a
    third of a second.
    """
    with torch.enable_grad():
        return losses.sum() if weights is None else (losses * weights).sum()


def slopes(
    losses: Tensor, by: Iterable[Tensor], weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return ∇ Σᵢ wᵢ Lᵢ of losses (n,) by each tensor; zeros for tensors that are not used."""
    inputs = list(by)
    if not losses.requires_grad:
        return tuple(map(torch.zeros_like, inputs))
    return torch.autograd.grad(
        summed(losses, weights),
        inputs,
        retain_graph=True,  # the model may own a part of the graph and need it again
        allow_unused=True,
        materialize_grads=True,
    )


def unfused() -> AbstractContextManager[None]:
    """Run recurrent layers step by step: fused kernels hide the steps and differentiate once."""
    return switched_off(torch.backends.mkldnn, torch.backends.cudnn)


@contextmanager
def double_precision() -> Iterator[None]:
    """Make tensors that a forward pass creates float64, like its inputs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def differentiable_inputs(batch: Batch) -> Batch:
    """Return the batch with floating-point inputs that require a gradient.

    The caller's tensors stay unchanged. The model gets copies that are not leaves, so it may write
    to them in place.
    """

    def leaf(t: Tensor) -> Tensor:
        differentiable = t.is_floating_point() or t.is_complex()
        return t.detach().requires_grad_(True) if differentiable else t

    return replace(batch, inputs=map_tensors(leaf, batch.inputs))
