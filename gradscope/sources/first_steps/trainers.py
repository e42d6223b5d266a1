"""Training loops of libraries: Lightning's, and the Trainer of transformers."""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from gradscope.sources.first_steps.modules import file_of
from gradscope.sources.first_steps.places import Feed, Place, Recorded
from gradscope.sources.first_steps.values import copied, leaves, same
from gradscope.sources.loops import Round

_STEP, _GIVEN = "_step", "_given"  # names in the code of a round


def steps_of_trainers(
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


def place_of_trainer(
    trainer: Any,
    step: Callable[[Any], Any],
    batch: Any,
    yielded: Iterable[tuple[Any, Any]],
    feed: Feed,
) -> Place:
    """Return the loop of a library, with its round."""
    kind = type(trainer)
    method = "training_step" if isinstance(trainer, nn.Module) else "compute_loss"
    code = getattr(trainer, method).__func__.__code__
    value = ast.parse(f"{_STEP}({_GIVEN})", mode="eval").body
    of = Round(ast.Name(_GIVEN, ast.Store()), (), value, 0, range(0), (0, 0))
    place = Place(code, file_of(kind), of, {"__builtins__": __builtins__}, feed)
    loaders = [loader for loader, made in yielded if same(*map(leaves, (batch, made)))]
    place.rounds = [Recorded({_STEP: step}, copied(batch), next(iter(loaders), None))]
    place.name = f"The loss is that of {kind.__name__}.{method}, for one sample each."
    return place
