"""The model, the data and the loss of a training script, taken from its own first steps.

The script is run as `python FILE.py ARGUMENTS` would run it, until its second training step. At
the first call of backward(), the loop over batches is found in the stack. At the next round of
this loop, its variables are recorded: the batch, and everything that the lines of the loop read. At
the next call of backward() the script is stopped. The lines of the loop are then the loss, for one
sample at a time.
"""

import ast
import copy
import inspect
import io
import math
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gradscope.core.batch import tensors
from gradscope.core.texts import count, listed
from gradscope.errors import ModelError
from gradscope.model.copies import graph_leaves
from gradscope.model.locate import first_line, is_installed
from gradscope.model.randomness import seeded
from gradscope.sources.loops import SIZED, Round, rounds
from gradscope.sources.variables import Variables

_STEP, _GIVEN = "_step", "_given"  # names in the code for trainers of libraries
_MODULE = "<module>"  # the name of the code of a file
_LOSS = "make_loss"  # the name of the function in the code of a round
_ENOUGH, _SECONDS = 64, 5.0  # samples to record of batches that no DataLoader makes, and seconds
_AHEAD = 4  # batches of DataLoaders to remember
_BYTES = 2**28  # of samples that are kept in memory
_CLOSE = 1e-4  # the largest relative difference of two losses that are equal
_DEPTH, _MOST = 3, 256  # how deep, and in how many entries, objects are searched for modules
_WRAPPERS = ("module", "_orig_mod")  # of DataParallel, and of torch.compile
_ELSE = (
    "Name the parts instead: `gradscope init CHECKPOINT FILE.py:LOADER` reads the script without "
    "running it."
)
_TRAINING = (
    "The script's loss needs outputs of the training mode: in evaluation mode, modules of its own "
    "classes stay in training mode. Batch normalisation and dropout of torch do not."
)
_AUGMENTED = "samples are random, as with augmentation: each sample is one draw, seeded with its "
_AUGMENTED += "position"


class _Reached(BaseException):
    """Ends a script at its second training step; a BaseException, so that it is not caught."""


