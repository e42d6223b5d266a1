"""What one setting may be: the types that the sections of a run file are made of."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from gradscope.config.compressions import parse_compression
from gradscope.config.references import HELD, function_of, split_reference
from gradscope.config.shards import parse_shard
from gradscope.config.sizes import parse_memory
from gradscope.errors import SpecError

_SAMPLES = re.compile(r"([0-9]{0,18}):([0-9]{0,18})")


def parse_samples(text: str) -> slice:
    """Return the slice that "A:B", "A:", ":B" or ":" stands for, counted from 0.

    Raises:
        SpecError: It has another form, or B is not beyond A.
    """
    match = _SAMPLES.fullmatch(text)
    start, stop = (int(n) if n else None for n in match.groups()) if match else (0, 0)
    if stop is not None and stop <= (start or 0):
        raise SpecError(
            f"found {text!r}",
            where="samples",
            remedy="Accepted: A:B with 0 ≤ A < B, from sample A up to, not including, sample B.",
        )
    return slice(start, stop)


def _path(value: Any) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    text.encode()  # a UnicodeEncodeError is a ValueError: the run is recorded as UTF-8
    if not text or "\0" in text:
        raise ValueError("not a path")
    return Path(text)


def _reference(value: str) -> str:
    if value != HELD:
        _as_value_error(split_reference, value)
    return value


def _loss(value: str) -> str:
    if function_of(value) is None and value.partition(":")[0].endswith(".py"):
        raise ValueError("a file without a function")
    return value


def _samples(value: str) -> str:
    _as_value_error(parse_samples, value)
    return value


def _shard(value: str) -> str:
    _as_value_error(parse_shard, value)
    return value


def _memory(value: str) -> str:
    _as_value_error(parse_memory, value)
    return value


def _compression(value: str) -> str:
    _as_value_error(parse_compression, value)
    return value


def _as_value_error(check: Any, value: str) -> None:
    try:
        check(value)
    except SpecError as error:
        raise ValueError(error.what) from error


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


# Longer texts take the square of their length, here or there.
Text = Annotated[str, Field(strict=True, min_length=1, max_length=10_000)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Glob = Annotated[str, Field(strict=True, min_length=1, max_length=1_000)]
Globs = Annotated[tuple[Glob, ...], Field(min_length=1)]
SomePath = Annotated[Path, PlainValidator(_path)]
Reference = Annotated[Text, AfterValidator(_reference)]
LossName = Annotated[Text, AfterValidator(_loss)]
Table = Annotated[dict[Text, Any], AfterValidator(_recordable)]
Samples = Annotated[Text, AfterValidator(_samples)]
Part = Annotated[Text, AfterValidator(_shard)]
Memory = Annotated[Text, AfterValidator(_memory)]
Compressed = Annotated[Text, AfterValidator(_compression)]
Names = Annotated[Texts, AfterValidator(_distinct)]
Switch = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**40)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Device = Annotated[str, Field(strict=True, pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Place = Annotated[int, Field(strict=True, ge=0, lt=2**40)]
Size = Annotated[int, Field(strict=True, ge=-1, lt=2**40)]
Shape = Annotated[tuple[Size, ...], AfterValidator(_shape)]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
Integer = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]
ArrayDtype = Dtype | Integer | Literal["complex64", "complex128"]
