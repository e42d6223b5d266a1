"""A commented run file for a checkpoint and a data file, with what can be guessed marked as such.

Nothing of the user's is executed: Python files are parsed, not imported.
"""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradscope.config import HELD, function_of
from gradscope.core.texts import listed
from gradscope.errors import CheckpointError
from gradscope.sources.data.columns import SequenceColumn, Stored, TextColumn, dtype_name
from gradscope.sources.data.files import open_arrays
from gradscope.sources.weights.checkpoints import read
from gradscope.sources.weights.fit import state_dicts
from gradscope.sources.weights.hugging_face import CONFIG

_SHOWN = 6  # tensors named in a comment
_TARGETS = {"target", "targets", "label", "labels", "y", "class", "classes", "following"}
_NO_INPUTS = {"id", "ids", "idx", "index", "indices"}  # a name that is only this
_KEYWORDS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values", "position_ids"}
_FACTORIES = ("build", "build_model", "make_model", "create_model", "get_model", "model", "net")

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
    _add_model(result, checkpoint, data, folder, model)
    _add_checkpoint(result, checkpoint, folder)
    _add_data_and_loss(result, data, folder, loss)
    result.text += _COMPUTE
    return result


def quoted(text: str) -> str:
    """Return a text as TOML writes it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'


def _add_model(
    result: Draft, checkpoint: Path, data: Path, folder: Path, model: str | None
) -> None:
    result.add("", "[model]", "# FILE.py:FUNCTION, a function that returns the model")
    beside = (checkpoint.absolute().parent, data.absolute().parent, Path.cwd())
    found, reason = (model, "") if model else _model_guess(checkpoint, beside)
    value = _anchored(found or "model.py:build", folder)
    if found and reason:
        result.guessed["model.factory"] = f"{value}: {reason}"
        result.add(f"# guessed: {_comment(reason)}")
    elif not found:
        result.missing.append("model.factory")
        result.add("# AN EXAMPLE: nothing that looks like it was found; write your own")
    result.add(f"factory = {quoted(value)}")
    result.add("# kwargs = { width = 64 }          # the function's keyword arguments")
    result.add('mode = "eval"                      # or "train"')


def _model_guess(checkpoint: Path, folders: Iterable[Path]) -> tuple[str | None, str]:
    """Return a factory, and why: config.json's, or a function of a file in these folders."""
    if (checkpoint / CONFIG).exists():
        return HELD, "the folder's config.json describes it"
    found = [
        (file.name != "model.py", _FACTORIES.index(name), f"{file}:{name}")
        for folder in dict.fromkeys(folders)
        for file in sorted(folder.glob("*.py"))
        for name in _functions(file)
        if name in _FACTORIES
    ]
    best = min(found, key=lambda each: each[:2])[2] if found else None
    return best, "the name of a function in a file beside it"