class _FoundLoss(BaseException):
    """Ends the lines of a loop at backward(), with the loss."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@dataclass
class Step:
    """What a script trains."""

    model: nn.Module
    samples: Dataset[Any]  # (2,) int64 for each sample: its position, and a checksum
    loss: Callable[..., Tensor]  # (model, samples (n, 2), None) -> (n,)
    notes: tuple[str, ...]


@dataclass
class _Recorded:
    """The start of a round."""

    values: dict[str, Any]  # the variables
    batch: Any
    loader: "DataLoader[Any] | None"  # the DataLoader that made the batch
    random: tuple[Any, ...] = ()  # the states of the random generators
    loss: float = math.nan  # the script's loss
    weights: Sequence[Tensor] = ()  # the parameters that it depends on


@dataclass
class _Place:
    """A loop that runs, or a function that is called once a batch."""

    code: CodeType
    file: Path
    round: Round
    names: dict[str, Any]  # the global names
    recorded: list[_Recorded] = field(default_factory=list)
    name: str = ""  # a sentence about the lines, if they belong to a library
    losses: int = -1  # the calls of backward() in the round that runs, or -1 outside of a round
    several: bool = False  # whether a round calls backward() more than once

    @property
    def done(self) -> list[_Recorded]:
        """The rounds whose loss is known, or the round of the first backward()."""
        return [each for each in self.recorded if not math.isnan(each.loss)] or self.recorded[:1]

    @property
    def loader(self) -> "DataLoader[Any] | None":
        """The DataLoader that made the batches."""
        return self.done[-1].loader if self.done else None

    def take(self, frame: FrameType, yielded: "Iterable[tuple[Any, Any]]") -> None:
        """Record the start of a round; `yielded` are DataLoaders and their last batches."""
        batch = _value_of(self.round.target, frame)
        own = _leaves(batch)
        loaders = (loader for loader, made in yielded if _same(own, _leaves(made)))
        recorded = _Recorded({**frame.f_locals}, _copied(batch), next(loaders, None))
        recorded.random = _random_states()
        self.recorded.append(recorded)
        self.losses = 0

    def told(self) -> str:
        """Return a sentence about the lines."""
        if self.name:
            return self.name
        first, last = self.round.lines
        told = f"The loss is that of lines {first} to {last} of {self.file.name}, for one sample "
        told += "each."
        if self.several:
            told += f" The loop calls backward() several times a round; line {last} is the first."
        return told


@dataclass
class FirstSteps:
    """Watches a script that trains."""

    path: Path  # its file
    places: list[_Place] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)  # that the loss depends on
    modules: dict[str, nn.Module] = field(default_factory=dict)  # the modules of the script
    line: str = ""  # the first line that calls backward()
    # DataLoaders and their last batches: accelerate reads one batch ahead
    yielded: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=_AHEAD))
    since: float = 0.0
    ended: bool = False
    inside: bool = False  # whether backward() runs

    def run(self, script: Callable[[], None]) -> None:
        """Run a script up to its second training step, and let its exceptions through."""
        with self._watching(), suppress(_Reached):
            try:
                script()
            except SystemExit:
                if not self.places:
                    raise

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch calls of backward(), and batches of DataLoaders, in the body."""
        traced = sys.gettrace()
        backward: Any = Tensor.backward
        iterate: Any = DataLoader.__iter__

        def noted_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.inside:  # torch's backward() calls itself if a torch function mode is active
                return backward(loss, *args, **kwargs)
            self._at_backward(loss, sys._getframe(1))
            self.inside = True
            try:
                return backward(loss, *args, **kwargs)
            finally:
                self.inside = False

        def noted_iterate(loader: Any) -> Iterator[Any]:
            return _noted(iterate(loader), lambda batch: self._note(loader, batch))

        Tensor.backward = noted_backward  # type: ignore[assignment, method-assign]
        DataLoader.__iter__ = noted_iterate  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            sys.settrace(traced)
            Tensor.backward = backward  # type: ignore[method-assign]
            DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _note(self, loader: Any, batch: Any) -> None:
        self.yielded.appendleft((loader, batch))

    def _at_backward(self, loss: Tensor, frame: FrameType) -> None:
        """Find the loops at the first call of backward(); end the script at a later one."""
        if self.ended:
            raise _Reached
        if not self.line:
            self._find(loss, frame)
            self.ended = not self.places
            if self.ended:
                raise _Reached
            return
        for place in self.places:
            if place.losses >= 0:
                place.losses += 1
                place.several |= place.losses > 1
            if place.losses == 1:
                place.recorded[-1].loss = float(loss.detach())
                if len(place.done) == 1:
                    place.recorded[-1].weights = [p.detach().clone() for p in self.parameters]
        known = [place for place in self.places if not math.isnan(place.done[-1].loss)]
        if not known:
            return
        rows = max(sum(_size(each.batch) for each in place.done) for place in known)
        late = time.perf_counter() - self.since > _SECONDS
        if rows >= _ENOUGH or late or any(place.loader is not None for place in known):
            self.ended = True
            raise _Reached

    def _find(self, loss: Tensor, frame: FrameType | None) -> None:
        """Find the loops over batches, and watch their next rounds."""
        found: list[FrameType] = []
        every: list[FrameType] = []
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            every.append(frame)
            if not is_installed(file) and file.is_file():
                found.append(frame)
            frame = frame.f_back
        self.line = "backward()"
        if found:
            name = Path(found[0].f_code.co_filename).name
            self.line = f"line {found[0].f_lineno} of {name}: backward()"
        self.since = time.perf_counter()
        self.parameters = [p for p in graph_leaves(loss) if isinstance(p, nn.Parameter)]
        self.modules = _modules_of(found)
        for trainer, step, batch in _steps_of_trainers(every):
            self.places = [_place_of_trainer(trainer, step, batch, self.yielded)]
            self.modules |= _modules_of_values({type(trainer).__name__: trainer})
            self.ended = True
            raise _Reached
        for frame in found:
            for place in _places_of(frame):
                place.take(frame, self.yielded)  # if there is no second round
                place.losses = -1
                self.places.append(place)
                frame.f_trace = self._trace_lines
        sys.settrace(self._trace_calls)

    def _trace_calls(self, frame: FrameType, event: str, _: Any) -> Any:
        own = [place for place in self.places if place.code is frame.f_code]
        for place in own:
            if not place.round.head:
                place.take(frame, self.yielded)
        return self._trace_lines if own else None

    def _trace_lines(self, frame: FrameType, event: str, _: Any) -> Any:
        for place in self.places if event == "line" else ():
            if place.code is not frame.f_code or not place.round.head:
                continue
            if frame.f_lineno == place.round.head:
                place.losses = -1
            if frame.f_lineno in place.round.start and place.losses != 0:
                place.take(frame, self.yielded)
        return self._trace_lines

    def step(self) -> Step:
        """Return what the script trains.

        Raises:
            ModelError: The script ended without a training step, or its loop is not understood.
        """
        if not self.line:
            raise ModelError(
                "the script ended, and did not call backward()",
                where=str(self.path),
                remedy="Give the arguments with which it trains: `argv` under [model] in the run "
                "file, or `gradscope init CHECKPOINT FILE.py -- ARGUMENTS`. A script that trains "
                f"in other processes is not followed. {_ELSE}",
            )
        if not self.places:
            what = f"{self.line} is called, but not in a loop over batches that gradscope finds"
            raise ModelError(what, where=str(self.path), remedy=_ELSE)
        model = _model_of(self.modules, self.parameters, self.path)
        tried = [_tried(place, model, self.parameters) for place in self.places]
        best = max(tried, key=lambda each: each.rank)  # the first of equal ones: the innermost
        if best.failed is not None:
            raise best.failed
        return best.step(model)


