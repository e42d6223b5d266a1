"""Values of settings: parsers of their texts, and the types of the run file's keys.

A user's function is written as "FILE.py:NAME" or "package.module:NAME". A loss is such a function
or a registered name, with arguments as in a chain:
`cross_entropy:label_smoothing=0.1,per_sample=sum`. Shards and workers are counted from 0, like
torchrun's RANK and the tasks of job arrays.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from gradscope.core.grammar import Stage, arguments
from gradscope.core.texts import count
from gradscope.errors import SpecError

REFERENCE_FORMS = "FILE.py:NAME or package.module:NAME"
NONE = {"none": True}  # a table of arguments that stands for None, which TOML does not have
FROM_CHECKPOINT = "checkpoint"  # instead of a factory: the model stored in the checkpoint

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAMES = rf"{_DOTTED}(?:,[^\W\d]\w*)*"  # NAME, or several variables of data: main.inputs,labels
_REFERENCE = re.compile(rf"(?P<place>.+\.py|{_DOTTED}):(?P<name>{_NAMES})", re.DOTALL)
_WITH_ARGUMENTS = re.compile(rf"(?P<function>(?:.+?\.py|{_DOTTED}):{_NAMES})(?::.*)?", re.DOTALL)
_SHARD = re.compile(r"(0|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})")
_SAMPLES = re.compile(r"([0-9]{0,18}):([0-9]{0,18})")
_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT])(i?)B", re.IGNORECASE)
_LEVELS = {"gzip": (1, 4, 9), "zstd": (1, 3, 22), "blosc2": (1, 5, 9)}  # lowest, default, highest


@dataclass(frozen=True)
class Compression:
    """The compression of rows: gzip, zstd or blosc2; a higher level is smaller and slower."""

    name: str
    level: int

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"


def parse_compression(text: str) -> Compression:
    """Return the compression for "NAME" or "NAME:LEVEL".

    Raises:
        SpecError: The name or level is unknown.
    """
    name, colon, level = text.partition(":")
    lowest, default, highest = _LEVELS.get(name, (0, 0, -1))
    number = int(level) if level.isascii() and level.isdigit() and len(level) < 4 else -1
    found = number if colon else default
    if not lowest <= found <= highest:
        known = ", ".join(f"{name}:{low} to {high}" for name, (low, _, high) in _LEVELS.items())
        remedy = f"Accepted: {known}; without a level, the default level."
        raise SpecError(f"found {text!r}", where="compression", remedy=remedy)
    return Compression(name, found)


def parse_memory(text: str) -> int:
    """Return the bytes for a text such as "2GB", "1.5 GiB" or "500MB"; 1 GB is 1000³ bytes.

    Raises:
        SpecError: The text has a different form, or the size is zero.
    """
    match = _MEMORY.fullmatch(text)
    size = 0
    if match:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    if not size:
        remedy = (
            "Accepted: a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 2GB or 1.5GiB."
        )
        raise SpecError(f"found {text!r}", where="memory", remedy=remedy)
    return size


def memory_text(size: float) -> str:
    """Return a size in bytes as text, such as "2.5 GB" or "500 MB"."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def parse_samples(text: str) -> slice:
    """Return the slice for "A:B", "A:", ":B" or ":", counted from 0.

    Raises:
        SpecError: The text has a different form, or B is not larger than A.
    """
    match = _SAMPLES.fullmatch(text)
    start, stop = (int(n) if n else None for n in match.groups()) if match else (0, 0)
    if stop is not None and stop <= (start or 0):
        remedy = "Accepted: A:B with 0 ≤ A < B, for the samples A to B - 1."
        raise SpecError(f"found {text!r}", where="samples", remedy=remedy)
    return slice(start, stop)


