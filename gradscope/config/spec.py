"""The settings of a run: the keys of the run file, and their flags on the command line.

`option` describes each setting once. Its flag, its key in the run file, the message for a wrong
value and its line in docs/reference.md are generated from it. `gradscope.config.commands` describes
the remaining options of the commands in the same way.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from gradscope.config import values
from gradscope.config.values import (
    FROM_CHECKPOINT,
    REFERENCE_FORMS,
    file_of,
    function_of,
    parse_loss,
)
from gradscope.core.grammar import Stage
from gradscope.errors import SpecError

_CHAINS = ("init", "check", "compute")
_RUNS = (*_CHAINS, "compare")
_FILES = _RUNS[1:]  # `init` defines these options itself, as required options


def option(
    default: Any, flag: str = "", commands: tuple[str, ...] = (), help: str = "", accepted: str = ""
) -> Any:
    """Describe a setting of a run, or an option of a command.

    Args:
        default: The value if the option is not given, or `...` for a required option.
        flag: Its names and a placeholder for its value, "--transform -t CHAIN". "DATASET" is a
            positional argument. "" means a key of the run file only.
        commands: The commands that take it as a setting of a run.
        help: The purpose of the option. The default value is appended.
        accepted: The accepted values, or "" if the type defines them.
    """
    described: Any = {"flag": flag, "commands": commands, "help": help, "accepted": accepted}
    return Field(default=default, json_schema_extra=described)


def same(section: str, key: str, default: Any) -> Any:
    """Describe an option of a command that is also a setting of a run, with a new default."""
    field = RunSpec.model_fields[section].annotation.model_fields[key]  # type: ignore[union-attr]
    return Field(default=default, json_schema_extra=field.json_schema_extra)


@dataclass(frozen=True)
class Option:
    """A setting of a run (a key of the run file, with or without a flag), or a command's option."""

    section: str  # the table of the run file, "" for an option of a command
    key: str
    type: Any  # without None and without pydantic's constraints
    required: bool
    default: Any  # the default value; for a required option None
    accepted: str  # the accepted values, "" if the type defines them
    least: int | None  # the smallest value, if there is a limit
    most: int | None  # the largest value, if there is a limit
    flags: tuple[str, ...]  # its names on the command line; empty for a key of the run file only
    metavar: str  # the placeholder for its value in the help; "" for a switch
    commands: tuple[str, ...]  # the commands that take it as a setting of a run
    help: str  # the purpose of the option

    @property
    def parameter(self) -> str:
        """The flag as the name of a parameter: `batch_size`; "" for an option without a flag."""
        flag = "".join(self.flags[:1]).partition("/")[0]
        if not self.section and not flag.startswith("-"):
            return self.key
        return flag.lstrip("-").replace("-", "_").lower()


def run_options() -> Iterator[Option]:
    """Yield every setting in the tables of a run file."""
    for section, table in RunSpec.model_fields.items():
        yield from options_of(table.annotation, section)


def options_of(table: Any, section: str = "") -> Iterator[Option]:
    """Yield the settings in one table of a run file, or the options of a command."""
    for key, field in getattr(table, "model_fields", {}).items():
        if field.json_schema_extra is None:
            continue  # the field `spec` of a command, which holds the settings of a run
        described: Any = field.json_schema_extra
        kind, accepted = field.annotation, described["accepted"] or field.description
        limits = [*field.metadata]
        while get_origin(kind) in (Annotated, Union, UnionType):
            kind, *rest = get_args(kind)
            fields = [each for each in rest if isinstance(each, FieldInfo)]
            accepted = accepted or next(filter(None, (f.description for f in fields)), None)
            limits += [limit for each in fields for limit in each.metadata]
        words = get_args(kind) if get_origin(kind) is Literal else ()
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            words = tuple(kind)
        accepted = accepted or " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
        flag = described["flag"].split()
        names = tuple(word for word in flag if word.startswith("-"))
        value = flag[-1] if len(flag) > len(names) else "|".join(words)
        yield Option(
            section=section,
            key=key,
            type=kind,
            required=field.is_required(),
            default=None if field.is_required() else field.get_default(),
            accepted=accepted,
            least=next((limit.ge for limit in limits if hasattr(limit, "ge")), None),
            most=next((limit.le for limit in limits if hasattr(limit, "le")), None),
            flags=names or tuple(filter(None, (described["flag"],))),
            metavar=value if names else "",
            commands=described["commands"],
            help=described["help"],
        )


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """The model: a user's function that returns an nn.Module."""

    factory: values.Reference = option(
        ...,
        "--model FILE.py:FACTORY",
        _RUNS,
        "A function that returns the model, FILE.py for the model that a script trains, or "
        f"{FROM_CHECKPOINT} for the model stored in CHECKPOINT; for an adapter also the folder of "
        "its base model",
        f"{REFERENCE_FORMS}, a function that returns the model; FILE.py for the model that a "
        f"script trains; or {FROM_CHECKPOINT} for the model stored in the checkpoint; for an "
        "adapter also the folder of its base model",
    )
    kwargs: values.Table = option(
        {},
        accepted="a table of the factory's keyword arguments; a table in it with a key `factory`, "
        "FILE.py:NAME, stands for what NAME returns for the table's other entries",
    )
    argv: tuple[str, ...] = option(
        (),
        accepted="a list of command-line arguments that FILE.py parses when it is imported, "
        'such as ["--data", "cifar10"]',
    )
    mode: Literal["eval", "train"] = option("eval", "--mode", _RUNS, "The model's mode")


