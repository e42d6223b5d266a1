"""Reads the state of a stopped Adam or AdamW, and the names of its parameters."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradscope.errors import CheckpointError, located
from gradscope.model.optimizer import (
    Moments,
    OptimizerState,
    ParameterNames,
    require_distinct,
)
from gradscope.sources.formats import reachable, reading
from gradscope.sources.weights import read

_SAVE = "Save optimizer.state_dict() of torch.optim.Adam or AdamW with torch.save."
_IN_ORDER = "model"  # what may be given instead of a file of names
_DEPTH = 2  # such as checkpoint["optimizer_states"][0]


def read_names(text: str) -> ParameterNames:
    """Read a JSON file with a list of the parameters' names in the optimiser's order.

    `model` instead of a file says that each group is in the order of the model's parameters.

    Raises:
        CheckpointError: The file cannot be read, or it is not a list of distinct names.
    """
    if text == _IN_ORDER:
        return ParameterNames(None)
    path = Path(text)
    remedy = f"Write a JSON list of names, or give names={_IN_ORDER}."
    with reachable(path, CheckpointError):
        content = path.read_bytes()
    with located(str(path)):
        try:
            names = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"this is not JSON: {error}", remedy=remedy) from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("this is not a list of names", remedy=remedy)
        require_distinct(names, "the parameters", "Give each parameter its own name.")
    return ParameterNames(names)


def read_optimizer(path: Path) -> OptimizerState:
    """Read the state of an Adam or AdamW, alone in its file or in a checkpoint.

    Nothing in it is executed.

    Raises:
        CheckpointError: The file cannot be read, or holds no such state.
    """
    try:
        content, _ = read(path)
    except CheckpointError as error:
        error.remedy = _SAVE if "unsafe_pickle" in (error.remedy or "") else error.remedy
        raise
    with reading(CheckpointError, path):
        states = list(_states(content, _DEPTH))
        if len(states) != 1:
            raise CheckpointError(
                f"it holds {len(states) or 'no'} states of an optimiser", remedy=_SAVE
            )
        state = states[0]["state"]
        groups = []
        for group in states[0]["param_groups"]:
            numbers = group["params"]
            known = all(isinstance(number, str) for number in numbers)  # as FSDP saves them
            names = group.get("param_names", numbers if known else [None] * len(numbers))
            own = [_moments(state.get(number), group) for number in numbers]
            groups.append(list(zip(names, own, strict=True)))
        return OptimizerState(groups, str(path))


def _states(content: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
        yield content
    elif depth and isinstance(content, Mapping | list | tuple):
        for inner in content.values() if isinstance(content, Mapping) else content:
            yield from _states(inner, depth - 1)


def _moments(state: Any, group: Mapping[str, Any]) -> Moments | None:
    """Return what the state of one parameter says, None if there is none."""
    if not state:
        return None
    known = {"step", "exp_avg", "exp_avg_sq"} <= state.keys() and "mu_product" not in state
    if not known or not {"betas", "eps", "amsgrad"} <= group.keys():
        raise CheckpointError("this is the state of another optimiser", remedy=_SAVE)
    if group.get("maximize"):
        raise CheckpointError(
            "the optimiser maximises, and gradients here are those of losses",
            remedy="Give the state of one that minimises.",
        )
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if second.is_complex():
        raise CheckpointError("moments of complex parameters are not supported", remedy=_SAVE)
    largest = state["max_exp_avg_sq"].double() if group["amsgrad"] else None
    if not bool((second >= 0).all()) or not float(state["step"]) >= 1:
        raise CheckpointError("its second moments are negative or NaN", remedy=_SAVE)
    betas = (float(group["betas"][0]), float(group["betas"][1]))
    step, eps = float(state["step"]), float(group["eps"])
    return Moments(first.double(), second.double(), largest, step, betas, eps)
