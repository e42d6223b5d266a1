"""A PEFT adapter: adapter_config.json, and the weights that it adds to a base model. Local only.

The weights are read by our own readers; peft puts them onto the base model, whose own parameters
are frozen. Parameters have the names that they have in peft's model.
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

_GIVE = 'Give its folder, model="FOLDER", or a factory that returns it, model="FILE.py:FACTORY".'
_CLASS = "kwargs = { architecture = ... }"
_AGAIN = "Save the adapter again with save_pretrained."


def is_adapter(path: Path) -> bool:
    """Whether a checkpoint, a folder or the file in it, is what PEFT writes of an adapter.

    Raises:
        CheckpointError: The folder holds a whole model, too.
    """
    with reachable(path, CheckpointError):
        folder = path if path.is_dir() else path.parent
        if not (folder / ADAPTER).is_file():
            return False
        file = weights_in(path) if path.is_dir() else path
        own = sorted(p.name for p in folder.glob(f"{ADAPTER_WEIGHTS}.*"))
    if path.is_dir() and own and file.name not in own:
        what = f"it holds a model, {file.name}, and an adapter, {own[0]}"
        remedy = f'Give one of these files; the adapter with model="{folder}", if that is its base.'
        raise CheckpointError(what, where=str(path), remedy=remedy)
    return file.stem == ADAPTER_WEIGHTS


def base_of(folder: Path) -> Path:
    """Return the folder of an adapter's base model, which is looked for on this machine alone.

    It is what `base_model_name_or_path` names as a path from the folder, from the one above it or
    from the working directory, a folder of the same last name beside it, or in the cache of
    huggingface_hub.

    Raises:
        CheckpointError: It is in none of these places.
    """
    content = _content(folder / ADAPTER)
    name = content.get("base_model_name_or_path")
    if isinstance(name, str) and name and "\0" not in name:
        last = Path(name).name
        places = (folder / name, folder.parent / name, Path(name), folder.parent / last)
        with reachable(folder, CheckpointError):
            # an empty last name, as of "..", would be the adapter's own folder
            found = [p for p in places if p.is_dir() and not p.samefile(folder)]
        cached = None if found else _cached(name, content.get("revision"))
        if found or cached:
            return found[0] if found else cached  # type: ignore[return-value]
    what = f"its base model, {name!r}, is not on this machine, and nothing is downloaded"
    if not name:
        what = "it does not say what its base model is"
    raise CheckpointError(what, where=str(folder / ADAPTER), remedy=_GIVE)


def with_adapter(base: nn.Module, folder: Path, state: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Return peft's model of a base model and an adapter with the weights `state`, and notes.

    Only what the adapter trains can be trained: all else is frozen.

    Raises:
        ModelError: peft is missing, cannot build the adapter, or one of its kind is refused.
        CheckpointError: The weights are not all that the adapter trains.
    """
    path = folder / ADAPTER
    content = _content(path)
    peft = need("peft", "this adapter", ModelError)
    values = state.values() if isinstance(state, Mapping) else [state]
    if not all(isinstance(v, Tensor) and not v.is_complex() for v in values):
        raise CheckpointError("it holds something other than named real tensors", remedy=_AGAIN)
    with located(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, to who trains an adapter
        try:
            config = peft.PeftConfig.from_peft_type(
                **{k: v for k, v in content.items() if k != "runtime_config"}
            )
            _require_kind(config)
            known = {f.name for f in fields(config)} | {"runtime_config", "peft_version"}
            unread = sorted(key for key, value in content.items() if value and key not in known)
            if unread:  # peft would leave it out
                raise ModelError(
                    f"peft {peft.__version__} has no setting {listed(unread)}",
                    remedy="Install the one that wrote it. What does nothing can be deleted here.",
                )
            config.inference_mode = False  # or nothing could be trained
            held = isinstance(base, peft.PeftModel)  # a factory may have put it there
            model: nn.Module = base if held else _class(peft, config)(base, config)
            name = model.active_adapter
            own = peft.get_peft_model_state_dict(
                model, adapter_name=name, save_embedding_layers=False
            )
            told = peft.set_peft_model_state_dict(model, dict(state), name)
        except (ModelError, MemoryError):
            raise
        except Exception as error:  # whatever peft makes of a config, and of weights
            what = f"peft cannot put the adapter onto its base model: {first_line(error)}"
            raise ModelError(what, remedy=f"Is it the adapter's base model? {_GIVE}") from error
        check_finite(state, state, set(state))
        what = _misfit(model, own, state, told)
    if what:
        raise CheckpointError(
            what, remedy=f"{_AGAIN} Or is the base model another, or of another class: {_CLASS}?"
        )
    return model, (f"An adapter ({content['peft_type']}): its parameters alone are trained.",)


def _content(path: Path) -> dict[str, Any]:
    content = table(path, CheckpointError, _AGAIN)
    if not isinstance(content.get("peft_type"), str):
        what = "is no table of settings with a `peft_type`"
        raise CheckpointError(what, where=str(path), remedy=_AGAIN)
    return content


def _class(peft: Any, config: Any) -> Any:
    """Return peft's class of a model; that of any, unless the adapter asks what it is called with.

    A Poly reads `task_ids`, an activated LoRA where the tokens invoke it.
    """
    if getattr(config, "alora_invocation_tokens", None):
        return peft.PeftModelForCausalLM  # others leave it off
    tasks = {"CAUSAL_LM": peft.PeftModelForCausalLM, "SEQ_2_SEQ_LM": peft.PeftModelForSeq2SeqLM}
    return tasks.get(config.task_type if config.peft_type == "POLY" else "", peft.PeftModel)


def _repeated(name: str, state: Mapping[str, Tensor]) -> bool:
    """Whether a bias is there a second time, as it is where all are trained and a whole layer."""
    one, other = state.get(name), state.get(name.replace(".modules_to_save.", "."))
    return one is not other and one is not None and other is not None and torch.equal(one, other)


def _misfit(
    model: nn.Module, own: Mapping[str, Tensor], state: Mapping[str, Tensor], told: Any
) -> str:
    """Say what of an adapter's weights is not as peft saves it; "" if all is.

    `own` is what it would save of the new adapter, `told` what it says of loading `state`.
    """
    absent = set(told.missing_keys)
    named = model.named_parameters(remove_duplicate=False)
    given = {p for name, p in named if name not in absent}  # layers may share one
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(name for name, p in trained.items() if p not in given)
    memory = {p.data_ptr() for p in trained.values()}
    # what else is saved is drawn at random, and drawn anew where it is absent
    missing += [n for n, v in own.items() if n not in state and v.data_ptr() not in memory]
    unknown = sorted(name for name in told.unexpected_keys if not _repeated(name, state))
    whole = sorted(name for name, v in state.items() if not v.dtype.is_floating_point)
    kept = {name: v for name, v in own.items() if not v.dtype.is_floating_point}  # counts, places
    cast = [name for name in whole if name not in kept]
    if missing:
        return f"not all of the adapter is in it: {listed(missing)} missing"
    if unknown:
        return f"without a place in the model: {listed(unknown)}"
    if cast:  # peft would make floating-point numbers of them
        dtypes = ", ".join(sorted({str(state[n].dtype) for n in cast}))
        return f"weights are no floating-point numbers, but {dtypes}: {listed(cast)}"
    layers = dict(model.named_modules())
    outside = [
        name
        for name, drawn in kept.items()
        if state[name].shape != drawn.shape
        or not _inside(layers.get(name.rpartition(".")[0]), state[name])
    ]
    return f"these are no places in the layer's weight: {listed(outside)}" if outside else ""


def _inside(layer: Any, places: Tensor) -> bool:
    """Whether places are in a layer's weight, beyond which torch would write without a word.

    They are (axes, k), or (k,) counted through all its entries; what is no list of places is.
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
    """Refuse adapters that are more than modules within the model, or not the same twice."""
    kind = config.peft_type.value
    if config.is_prompt_learning:
        raise ModelError(
            f"{kind} adds positions to the inputs, not modules to the model",
            remedy="Write a factory that returns the whole model, and a loss for its outputs.",
        )
    if kind == "XLORA":
        raise ModelError(
            "it mixes adapters of other folders, which is not supported",
            remedy="Write a factory that returns the whole model, and save its state_dict().",
        )
    if getattr(config, "save_only_topk_weights", False):
        raise ModelError(
            "of its weights only the largest were saved (save_only_topk_weights)",
            remedy="Save it again without that: the others have gradients, too.",
        )
    drawn = str(getattr(config, "init_lora_weights", ""))
    if "niter" in drawn:
        raise ModelError(
            f"with init_lora_weights={drawn!r} the base model's weights are changed by random "
            "numbers whenever the adapter is opened",
            remedy="Convert it to LoRA: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...).",
        )


def _cached(name: str, revision: Any) -> Path | None:
    hub = need("huggingface_hub", "this adapter", ModelError)
    try:
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # no such name, or it is not there
        return None