class CheckpointSpec(_Section):
    """The weights of the model."""

    path: values.SomePath = option(
        ...,
        "CHECKPOINT",
        _FILES,
        "A file with the model's weights, or a folder with such a file",
        "the path of a file with the weights, or of a folder with such a file",
    )
    key: values.Text | None = option(
        None,
        "--key KEY",
        _RUNS,
        "The key of the weights in CHECKPOINT, such as ema.module",
        'the key of the weights in the checkpoint, such as "ema.module"',
    )
    ignore: values.Globs | None = option(
        None,
        "--ignore GLOB",
        _RUNS,
        "Ignore entries of CHECKPOINT with these names, which the model does not have",
        "a list of globs of names in the checkpoint that the model does not have",
    )
    unsafe_pickle: values.Switch = option(
        False,
        "--unsafe-pickle",
        _RUNS,
        "Load CHECKPOINT even if it can execute code, such as pickled objects or programs",
        "true or false; with true, the file may execute code while it is loaded",
    )


class DatasetSpec(_Section):
    """The arrays of a data set, and their conversion to tensors."""

    path: values.SomePath = option(
        ...,
        "DATASET",
        _FILES,
        "A data file, a dataset spec (.toml), FILE.py:NAME for a Dataset or a DataLoader, or "
        "FILE.py for the data of a script that trains",
        "the path of a data file or folder, of a dataset spec ending in .toml, "
        "FILE.py:NAME, a torch Dataset or DataLoader or a function that returns one, or FILE.py "
        "for the data of a script that trains",
    )
    kwargs: values.Table = option(
        {}, accepted="a table of the keyword arguments of a function FILE.py:NAME"
    )
    files: dict[values.Text, values.SomePath] = option(
        {}, accepted="a table from an array's name to the file of this array"
    )
    columns: dict[values.Text, values.Glob | values.Globs] = option(
        {},
        accepted="a table from an array's name to a column, or to a list of columns that form "
        'the array, such as ["age", "pixel*", "table[0:3]"]',
    )
    inputs: Annotated[values.ArrayNames | dict[values.Text, values.Text], Field(min_length=1)] = (
        option(
            ("inputs",),
            accepted='a list of array names, or a table {keyword = "array"}; at least one',
        )
    )
    targets: values.ArrayNames = option(
        ("targets",), accepted="a list of array names, or [] for no targets"
    )
    whole: values.ArrayNames = option(
        (),
        accepted="a list of inputs that all samples share, such as an adjacency matrix; if all "
        "inputs are listed, row i of the model's output belongs to sample i",
    )
    dtype: dict[values.Text, values.ArrayDtype] = option(
        {},
        accepted="a table from an array's name to one of float32, float64, float16, bfloat16, "
        "bool, uint8, int8, int16, int32, int64, complex64, complex128",
    )
    scale: dict[values.Text, values.Number] = option(
        {}, accepted="a table from an array's name to a finite factor of its entries"
    )
    reshape: dict[values.Text, values.Shape] = option(
        {},
        accepted="a table from an array's name to the shape of one sample, such as [1, 8, 8]; one "
        "entry may be -1",
    )
    classes: dict[values.Text, values.Names] = option(
        {}, accepted="a table from an array of texts to the list of texts that become 0, 1, ..."
    )
    tokenizer: dict[values.Text, values.SomePath] = option(
        {},
        accepted="a table from an array of texts to a tokenizer.json, or to the folder of a "
        "Hugging Face tokenizer",
    )
    vocabulary: dict[values.Text, values.Text | values.Texts] = option(
        {},
        accepted="a table from an array of integers to the letters (a text) or the words (a list) "
        "that 0, 1, ... represent; used to show samples",
    )
    pad: dict[values.Text, values.Number] = option(
        {},
        accepted="a table from an array of sequences to the padding value; the array NAME_mask "
        "then marks the entries that are not padding",
    )
    length: dict[values.Text, values.Count] = option(
        {}, accepted="a table from an array of sequences to the length to cut or pad them to"
    )
    id: values.Text | None = option(
        None, accepted="the name of an array with a different number or text for each sample"
    )
    group: values.Text | None = option(
        None,
        "--group COLUMN",
        _RUNS,
        "One row for each different id in this array: the sum of the gradients of a user, a source "
        "or a document; ids of samples, or with --rows token of positions",
        "the name of an array with the id of each sample's group, or of each position's group",
    )
    select: values.Text | Annotated[tuple[values.Position, ...], Field(min_length=1)] | None = (
        option(
            None, accepted="positions of samples, or the name of an array of booleans or positions"
        )
    )

    _mask: str | None = PrivateAttr(None)  # the target that is a mask of the first target

    @property
    def masks(self) -> dict[str, str]:
        """{mask: target}, where the target called `mask` says which entries of `target` count."""
        return {} if self._mask is None else {self._mask: self.targets[0]}

    @property
    def divided(self) -> tuple[str, ...]:
        """The names of the arrays that have a row for each sample, inputs first, each once."""
        whole = {*self.whole} - {*self.targets}
        return tuple(name for name in self.arrays if name not in whole)

    @property
    def factory(self) -> str | None:
        """FILE.py:FACTORY, FILE.py for the data of a script, or None if the data are in a file."""
        text = str(self.path)
        return text if function_of(text) == text and file_of(text) is not None else None

    @property
    def sources(self) -> tuple[Path, ...]:
        """All files and folders to read."""
        place = Path(file_of(self.factory or "") or self.path)
        return (place, *self.files.values(), *self.tokenizer.values())

    @property
    def input_arrays(self) -> tuple[str, ...]:
        """The names of the arrays that are inputs, in the order of the model's arguments."""
        return (*(self.inputs.values() if isinstance(self.inputs, dict) else self.inputs),)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of all arrays that are read, inputs first, each once."""
        return tuple(dict.fromkeys((*self.input_arrays, *self.targets)))


class LossSpec(_Section):
    """The loss."""

    name: values.LossName = option(
        ...,
        "--loss LOSS",
        _RUNS,
        "A name (see `gradscope list losses`) or FILE.py:LOSS, then options as :key=value,...; or "
        "FILE.py for the loss of a script that trains",
        f"a name from `gradscope list losses`, or {REFERENCE_FORMS}; then options as "
        ":key=value,...; or FILE.py for the loss of a script that trains",
    )
    kwargs: values.Table = option(
        {}, accepted="a table of the loss's arguments: numbers, text, lists of numbers"
    )

    @property
    def stage(self) -> Stage:
        """The loss and its arguments, not yet converted from text.

        Raises:
            SpecError: An argument is not of the form key=value.
        """
        return parse_loss(self.name, self.kwargs)


class ComputeSpec(_Section):
    """The settings of the computation."""

    backend: values.Text = option(
        "auto",
        "--backend NAME",
        _CHAINS,
        "The backend, see `gradscope list backends`",
        "a backend's name",
    )
    transform: values.Texts = option(
        ("identity",),
        "--transform -t CHAIN",
        _CHAINS,
        'What to compute, such as "clip:max_norm=1.0 | mean"',
        'a list of chains such as ["clip:max_norm=1.0 | mean"]',
    )
    parameters: values.Globs | None = option(
        None,
        "--parameters GLOB",
        _RUNS,
        "Use only parameters with these names",
        'a list of globs such as ["head.*"]',
    )
    samples: values.Samples | None = option(
        None, "--samples A:B", _RUNS, "Use only samples A to B - 1, counted from 0"
    )
    shard: values.ShardText | None = option(
        None,
        "--shard I/N",
        _CHAINS,
        "Compute only part I of N, counted from 0; torchrun sets this for its workers",
    )
    sharded: values.Switch = option(
        False,
        "--sharded",
        _CHAINS,
        "Shard the model over the workers of torchrun (fully_shard); write one result file",
    )
    batch_size: values.Count | None = option(
        None, "--batch-size N", _RUNS, "The number of samples in a batch"
    )
    memory: values.Memory | None = option(
        None,
        "--memory SIZE",
        _CHAINS,
        "Memory for the run without model and data, such as 2GB; it sets the batch size",
    )
    dtype: values.Dtype | None = option(None, "--dtype", _RUNS, "The dtype of the computation")
    device: values.Device | None = option(
        None, "--device DEVICE", _RUNS, "The device: cpu, cuda or cuda:N [cpu]"
    )
    seed: values.Seed = option(0, "--seed N", _RUNS, "The seed of all random numbers")
    compile: values.Switch = option(
        False,
        "--compile",
        _RUNS,
        "Compile gradient and reduction if possible; backend auto does so only if it is faster",
    )
    cache: values.Switch = option(
        True,
        "--cache",
        _CHAINS,
        "Measure which kernels are faster, and store the result on this machine",
    )
    layout: Literal["auto", "dense", "factored"] = option(
        "dense", "--layout", _CHAINS, "The storage format of rows"
    )
    compression: values.Compressed | None = option(
        None,
        "--compression gzip|zstd|blosc2[:LEVEL]",
        _CHAINS,
        "Compress rows [no compression]",
    )
    labels: Literal["data", "sampled", "exact"] = option(
        "data",
        "--labels",
        _CHAINS,
        "The data's labels, labels sampled from the model's predictions, or all classes",
    )
    rows: Literal["sample", "token"] = option(
        "sample",
        "--rows",
        _RUNS,
        "A row for each sample, or for each counted position (token) of a loss (n, t)",
    )
    group_reduction: Literal["sum", "mean"] = option(
        "sum",
        "--group-reduction",
        _RUNS,
        "How the gradients of a group make one row; the mean is over its samples or tokens",
    )
    predictions: values.Switch = option(
        True,
        "--predictions",
        _CHAINS,
        "Store the model's prediction for each sample, and the margin of its class",
    )
    previews: values.Preview | None = option(
        None,
        "--previews BYTES",
        _CHAINS,
        "Store a small picture or the first text of each sample, in at most this many bytes",
    )
    coupling: Literal["refuse", "own-loss", "frozen"] = option(
        "refuse", "--coupling", _CHAINS, "What to do if a sample's loss depends on its batch"
    )
    randomness: Literal["refuse", "fixed"] = option(
        "refuse",
        "--randomness",
        _RUNS,
        "If the model draws random numbers: refuse it, or fix them by seed and sample",
    )
    nonfinite: Literal["skip", "fail", "keep"] = option(
        "skip", "--nonfinite", _CHAINS, "What reducers do with samples that are not finite"
    )
    verify: Literal["audit", "first", "always", "never"] = option(
        "audit",
        "--verify",
        _CHAINS,
        "Which batches to prove; audit: the first, the last and some batches between",
    )


class CompareSpec(_Section):
    """The settings of `gradscope compare`."""

    backends: values.Names = option(
        ("loop", "hooks", "vmap", "expand"),
        "--backends --backend A,B,...",
        ("compare",),
        "The backends to compare",
        "a list of different backend names",
    )


class RunSpec(_Section):
    """All settings of a run, with absolute paths."""

    version: Annotated[int, Field(strict=True, ge=1, le=1)] = Field(
        default=1, description="1, the only version of the run file so far"
    )
    model: ModelSpec
    checkpoint: CheckpointSpec
    dataset: DatasetSpec
    loss: LossSpec
    compute: ComputeSpec = ComputeSpec()
    compare: CompareSpec = CompareSpec()
    _places: dict[tuple[str, ...], str | None] = PrivateAttr({})

    @model_validator(mode="after")
    def _with_mask(self) -> "RunSpec":
        """Append the column of `causal_lm:mask=COLUMN` to the targets."""
        with suppress(SpecError):  # reported when the loss is bound
            mask = self.loss.stage.arguments.get("mask")
            others = tuple(name for name in self.dataset.targets if name != mask)
            if self.loss.stage.name == "causal_lm" and mask is not None and others:
                data = self.dataset.model_copy(update={"targets": (*others, mask)})
                data._mask = mask
                object.__setattr__(self, "dataset", data)  # the spec is frozen
        return self

    def place(self, section: str, key: str) -> str | None:
        """Return "FILE: section.key" for a setting from a file, else None."""
        return self._places.get((section, key))

    def computing(self, **settings: Any) -> "RunSpec":
        """Return this run with new settings in [compute]."""
        return self.model_copy(update={"compute": self.compute.model_copy(update=settings)})

    def is_flag(self, section: str, key: str) -> bool:
        """Whether the setting was given on the command line."""
        return self._places.get((section, key), "") is None