def _noted(batches: Iterator[Any], note: Callable[[Any], None]) -> Iterator[Any]:
    for batch in batches:
        note(batch)
        yield batch


def _places_of(frame: FrameType) -> Iterator[_Place]:
    """Yield the loops over batches that run in a frame, the innermost first."""
    file = Path(frame.f_code.co_filename)
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(file.read_bytes(), str(file))
        code = frame.f_code
        function = None if code.co_name == _MODULE else (code.co_name, code.co_firstlineno)
        for found in rounds(tree, function, frame.f_lineno, Variables(tree, file)):
            if not found.head:  # the parameters that are tensors
                assert isinstance(found.target, ast.Tuple)
                kept = [e for e in found.target.elts if tensors(_plain(_value_of(e, frame)))]
                found = replace(found, target=ast.Tuple(kept, ast.Store()))
            if _size(_value_of(found.target, frame)):
                yield _Place(code, file, found, frame.f_globals)


def _size(batch: Any) -> int:
    """Return the number of samples that a batch may have, 0 if it has no samples."""
    if isinstance(batch, list):
        return len(batch)
    found = _leaves(batch)
    return max([*(t.shape[0] for t in found if t.dim()), len(found) > 0])


def _value_of(target: ast.expr, frame: FrameType) -> Any:
    """Return the value of the variables of a batch, or None."""
    read = copy.deepcopy(target)
    for node in ast.walk(read):
        if hasattr(node, "ctx"):
            node.ctx = ast.Load()
    code = compile(ast.fix_missing_locations(ast.Expression(read)), "<batch>", "eval")
    with suppress(Exception):
        return eval(code, frame.f_globals, frame.f_locals)
    return None