@dataclass(frozen=True)
class Shard:
    """The part of the samples for worker `index` (counted from 0) of `count` workers."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def place(self, output: Path) -> Path:
        """Return the path of this shard's file, next to the file of the whole run."""
        name = f"{output.stem}.shard-{self.index}-of-{self.count}{output.suffix}"
        return output.with_name(name)

    def rows(self, whole: range, batch: int) -> range:
        """Return this shard's samples, in whole batches of `batch` samples.

        Raises:
            SpecError: There are fewer batches than shards.
        """
        batches = -(-len(whole) // batch)
        if batches < self.count:
            raise SpecError(
                f"there are too few batches of {batch:,} for {self.count:,} shards: "
                f"{count(len(whole), 'sample')} make {count(batches, 'batch')}",
                where="shard",
                remedy=f"Use at most {count(batches, 'shard')}, or a smaller `batch_size`.",
            )
        first, last = (k * batches // self.count * batch for k in (self.index, self.index + 1))
        return whole[first:last]


def parse_shard(text: str) -> Shard:
    """Return the shard for "I/N".

    Raises:
        SpecError: The text has a different form, or I is not below N.
    """
    match = _SHARD.fullmatch(text)
    shard = Shard(*map(int, match.groups())) if match else Shard(0, 0)
    if shard.index >= shard.count:
        remedy = "Accepted: I/N with 0 ≤ I < N. Shards are counted from 0."
        raise SpecError(f"found {text!r}", where="shard", remedy=remedy)
    return shard


@dataclass(frozen=True)
class Worker:
    """One of several processes that torchrun has started."""

    shard: Shard  # the samples that the worker computes
    local: int | None  # LOCAL_RANK, which selects the GPU, or None if it is not set
    restarted: bool  # whether torchrun restarted the worker after a failure

    def device(self, wanted: str | None) -> str | None:
        """Return this worker's GPU if `wanted` is "cuda", else `wanted`."""
        return f"cuda:{self.local}" if wanted == "cuda" and self.local is not None else wanted


def this_worker(environment: Mapping[str, str]) -> Worker | None:
    """Return this process as one of several workers, or None if it is the only process.

    Raises:
        SpecError: RANK and WORLD_SIZE do not match.
    """
    count = environment.get("WORLD_SIZE", "1")
    if count == "1":
        return None
    index, local = (environment.get(key, "") for key in ("RANK", "LOCAL_RANK"))
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    try:
        shard = parse_shard(f"{index}/{count}")
    except SpecError as error:
        raise SpecError(
            f"found RANK={index!r} and WORLD_SIZE={count!r}",
            where="environment",
            remedy="Start the workers with torchrun, or unset WORLD_SIZE. To name the shard "
            "yourself, use `gradscope compute --shard I/N`.",
        ) from error
    return Worker(shard, int(local) if local.isdecimal() else None, restarts not in ("", "0"))


def split_reference(reference: str) -> tuple[str, str]:
    """Split "FILE.py:NAME" or "package.module:NAME" into file or module, and name.

    The name of a script as a whole, "FILE.py", is "".

    Raises:
        SpecError: The text has none of these forms.
    """
    if is_script(reference):
        return reference, ""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise SpecError(f"found {reference!r}", remedy=f"Accepted: {REFERENCE_FORMS}.")
    return match["place"], match["name"]


def is_script(text: str) -> bool:
    """Whether a reference is a script as a whole, "FILE.py": what it trains in its first steps."""
    return text.endswith(".py") and ":" not in text


def file_of(reference: str) -> str | None:
    """Return FILE.py of a reference, with a loss's arguments or without, or None."""
    text = function_of(reference) or reference
    place = text if is_script(text) else text.rpartition(":")[0]
    return place if place.endswith(".py") else None


def function_of(loss: str) -> str | None:
    """Return the reference "FILE.py:NAME" of a loss without its arguments, or None for a name."""
    if is_script(loss):
        return loss
    match = _WITH_ARGUMENTS.fullmatch(loss)
    return None if match is None else match["function"]


def nested_factory(table: Any) -> str | None:
    """Return the reference "FILE.py:NAME" under the key `factory` of a table, or None."""
    found = table.get("factory") if isinstance(table, Mapping) else None
    return found if isinstance(found, str) and function_of(found) == found else None


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder: the model is then an adapter's base model."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # the path is too long, or has no permission
        return False


def parse_loss(text: str, kwargs: Mapping[str, Any] | None = None) -> Stage:
    """Return the loss's name and its arguments, from the text and from the table `kwargs`.

    Raises:
        SpecError: An argument is not of the form key=value, is given twice, or is a table.
    """
    name = function_of(text) or text.partition(":")[0]
    rest = text[len(name) :]
    try:
        given = arguments(text, name, rest[1:], len(name) + 1) if rest else {}
    except SpecError as error:
        error.where = "loss"
        raise
    for key, value in (kwargs or {}).items():
        if key in given:
            raise SpecError(
                f"{key!r} is given twice, in the name and in kwargs",
                where="loss",
                remedy="Remove one of the two.",
            )
        if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
            given[key] = ",".join(map(str, value)) + "," * (len(value) == 1)
        elif isinstance(value, str | int | float):
            given[key] = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            remedy = "Accepted: a number, text, true or false, or a list of numbers."
            raise SpecError(f"{key!r} is {value!r}", where="loss.kwargs", remedy=remedy)
    return Stage(name, given, text)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return the validator that accepts the same texts as `parse`."""

    def check(value: str) -> str:
        try:
            parse(value)
        except SpecError as error:
            raise ValueError(error.what) from error
        return value

    return AfterValidator(check)


def _path(value: Any) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    text.encode()  # raises UnicodeEncodeError, a ValueError: results record the run as UTF-8
    if not text or "\0" in text:
        raise ValueError("not a path")
    return Path(text)


def _reference(value: str) -> None:
    if value != FROM_CHECKPOINT and not is_folder(Path(value)):
        split_reference(value)


def _loss(value: str) -> None:
    if function_of(value) is None and value.partition(":")[0].endswith(".py"):
        raise SpecError("a file without a function")


def _shape(value: tuple[int, ...]) -> tuple[int, ...]:
    if 0 in value or value.count(-1) > 1:
        raise ValueError("not a shape")
    return value


def _recordable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, default=str)  # dates are written as text
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("repeated")
    return value


# The parsing time is quadratic in the length of a text, so the length is limited.
Text = Annotated[str, Field(strict=True, min_length=1, max_length=10_000)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Names = Annotated[Texts, AfterValidator(_distinct)]
# a single name is a list of one name
ArrayNames = Annotated[
    tuple[Text, ...], BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)
]
Glob = Annotated[str, Field(strict=True, min_length=1, max_length=1_000)]
Globs = Annotated[tuple[Glob, ...], Field(min_length=1)]
SomePath = Annotated[Path, PlainValidator(_path)]
Table = Annotated[dict[Text, Any], AfterValidator(_recordable)]
Switch = Annotated[bool, Field(description="true or false", strict=True)]
Reference = Annotated[Text, _parsed_by(_reference)]
LossName = Annotated[Text, _parsed_by(_loss)]
Samples = Annotated[
    Text,
    _parsed_by(parse_samples),
    Field(description='"A:B" with 0 ≤ A < B; A or B may be left out'),
]
_OTHER_FORMATS = {
    *(".npz", ".npy", ".pt", ".pth", ".pkl", ".safetensors", ".csv", ".json", ".jsonl", ".parquet"),
    *(".arrow", ".toml", ".html", ".txt"),
}


def _result_path(path: Path) -> Path:
    if path.suffix.lower() in _OTHER_FORMATS:
        raise ValueError("the ending belongs to a different format")
    return path


ResultPath = Annotated[Path, AfterValidator(_result_path)]
ShardText = Annotated[
    Text,
    _parsed_by(parse_shard),
    Field(description='"I/N" with 0 ≤ I < N: part I of N, counted from 0'),
]
Memory = Annotated[
    Text, _parsed_by(parse_memory), Field(description='a size such as "2GB", "500MB" or "1.5GiB"')
]
Compressed = Annotated[
    Text,
    _parsed_by(parse_compression),
    Field(description="gzip, zstd or blosc2, optionally with :LEVEL"),
]
Device = Annotated[
    str,
    Field(description="cpu, cuda or cuda:N", strict=True, pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$"),
]
Count = Annotated[int, Field(description="an integer of at least 1", strict=True, ge=1, lt=2**40)]
Seed = Annotated[
    int, Field(description="an integer from 0 to 2^63 - 1", strict=True, ge=0, lt=2**63)
]
Preview = Annotated[
    int, Field(description="bytes, from 32 to 65,536", strict=True, ge=32, le=65_536)
]
Position = Annotated[int, Field(strict=True, ge=0, lt=2**40)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    BeforeValidator(lambda text: text.split(",")),
    Field(description="numbers separated by commas"),
]
Size = Annotated[int, Field(strict=True, ge=-1, lt=2**40)]
Shape = Annotated[tuple[Size, ...], AfterValidator(_shape)]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
Integer = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]
ArrayDtype = Dtype | Integer | Literal["complex64", "complex128"]
