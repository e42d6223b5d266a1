"""Reads the state of a stopped Adam or AdamW, and the names of its parameters."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradscope.errors import CheckpointError, located
from gradscope.model.optimizer import (
    AdamMoments,
    OptimizerState,
    ParameterNames,
    require_distinct,
)
from gradscope.sources.formats import reachable, reading
from gradscope.sources.weights import read

_SAVE = "Save optimizer.state_dict() of torch.optim.Adam or AdamW with torch.save."
_IN_ORDER = "model"  # accepted instead of a file with names
_DEPTH = 2  # for example checkpoint["optimizer_states"][0]


def read_names(text: str) -> ParameterNames:
    """Read a JSON file with a list of the parameters' names in the optimiser's order.

    The text `model` instead of a file means that each group is in the order of the model's
    parameters.

    Raises:
        CheckpointError: The file cannot be read, or is not a list of different names.
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
    """Read the state of an Adam or AdamW from a file with the state, or from a checkpoint.

    No code in the file is executed.

    Raises:
        CheckpointError: The file cannot be read, or has no such state.
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
                f"it has {len(states) or 'no'} states of an optimiser", remedy=_SAVE
            )
        state = states[0]["state"]
        groups = []
        for group in states[0]["param_groups"]:
            numbers = group["params"]
            known = all(isinstance(number, str) for number in numbers)  # the form that FSDP saves
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


def _moments(state: Any, group: Mapping[str, Any]) -> AdamMoments | None:
    """Return the moments in the state of a parameter, or None without a state."""
    if not state:
        return None
    known = {"step", "exp_avg", "exp_avg_sq"} <= state.keys() and "mu_product" not in state
    if not known or not {"betas", "eps", "amsgrad"} <= group.keys():
        raise CheckpointError("this is not the state of an Adam or AdamW optimiser", remedy=_SAVE)
    if group.get("maximize"):
        raise CheckpointError(
            "the optimiser was created with maximize=True, which is not supported",
            remedy="Give the state of an optimiser that minimises the loss.",
        )
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if second.is_complex():
        raise CheckpointError("moments of complex parameters are not supported", remedy=_SAVE)
    largest = state["max_exp_avg_sq"].double() if group["amsgrad"] else None
    if not bool((second >= 0).all()) or not float(state["step"]) >= 1:
        raise CheckpointError("its second moments are negative or NaN", remedy=_SAVE)
    betas = (float(group["betas"][0]), float(group["betas"][1]))
    step, eps = float(state["step"]), float(group["eps"])
    return AdamMoments(first.double(), second.double(), largest, step, betas, eps)
