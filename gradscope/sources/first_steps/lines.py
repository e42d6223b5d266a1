"""The lines of a round as the loss of a batch."""

import copy
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from gradscope.core.batch import tensors
from gradscope.errors import ModelError
from gradscope.model.copies import graph_leaves
from gradscope.model.randomness import seeded
from gradscope.sources.first_steps.places import Place, Recorded
from gradscope.sources.first_steps.values import ELSE, copied, random_states, restore, same_states
from gradscope.sources.loops import SIZED

_LOSS = "make_loss"  # the name of the function in the code of a round


class _FoundLoss(BaseException):
    """Ends the lines of a loop at backward()."""


class Lines:
    """The lines of a round, which return the loss of a batch.

    Attributes:
        model: The module that the lines use, whose weights are replaced for a call.
        draws: Whether the lines draw random numbers of torch.
        trains: Modules that stay in training mode.
        used: The modules that a call of `again` used.
        calls: The number of calls of backward() in the last evaluation.
        sizes: The sizes of batches that the lines read, such as args.batch_size.
    """

    def __init__(self, place: Place, recorded: Recorded, model: nn.Module) -> None:
        self.model = model
        self.draws = False
        self.trains: list[nn.Module] = []
        self.used: list[nn.Module] = []
        self.sizes = set[int]()
        self.calls = 0
        self._most = max(len(recorded.lines), 1)  # calls of backward(), whose losses are added
        self._size: tuple[int, int] | None = None  # of the script's batches, and of this batch
        self._dtype = _dtype_of(model)
        self._feed, self._fetches = place.feed, place.round.fetches
        self._carried = place.round.carried
        own = place.round.names & recorded.values.keys()
        self._values = {name: _detached(recorded.values[name]) for name in sorted(own)}
        if SIZED in place.round.names:
            self._values[SIZED] = self._sized
        self._globals = place.names
        code = place.round.code([*self._values])
        self._code = compile(code, str(place.file), "exec", dont_inherit=True)
        self._made: dict[torch.dtype | None, Callable[..., Any]] = {}

    def __call__(
        self,
        model: nn.Module,
        batch: Any,
        carried: Mapping[str, Any],
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the loss () of a batch, with the weights and the mode of `model`.

        Args:
            model: The model, or a copy.
            batch: The batch.
            carried: Variables that the round takes from the round before.
            size: The size of the script's batches, and of this batch, if they differ.

        Raises:
            ModelError: The loss is not one number.
        """
        self._size = size
        dtype = _dtype_of(model)
        if dtype != self._dtype:
            batch, carried = _cast(batch, dtype), _cast(carried, dtype)
        feeding = self._feed.giving(batch) if self._fetches else nullcontext()
        ended = _ended_at_backward(self._most)
        with feeding, _in_place_of(self.model, model, self.trains), ended as losses:
            try:
                found = self._of(dtype)(None, batch, **carried)
            except _FoundLoss:
                found = None
        self.calls = len(losses)
        found = torch.stack(losses).sum() if losses else found  # fewer calls for a small batch
        if not isinstance(found, Tensor) or found.numel() != 1:
            kind = f"{tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ModelError(f"the lines returned no loss of one number: {kind}", remedy=ELSE)
        return found.reshape(())

    def again(self, recorded: Recorded) -> float:
        """Return the loss of a recorded batch with the same random numbers.

        Raises:
            ModelError: The lines do not use all parameters that the script's loss depends on.
        """
        kept, used = random_states(), dict.fromkeys(self.used)
        hook = register_module_forward_pre_hook(lambda module, _: used.setdefault(module))
        try:
            restore(recorded.random)
            with torch.enable_grad():
                loss = self(self.model, copied(recorded.batch), {})
            if not recorded.parameters.keys() <= {id(leaf) for leaf in graph_leaves(loss)}:
                raise ModelError("the lines do not use all parameters of the loss", remedy=ELSE)
            return float(loss.detach())
        finally:
            restore(kept)
            hook.remove()
            self.used = [*used]

    def value(
        self,
        batch: Any,
        carried: Mapping[str, Any],
        size: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> float:
        """Return the loss of a batch with fixed random numbers; see `__call__`."""
        with seeded(seed):
            before = random_states()
            found = float(self(self.model, copied(batch), copied(carried), size=size))
            self.draws |= not same_states(before, random_states())
            return found

    def _sized(self, n: Any) -> Any:
        """Return the size of the batch that is computed in place of the script's size."""
        self.sizes |= {n} if isinstance(n, int) else set()
        replaces = self._size is not None and isinstance(n, int) and n == self._size[0]
        return self._size[1] if replaces and self._size is not None else n

    def carried_of(self, recorded: Recorded) -> dict[str, Any]:
        """Return the tensors that a round takes from the round before."""
        own = {k: v for k, v in recorded.values.items() if k in self._carried}
        return {k: _detached(v) for k, v in own.items() if tensors(v)}

    def _of(self, dtype: torch.dtype | None) -> Callable[..., Any]:
        if dtype not in self._made:
            exec(self._code, self._globals)
            values = self._values
            if dtype != self._dtype:
                values = {k: _cast(v, dtype, self.model) for k, v in values.items()}
            self._made[dtype] = self._globals.pop(_LOSS)(**values)
        return self._made[dtype]


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _detached(value: Any) -> Any:
    """Return a variable without the graph of an earlier round."""
    if isinstance(value, Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
        return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value
    return value


def _cast(value: Any, dtype: torch.dtype | None, model: nn.Module | None = None) -> Any:
    """Return a value with its floating-point tensors in a dtype; also modules, but `model`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_cast(v, dtype, model) for v in value)
    if type(value) in (tuple, list):
        return type(value)(_cast(v, dtype, model) for v in value)
    if type(value) is dict:
        return {key: _cast(v, dtype, model) for key, v in value.items()}
    if isinstance(value, nn.Module) and not any(m is value for m in _parts(model)):
        with suppress(Exception):
            return copy.deepcopy(value).to(dtype=dtype)
    return value


def _parts(model: nn.Module | None) -> Iterable[nn.Module]:
    return () if model is None else model.modules()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode in the body, and each module back in its mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _in_place_of(own: nn.Module, given: nn.Module, trains: Collection[nn.Module]) -> Iterator[None]:
    """Let a module have the tensors, the attributes and the mode of another one in the body.

    The modules `trains` of `own` are in training mode.
    """
    pairs = [*zip(own.modules(), given.modules(), strict=True)]
    kept = [{**vars(module)} for module, _ in pairs]
    try:
        for module, other in pairs:
            vars(module).update({k: v for k, v in vars(other).items() if k != "_modules"})
        for module in trains:
            module.training = True
        yield
    finally:
        for (module, _), values in zip(pairs, kept, strict=True):
            vars(module).clear()
            vars(module).update(values)


@contextmanager
def _ended_at_backward(calls: int) -> Iterator[list[Tensor]]:
    """Let a call of backward() end the body; yield a list for the losses of all calls.

    Modules keep their modes, and print() is quiet.
    """
    losses: list[Tensor] = []

    def end(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.sum())
        if len(losses) >= calls:
            raise _FoundLoss

    with ExitStack() as around:
        around.enter_context(redirect_stdout(io.StringIO()))
        around.enter_context(redirect_stderr(io.StringIO()))
        around.enter_context(patch.object(Tensor, "backward", end))
        around.enter_context(patch.object(torch.autograd, "backward", end))
        around.enter_context(patch.object(nn.Module, "train", lambda module, mode=True: module))
        # it would wait for gradients of other processes
        around.enter_context(patch.object(DistributedDataParallel, "forward", _of_module))
        yield losses


def _of_module(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)