def _plain(value: Any, depth: int = 1) -> Any:
    """Return a value with arrays of numpy as tensors, and objects as their attributes."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        return {key: _plain(v, depth) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(v, depth) for v in value)
    if depth and not isinstance(value, Tensor) and _is_object(value):
        return _plain(vars(value), depth - 1)
    return value


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists have the same tensors, or tensors with equal numbers."""
    if not some or len(some) != len(others):
        return False
    pairs = zip(some, others, strict=True)
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def _copied(value: Any) -> Any:
    """Return a deep copy of a batch, or the batch if it cannot be copied."""
    with suppress(Exception):
        return copy.deepcopy(value)
    return value


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _is_stream(loader: "DataLoader[Any]") -> bool:
    """Whether the samples of a loader have no positions."""
    data = loader.dataset
    return isinstance(data, IterableDataset) or not hasattr(type(data), "__len__")


# trainers of libraries


def _steps_of_trainers(
    frames: Sequence[FrameType],
) -> Iterator[tuple[Any, Callable[[Any], Any], Any]]:
    """Yield (trainer, function that returns the loss of a batch, batch) of libraries that train.

    They are Lightning's module with training_step, and transformers' Trainer with compute_loss.
    """
    for frame in frames:
        values = frame.f_locals
        for value in (*values.values(), getattr(values.get("self"), "trainer", None)):
            module = getattr(value, "lightning_module", value)
            if isinstance(module, nn.Module) and hasattr(module, "training_step"):
                batch = next((f.f_locals["batch"] for f in frames if "batch" in f.f_locals), None)
                yield module, partial(_loss_of_lightning, module), batch
                return
        trainer, inputs = values.get("self"), values.get("inputs")
        if hasattr(trainer, "compute_loss") and inputs is not None:
            yield trainer, partial(_loss_of_transformers, trainer), inputs
            return


def _loss_of_lightning(module: Any, batch: Any) -> Any:
    """Return the loss of Lightning's training_step, which logs nothing."""
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        several = len(inspect.signature(module.training_step).parameters) > 1
        found = module.training_step(batch, *([0] if several else []))
    finally:
        del module.log, module.log_dict
    return found["loss"] if isinstance(found, Mapping) else found


def _loss_of_transformers(trainer: Any, batch: Any) -> Any:
    """Return the loss of transformers' Trainer."""
    return trainer.compute_loss(trainer.model, {**batch})


def _place_of_trainer(
    trainer: Any, step: Callable[[Any], Any], batch: Any, yielded: Iterable[tuple[Any, Any]]
) -> _Place:
    """Return the loop of a library, with its round."""
    kind = type(trainer)
    method = "training_step" if isinstance(trainer, nn.Module) else "compute_loss"
    code = getattr(trainer, method).__func__.__code__
    value = ast.parse(f"{_STEP}({_GIVEN})", mode="eval").body
    of = Round(ast.Name(_GIVEN, ast.Store()), (), value, 0, range(0), (0, 0))
    place = _Place(code, _file_of(kind), of, {"__builtins__": __builtins__})
    loaders = [loader for loader, made in yielded if _same(*map(_leaves, (batch, made)))]
    place.recorded = [_Recorded({_STEP: step}, _copied(batch), next(iter(loaders), None))]
    place.name = f"The loss is that of {kind.__name__}.{method}, for one sample each."
    return place


def _leaves(batch: Any) -> list[Tensor]:
    return tensors(_plain(batch))


# the model


def _modules_of(frames: Iterable[FrameType]) -> dict[str, nn.Module]:
    """Return the modules in the variables of functions that run, {name: module}."""
    every: list[Mapping[str, Any]] = []
    for frame in frames:
        every.append({**frame.f_locals})
        every.append({k: v for k, v in frame.f_globals.items() if not k.startswith("__")})
    return _modules_of_values(*every)


