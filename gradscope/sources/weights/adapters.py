"""Loads PEFT adapters: adapter_config.json, and weights to add to a base model. Local files only.

gradscope's readers read the weights, and peft adds them to the base model. The base model's
parameters are frozen. Parameters have the names of peft's model.
"""

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.core.texts import listed
from gradscope.errors import CheckpointError, ModelError, located
from gradscope.model.locate import first_line
from gradscope.sources.formats import need, reachable
from gradscope.sources.weights.fit import check_finite
from gradscope.sources.weights.readers import ADAPTER, ADAPTER_WEIGHTS, table, weights_in

_GIVE = (
    'Give the folder of the base model, model="FOLDER", or a factory that returns it, '
    'model="FILE.py:FACTORY".'
)
_CLASS = "kwargs = { architecture = ... }"
_AGAIN = "Save the adapter again with save_pretrained."


def is_adapter(path: Path) -> bool:
    """Whether a checkpoint (a folder or the file in it) is a PEFT adapter.

    Raises:
        CheckpointError: The folder also has a full model.
    """
    with reachable(path, CheckpointError):
        folder = path if path.is_dir() else path.parent
        if not (folder / ADAPTER).is_file():
            return False
        file = weights_in(path) if path.is_dir() else path
        own = sorted(p.name for p in folder.glob(f"{ADAPTER_WEIGHTS}.*"))
    if path.is_dir() and own and file.name not in own:
        what = f"the folder has a model, {file.name}, and an adapter, {own[0]}"
        remedy = (
            f"Give one of the two files. If the model is the adapter's base model, give {own[0]} "
            f'with model="{folder}".'
        )
        raise CheckpointError(what, where=str(path), remedy=remedy)
    return file.stem == ADAPTER_WEIGHTS


def base_of(folder: Path) -> Path:
    """Return the folder of an adapter's base model. Only this machine is searched.

    `base_model_name_or_path` is tried as a path relative to the folder, its parent folder and the
    working directory; as the name of a folder next to it; and in the cache of huggingface_hub.

    Raises:
        CheckpointError: The base model is not found.
    """
    content = _content(folder / ADAPTER)
    name = content.get("base_model_name_or_path")
    if isinstance(name, str) and name and "\0" not in name:
        last = Path(name).name
        places = (folder / name, folder.parent / name, Path(name), folder.parent / last)
        with reachable(folder, CheckpointError):
            # an empty last name, as in "..", would be the adapter's folder
            found = [p for p in places if p.is_dir() and not p.samefile(folder)]
        cached = None if found else _cached(name, content.get("revision"))
        if found or cached:
            return found[0] if found else cached  # type: ignore[return-value]
    what = f"its base model {name!r} is not on this machine, and gradscope downloads nothing"
    if not name:
        what = "it has no base_model_name_or_path"
    raise CheckpointError(what, where=str(folder / ADAPTER), remedy=_GIVE)


