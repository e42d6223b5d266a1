"""The settings of a run: what the run file may hold, checked strictly and all at once.

    spec = resolve(Path("run.toml"), {"compute": {"backend": "loop"}})

Nothing is loaded here, and torch is not imported.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from gradscope.core.complaints import combined, complaints
from gradscope.core.grammar import Stage
from gradscope.core.references import REFERENCE_FORMS, function_of, parse_loss, split_reference
from gradscope.core.runfile import gather, merge
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
    _as_value_error(split_reference, value)
    return value


def _loss(value: str) -> str:
    if function_of(value) is None and value.partition(":")[0].endswith(".py"):
        raise ValueError("a file without a function")
    return value


def _samples(value: str) -> str:
    _as_value_error(parse_samples, value)
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


_Text = Annotated[str, Field(strict=True, min_length=1)]
_Path = Annotated[Path, PlainValidator(_path)]
_Size = Annotated[int, Field(strict=True, ge=-1, lt=2**40)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Shape = Annotated[tuple[_Size, ...], AfterValidator(_shape)]
_Dtype = Literal["float32", "float64", "float16", "bfloat16"]
_Integer = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]
_ArrayDtype = _Dtype | _Integer | Literal["complex64", "complex128"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """Which model: a function of the user's that returns an nn.Module."""

    factory: Annotated[_Text, AfterValidator(_reference)] = Field(
        description=f"{REFERENCE_FORMS}, a function that returns the model (--model)"
    )
    kwargs: Annotated[dict[_Text, Any], AfterValidator(_recordable)] = Field(
        default={}, description="a table of the factory's keyword arguments"
    )
    mode: Literal["eval", "train"] = Field(default="eval", description="eval or train (--mode)")


class CheckpointSpec(_Section):
    """Which weights."""

    path: _Path = Field(description="the path of a file with the weights (CHECKPOINT)")