def _modules_of_values(*tables: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules in tables of variables, and in their attributes and entries."""
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: dict[int, Any] = {}  # the values keep their ids

    def search(name: str, value: Any, depth: int) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            for wrapper in _WRAPPERS:
                value = getattr(value, wrapper, value) if wrapper in _own_names(value) else value
            found.setdefault(id(value), (name, value))
        elif isinstance(value, ModuleType | type | Tensor) or depth == 0:
            return
        elif isinstance(value, Mapping):
            for key, inner in [*value.items()][:_MOST]:
                search(str(key), inner, depth - 1)
        elif isinstance(value, list | tuple):
            for k, inner in enumerate(value[:_MOST]):
                search(f"{name}_{k}", inner, depth - 1)
        elif hasattr(value, "__dict__") and not is_installed(_file_of(type(value))):
            search(name, vars(value), depth)

    for table in tables:
        search("", table, _DEPTH)
    return {f"{name}": module for name, module in reversed(found.values())}


def _own_names(module: nn.Module) -> Iterable[str]:
    is_wrapper = type(module).__module__.partition(".")[0] == "torch"
    return module._modules.keys() if is_wrapper else ()


def _file_of(kind: type) -> Path:
    return Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _model_of(
    modules: Mapping[str, nn.Module], parameters: Sequence[nn.Parameter], path: Path
) -> nn.Module:
    """Return the smallest module with all parameters, or a module of the modules that share them.

    Raises:
        ModelError: Some parameters are in no module of the script's variables.
    """
    wanted = {id(p) for p in parameters}
    own = {name: {id(p) for p in module.parameters()} for name, module in modules.items()}
    whole = [name for name in own if wanted and wanted <= own[name]]
    if whole:
        return modules[min(whole, key=lambda name: len(own[name]))]
    parts: list[str] = []
    rest = set(wanted)
    while rest:
        best = max(own, key=lambda name: (len(own[name] & rest), -len(own[name])), default="")
        if not best or not own[best] & rest:
            shapes = listed(str(tuple(p.shape)) for p in parameters if id(p) in rest)
            raise ModelError(
                "the loss depends on parameters that are in no module of the script's variables: "
                f"{shapes}" * bool(rest),
                where=str(path),
                remedy=_ELSE,
            )
        parts.append(best)
        rest -= own[best]
    if not parts:
        raise ModelError(
            "the loss of the first backward() depends on no parameter of a module",
            where=str(path),
            remedy=_ELSE,
        )
    return nn.ModuleDict({name.replace(".", "_"): modules[name] for name in sorted(parts)})


# the choice of a loop


@dataclass
class _Tried:
    """A loop, and how well its lines give the script's loss."""

    place: _Place
    lines: "_Lines | None" = None
    notes: tuple[str, ...] = ()
    samples: "_Samples | _Recordings | None" = None
    rank: tuple[int, ...] = ()  # the best is the largest
    failed: ModelError | None = None

    def step(self, model: nn.Module) -> Step:
        """Return what the script trains."""
        assert self.lines is not None and self.samples is not None
        loss = _loss(self.lines, self.samples)
        notes = (self.place.told(), *self.notes, *self.samples.notes)
        return Step(model, self.samples, loss, notes)


def _evaluates(lines: "_Lines", recorded: _Recorded) -> bool:
    """Whether the lines run in evaluation mode; else modules of own classes keep training."""
    modes = {module: module.training for module in lines.model.modules()}
    lines.model.eval()
    try:
        lines.again(recorded)
        return True
    except Exception:
        lines.trains = [m for m in modes if type(m).__module__.partition(".")[0] != "torch"]
        lines.again(recorded)
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode


def _tried(place: _Place, model: nn.Module, parameters: Sequence[nn.Parameter]) -> _Tried:
    """Run the lines of a loop again for its first batch, with the weights of that time."""
    own = [p.detach().clone() for p in parameters]
    last = place.done[0]
    try:
        lines = _Lines(place, last.values, model)
        with torch.no_grad():
            for p, value in zip(parameters, last.weights, strict=False):
                p.copy_(value)
        found = lines.again(last)
        evaluates = _evaluates(lines, last)
    except Exception as error:
        first, end = place.round.lines
        failed = ModelError(
            f"lines {first} to {end} of {place.file.name} cannot be run again for the same batch: "
            f"{type(error).__name__}: {first_line(error)}",
            where=str(place.file),
            remedy=_ELSE,
        )
        return _Tried(place, rank=(0,), failed=failed)
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, own, strict=True):
                p.copy_(value)
    known = not math.isnan(last.loss)
    share = round(found / last.loss) if known and last.loss else 1
    right = math.isclose(found, last.loss * max(share, 1), rel_tol=_CLOSE, abs_tol=1e-8)
    notes: tuple[str, ...] = ()
    if right:
        told = f", which the script divides by {share}" if share > 1 else ""
        notes = (f"They give the script's own loss of a batch, {found:.6g}{told}.",)
    elif known:
        notes = (
            f"They give the loss {found:.6g} for a batch, but the script had {last.loss:.6g}: it "
            "may use numbers that change between the steps.",
        )
    if not evaluates:
        notes += (_TRAINING,)
    samples: _Samples | _Recordings
    if last.loader is not None and not _is_stream(last.loader):
        samples = _Samples(last.loader)
        divided = True
    else:
        samples = _Recordings(place, lines)
        divided = samples.axis is not None
    rank = (1, right, divided, place.loader is not None)
    return _Tried(place, lines, notes, samples, rank)


