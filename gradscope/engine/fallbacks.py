"""The time that backends take for a batch, to choose the fastest if `hooks` refuses a model."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from gradscope.backends.base import Evaluate, backend_of, refusing
from gradscope.blocks import Clock
from gradscope.core.batch import Batch
from gradscope.errors import CoupledSamplesError, ModelError, RefusedError
from gradscope.model.problem import Problem, RowKind

_FEW = 4  # samples that a backend computes first
_CALLS = 3  # calls that are timed, at most; the shortest time counts
_LONG = 0.5  # seconds of calls: noise does not matter in such long calls
_CLOSE = 2.0  # times the shortest time: backends that are this fast are timed again in turn


def measure(
    problem: Problem,
    names: Sequence[str],
    rows: RowKind,
    batch: Batch,
    note: Callable[[str], None],
    timed: Clock,
    *,
    own_loss: bool = False,
) -> dict[str, float]:
    """Return the seconds of the backends `names` for a batch, except those that refuse the model.

    `loop` is last in `names`. It takes the same time for each sample, so a few samples are enough.
    No other backend continues with the whole batch if it is slower for these few samples than
    `loop` is for all. `note` is called with the reason of each refusal.
    """
    one, few = batch.select(slice(0, 1)), batch.select(slice(0, _FEW))
    spent: dict[str, float] = {}
    whole: dict[str, Callable[[], float]] = {}  # returns the seconds of the whole batch
    with ExitStack() as opened:
        for name in reversed(names):
            backend = backend_of(name, rows, own_loss=own_loss)
            try:
                with refusing(name, problem.model, ""):
                    evaluate = opened.enter_context(backend(problem))
                    evaluate(one)  # a first call takes longer
                    run = partial(_shortest, timed, problem, evaluate, 1 + (name == "hooks"))
                    seconds = run(few)
                    if name == "loop":
                        scale = len(batch) / len(few)
                        seconds, whole[name] = seconds * scale, partial(run, few, scale)
                    elif seconds < min(spent.values(), default=math.inf):
                        seconds, whole[name] = run(batch), partial(run, batch)
                    spent[name] = seconds
            except (CoupledSamplesError, ModelError):
                return {}  # the proof explains the error
            except RefusedError as error:
                note(f"{name} refused: {error.what}")
        close = [k for k in whole if spent[k] < _CLOSE * min(spent.values())]
        if len(close) > 1 and max(spent[k] for k in close) < _LONG:
            for name in close:  # another process may have slowed one of them
                spent[name] = min(spent[name], whole[name]())
    return spent


def _shortest(
    timed: Clock, problem: Problem, evaluate: Evaluate, calls: int, part: Batch, scale: float = 1.0
) -> float:
    """Return `scale` times the shortest time of some calls, at least `calls`.

    Each call has the samples in another order. If the program depends on single samples, `hooks`
    then analyses it anew, as in later batches. Otherwise only the first call has an analysis.
    """
    times: list[float] = []
    while len(times) < calls or (len(times) < _CALLS and sum(times) < _LONG):
        order = torch.arange(len(part)).roll(len(times))
        times.append(timed(partial(evaluate, part.select(order)), problem.device)[0])
    return scale * min(times)
