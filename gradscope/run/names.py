"""The names in a run spec, resolved: chains, backends, the loss. All mistakes are told at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradscope.backends import backends, candidates
from gradscope.config import MOST, RunSpec, combined
from gradscope.core.problem import Loss
from gradscope.errors import SpecError
from gradscope.sources import load_function
from gradscope.stages.chain import Chain, bind
from gradscope.stages.losses import bound as bound_loss
from gradscope.stages.losses import losses


def resolve_names(spec: RunSpec) -> tuple[tuple[Chain, ...], Loss]:
    """Return the chains and the loss, bound.

    Raises:
        SpecError: A name or an argument does not fit; one error tells all that do not.
        ModelError: The loss is the user's own, and cannot be imported.
    """
    problems: list[SpecError] = []
    bound: list[Chain] = []
    for k, text in enumerate(spec.compute.transform):
        if len(problems) > MOST:
            raise combined(problems)
        with _collected(problems, spec, "compute", "transform", f"[{k}]"):
            bound.append(bind(text))
    with _collected(problems, spec, "compute", "backend"):
        candidates(spec.compute.backend, own_loss=spec.compute.coupling == "own-loss")
    for name in spec.compare.backends[: MOST + 1]:
        with _collected(problems, spec, "compare", "backends"):
            backends.get(name)
    with _collected(problems, spec, "loss", "name"):
        stage = spec.loss.stage
        if ":" not in stage.name:
            loss = bound_loss(losses.get(stage.name), stage)
    if problems:
        raise combined(problems)
    if ":" in stage.name:
        loss = bound_loss(load_function(stage.name, "loss"), stage)
    return tuple(bound), loss


@contextmanager
def _collected(
    problems: list[SpecError], spec: RunSpec, section: str, key: str, index: str = ""
) -> Iterator[None]:
    """Keep a `SpecError`, with the file and key that it is about if a file says so."""
    try:
        yield
    except SpecError as error:
        place = spec.place(section, key)
        if place is not None:
            error.where = f"{place}{index}"
        problems.append(error)