# the loss


class _Lines:
    """The lines of a round, which return the loss of a batch."""

    def __init__(self, place: _Place, values: Mapping[str, Any], model: nn.Module) -> None:
        self.model = model
        self.draws = False  # whether they draw random numbers of torch
        self.trains: list[nn.Module] = []  # modules that stay in training mode
        self._size: int | None = None  # the size of a batch, if one of its samples is computed
        self._dtype = _dtype_of(model)
        names = sorted(place.round.names & values.keys())
        self._carried = place.round.carried
        self._values = {name: _detached(values[name]) for name in names}
        if SIZED in place.round.names:
            self._values[SIZED] = lambda n: 1 if isinstance(n, int) and n == self._size else n
            names = [*names, SIZED]
        self._globals = place.names
        self._code = compile(place.round.code(names), str(place.file), "exec", dont_inherit=True)
        self._made: dict[torch.dtype | None, Callable[..., Any]] = {}

    def __call__(
        self, model: nn.Module, batch: Any, carried: Mapping[str, Any], size: int | None = None
    ) -> Tensor:
        """Return the loss () of a batch, with the weights and the mode of `model`.

        Args:
            model: The model, or a copy.
            batch: The batch.
            carried: Variables that the round takes from the round before.
            size: The size of the script's batches, if this batch has one sample.
        """
        self._size = size
        dtype = _dtype_of(model)
        if dtype != self._dtype:
            batch, carried = _cast(batch, dtype), _cast(carried, dtype)
        with _in_place_of(self.model, model, self.trains), _stopped_at_backward():
            try:
                found = self._of(dtype)(None, batch, **carried)
            except _FoundLoss as reached:
                found = reached.loss
        if not isinstance(found, Tensor) or found.numel() != 1:
            kind = f"{tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ModelError(f"the lines returned no loss of one number: {kind}", remedy=_ELSE)
        return found.reshape(())

    def again(self, recorded: _Recorded) -> float:
        """Return the loss of a recorded batch with the same random numbers."""
        kept = _random_states()
        try:
            _restore(recorded.random)
            with torch.no_grad():
                return float(self(self.model, _copied(recorded.batch), {}))
        finally:
            _restore(kept)

    def carried_of(self, recorded: _Recorded) -> dict[str, Any]:
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
def _stopped_at_backward() -> Iterator[None]:
    """Let backward() end the body with the loss; modules keep their modes, and print() is quiet."""
    backward, train = Tensor.backward, nn.Module.train

    def stop(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise _FoundLoss(loss)

    with ExitStack() as around:
        around.enter_context(redirect_stdout(io.StringIO()))
        around.enter_context(redirect_stderr(io.StringIO()))
        Tensor.backward = stop  # type: ignore[assignment, method-assign]
        nn.Module.train = lambda module, mode=True: module  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Tensor.backward = backward  # type: ignore[method-assign]
            nn.Module.train = train  # type: ignore[method-assign]


def _restore(states: Sequence[Any]) -> None:
    if states:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _loss(lines: _Lines, samples: "_Samples | _Recordings") -> Callable[..., Tensor]:
    """Return the loss (model, samples (n, 2), None) -> (n,), one sample at a time."""

    def loss(model: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
        found = []
        for k in inputs[..., 0].reshape(-1).tolist():
            batch, carried = samples.batch(int(k))
            with seeded(int(k)):
                found.append(lines(model, batch, carried, size=samples.size))
        return torch.stack(found)

    loss.one_by_one = True  # type: ignore[attr-defined]
    return loss


# the samples


class _Samples(Dataset[Any]):
    """The samples of a DataLoader in the order of its data set."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._data, self._collate = loader.dataset, loader.collate_fn or default_collate
        self.size = loader.batch_size  # the size of the script's batches
        if loader.batch_size is None and loader.batch_sampler is None:  # samples are batches
            self._collate = lambda samples: samples[0]
        self._kept: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        drawn = _checksum(self._read(0, 0)) != _checksum(self._read(0, 1))
        self.notes = (_AUGMENTED,) * drawn

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor([k, _checksum(self.batch(k)[0])])

    def _read(self, k: int, seed: int) -> Any:
        with seeded(seed):
            return self._collate([self._data[k]])

    def batch(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Return the batch that has only sample k, and no carried variables."""
        if k not in self._kept:
            made = self._read(k, k)
            size = sum(t.nbytes for t in _leaves(made))
            self._kept[k] = made, size
            self._bytes += size
            while self._bytes > _BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1][1]
        return _copied(self._kept[k][0]), {}


class _Recordings(Dataset[Any]):
    """The samples of batches that a script made: single rows, or whole batches."""

    def __init__(self, place: _Place, lines: _Lines) -> None:
        batches = [(each.batch, lines.carried_of(each)) for each in place.done]
        self.axis, notes = _axis_of(*batches[-1], lines)
        axes = [_same_axis(batch, self.axis) for batch, _ in batches]
        self.size = None if self.axis is None else self.axis[1]  # the size of the script's batches
        kept = [pair for pair in zip(batches, axes, strict=True) if pair[1] or self.axis is None]
        self._samples = [one for batch, axis in kept for one in _split(*batch, axis)]
        n = count(len(self._samples), "sample")
        self.notes = (f"The samples are those of the script's first batches, {n}.", *notes)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, k: int) -> Tensor:
        return torch.tensor([k, _checksum(self._samples[k])])

    def batch(self, k: int) -> tuple[Any, dict[str, Any]]:
        """Return the batch that has only sample k, and variables of the round before."""
        return _copied(self._samples[k])  # type: ignore[no-any-return]


