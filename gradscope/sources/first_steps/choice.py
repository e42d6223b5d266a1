"""The choice of the loop whose lines give the script's loss."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gradscope.core.texts import listed
from gradscope.errors import CoupledSamplesError, GradscopeError, ModelError
from gradscope.model.locate import describe_raised
from gradscope.model.randomness import seeded
from gradscope.sources.first_steps.lines import Lines, evaluating
from gradscope.sources.first_steps.modules import forget_graphs, model_of
from gradscope.sources.first_steps.places import Place, Recorded
from gradscope.sources.first_steps.samples import (
    CLOSE,
    Recordings,
    Samples,
    axes_of,
    independence,
    is_stream,
)
from gradscope.sources.first_steps.values import ELSE, leaves

_TRAINING = (
    "The script's loss needs outputs of the training mode: in evaluation mode, modules of its own "
    "classes stay in training mode. Batch normalisation and dropout of torch do not."
)


@dataclass(frozen=True)
class Step:
    """What a script trains."""

    model: nn.Module
    samples: Dataset[Any]  # (2,) int64 for each sample: its position, and a checksum
    loss: Callable[..., Tensor]  # (model, samples (n, 2), None) -> (n,)
    notes: tuple[str, ...]
    # how well the lines give the script's loss: right, divided into samples, of a DataLoader
    rank: tuple[bool, bool, bool]


def chosen(
    places: Sequence[Place],
    modules: Mapping[str, nn.Module],
    trained: Mapping[int, Tensor],
    path: Path,
) -> Step:
    """Return what the lines of the loop train that fits best.

    Args:
        places: The loops, the innermost first.
        modules: The modules in the script's variables.
        trained: The parameters that the training changes, by id.
        path: The script.

    Raises:
        ModelError: No loop gives a loss, or its parameters are in no module.
    """
    found, failed = list[Step](), list[GradscopeError]()
    for place in (each for each in places if each.done):
        try:
            found.append(_step(place, modules, trained, path))
            if all(found[-1].rank):
                return found[-1]
        except (ModelError, CoupledSamplesError) as error:
            failed.append(error)
    coupled = [each for each in failed if isinstance(each, CoupledSamplesError)]
    if coupled or not found:
        raise [*coupled, *failed][0]
    return max(found, key=lambda each: each.rank)


def _step(
    place: Place, modules: Mapping[str, nn.Module], trained: Mapping[int, Tensor], path: Path
) -> Step:
    """Run the lines of a loop again for its first batch, with the weights of that time."""
    first = place.done[0]
    place = place.of_lines(first.lines)
    model = model_of(modules, first.parameters, path)
    notes: tuple[str, ...] = ()
    with _weights_of(first):
        lines = Lines(place, first, model)
        found = _again(lines, first, place)
        others = _others(modules, lines)
        if parts := [name for name, own in others.items() if own & trained.keys()]:
            every = {id(p): p for name in parts for p in modules[name].parameters()}
            model = model_of(modules, first.parameters | every, path)
            lines = Lines(place, first, model)
            others = {name: own for name, own in others.items() if name not in parts}
        if others:
            notes += (
                f"The lines also use {listed(others)}, with the weights that the script gives it.",
            )
        if not _evaluates(lines, first, place):
            notes += (_TRAINING,)
    # the random numbers of a library's loop are not known
    told, right = _compared(found, math.nan if place.name else first.loss)
    if len(first.lines) > 1:
        n = len(first.lines)
        told = (f"The loss is the sum of the losses of {n} calls of backward().", *told)
    samples: Samples | Recordings | None = None
    if first.loader is not None and not is_stream(first.loader):
        samples = Samples(first.loader)
        samples = samples if _runs(lines, samples, first) else None
    divided = samples is not None
    if samples is not None:
        told += _require_independent(first, lines)
    else:
        samples = Recordings(place, lines)
        divided = samples.axis is not None
    forget_graphs(model)
    return Step(
        model,
        samples,
        _loss(lines, samples),
        (place.told(), *told, *notes, *samples.notes),
        (right, divided, first.loader is not None),
    )


def _runs(lines: Lines, samples: Samples, recorded: Recorded) -> bool:
    """Whether the lines run for a batch with only the first sample, of the script's form."""
    one, several = (leaves(batch) for batch in (samples.batch(0)[0], recorded.batch))
    alike = [t.dim() for t in one] == [t.dim() for t in several]
    if len(one) == len(several) and not alike:
        return False
    with evaluating(lines.model), torch.no_grad(), suppress(Exception):
        lines.value(*samples.batch(0), size=samples.size)
        return True
    return False


