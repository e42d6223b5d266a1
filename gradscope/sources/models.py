"""Loads a model with its weights, from the user's factory or from the checkpoint."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradscope.config import (
    FROM_CHECKPOINT,
    CheckpointSpec,
    ModelSpec,
    is_folder,
    is_script,
    nested_factory,
)
from gradscope.core.precision import cast
from gradscope.core.texts import article, listed
from gradscope.errors import CheckpointError, ModelError, SpecError, located
from gradscope.model.copies import deep_copy
from gradscope.model.locate import first_line
from gradscope.model.randomness import random_numbers_kept
from gradscope.sources.code import (
    as_config,
    class_digests,
    code_digests,
    import_notes,
    keep_on_cpu,
    load_function,
    loading,
    user_file,
)
from gradscope.sources.formats import sha256, sha256_of_list
from gradscope.sources.kwargs import fitting_arguments
from gradscope.sources.weights import CheckpointReport, load_into, read
from gradscope.sources.weights.adapters import base_of, is_adapter, with_adapter
from gradscope.sources.weights.fit import (
    changed_dtypes,
    check_finite,
    rounding_note,
    stored_modules,
)
from gradscope.sources.weights.hugging_face import CONFIG, build_from_config
from gradscope.sources.weights.readers import ADAPTER, ADAPTER_WEIGHTS

_FACTORY = 'Write a function that builds the model, and name it with model="FILE.py:FACTORY".'


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights."""

    model: nn.Module  # in the requested mode
    checkpoint: CheckpointReport
    # {file: SHA-256} of the files that describe the model: the factory's code, config.json, or the
    # code of pickled classes; empty if the checkpoint is the only file
    digests: dict[str, str]
    notes: tuple[str, ...]  # facts that the user may not expect


