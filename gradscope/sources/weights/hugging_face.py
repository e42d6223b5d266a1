"""A Hugging Face model folder: config.json and weights. Local files only, no code from the folder.

The weights are read by our own readers; transformers builds the model and maps old names to new
ones. A model that answers with logits gives these alone, so that losses by name take its output.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from gradscope.core.locate import first_line
from gradscope.core.registry import suggestion
from gradscope.errors import CheckpointError, ModelError
from gradscope.sources.listing import listed

CONFIG = "config.json"
_MAX_BYTES = 2**24
_ATTENTION = "attn_implementation"
_SAVED = "Save the model again with save_pretrained, or write a factory for it (--model)."


def built(
    folder: Path, state: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that a folder describes, with its weights, and notes.

    Args:
        folder: Holds config.json.
        state: {name: tensor}, as stored.
        kwargs: `architecture`, the class in transformers, where it is not the config's;
            `attn_implementation`, how attention is computed; anything else replaces a value of the
            config.

    Raises:
        ModelError: transformers is absent, or does not know the model.
        CheckpointError: The weights are not those of the model.
    """
    where = str(folder / CONFIG)
    content = _content(folder / CONFIG)
    _refuse_code({**content, **kwargs}, where)
    transformers = _transformers(where)
    with _quiet(transformers), _building(where):
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        _override(config, kwargs, where)
        kind = _class(transformers, content, kwargs, where)
        model, told = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in our own words
            **{key: value for key, value in kwargs.items() if key == _ATTENTION},
        )
    notes = _notes(told, str(folder))
    model.__class__ = _answering_logits(kind)
    return model, notes


def _content(path: Path) -> dict[str, Any]:
    """Read config.json."""

    def error(what: str, remedy: str = _SAVED) -> ModelError:
        return ModelError(what, where=str(path), remedy=remedy)

    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise error(f"it is larger than {_MAX_BYTES:,} bytes")
        content = json.loads(text)
    except OSError as failure:
        raise error(f"cannot be read: {failure.strerror}") from failure
    except (ValueError, RecursionError) as failure:
        raise error(f"is no JSON: {first_line(failure)}") from failure
    if not isinstance(content, dict):
        raise error("is no table of settings")
    if "quantization_config" in content:
        raise error("the weights are quantized", "Give the folder of the model before quantizing.")
    return content


def _refuse_code(settings: Mapping[str, Any], where: str) -> None:
    """Refuse what would be executed: classes of the folder, kernels of a repository."""
    attention = [v for k, v in settings.items() if _ATTENTION in k and isinstance(v, str)]
    if "auto_map" in settings or any("/" in value for value in attention):
        raise ModelError(
            "the model needs code of its own, which is never executed", where=where, remedy=_SAVED
        )


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"the package transformers is needed to build this model: {error}",
            where=where,
            remedy="Install it: pip install 'gradscope[hf]'.",
        ) from error
    return transformers


def _override(config: Any, kwargs: Mapping[str, Any], where: str) -> None:
    for key, value in {"use_cache": False, **kwargs}.items():
        if key in ("architecture", _ATTENTION):
            continue
        if not hasattr(config, key):
            if key == "use_cache":
                continue
            raise ModelError(
                f"the config has no value {key!r} that `kwargs` could replace",
                where=where,
                remedy=suggestion(key, sorted(config.to_dict())),
            )
        setattr(config, key, value)


def _class(
    transformers: Any, content: Mapping[str, Any], kwargs: Mapping[str, Any], where: str
) -> Any:
    own = content.get("architectures")
    name = kwargs.get("architecture", own[0] if isinstance(own, list) and own else None)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ModelError(
            "it names no architecture" if name is None else f"transformers has no model {name!r}",
            where=where,
            remedy='Name a class of transformers: kwargs = { architecture = "..." } under [model].',
        )
    return kind


def _notes(told: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Refuse a model of which not every weight came from the checkpoint."""
    missing = sorted(told["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of the model are missing: {listed(missing)}",
            where=where,
            remedy="Name the architecture that was saved: kwargs = { architecture = ... }.",
        )
    wrong = sorted(
        f"{name}: {tuple(here)} here, {tuple(there)} in the model"
        for name, here, there in told["mismatched_keys"]
    )
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit: {listed(wrong)}", where=where, remedy=_SAVED
        )
    if told["error_msgs"]:
        raise CheckpointError(
            f"transformers could not convert the weights: {listed(told['error_msgs'], 3)}",
            where=where,
            remedy=_SAVED,
        )
    unused = sorted(told["unexpected_keys"])
    return (f"The model does not use these of the checkpoint: {listed(unused)}.",) if unused else ()


def _answering_logits(kind: Any) -> Any:
    """Return the class with a forward pass that gives the logits alone, where there are any."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = kind.forward(self, *args, **kwargs)
        return getattr(answer, "logits", answer)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' own reports and progress bars off the terminal."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _building(where: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # whatever transformers makes of a config
        raise ModelError(
            f"transformers cannot build the model: {first_line(error)}", where=where, remedy=_SAVED
        ) from error
