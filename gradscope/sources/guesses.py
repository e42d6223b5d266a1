"""What a run file may say, guessed from a checkpoint, a data file and the files beside them.

Nothing of the user's is executed: Python files are parsed, not imported.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradscope.config import HELD
from gradscope.errors import CheckpointError
from gradscope.sources.conversion import dtype_name
from gradscope.sources.data.files import open_arrays
from gradscope.sources.weights.checkpoints import read
from gradscope.sources.weights.contents import StateDict, state_dicts
from gradscope.sources.weights.hugging_face import CONFIG

_TARGETS = {"target", "targets", "label", "labels", "y", "class", "classes", "following"}
_NO_INPUTS = {"id", "ids", "idx", "index", "indices"}  # a name that is only this
_KEYWORDS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values", "position_ids"}
_FACTORIES = ("build", "build_model", "make_model", "create_model", "get_model", "model", "net")


@dataclass(frozen=True)
class Array:
    """An array of the data file.

    Attributes:
        length: N.
        sample: The shape of one sample; None for texts and for sequences of different lengths.
        dtype: "float32", or "text".
    """

    length: int
    sample: tuple[int, ...] | None
    dtype: str

    @property
    def is_integer(self) -> bool:
        """Whether it holds whole numbers."""
        return "int" in self.dtype

    def __str__(self) -> str:
        shape = "of different lengths" if self.sample is None else str(self.sample)
        return f"{self.dtype} {shape}" if self.dtype != "text" else "text"


@dataclass(frozen=True)
class Guess:
    """A value, and why.

    Attributes:
        value: For the run file.
        reason: One clause.
    """

    value: Any
    reason: str


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint holds.

    Attributes:
        format: The reader's name.
        keys: Where state dicts are in it, dotted.
        tensors: "name (shape)" of the first one's tensors.
    """

    format: str
    keys: tuple[str, ...]
    tensors: tuple[str, ...]


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a checkpoint and return what it holds.

    Raises:
        CheckpointError: It cannot be read or is refused, or holds no weights.
    """
    content = read(path)
    found = state_dicts(content.value) if isinstance(content.value, Mapping | nn.Module) else []
    weights = [each for each in found if all(isinstance(k, str) for k in each.state)]
    largest = max(weights, key=_tensors, default=StateDict("", {}))
    if not _tensors(largest):
        raise CheckpointError(
            "there are no named tensors in it", where=str(path), remedy="Save model.state_dict()."
        )
    tensors = {k: v for k, v in largest.state.items() if isinstance(v, Tensor)}
    return CheckpointFacts(
        content.format,
        tuple(each.key for each in weights if _tensors(each) == len(tensors)),
        tuple(f"{name} {tuple(value.shape)}" for name, value in tensors.items()),
    )


def data_arrays(path: Path) -> tuple[str, dict[str, Array]]:
    """Return the format of a data file and its arrays.

    Raises:
        DatasetError: It cannot be read.
    """
    name, opened = open_arrays(path)
    return name, {array: _array(opened.load(array)) for array in opened.names}


def model_guess(checkpoint: Path, folders: Iterable[Path]) -> Guess | None:
    """Return a factory: what config.json describes, or a function of a file in these folders."""
    if (checkpoint / CONFIG).exists():
        return Guess(HELD, "the folder's config.json describes it")
    found = [
        (file.name != "model.py", _FACTORIES.index(name), file, name)
        for folder in dict.fromkeys(folders)
        for file in sorted(folder.glob("*.py"))
        for name in _functions(file)
        if name in _FACTORIES
    ]
    if not found:
        return None
    *_, file, name = min(found, key=lambda each: each[:2])
    return Guess(f"{file}:{name}", "the name of a function in a file beside it")


def columns_guess(arrays: Mapping[str, Array]) -> tuple[Guess, Guess]:
    """Return which arrays are the inputs, a list or {keyword: name}, and which the targets."""
    n = Counter(array.length for array in arrays.values()).most_common(1)[0][0] if arrays else 0
    usable = [name for name, array in arrays.items() if array.length == n]
    targets = [name for name in usable if _TARGETS & set(re.split(r"[\W_]+", name.lower()))]
    inputs = [k for k in usable if k not in targets and k.lower() not in _NO_INPUTS]
    if not inputs:  # one array, or only names that look like targets
        inputs, targets = targets[:1] or usable[:1], targets[1:]
    if "input_ids" in inputs and not targets:
        targets = ["input_ids"]
    if len(inputs) == 2 and not targets and not _KEYWORDS & set(inputs):
        reason = "of two arrays, the first and the second"
        return Guess(inputs[:1], reason), Guess(inputs[1:], reason)
    if _KEYWORDS & set(inputs):
        known = [name for name in inputs if name in _KEYWORDS]
        return Guess({k: k for k in known}, "by their names"), Guess(targets, "by their names")
    return Guess(inputs, "by their names"), Guess(targets, "by their names")


def loss_guess(arrays: Mapping[str, Array], inputs: Iterable[str], targets: list[str]) -> Guess:
    """Return a loss that takes targets of this dtype and shape."""
    if not targets:
        return Guess("mse", "there are no targets: name a function of your own, FILE.py:LOSS")
    target = arrays[targets[0]]
    if "input_ids" in inputs and target.is_integer and target.sample != ():
        return Guess("causal_lm", "targets are token ids, one a position")
    if target.is_integer:
        return Guess("cross_entropy", "targets are integers, taken for classes")
    if target.dtype == "bool":
        return Guess("bce_with_logits", "targets are true or false")
    return Guess("mse", f"targets are {target.dtype}")


def dtype_guess(arrays: Mapping[str, Array], inputs: Iterable[str]) -> dict[str, str]:
    """Return what bytes that stand for pixels are to be cast to."""
    return {
        name: "float32"
        for name in inputs
        if arrays[name].dtype in ("uint8", "bool") and arrays[name].sample
    }


def _tensors(each: StateDict) -> int:
    return sum(isinstance(value, Tensor) for value in each.state.values())


def _array(stored: Any) -> Array:
    if hasattr(stored, "lengths"):
        return Array(len(stored.lengths), None, dtype_name(stored.dtype))
    if not hasattr(stored, "shape"):
        return Array(stored.n, None, "text")
    length, *sample = stored.shape or (0,)
    return Array(int(length), tuple(map(int, sample)), dtype_name(stored.dtype))


def _functions(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # it will be told when it is used
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