def _axis_of(
    batch: Any, carried: Mapping[str, Any], lines: _Lines
) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """Return (axis, size) of the samples of a batch, or None for a single sample, and notes.

    The loss decides: n copies of a sample have the loss of the sample, or n times this loss.
    """
    modes = {module: module.training for module in lines.model.modules()}
    lines.model.eval()
    try:
        for axis, n in _axes(batch):
            with suppress(Exception), torch.no_grad():
                parts = _split(batch, carried, (axis, n))
                each = [_loss_of(lines, part, own, size=n) for part, own in parts]
                copies = [
                    _loss_of(lines, *_part((batch, carried), [k] * n, n, axis)) for k in (0, n - 1)
                ]
                alike = [*zip(copies, (each[0], each[-1]), strict=True)]
                if not lines.draws and not any(
                    all(math.isclose(a, b * times, rel_tol=_CLOSE) for a, b in alike)
                    for times in (1, n)
                ):
                    continue
                whole, total = _loss_of(lines, batch, carried), math.fsum(each)
                if any(math.isclose(whole, t, rel_tol=_CLOSE) for t in (total / n, total)):
                    return (axis, n), ()
                return (axis, n), (
                    f"The loss of a batch, {whole:.4g}, is neither the mean of the losses of its "
                    f"{n} samples, {total / n:.4g}, nor their sum. A row belongs to the loss of a "
                    "batch with one sample.",
                )
    finally:
        for module, mode in modes.items():
            module.training = mode
    told = (
        "Each batch is one row: its loss is not a loss of independent samples. If the script has "
        "an argument for the batch size, 1 makes each sample a row."
    )
    return None, (told,) * (_size(batch) > 1)