def _require_independent(recorded: Recorded, lines: Lines) -> tuple[str, ...]:
    """Raise if a sample's loss depends on other samples of its batch; return notes on the loss."""
    axes = [each for each in axes_of(recorded.batch) if each[0] == 0]
    found = independence(recorded.batch, lines.carried_of(recorded), lines, *axes) if axes else None
    if found is None:
        return ()
    if not found.nearly:
        raise CoupledSamplesError(
            "the loss of the script is no loss of single samples: a batch with one sample has the "
            f"loss {found.alone:.4g}, and a batch of copies of this sample {found.several:.4g}",
            remedy="Contrastive losses compare the samples of a batch. Give the script a batch "
            "size of one, if that is the loss you want. Or write a loss of a sample: "
            "`gradscope init CHECKPOINT FILE.py:LOADER` reads the script.",
        )
    return found.notes


@contextmanager
def _weights_of(recorded: Recorded) -> Iterator[None]:
    """Give parameters their values of a round in the body."""
    pairs = [(recorded.parameters[k], value) for k, value in recorded.weights.items()]
    kept = [p.detach().clone() for p, _ in pairs]
    with torch.no_grad():
        for p, value in pairs:
            p.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for (p, _), value in zip(pairs, kept, strict=True):
                p.copy_(value)


def _again(lines: Lines, recorded: Recorded, place: Place) -> float:
    """Return the loss of a batch; an error of the lines is a ModelError."""
    try:
        return lines.again(recorded)
    except Exception as error:
        first, last = place.round.lines
        raise ModelError(
            f"lines {first} to {last} of {place.file.name} cannot be run again for the same batch: "
            f"{error.what if isinstance(error, GradscopeError) else describe_raised(error)}",
            where=str(place.file),
            remedy=ELSE,
        ) from error


def _evaluates(lines: Lines, recorded: Recorded, place: Place) -> bool:
    """Whether the lines run in evaluation mode; else modules of own classes keep training."""
    with evaluating(lines.model):
        with suppress(Exception):
            lines.again(recorded)
            return True
        every = lines.model.modules()
        lines.trains = [m for m in every if type(m).__module__.partition(".")[0] != "torch"]
        _again(lines, recorded, place)
    return False


def _others(modules: Mapping[str, nn.Module], lines: Lines) -> dict[str, set[int]]:
    """Return {name: ids of its parameters} of further modules that the lines use."""
    known = {id(p) for p in lines.model.parameters()}
    used = {id(p) for m in lines.used for p in m.parameters(recurse=False)} - known
    found = {name: {id(p) for p in module.parameters()} for name, module in modules.items()}
    return {name: own for name, own in found.items() if own & used and not own & known}


def _compared(found: float, loss: float) -> tuple[tuple[str, ...], bool]:
    """Return a note on the loss of the lines and the script's own loss, and whether they agree."""
    if math.isnan(loss):
        return (), False
    share = round(found / loss) if loss else 1
    if math.isclose(found, loss * max(share, 1), rel_tol=CLOSE, abs_tol=1e-8):
        told = f", which the script divides by {share}" if share > 1 else ""
        return (f"In the script's second step they give its own loss, {found:.6g}{told}.",), True
    return (
        f"In the script's second step they give the loss {found:.6g}, but the script had "
        f"{loss:.6g}: it may use numbers that change between the steps.",
    ), False


def _loss(lines: Lines, samples: Samples | Recordings) -> Callable[..., Tensor]:
    """Return the loss (model, samples (n, 2), None) -> (n,), one sample at a time."""

    def loss(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        rows = inputs.tolist() if isinstance(inputs, Tensor) and inputs.dim() == 2 else [[]]
        found = []
        for row in rows:
            k = row[0] if len(row) == 2 else -1
            if not 0 <= k < len(samples) or row[1] != samples.checksum(k):
                raise ModelError(
                    "the loss is that of a script, and these samples do not belong to the script",
                    remedy="Give the script also as the data. Or name a loss.",
                )
            batch, carried = samples.batch(k)
            with seeded(k):
                found.append(lines(model, batch, carried, size=samples.size))
        return torch.stack(found)

    # hooks would take long, and vmap cannot read the positions of the samples
    loss.skips = ("hooks", "vmap")  # type: ignore[attr-defined]
    return loss
