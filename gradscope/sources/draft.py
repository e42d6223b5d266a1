"""A commented run file for a checkpoint and a data file."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradscope.config import function_of
from gradscope.sources import guesses
from gradscope.sources.listing import listed

_SHOWN = 6  # tensors named in a comment

_HEAD = """\
# A run file for gradscope. What was guessed is marked. Paths are relative to this file.
#   gradscope check --config FILE                loads, proves the first batch, writes nothing
#   gradscope compute --config FILE -o OUT.h5
version = 1
"""
_COMPUTE = """\
[compute]
backend = "auto"
transform = ["identity"]           # every sample's gradient; or such as "clip:max_norm=1.0 | mean"
# parameters = ["*"]               # only parameters of these names
# samples = "0:100"                # only some samples
# batch_size = 32                  # samples computed at a time
"""


@dataclass
class Draft:
    """A run file to be looked at.

    Attributes:
        text: TOML.
        guessed: {key: "value: why"}.
        missing: Keys that could not be guessed; their values are examples.
    """

    text: str = ""
    guessed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        """Append lines."""
        self.text += "".join(f"{line}\n" for line in lines)


def draft(
    checkpoint: Path,
    data: Path,
    folder: Path,
    *,
    model: str | None = None,
    loss: str | None = None,
) -> Draft:
    """Return a run file, guessing what can be guessed.

    Args:
        checkpoint: A checkpoint.
        data: A data file, or a dataset spec ending in .toml.
        folder: Where the run file will be.
        model: The factory, if it is known.
        loss: The loss, if it is known.

    Raises:
        CheckpointError: The checkpoint cannot be read or is refused.
        DatasetError: The data cannot be read.
    """
    result = Draft(_HEAD)
    _model(result, checkpoint, data, folder, model)
    _checkpoint(result, checkpoint, folder)
    _data_and_loss(result, data, folder, loss)
    result.add("", *_COMPUTE.splitlines())
    return result


def quoted(text: str) -> str:
    """Return a text as TOML writes it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'


def _model(result: Draft, checkpoint: Path, data: Path, folder: Path, model: str | None) -> None:
    result.add("", "[model]", "# FILE.py:FUNCTION, a function that returns the model")
    beside = (checkpoint.absolute().parent, data.absolute().parent, Path.cwd())
    found = None if model else guesses.model_guess(checkpoint, beside)
    value = _anchored(model or (found.value if found else "model.py:build"), folder)
    if found:
        result.guessed["model.factory"] = f"{value}: {found.reason}"
        result.add(f"# guessed: {_comment(found.reason)}")
    elif model is None:
        result.missing.append("model.factory")
        result.add("# AN EXAMPLE: nothing that looks like it was found; write your own")
    result.add(f"factory = {quoted(value)}")
    result.add("# kwargs = { width = 64 }          # the function's keyword arguments")
    result.add('mode = "eval"                      # or "train"')


def _checkpoint(result: Draft, checkpoint: Path, folder: Path) -> None:
    facts = guesses.checkpoint_facts(checkpoint)
    tensors = _comment(listed(facts.tensors, _SHOWN))
    result.add("", "[checkpoint]", f"# {facts.format}, {len(facts.tensors)} tensors: {tensors}")
    result.add(f"path = {quoted(_relative(checkpoint, folder))}")
    keys = [key for key in facts.keys if key]
    if len(facts.keys) > 1:
        result.guessed["checkpoint.key"] = f"{keys[0]}: the first of {listed(keys)}"
        result.add(f"key = {quoted(keys[0])}  # guessed: one of {_comment(listed(keys))}")


def _data_and_loss(result: Draft, data: Path, folder: Path, loss: str | None) -> None:
    result.add("", "[dataset]")
    found = guesses.Guess("mse", "an example")
    if data.suffix.lower() == ".toml":
        result.add(f"spec = {quoted(_relative(data, folder))}")
        result.missing += [] if loss else ["loss.name"]
    else:
        found = _columns(result, data, folder)
        if loss is None:
            result.guessed["loss.name"] = f"{found.value}: {found.reason}"
    result.add("", "[loss]", "# of `gradscope list losses`, or FILE.py:FUNCTION")
    result.add("# (outputs, targets) -> one number a sample")
    if loss is None:
        result.add(f"# guessed: {_comment(found.reason)}")
    result.add(f"name = {quoted(_anchored(loss or found.value, folder))}")


def _columns(result: Draft, data: Path, folder: Path) -> guesses.Guess:
    """Add what is known of a data file, and return a loss."""
    name, arrays = guesses.data_arrays(data)
    inputs, targets = guesses.columns_guess(arrays)
    loss = guesses.loss_guess(arrays, inputs.value, targets.value)
    casts = guesses.dtype_guess(arrays, inputs.value)
    values = {"inputs": _value(inputs.value), "targets": _value(targets.value)}
    held = listed(f"{k} {array} x {array.length:,}" for k, array in arrays.items())
    result.add(f"# {name}: {_comment(held)}", f"path = {quoted(_relative(data, folder))}")
    for key, value in values.items():
        result.guessed[f"dataset.{key}"] = f"{value}: {inputs.reason}"
        result.add(f"{key} = {value}  # guessed: {inputs.reason}")
    if casts:
        result.guessed["dataset.dtype"] = f"{_value(casts)}: inputs are bytes"
        result.add(f"dtype = {_value(casts)}  # guessed: these inputs are bytes, such as pixels")
        example = _value(dict.fromkeys(casts, 1 / 255))
        result.add(f"# scale = {example}  # times this, as the model was trained")
    return loss


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quoted(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)


def _comment(text: str) -> str:
    """Return a text that may stand in a comment, on one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _anchored(reference: str, folder: Path) -> str:
    """Make the file of FILE.py:FUNCTION relative to the folder."""
    function = function_of(reference)
    file = (function or "").rpartition(":")[0]
    if not file.endswith(".py") or (reference == "model.py:build" and not Path(file).exists()):
        return reference
    return _relative(Path(file), folder) + reference[len(file) :]


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