def with_adapter(base: nn.Module, folder: Path, state: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Return peft's model of a base model and an adapter with the weights `state`, and notes.

    Only the parameters that the adapter trains are trainable. The rest is frozen.

    Raises:
        ModelError: peft is missing, cannot build the adapter, or the adapter is not supported.
        CheckpointError: Weights that the adapter trains are missing.
    """
    path = folder / ADAPTER
    content = _content(path)
    peft = need("peft", "this adapter", ModelError)
    values = state.values() if isinstance(state, Mapping) else [state]
    if not all(isinstance(v, Tensor) and not v.is_complex() for v in values):
        raise CheckpointError("it has values that are not named real tensors", remedy=_AGAIN)
    with located(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's warnings are about training
        try:
            config = peft.PeftConfig.from_peft_type(
                **{k: v for k, v in content.items() if k != "runtime_config"}
            )
            _require_kind(config)
            known = {f.name for f in fields(config)} | {"runtime_config", "peft_version"}
            unread = sorted(key for key, value in content.items() if value and key not in known)
            if unread:  # peft would ignore it
                raise ModelError(
                    f"peft {peft.__version__} has no setting {listed(unread)}",
                    remedy="Install the release of peft that wrote it. Settings without effect can "
                    "be deleted here.",
                )
            config.inference_mode = False  # else no parameter is trainable
            held = isinstance(base, peft.PeftModel)  # a factory may have added the adapter
            model: nn.Module = base if held else _class(peft, config)(base, config)
            name = model.active_adapter
            own = peft.get_peft_model_state_dict(
                model, adapter_name=name, save_embedding_layers=False
            )
            told = peft.set_peft_model_state_dict(model, dict(state), name)
        except (ModelError, MemoryError):
            raise
        except Exception as error:  # peft can raise anything for a config and weights
            what = f"peft cannot add the adapter to its base model: {first_line(error)}"
            remedy = f"Check that this is the adapter's base model. {_GIVE}"
            raise ModelError(what, remedy=remedy) from error
        check_finite(state, state, set(state))
        what = _misfit(model, own, state, told)
    if what:
        raise CheckpointError(
            what, remedy=f"{_AGAIN} Or check the base model and its class: {_CLASS}."
        )
    return model, (f"Only the parameters of the adapter ({content['peft_type']}) are trainable.",)


def _content(path: Path) -> dict[str, Any]:
    content = table(path, CheckpointError, _AGAIN)
    if not isinstance(content.get("peft_type"), str):
        what = "the file has no table of settings with a `peft_type`"
        raise CheckpointError(what, where=str(path), remedy=_AGAIN)
    return content


def _class(peft: Any, config: Any) -> Any:
    """Return peft's general model class, or a specific class if the adapter reads more inputs.

    A Poly reads `task_ids`. An activated LoRA reads the position of its invocation tokens.
    """
    if getattr(config, "alora_invocation_tokens", None):
        return peft.PeftModelForCausalLM  # the remaining classes do not activate it
    tasks = {"CAUSAL_LM": peft.PeftModelForCausalLM, "SEQ_2_SEQ_LM": peft.PeftModelForSeq2SeqLM}
    return tasks.get(config.task_type if config.peft_type == "POLY" else "", peft.PeftModel)


def _repeated(name: str, state: Mapping[str, Tensor]) -> bool:
    """Whether a bias is stored twice, as with bias="all" and a layer in modules_to_save."""
    one, other = state.get(name), state.get(name.replace(".modules_to_save.", "."))
    return one is not other and one is not None and other is not None and torch.equal(one, other)


def _misfit(
    model: nn.Module, own: Mapping[str, Tensor], state: Mapping[str, Tensor], told: Any
) -> str:
    """Return a description of weights that differ from what peft saves, or "".

    `own` are the weights that peft would save for the new adapter. `told` is peft's report on
    loading `state`.
    """
    absent = set(told.missing_keys)
    named = model.named_parameters(remove_duplicate=False)
    given = {p for name, p in named if name not in absent}  # layers may share a parameter
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(name for name, p in trained.items() if p not in given)
    memory = {p.data_ptr() for p in trained.values()}
    # further saved tensors are random; peft draws new random numbers for missing tensors
    missing += [n for n, v in own.items() if n not in state and v.data_ptr() not in memory]
    unknown = sorted(name for name in told.unexpected_keys if not _repeated(name, state))
    whole = sorted(name for name, v in state.items() if not v.dtype.is_floating_point)
    kept = {name: v for name, v in own.items() if not v.dtype.is_floating_point}  # counts, indices
    cast = [name for name in whole if name not in kept]
    if missing:
        return f"weights of the adapter are missing: {listed(missing)}"
    if unknown:
        return f"the model has no parameters for {listed(unknown)}"
    if cast:  # peft would cast them to floating-point numbers
        dtypes = ", ".join(sorted({str(state[n].dtype) for n in cast}))
        return f"weights are not floating-point numbers but {dtypes}: {listed(cast)}"
    layers = dict(model.named_modules())
    outside = [
        name
        for name, drawn in kept.items()
        if state[name].shape != drawn.shape
        or not _inside(layers.get(name.rpartition(".")[0]), state[name])
    ]
    return f"indices are outside of the layer's weight: {listed(outside)}" if outside else ""


def _inside(layer: Any, places: Tensor) -> bool:
    """Whether indices are inside a layer's weight; torch would silently write outside of it.

    Indices are (axes, k), or (k,) into the flattened weight. Other tensors return True.
    """
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or not places.dim() or not places.numel():
        return True
    sizes = weight.shape if places.dim() > 1 else (weight.numel(),)
    rows = places.reshape(len(sizes), -1)
    return bool((rows >= 0).all()) and all(
        row.max() < n for row, n in zip(rows, sizes, strict=True)
    )


def _require_kind(config: Any) -> None:
    """Raise for adapters that change more than modules of the model, or that are random."""
    kind = config.peft_type.value
    if config.is_prompt_learning:
        raise ModelError(
            f"adapters of type {kind} add positions to the inputs, which is not supported",
            remedy="Write a factory that returns the whole model, and a loss for its outputs.",
        )
    if kind == "XLORA":
        raise ModelError(
            "it mixes adapters of other folders, which is not supported",
            remedy="Write a factory that returns the whole model, and save its state_dict().",
        )
    if getattr(config, "save_only_topk_weights", False):
        raise ModelError(
            "only its largest weights were saved (save_only_topk_weights)",
            remedy="Save the adapter again without save_only_topk_weights, because all weights "
            "have gradients.",
        )
    drawn = str(getattr(config, "init_lora_weights", ""))
    if "niter" in drawn:
        raise ModelError(
            f"with init_lora_weights={drawn!r}, random numbers change the base model's weights "
            "each time the adapter is loaded",
            remedy="Convert the adapter to LoRA: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...).",
        )


def _cached(name: str, revision: Any) -> Path | None:
    hub = need("huggingface_hub", "this adapter", ModelError)
    try:
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # the name is unknown or not in the cache
        return None