def _axes(batch: Any) -> list[tuple[int, int]]:
    """Return the axes that may be the samples', of the first entry of a batch, with their sizes."""
    if _are_samples(batch):
        return [(0, len(batch))]
    entries = [batch]
    if isinstance(batch, Mapping):
        entries = [*batch.values()]
    elif isinstance(batch, tuple | list):
        entries = [*batch]
    elif _is_object(batch):
        entries = [*vars(batch).values()]
    sizes = [each for entry in entries if (each := _sizes(entry))]
    found = [*enumerate(sizes[0][:2])] if sizes else []
    return [(axis, n) for axis, n in found if n > 1 and all(n in each for each in sizes)]


def _same_axis(batch: Any, axis: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the sample axis of another batch, which may have another number of samples."""
    return next((own for own in _axes(batch) if axis is not None and own[0] == axis[0]), None)


def _sizes(entry: Any) -> list[int]:
    """Return the sizes of axes that may be the samples', [] for a value without axes."""
    if isinstance(entry, Tensor | np.ndarray):
        return [*entry.shape]
    if not isinstance(entry, tuple | list):
        return []
    inner = [each for value in entry if (each := _sizes(value))]
    shared = [n for n in inner[0] if all(n in each for each in inner)] if inner else []
    return [*shared, len(entry)]


def _are_samples(batch: Any) -> bool:
    """Whether a batch is a list of samples."""
    several = isinstance(batch, list) and len(batch) > 1
    return several and not any(isinstance(v, Tensor | np.ndarray) for v in batch)


def _loss_of(
    lines: _Lines, batch: Any, carried: Mapping[str, Any], size: int | None = None
) -> float:
    with seeded(0):
        before = torch.get_rng_state()
        found = float(lines(lines.model, _copied(batch), _copied(carried), size=size))
        lines.draws |= not torch.equal(before, torch.get_rng_state())
        return found


def _split(batch: Any, carried: Mapping[str, Any], axis: tuple[int, int] | None) -> list[Any]:
    """Return batches of one sample each, with their carried variables."""
    if axis is None:
        return [(batch, carried)]
    return [_part((batch, carried), [k], axis[1], axis[0]) for k in range(axis[1])]


def _part(value: Any, rows: list[int], n: int, axis: int, depth: int = 1) -> Any:
    """Return some of the n samples of a value; an axis of size n belongs to the samples."""
    if isinstance(value, Tensor | np.ndarray):
        every = [axis, *(k for k in range(value.ndim) if k != axis)]
        own = next((k for k in every if k < value.ndim and value.shape[k] == n), None)
        return value if own is None else value[(slice(None),) * own + (rows,)]
    part = partial(_part, rows=rows, n=n, axis=axis, depth=depth)
    if isinstance(value, Mapping):
        return {key: part(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        if len(value) == n and _sizes(value)[:-1].count(n) == 0:
            return type(value)([value[k] for k in rows])
        return type(value)([part(v) for v in value])
    if depth and _is_object(value):
        made = copy.copy(value)
        vars(made).update({k: part(v, depth=depth - 1) for k, v in vars(value).items()})
        return made
    return value


def _is_object(value: Any) -> bool:
    """Whether a value is a batch with attributes, such as torchtext makes."""
    plain = hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | nn.Module)
    return plain and not callable(value)


def _checksum(batch: Any) -> int:
    """Return a number that depends on all tensors of a batch."""
    found = 0
    for t in _leaves(batch):
        plain = t.detach().cpu().contiguous().reshape(-1)
        found = crc32(plain.view(torch.uint8).numpy().data, found)
    return found
