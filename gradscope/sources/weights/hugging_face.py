"""Loads Hugging Face model folders: config.json and weights. Local files only, no code is run.

gradscope's readers read the weights. transformers builds the model and maps old names to new names.
If a model's output has logits, the model returns only the logits, so losses by name accept them.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradscope.core.registry import suggestion
from gradscope.core.texts import listed
from gradscope.errors import CheckpointError, ModelError, located
from gradscope.model.locate import first_line
from gradscope.sources.formats import need
from gradscope.sources.weights.fit import changed_dtypes
from gradscope.sources.weights.readers import table

CONFIG = "config.json"
_ATTENTION = "attn_implementation"
_OURS = ("architecture", _ATTENTION)  # arguments that are not values of a config
_SAVED = "Save the model again with save_pretrained, or write a factory for it (`model`)."


def build_from_config(
    folder: Path,
    state: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    brought: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that a folder's config.json describes, with the weights `state`, and notes.

    In `kwargs`, `architecture` is a transformers class that replaces the config's class, and
    `attn_implementation` selects the computation of attention. The remaining `kwargs` replace
    values of the config. Weights `brought` by an adapter may be missing. If the config's dtype has
    fewer digits than the weights, the weights are loaded in `dtype`.
    """
    with located(folder / CONFIG):
        content = _content(folder / CONFIG, kwargs)
        transformers = need("transformers", "this model", ModelError)
        with _building(transformers):
            config = transformers.AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            for key in kwargs:
                if key not in _OURS and not hasattr(config, key):
                    what = f"the config has no value {key!r}, which `kwargs` would replace"
                    raise ModelError(what, remedy=suggestion(key, sorted(config.to_dict())))
            config.update({k: v for k, v in kwargs.items() if k not in _OURS})
            if hasattr(config, "use_cache") and "use_cache" not in kwargs:
                config.use_cache = False
            kind = _class(transformers, content, kwargs)
            own = {key: value for key, value in kwargs.items() if key == _ATTENTION}
            model, told = _loaded(kind, config, state, own)
            if dtype is not None and changed_dtypes(state, model):
                model, told = _loaded(kind, config, state, own | {"dtype": dtype})
        missing = sorted(set(told["missing_keys"]).difference(brought))
        wrong = sorted(
            f"{name}: {tuple(here)} in the checkpoint, {tuple(there)} in the model"
            for name, here, there in told["mismatched_keys"]
        )
        what, remedy = "", _SAVED
        if missing:
            what = f"{len(missing)} weights of the model are missing: {listed(missing)}"
            remedy = "Name the saved architecture: kwargs = { architecture = ... }."
        elif wrong:
            what = f"{len(wrong)} tensors do not fit: {listed(wrong)}"
        elif told["error_msgs"]:
            what = f"transformers could not convert the weights: {listed(told['error_msgs'], 3)}"
        if what:  # not every weight came from the checkpoint
            raise CheckpointError(what, remedy=remedy)

    @wraps(kind.forward)  # for its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = kind.forward(self, *args, **kwargs)
        return getattr(answer, "logits", answer)

    methods = {"forward": forward, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), methods)
    unused = sorted(told["unexpected_keys"])
    note = f"The model does not use these tensors of the checkpoint: {listed(unused)}."
    return model, (note,) if unused else ()


def _loaded(
    kind: Any, config: Any, state: Mapping[str, Any], more: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with its weights, and transformers' report on loading them."""
    model, told = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(state),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the caller reports them
        **more,
    )
    return model, told


def _content(path: Path, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Read config.json; raise if it would execute code, such as classes or custom kernels."""
    content = table(path, ModelError, _SAVED)
    if "quantization_config" in content:
        remedy = "Give the folder of the model before quantizing."
        raise ModelError("the weights are quantized", remedy=remedy)
    settings = {**content, **kwargs}
    attention = [v for k, v in settings.items() if _ATTENTION in k and isinstance(v, str)]
    if "auto_map" in settings or any("/" in value for value in attention):
        what = "the model needs code from its folder or a hub, which is never executed"
        raise ModelError(what, remedy=_SAVED)
    return content


def _class(transformers: Any, content: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    own = content.get("architectures")
    name = kwargs.get("architecture", own[0] if isinstance(own, list) and own else None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ModelError(
            "it has no architecture" if name is None else f"transformers has no model {name!r}",
            remedy='Name a class of transformers: kwargs = { architecture = "..." } under [model].',
        )
    return kind


@contextmanager
def _building(transformers: Any) -> Iterator[None]:
    """Translate errors of transformers, and hide its reports and progress bars."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers can raise anything for a config
        what = f"transformers cannot build the model: {first_line(error)}"
        raise ModelError(what, remedy=_SAVED) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
