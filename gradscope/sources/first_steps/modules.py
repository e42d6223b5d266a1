"""The modules in the variables of a script, and the module that it trains."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from gradscope.core.texts import listed
from gradscope.errors import ModelError
from gradscope.model.locate import is_installed
from gradscope.sources.first_steps.values import ELSE

_DEPTH, _MOST = 3, 256  # how deep, and in how many entries, objects are searched for modules
_WRAPPERS = ("module", "_orig_mod")  # of DataParallel, and of torch.compile


def modules_of(frames: Iterable[FrameType]) -> dict[str, nn.Module]:
    """Return the modules in the variables of functions that run, {name: module}."""
    every: list[Mapping[str, Any]] = []
    for frame in frames:
        every.append({**frame.f_locals})
        every.append({k: v for k, v in frame.f_globals.items() if not k.startswith("__")})
    return modules_of_values(*every)


def modules_of_values(*tables: Mapping[str, Any]) -> dict[str, nn.Module]:
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
        elif hasattr(value, "__dict__") and not is_installed(file_of(type(value))):
            search(name, vars(value), depth)

    for table in tables:
        search("", table, _DEPTH)
    return {f"{name}": module for name, module in reversed(found.values())}


def _own_names(module: nn.Module) -> Iterable[str]:
    is_wrapper = type(module).__module__.partition(".")[0] == "torch"
    return module._modules.keys() if is_wrapper else ()


def forget_graphs(model: nn.Module) -> None:
    """Detach results of a forward pass that modules keep, which cannot be copied."""
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, Tensor) and not value.is_leaf:
                vars(module)[name] = value.detach()


def file_of(kind: type) -> Path:
    """Return the file of a class."""
    return Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def model_of(
    modules: Mapping[str, nn.Module], parameters: Mapping[int, nn.Parameter], path: Path
) -> nn.Module:
    """Return the smallest module with all parameters, or a module of the modules that share them.

    Raises:
        ModelError: Some parameters are in no module of the script's variables.
    """
    wanted = parameters.keys()
    own = {name: {id(p) for p in module.parameters()} for name, module in modules.items()}
    whole = [name for name in own if wanted and wanted <= own[name]]
    if whole:
        return modules[min(whole, key=lambda name: len(own[name]))]
    parts: list[str] = []
    rest = set(wanted)
    while rest:
        best = max(own, key=lambda name: (len(own[name] & rest), -len(own[name])), default="")
        if not best or not own[best] & rest:
            shapes = listed(str(tuple(parameters[k].shape)) for k in rest)
            raise ModelError(
                "the loss depends on parameters that are in no module of the script's variables: "
                f"{shapes}" * bool(rest),
                where=str(path),
                remedy=ELSE,
            )
        parts.append(best)
        rest -= own[best]
    if not parts:
        raise ModelError(
            "the loss of the first backward() depends on no parameter of a module",
            where=str(path),
            remedy=ELSE,
        )
    return nn.ModuleDict({name.replace(".", "_"): modules[name] for name in sorted(parts)})
