"""A model with its weights: of the user's factory, or the one that the checkpoint itself holds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from gradscope.config import HELD, CheckpointSpec, ModelSpec
from gradscope.errors import CheckpointError, ModelError
from gradscope.sources.code import class_digests, code_digests, user_file
from gradscope.sources.digests import sha256
from gradscope.sources.fit import check_finite
from gradscope.sources.models import build, notes_on, require_trainable
from gradscope.sources.weights.checkpoints import (
    CheckpointReport,
    Content,
    load_into,
    located,
    read,
)
from gradscope.sources.weights.hugging_face import CONFIG, built

_FACTORY = "Write a function that builds the model, and name it with --model FILE.py:FACTORY."


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        model: In the mode asked for.
        checkpoint: What was loaded.
        digests: SHA-256 of what describes the model, by file: the factory's code, config.json, or
            the code of classes that were pickled; empty where the checkpoint alone does.
        notes: What the user may not expect.
    """

    model: nn.Module
    checkpoint: CheckpointReport
    digests: dict[str, str]
    notes: tuple[str, ...]


def load_model(model: ModelSpec, checkpoint: CheckpointSpec) -> LoadedModel:
    """Build a model and load its weights.

    Raises:
        ModelError: The factory raised, or there is no trainable model.
        CheckpointError: The checkpoint cannot be read or does not fit.
    """
    if model.factory == HELD:
        made, report, digests = _held(model.kwargs, model.mode, checkpoint)
    else:
        made = build(model.factory, model.kwargs, model.mode)
        report = load_into(
            made,
            checkpoint.path,
            key=checkpoint.key,
            ignore=checkpoint.ignore or (),
            unsafe_pickle=checkpoint.unsafe_pickle,
        )
        digests = code_digests(model.factory, "model factory")
    return LoadedModel(made, report, digests, (*report.notes, *notes_on(made)))


def _held(
    kwargs: Mapping[str, Any], mode: Literal["eval", "train"], checkpoint: CheckpointSpec
) -> tuple[nn.Module, CheckpointReport, dict[str, str]]:
    """Return the model that a checkpoint holds."""
    content = read(checkpoint.path, unsafe_pickle=checkpoint.unsafe_pickle)
    path = checkpoint.path
    config = (path if path.is_dir() else path.parent) / CONFIG
    report = CheckpointReport(
        content.path,
        content.format,
        content.sha256,
        0,
        others=content.notes,
        files=content.files,
    )
    if config.exists() and not isinstance(content.value, nn.Module):
        with located(content.path):
            model, notes = built(config.parent, _tensors(content), kwargs)
        report = replace(report, others=(*report.others, *notes), files=(*report.files, config))
        digests = {CONFIG: sha256(config)}
    else:
        model = _module(content, checkpoint.key)
        digests = class_digests(type(module).__module__ for module in model.modules())
        if kwargs:
            raise ModelError(
                "there is no factory that takes the arguments",
                where="model.kwargs",
                remedy="Leave them out: the model is as the checkpoint holds it.",
            )
    require_trainable(model, str(content.path))
    state = model.state_dict()
    with located(content.path):
        check_finite(state, state, {name for name, _ in model.named_parameters()})
    _set_mode(model, mode, content.path)
    return model, replace(report, tensors=len(state)), digests


def _tensors(content: Content) -> Mapping[str, Any]:
    if not isinstance(content.value, Mapping):
        kind = type(content.value).__name__
        raise CheckpointError(f"it holds a {kind}, not a state dict", remedy=_FACTORY)
    return content.value


def _module(content: Content, key: str | None) -> nn.Module:
    """Return the one module in what a trusted file held."""
    value = content.value
    held = {"": value} if isinstance(value, nn.Module) else {}
    if isinstance(value, Mapping):
        held = {k: v for k, v in value.items() if isinstance(v, nn.Module) and key in (None, k)}
    if len(held) == 1:
        return next(iter(held.values()))
    what = (
        f"it holds several models, under {', '.join(map(repr, held))}"
        if held
        else "the checkpoint holds weights, not the model they belong to"
    )
    remedy = "Name one with --key." if held else _FACTORY
    raise CheckpointError(what, where=str(content.path), remedy=remedy)


def _set_mode(model: nn.Module, mode: Literal["eval", "train"], path: Path) -> None:
    try:
        with user_file("the model's own train()"):
            model.train(mode == "train")
    except ModelError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        if mode == "train":
            raise CheckpointError(
                "an exported program stays in the mode in which it was exported",
                where=str(path),
                remedy="Leave --mode out, or export it again in train mode.",
            ) from error