def load_model(
    model: ModelSpec,
    checkpoint: CheckpointSpec,
    *,
    lean: bool = False,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Build a model and load its weights.

    Args:
        model: The factory.
        checkpoint: The weights.
        lean: The model will be sharded. If the factory permits it, parameters take no memory until
            then except for the checkpoint's tensors, which safetensors leaves in the file.
        dtype: The dtype to cast the model to before its weights are loaded.

    Raises:
        ModelError: The factory raised, or the model is not trainable.
        CheckpointError: The checkpoint cannot be read or does not fit.
    """
    if is_adapter(checkpoint.path):
        made, report, digests = _adapted(model, checkpoint, dtype)
    elif model.factory == FROM_CHECKPOINT:
        made, report, digests = _model_in_checkpoint(model, checkpoint, dtype)
    elif is_folder(Path(model.factory)):
        what = "the model is a folder, but CHECKPOINT is not an adapter with this base model"
        raise ModelError(what, where=f"model {model.factory}", remedy=_FACTORY)
    else:
        made, report = (_lean if lean else _whole)(model, checkpoint, dtype)
        references = [model.factory, *_nested_factories(model.kwargs)]
        every = [code_digests(each, "model factory") for each in references]
        digests = {name: digest for own in reversed(every) for name, digest in own.items()}
        report = replace(
            report, notes=(*import_notes(model.factory, "model factory"), *report.notes)
        )
    keep_on_cpu(made)
    return LoadedModel(made, report, digests, (*report.notes, *notes_on(made)))


def _whole(
    model: ModelSpec,
    checkpoint: CheckpointSpec,
    dtype: torch.dtype | None,
    *,
    assign: bool = False,
) -> tuple[nn.Module, CheckpointReport]:
    with parameters_on_meta() if assign else nullcontext():
        made = _cast(build(model.factory, model.kwargs, model.mode), dtype)
    try:
        return made, load_into(
            made,
            checkpoint.path,
            key=checkpoint.key,
            ignore=checkpoint.ignore or (),
            unsafe_pickle=checkpoint.unsafe_pickle,
            assign=assign,
            asked=dtype,
        )
    except CheckpointError as error:
        if is_script(model.factory) and isinstance(made, nn.ModuleDict):
            parts = ", ".join(f'"{name}": {name}.state_dict()' for name in made)
            error.remedy = (
                f"The script trains these modules together: {listed([*made])}. Save them in one "
                f"file: torch.save({{{parts}}}, ...)."
            )
            raise
        found = fitting_arguments(model, checkpoint, _made) if "fit" in error.what else {}
        if found:
            lines = listed(
                f"{name} = {_toml(new)} (not {_toml(old)})" for name, (old, new) in found.items()
            )
            error.remedy = f"All tensors fit with {lines}, under [model.kwargs]."
        raise


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return model if dtype is None else cast(model, dtype)


def _lean(
    model: ModelSpec, checkpoint: CheckpointSpec, dtype: torch.dtype | None
) -> tuple[nn.Module, CheckpointReport]:
    """Build a model without its parameters' values if that gives the same model, else with them.

    The model may differ if the factory reads values of parameters, or draws further random numbers:
    these differ if the parameters draw none.
    """
    before = torch.get_rng_state()
    try:
        with random_numbers_kept():
            made, report = _whole(model, checkpoint, dtype, assign=True)
        if not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError("it draws random numbers")
        kept = (t for m in made.modules() for t in (*vars(m).values(), *m._buffers.values()))
        if any(isinstance(t, Tensor) and t.is_meta for t in (*kept, *made.parameters())):
            raise RuntimeError("it computes tensors from parameters")
    except Exception as error:  # an error with a different cause is raised again below
        torch.set_rng_state(before)
        made, report = _whole(model, checkpoint, dtype)
        note = f"Each process built the whole model, one after another: {first_line(error)}."
        report = replace(report, notes=(*report.notes, note))
    return made, report


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device on registration; tied parameters stay tied."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        own(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            known = vars(parameter).get("_lean")
            if known is None:
                known = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                parameter._lean = known._lean = known  # type: ignore[attr-defined]
            module._parameters[name] = known

    nn.Module.register_parameter = register  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


def build(
    factory: str, kwargs: Mapping[str, Any], mode: Literal["eval", "train"] = "eval"
) -> nn.Module:
    """Call a factory and return its model in the requested mode.

    Args:
        factory: "FILE.py:NAME" or "package.module:NAME".
        kwargs: The factory's keyword arguments. A table with a key `factory` stands for the object
            that this factory returns for the table's other entries.
        mode: "eval" or "train", the mode of batch normalisation and dropout.

    Raises:
        SpecError: The reference has neither form.
        ModelError: The factory cannot be imported, raised, or returned no trainable model.
    """
    model: nn.Module = _made(factory, kwargs)
    model = model.module if isinstance(model, nn.DataParallel) else model  # for several GPUs
    where = f"model factory {factory}"
    _require_trainable(model, where)
    with user_file(where):
        model.train(mode == "train")
    return model


def _made(factory: str, kwargs: Mapping[str, Any]) -> Any:
    """Call a factory and return its result."""
    function = load_function(factory, "model factory")
    where = f"model factory {factory}"
    if isinstance(function, nn.Module):  # a variable of a script
        made, function = function, lambda: _copied(made)
    with suppress(TypeError, ValueError):  # a builtin without a signature: the call checks it
        signature = inspect.signature(function)
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            taken = ", ".join(map(str, signature.parameters.values())) or "none"
            what = f"the arguments do not fit the factory: {error}"
            remedy = f"It takes: {taken}. Correct `kwargs` under [model] in the run file."
            raise ModelError(what, where=where, remedy=remedy) from error
    given = {name: _argument(value) for name, value in kwargs.items()}
    with user_file(where), loading(factory, "model factory"):
        return function(**given)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model; weights that are computed from parameters are copied as values."""
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf  # as of nn.utils.weight_norm
    }
    return deep_copy(model, computed)[0]


def _argument(value: Any) -> Any:
    nested = nested_factory(value)
    if nested is not None:
        return _made(nested, {name: entry for name, entry in value.items() if name != "factory"})
    return as_config(value, _argument)


