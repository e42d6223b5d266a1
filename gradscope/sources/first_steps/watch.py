"""Watches a script that trains, until its second step."""

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from gradscope.errors import ModelError
from gradscope.model.locate import is_installed
from gradscope.sources.first_steps.choice import Step, chosen
from gradscope.sources.first_steps.modules import modules_of, modules_of_values
from gradscope.sources.first_steps.places import Batches, Feed, Place, places_of
from gradscope.sources.first_steps.trainers import place_of_trainer, steps_of_trainers
from gradscope.sources.first_steps.values import ELSE, copied, size_of

_ENOUGH, _SECONDS = 64, 5.0  # samples to record of batches that no DataLoader makes, and seconds
_AHEAD = 4  # batches of DataLoaders to remember


# arguments of a DataLoader
_NO_WORKERS: dict[str, Any] = {"num_workers": 0, "persistent_workers": False, "timeout": 0}
_NO_WORKERS |= {"prefetch_factor": None, "multiprocessing_context": None}


class _Reached(BaseException):
    """Ends a script at its second training step; a BaseException, so that it is not caught."""


@dataclass
class FirstSteps:
    """Watches a script that trains."""

    path: Path  # its file
    places: list[Place] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # in its variables
    optimised: dict[int, Tensor] = field(default_factory=dict)  # the parameters of its optimizers
    sums: dict[int, float] = field(
        default_factory=dict
    )  # the sum of each parameter at the first step
    line: str = ""  # the first line that calls backward()
    # DataLoaders and their last batches: accelerate reads one batch ahead
    yielded: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=_AHEAD))
    feed: Feed = field(default_factory=Feed)
    since: float = 0.0
    ended: bool = False
    inside: bool = False  # whether backward() runs
    stepping: bool = False  # whether step() of an optimizer runs, which may call a closure

    def run(self, script: Callable[[], None]) -> None:
        """Run a script up to its second training step, and let its exceptions through."""
        with self._watching(), suppress(_Reached):
            try:
                script()
            except SystemExit:
                if not self.places:
                    raise
        for place in self.places:
            place.end()

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
                f"in other processes is not followed. {ELSE}",
            )
        if not any(place.done for place in self.places):
            what = f"{self.line} is called, but not in a loop over batches that gradscope finds"
            raise ModelError(what, where=str(self.path), remedy=ELSE)
        every = {id(p): p for module in self.modules.values() for p in module.parameters()}
        # an average of the weights, such as a teacher, also changes
        trained = self.optimised | {
            k: p for k, p in every.items() if k in self.sums and _sum(p) != self.sums[k]
        }
        return chosen(self.places, self.modules, trained, self.path)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch backward(), optimizers, and batches of DataLoaders in the body."""
        traced = sys.gettrace()
        backward: Any = Tensor.backward
        autograd: Any = torch.autograd.backward
        iterate: Any = DataLoader.__iter__
        add: Any = Optimizer.add_param_group

        def noted_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.inside:  # torch's backward() calls itself if a torch function mode is active
                return backward(loss, *args, **kwargs)
            self._at_backward(loss, sys._getframe(1))
            self.inside = True
            try:
                return backward(loss, *args, **kwargs)
            finally:
                self.inside = False

        def noted_autograd(losses: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside or not isinstance(losses, Tensor):
                return autograd(losses, *args, **kwargs)
            return noted_backward(losses, *args, **kwargs)

        def noted_iterate(loader: Any) -> Iterator[Any]:
            return Batches(iterate(loader), self.feed, partial(self._note, loader))

        def noted_add(optimizer: Any, group: dict[str, Any]) -> None:
            add(optimizer, group)
            self.optimised.update((id(p), p) for p in optimizer.param_groups[-1]["params"])

        def after_step(*_: Any) -> None:
            self.stepping = False

        hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._at_step()),
            register_optimizer_step_post_hook(after_step),
        ]

        with ExitStack() as around:
            around.callback(sys.settrace, traced)
            for kind, name, function in (
                (Tensor, "backward", noted_backward),
                (torch.autograd, "backward", noted_autograd),
                (DataLoader, "__iter__", noted_iterate),
                (DataLoader, "__init__", _with(DataLoader.__init__, _NO_WORKERS)),
                (GradScaler, "__init__", _with(GradScaler.__init__, {"enabled": False})),
                (Optimizer, "add_param_group", noted_add),
            ):
                around.enter_context(patch.object(kind, name, function))
            for hook in hooks:
                around.callback(hook.remove)
            yield

    def _note(self, loader: Any, batch: Any) -> None:
        """Note a batch of a DataLoader."""
        self.yielded.appendleft((loader, batch))
        for place in self.places:
            if place.round.fetches and place.open is not None:
                place.open.fetched.append(copied(batch))

    def _at_backward(self, loss: Tensor, frame: FrameType) -> None:
        """Find the loops at the first call of backward(); note the losses of later calls."""
        if self.ended:
            raise _Reached
        if not self.line:
            self._find(loss, frame)
        for place in self.places:
            if place.open is not None:
                called = _frame_of(place, frame)
                keep = not any(each.weights for each in place.rounds[1:-1])
                if called is not None:
                    place.open.add(loss, called.f_lineno, keep=keep)
                    if self.stepping:
                        place.end()

    def _at_step(self) -> None:
        """End the rounds at a step of an optimizer, and the script if enough is known."""
        for place in self.places:
            if place.open is not None and place.open.losses:
                place.end()
        self._end_if_known()
        self.stepping = True

    def _end_if_known(self) -> None:
        known = [place for place in self.places if any(e.ended for e in place.rounds[1:])]
        known = [place for place in known if place.done]
        if not known:
            return
        rows = max(sum(size_of(each.batch) for each in place.done) for place in known)
        late = time.perf_counter() - self.since > _SECONDS
        if rows >= _ENOUGH or late or known[0].done[0].loader is not None:  # the innermost loop
            self.ended = True
            raise _Reached

    def _find(self, loss: Tensor, frame: FrameType | None) -> None:
        """Find the loops over batches, and watch their next rounds."""
        own: list[FrameType] = []
        every: list[FrameType] = []
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            every.append(frame)
            if not is_installed(file) and file.is_file():
                own.append(frame)
            frame = frame.f_back
        self.line = "backward()"
        if own:
            name = Path(own[0].f_code.co_filename).name
            self.line = f"line {own[0].f_lineno} of {name}: backward()"
        self.since = time.perf_counter()
        self.modules = modules_of(own)
        every_parameter = (p for module in self.modules.values() for p in module.parameters())
        self.sums = {id(p): _sum(p) for p in every_parameter}
        for trainer, step, batch in steps_of_trainers(every):
            place = place_of_trainer(trainer, step, batch, self.yielded, self.feed)
            place.rounds[0].add(loss, 0, keep=False)
            self.places = [place]
            self.modules |= modules_of_values({type(trainer).__name__: trainer})
            self.ended = True
            raise _Reached
        for each in own:
            for place in places_of(each, self.feed):
                place.take(each, self.yielded)  # if there is no second round
                self.places.append(place)
                each.f_trace = self._trace_lines
        self.ended = not self.places
        if self.ended:
            raise _Reached
        sys.settrace(self._trace_calls)

    def _trace_calls(self, frame: FrameType, event: str, _: Any) -> Any:
        own = [place for place in self.places if place.code is frame.f_code]
        for place in own:
            if not place.round.head:
                self._start(place, frame)
        return self._trace_lines if own else None

    def _trace_lines(self, frame: FrameType, event: str, _: Any) -> Any:
        for place in self.places if event == "line" else ():
            if place.code is not frame.f_code or not place.round.head:
                continue
            if frame.f_lineno == place.round.head:
                place.end()
            starts = place.open is None or bool(place.open.losses)
            if frame.f_lineno in place.round.start and starts:
                self._start(place, frame)
        return self._trace_lines

    def _start(self, place: Place, frame: FrameType) -> None:
        """Record the start of a round, and end the script if enough is known."""
        place.end()
        self._end_if_known()
        place.take(frame, self.yielded)


def _with(function: Any, values: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that replaces arguments."""

    def called(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(function).bind(*args, **kwargs)
        given.arguments |= values
        return function(*given.args, **given.kwargs)

    return called


def _sum(p: Tensor) -> float:
    return float(p.detach().double().sum())


def _frame_of(place: Place, frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a place's function in a stack."""
    while frame is not None and frame.f_code is not place.code:
        frame = frame.f_back
    return frame
