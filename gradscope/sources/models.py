"""The user's model, built by the user's factory."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from gradscope.errors import ModelError
from gradscope.sources.code import load_function, loading, user_file
from gradscope.sources.listing import listed


def build(
    factory: str, kwargs: Mapping[str, Any], mode: Literal["eval", "train"] = "eval"
) -> nn.Module:
    """Call a factory and return its model in the mode asked for.

    Args:
        factory: "FILE.py:NAME" or "package.module:NAME".
        kwargs: The factory's keyword arguments.
        mode: Whether batch normalisation and dropout behave as in evaluation or in training.

    Raises:
        SpecError: The reference has neither form.
        ModelError: It cannot be imported, it raised, or what it returned is no trainable model.
    """
    function = load_function(factory, "model factory")
    where = f"model factory {factory}"
    if isinstance(function, nn.Module):
        raise ModelError(
            "this is a model, not a function that returns one",
            where=where,
            remedy="Write a function that builds the model, and name that.",
        )
    _check_arguments(function, kwargs, where)
    with user_file(where), loading(factory, "model factory"):
        model = function(**kwargs)
    require_trainable(model, where)
    with user_file(where):
        model.train(mode == "train")
    return model  # type: ignore[no-any-return]  # checked to be an nn.Module


def _check_arguments(function: Any, kwargs: Mapping[str, Any], where: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; the call itself will tell
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        taken = ", ".join(map(str, signature.parameters.values())) or "none"
        raise ModelError(
            f"the arguments do not fit: {error}",
            where=where,
            remedy=f"It takes: {taken}. Correct `kwargs` under [model] in the run file.",
        ) from error


def require_trainable(model: Any, where: str) -> None:
    """Refuse what is no model, or has nothing to differentiate by.

    Raises:
        ModelError: It is neither.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the factory returned {type(model).__name__}, not a torch.nn.Module",
            where=where,
            remedy="Return the model; a missing `return` gives NoneType.",
        )
    parameters = dict(model.named_parameters())
    lazy = [name for name, p in parameters.items() if is_lazy(p)]
    if lazy:
        raise ModelError(
            f"the parameters {', '.join(lazy[:10])} have no shape yet",
            where=where,
            remedy="Give lazy layers their sizes, or run one forward pass in the factory.",
        )
    meta = [name for name, p in parameters.items() if p.is_meta]
    if meta:
        raise ModelError(
            f"the parameters {', '.join(meta[:10])} are on the meta device and hold no numbers",
            where=where,
            remedy="Build the model on the CPU.",
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError(
            "the model has no trainable parameter"
            if parameters
            else "the model has no parameter at all",
            where=where,
            remedy="Leave requires_grad set on the parameters whose gradients you want.",
        )


def notes_on(model: nn.Module) -> tuple[str, ...]:
    """Return what the user should know of a model: tied parameters, frozen ones."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    every = dict(model.named_parameters())
    frozen = [name for name, parameter in every.items() if not parameter.requires_grad]
    notes = []
    if tied:
        notes.append(f"Tied, so one parameter under its first name: {listed(tied)}.")
    if frozen:
        notes.append(
            f"Frozen, so without gradients: {len(frozen)} of {len(every)} parameters "
            f"({listed(frozen)})."
        )
    return tuple(notes)