def _functions(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # it will be told when it is used
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _add_checkpoint(result: Draft, checkpoint: Path, folder: Path) -> None:
    content, report = read(checkpoint)
    found = state_dicts(content) if isinstance(content, Mapping | nn.Module) else []
    weights = [
        (key, {k: v for k, v in state.items() if isinstance(v, Tensor)})
        for key, state in found
        if all(isinstance(k, str) for k in state)
    ]
    most = max((len(tensors) for _, tensors in weights), default=0)
    if not most:
        remedy = "Save model.state_dict()."
        what = "there are no named tensors in it"
        raise CheckpointError(what, where=str(checkpoint), remedy=remedy)
    largest = [(key, tensors) for key, tensors in weights if len(tensors) == most]
    names = [f"{name} {tuple(value.shape)}" for name, value in largest[0][1].items()]
    shown = _comment(listed(names, _SHOWN))
    result.add("", "[checkpoint]", f"# {report.format}, {len(names)} tensors: {shown}")
    result.add(f"path = {quoted(_relative(checkpoint, folder))}")
    keys = [key for key, _ in largest if key]
    if len(largest) > 1:
        result.guessed["checkpoint.key"] = f"{keys[0]}: the first of {listed(keys)}"
        result.add(f"key = {quoted(keys[0])}  # guessed: one of {_comment(listed(keys))}")


def _add_data_and_loss(result: Draft, data: Path, folder: Path, loss: str | None) -> None:
    result.add("", "[dataset]")
    found, reason = "mse", "an example"
    if data.suffix.lower() == ".toml":
        result.add(f"spec = {quoted(_relative(data, folder))}")
        result.missing += [] if loss else ["loss.name"]
    else:
        found, reason = _add_arrays(result, data, folder)
        if loss is None:
            result.guessed["loss.name"] = f"{found}: {reason}"
    result.add("", "[loss]", "# of `gradscope list losses`, or FILE.py:FUNCTION")
    result.add("# (outputs, targets) -> one number a sample")
    if loss is None:
        result.add(f"# guessed: {_comment(reason)}")
    result.add(f"name = {quoted(_anchored(loss or found, folder))}")


@dataclass(frozen=True)
class _DataArray:
    """An array of the data file: N, the shape of a sample if all have one, "float32" or "text"."""

    length: int
    sample: tuple[int, ...] | None
    dtype: str

    def __str__(self) -> str:
        shape = "of different lengths" if self.sample is None else str(self.sample)
        return f"{self.dtype} {shape} x {self.length:,}".replace(
            "text of different lengths", "text"
        )

    @classmethod
    def of(cls, stored: Stored) -> "_DataArray":
        """Return what is known of an array before its rows are read."""
        if isinstance(stored, SequenceColumn):
            return cls(len(stored.lengths), None, dtype_name(stored.dtype))
        if isinstance(stored, TextColumn):
            return cls(stored.n, None, "text")
        length, *sample = stored.shape or (0,)
        return cls(int(length), tuple(map(int, sample)), dtype_name(stored.dtype))


_DataArrays = Mapping[str, _DataArray]


def _add_arrays(result: Draft, data: Path, folder: Path) -> tuple[str, str]:
    """Add what is known of a data file, and return a loss, and why."""
    kind, opened = open_arrays(data)
    arrays = {name: _DataArray.of(opened.load(name)) for name in opened.names}
    inputs, targets, reason = _columns_guess(arrays)
    held = listed(f"{name} {array}" for name, array in arrays.items())
    result.add(f"# {kind}: {_comment(held)}", f"path = {quoted(_relative(data, folder))}")
    for key, value in (("inputs", _value(inputs)), ("targets", _value(targets))):
        result.guessed[f"dataset.{key}"] = f"{value}: {reason}"
        result.add(f"{key} = {value}  # guessed: {reason}")
    bytes_ = [k for k in inputs if arrays[k].dtype in ("uint8", "bool") and arrays[k].sample]
    if bytes_:
        casts = _value(dict.fromkeys(bytes_, "float32"))
        result.guessed["dataset.dtype"] = f"{casts}: inputs are bytes"
        result.add(f"dtype = {casts}  # guessed: these inputs are bytes, such as pixels")
        example = _value(dict.fromkeys(bytes_, 1 / 255))
        result.add(f"# scale = {example}  # times this, as the model was trained")
    return _loss_guess(arrays, inputs, targets)


def _columns_guess(arrays: _DataArrays) -> tuple[list[str] | dict[str, str], list[str], str]:
    """Return which arrays are the inputs, a list or {keyword: name}, which the targets, and why."""
    n = Counter(array.length for array in arrays.values()).most_common(1)[0][0] if arrays else 0
    usable = [name for name, array in arrays.items() if array.length == n]
    targets = [name for name in usable if _TARGETS & set(re.split(r"[\W_]+", name.lower()))]
    inputs = [k for k in usable if k not in targets and k.lower() not in _NO_INPUTS]
    if not inputs:  # one array, or only names that look like targets
        inputs, targets = targets[:1] or usable[:1], targets[1:]
    if "input_ids" in inputs and not targets:
        targets = ["input_ids"]
    known = {name: name for name in inputs if name in _KEYWORDS}
    if len(inputs) == 2 and not targets and not known:
        return inputs[:1], inputs[1:], "of two arrays, the first and the second"
    return known or inputs, targets, "by their names"


def _loss_guess(arrays: _DataArrays, inputs: Iterable[str], targets: list[str]) -> tuple[str, str]:
    """Return a loss that takes targets of this dtype and shape, and why."""
    if not targets:
        return "mse", "there are no targets: name a function of your own, FILE.py:LOSS"
    target = arrays[targets[0]]
    integer = "int" in target.dtype
    if "input_ids" in inputs and integer and target.sample != ():
        return "causal_lm", "targets are token ids, one a position"
    if integer:
        return "cross_entropy", "targets are integers, taken for classes"
    if target.dtype == "bool":
        return "bce_with_logits", "targets are true or false"
    return "mse", f"targets are {target.dtype}"


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