def _nested_factories(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the factories in tables of arguments."""
    tables = [value for value in kwargs.values() if isinstance(value, Mapping)]
    own = [found for table in tables if (found := nested_factory(table)) is not None]
    return [*own, *(found for table in tables for found in _nested_factories(table))]


def _require_trainable(model: Any, where: str) -> None:
    """Raise if the object is not a model, or has no trainable parameter."""
    if not isinstance(model, nn.Module):
        kind = "None" if model is None else article(type(model).__name__)
        what = f"the factory returned {kind}, not a torch.nn.Module"
        remedy = "Return the model."
        if model is None:
            remedy = "Return the model: the function has no `return`."
        elif isinstance(model, type):
            what = f"the factory returned the class {model.__name__}, not a model"
            remedy = f"Return {model.__name__}(...), called with its arguments."
        elif isinstance(model, Mapping):
            remedy = "Return the model, not its state dict."
        raise ModelError(what, where=where, remedy=remedy)
    parameters = dict(model.named_parameters())
    lazy = [name for name, p in parameters.items() if is_lazy(p)]
    meta = [name for name, p in parameters.items() if p.is_meta and not hasattr(p, "_lean")]
    if lazy:
        what = f"the parameters {', '.join(lazy[:10])} have no shape yet"
        remedy = "Give lazy layers their sizes, or run one forward pass in the factory."
    elif meta:
        what = f"the parameters {', '.join(meta[:10])} are on the meta device and have no values"
        remedy = "Build the model on the CPU."
    elif not any(p.requires_grad for p in parameters.values()):
        what = f"the model has no {'trainable parameter' if parameters else 'parameter at all'}"
        remedy = "Set requires_grad on the parameters whose gradients you need."
    else:
        return
    raise ModelError(what, where=where, remedy=remedy)


def positional(model: nn.Module) -> list[str] | None:
    """Return the parameters of `forward` to pass by position, None if it takes any number."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with suppress(TypeError, ValueError):  # callables may lack a signature
        every = inspect.signature(model.forward).parameters.values()
        if all(p.kind != inspect.Parameter.VAR_POSITIONAL for p in every):
            return [p.name for p in every if p.kind in by_position]
    return None


def takes_mapping(model: nn.Module, keywords: Sequence[str]) -> bool:
    """Whether `forward` takes inputs with these keywords only as one mapping, forward(batch)."""
    with suppress(TypeError, ValueError):  # callables may lack a signature
        signature = inspect.signature(model.forward)
        try:
            signature.bind(**dict.fromkeys(keywords))
        except TypeError:
            needed = [p for p in signature.parameters.values() if p.default is p.empty]
            single = len(needed) == 1 and needed[0].kind == needed[0].POSITIONAL_OR_KEYWORD
            return single and needed[0].name not in keywords
    return False


def require_order(model: nn.Module, inputs: Sequence[str] | Mapping[str, str]) -> None:
    """Raise if arrays have the names of `forward`'s arguments, but a different order.

    Args:
        model: Any module.
        inputs: Names of arrays, which are passed by position; or {keyword: name}.

    Raises:
        SpecError: An array is passed to an argument, but a different argument has its name.
    """
    if isinstance(inputs, Mapping):
        return
    taken = positional(model) or []
    for name, argument in zip(inputs, taken, strict=False):
        if name != argument and name in taken:
            pairs = ", ".join(f'{k} = "{k}"' if k in taken else f'... = "{k}"' for k in inputs)
            raise SpecError(
                f"the array {name!r} would be passed as the model's argument {argument!r}, but "
                f"the model has an argument {name!r}",
                where="dataset: inputs",
                remedy=f"Name the arguments: inputs = {{ {pairs} }}.",
            )


def notes_on(model: nn.Module) -> tuple[str, ...]:
    """Return notes on a model's tied and frozen parameters."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    every = dict(model.named_parameters())
    frozen = [name for name, parameter in every.items() if not parameter.requires_grad]
    notes = []
    if tied:
        notes.append(f"Tied parameters are one parameter under the first name: {listed(tied)}.")
    if frozen:
        count = f"{len(frozen)} of {len(every)} parameters"
        notes.append(f"Frozen parameters have no gradients: {count} ({listed(frozen)}).")
    return tuple(notes)


def _model_in_checkpoint(
    spec: ModelSpec,
    checkpoint: CheckpointSpec,
    dtype: torch.dtype | None,
    brought: Collection[str] = (),
) -> tuple[nn.Module, CheckpointReport, dict[str, str]]:
    """Return the model stored in a checkpoint, or described by the config.json next to it."""
    value, report = read(checkpoint.path, unsafe_pickle=checkpoint.unsafe_pickle)
    path = checkpoint.path
    config = (path if path.is_dir() else path.parent) / CONFIG
    with located(report.path):
        if config.exists() and not isinstance(value, nn.Module):
            if not isinstance(value, Mapping):
                kind = type(value).__name__
                raise CheckpointError(f"it has a {kind}, not a state dict", remedy=_FACTORY)
            model, notes = build_from_config(config.parent, value, spec.kwargs, brought, dtype)
            model = _cast(model, dtype)
            notes += _rounding(value, model)
            report = replace(report, notes=report.notes + notes, files=(*report.files, config))
            digests = {CONFIG: sha256(config)}
        else:
            _require_whole(report.path)
            model = _module(value, checkpoint.key)
            stored = model.state_dict()
            model = _cast(model, dtype)
            report = replace(report, notes=report.notes + _rounding(stored, model))
            digests = class_digests(type(module).__module__ for module in model.modules())
            if spec.kwargs:
                what = "arguments are given, but the model is stored in the checkpoint"
                remedy = "Remove the arguments."
                raise ModelError(what, where="model.kwargs", remedy=remedy)
        _require_trainable(model, str(report.path))
        state = model.state_dict()
        check_finite(state, state, {name for name, _ in model.named_parameters()})
    try:
        with user_file("the model's own train()"):
            model.train(spec.mode == "train")
    except ModelError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        if spec.mode == "train":
            what = "the mode of an exported program cannot be changed"
            remedy = "Leave `mode` out, or export the program again in train mode."
            raise CheckpointError(what, where=str(report.path), remedy=remedy) from error
    return model, replace(report, tensors=len(state)), digests


def _rounding(state: Mapping[str, Any], model: nn.Module) -> tuple[str, ...]:
    note = rounding_note(changed_dtypes(state, model))
    return (note,) if note else ()


def _adapted(
    spec: ModelSpec, checkpoint: CheckpointSpec, dtype: torch.dtype | None
) -> tuple[nn.Module, CheckpointReport, dict[str, str]]:
    """Return a base model (of a folder or a factory) with the adapter and its weights."""
    state, report = read(checkpoint.path, unsafe_pickle=checkpoint.unsafe_pickle)
    folder, files = report.path.parent, (*report.files, report.path.parent / ADAPTER)
    if spec.factory == FROM_CHECKPOINT or is_folder(Path(spec.factory)):
        place = base_of(folder) if spec.factory == FROM_CHECKPOINT else Path(spec.factory)
        names = state if isinstance(state, Mapping) else ()
        brought = [str(name).removeprefix("base_model.model.") for name in names]
        below = checkpoint.model_copy(update={"path": place})
        base, under, digests = _model_in_checkpoint(spec, below, dtype, brought)
        notes = (f"The base model is {place.name}.", *under.notes)
        both = [(each.path.name, each.sha256) for each in (report, under)]
        report = replace(report, files=files + under.files, sha256=sha256_of_list(both))
    else:
        base, notes = _cast(build(spec.factory, spec.kwargs, spec.mode), dtype), ()
        digests = code_digests(spec.factory, "model factory")
        report = replace(report, files=files)
    with located(report.path):
        model, told = with_adapter(base, folder, state)
        told += () if any("more digits" in note for note in notes) else _rounding(state, model)
        _require_trainable(model, str(report.path))
    model.train(spec.mode == "train")
    digests = {ADAPTER: sha256(folder / ADAPTER), **digests}
    return model, replace(report, notes=report.notes + notes + told, tensors=len(state)), digests


def _require_whole(path: Path) -> None:
    """Raise for an adapter's weights if a whole model is needed."""
    if path.stem != ADAPTER_WEIGHTS:
        return
    what = f"an adapter's {ADAPTER} is missing in the folder of these weights"
    remedy = "Save the adapter again with save_pretrained."
    if (path.parent / ADAPTER).exists():
        what = "the base model of the adapter is itself an adapter"
        remedy = (
            "Merge the base model with merge_and_unload().save_pretrained(FOLDER), and give "
            'model="FOLDER".'
        )
    raise CheckpointError(what, remedy=remedy)


def _module(value: Any, key: str | None) -> nn.Module:
    """Return the only module in the content of a trusted file."""
    held = {"": value} if isinstance(value, nn.Module) else stored_modules(value, key)
    if len(held) == 1:
        return next(iter(held.values()))
    what, remedy = "the checkpoint has weights, but no model", _FACTORY
    if held:
        what = f"the checkpoint has several models, under {', '.join(map(repr, held))}"
        remedy = "Name the model with `key`."
    raise CheckpointError(what, remedy=remedy)