class DatasetSpec(_Section):
    """Which arrays of which file, and how they are made into tensors."""

    path: _Path = Field(
        description="the path of a data file, or of a dataset spec ending in .toml (DATASET)"
    )
    inputs: Annotated[tuple[_Text, ...] | dict[_Text, _Text], Field(min_length=1)] = Field(
        default=("inputs",),
        description='a list of array names, or a table {keyword = "array"}; at least one',
    )
    targets: tuple[_Text, ...] = Field(
        default=("targets",), description="a list of array names, [] for none"
    )
    dtype: dict[_Text, _ArrayDtype] = Field(
        default={},
        description="a table from an array's name to one of float32, float64, float16, bfloat16, "
        "bool, uint8, int8, int16, int32, int64, complex64, complex128",
    )
    scale: dict[_Text, _Number] = Field(
        default={}, description="a table from an array's name to the finite number it is times"
    )
    reshape: dict[_Text, _Shape] = Field(
        default={},
        description="a table from an array's name to the shape of one sample, such as [1, 8, 8]; "
        "one entry may be -1",
    )

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of all arrays that are read, inputs first, each once."""
        inputs = self.inputs.values() if isinstance(self.inputs, dict) else self.inputs
        return tuple(dict.fromkeys((*inputs, *self.targets)))


class LossSpec(_Section):
    """Which loss."""

    name: Annotated[_Text, AfterValidator(_loss)] = Field(
        description=f"a loss that `gradscope list losses` shows, or {REFERENCE_FORMS}; "
        ":key=value,... may follow (--loss)"
    )
    kwargs: Annotated[dict[_Text, Any], AfterValidator(_recordable)] = Field(
        default={}, description="a table of the loss's arguments: numbers, text, lists of numbers"
    )

    @property
    def stage(self) -> Stage:
        """The loss and its arguments, still text.

        Raises:
            SpecError: An argument is not of the form key=value.
        """
        return parse_loss(self.name, self.kwargs)


class ComputeSpec(_Section):
    """What is computed, and how."""

    backend: _Text = Field(default="auto", description="a backend's name (--backend)")
    transform: Annotated[tuple[_Text, ...], Field(min_length=1)] = Field(
        default=("identity",),
        description='a list of chains such as ["clip:max_norm=1.0 | mean"] (--transform)',
    )
    parameters: Annotated[tuple[_Text, ...], Field(min_length=1)] | None = Field(
        default=None, description='a list of globs such as ["head.*"] (--parameters)'
    )
    samples: Annotated[_Text, AfterValidator(_samples)] | None = Field(
        default=None, description='"A:B" with 0 ≤ A < B, either may be left out (--samples)'
    )
    batch_size: Annotated[int, Field(strict=True, ge=1, lt=2**40)] | None = Field(
        default=None, description="an integer of at least 1 (--batch-size)"
    )
    dtype: _Dtype | None = Field(
        default=None, description="float32, float64, float16 or bfloat16 (--dtype)"
    )
    compile: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="true or false (--compile)"
    )
    device: Annotated[str, Field(strict=True, pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")] | None = (
        Field(default=None, description="cpu, cuda or cuda:N (--device)")
    )
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(
        default=0, description="an integer from 0 to 2^63 - 1 (--seed)"
    )
    layout: Literal["auto", "dense", "factored"] = Field(
        default="dense", description="auto, dense or factored (--layout)"
    )
    labels: Literal["data", "sampled", "exact"] = Field(
        default="data", description="data, sampled or exact (--labels)"
    )
    coupling: Literal["refuse", "own-loss", "frozen"] = Field(
        default="refuse", description="refuse, own-loss or frozen (--coupling)"
    )
    nonfinite: Literal["skip", "fail", "keep"] = Field(
        default="skip", description="skip, fail or keep (--nonfinite)"
    )
    verify: Literal["first", "always", "never"] = Field(
        default="first", description="first, always or never (--verify)"
    )


class CompareSpec(_Section):
    """What `gradscope compare` runs."""

    backends: Annotated[tuple[_Text, ...], Field(min_length=1), AfterValidator(_distinct)] = Field(
        default=("loop", "hooks", "vmap", "expand"),
        description="a list of backends' names, each once (--backends)",
    )


class RunSpec(_Section):
    """Everything about a run, every path absolute."""

    version: Annotated[int, Field(strict=True, ge=1, le=1)] = Field(
        default=1, description="1, the only version of the run file so far"
    )
    model: ModelSpec = Field(description="a table [model]")
    checkpoint: CheckpointSpec = Field(description="a table [checkpoint]")
    dataset: DatasetSpec = Field(description="a table [dataset]")
    loss: LossSpec = Field(description="a table [loss]")
    compute: ComputeSpec = Field(default=ComputeSpec(), description="a table [compute]")
    compare: CompareSpec = Field(default=CompareSpec(), description="a table [compare]")


def resolve(config: Path | None, overrides: Mapping[str, Any]) -> RunSpec:
    """Return the settings of a run file with those of the command line over them.

    Args:
        config: The run file, or None. Paths in it are relative to it.
        overrides: {section: {key: value}}, only the flags that were given. Paths in it are
            relative to the working directory. A dataset path ending in .toml is a dataset spec.

    Raises:
        SpecError: Anything is wrong; one error tells everything that is.
    """
    layers, problems = gather(config, overrides)
    merged, origin = merge(layers)
    for section in ("model", "checkpoint", "dataset", "loss"):
        merged.setdefault(section, {})  # so that the missing key is named, not only its table
    try:
        spec = RunSpec.model_validate(merged)
    except ValidationError as failure:
        origin[()] = next(layer for layer in layers if not layer.flat)
        missing = not problems  # what is missing may be in the file that could not be read
        problems += complaints(failure, RunSpec, merged, origin, missing=missing)
    if problems:
        raise combined(problems)
    return spec


def load(path: Path) -> RunSpec:
    """Return the settings of a run file.

    Raises:
        SpecError: It cannot be read, or anything in it is wrong.
    """
    return resolve(path, {})
