"""The settings of a run: what the run file may hold, and which of it the command line takes.

Each setting is described once, by `option`. Its flag, its key in the run file, the message about a
wrong value and its line in docs/reference.md follow from that. The other options of the commands
are described in the same way, in `gradscope.config.commands`.
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
from gradscope.config.values import FROM_CHECKPOINT, REFERENCE_FORMS, function_of, parse_loss
from gradscope.core.grammar import Stage
from gradscope.errors import SpecError

_CHAINS = ("init", "check", "compute")
_RUNS = (*_CHAINS, "compare")
_FILES = _RUNS[1:]  # of init these are options of its own, which must be given


def option(
    default: Any, flag: str = "", commands: tuple[str, ...] = (), help: str = "", accepted: str = ""
) -> Any:
    """Describe a setting of a run, or an option of a command.

    Args:
        default: Its value where it is not given; `...` if it must be given.
        flag: Its names on the command line and what stands for its value, "--transform -t CHAIN";
            "DATASET" is a positional argument; "" if only the run file has it.
        commands: The commands that take it as a setting of a run.
        help: What it is for; the default is added.
        accepted: What it may be; "" where its type says so.
    """
    described: Any = {"flag": flag, "commands": commands, "help": help, "accepted": accepted}
    return Field(default=default, json_schema_extra=described)


def same(section: str, key: str, default: Any) -> Any:
    """Describe an option of a command that is a setting of a run, too, with its own default."""
    field = RunSpec.model_fields[section].annotation.model_fields[key]  # type: ignore[union-attr]
    return Field(default=default, json_schema_extra=field.json_schema_extra)


@dataclass(frozen=True)
class Option:
    """A setting of a run (a key of the run file, with or without a flag), or a command's option."""

    section: str  # the table of the run file, "" of an option of a command
    key: str
    type: Any  # without None and without what is checked beyond it
    required: bool
    default: Any  # None if the option is required
    accepted: str  # what it may be, "" if its type says so
    least: int | None  # the smallest value; None for no limit
    most: int | None  # the largest value; None for no limit
    flags: tuple[str, ...]  # its names on the command line, none if only the run file has it
    metavar: str  # what stands for its value in the help; "" of a switch
    commands: tuple[str, ...]  # those that take it as a setting of a run
    help: str  # what it is for

    @property
    def parameter(self) -> str:
        """The flag as the name of a parameter: `batch_size`; "" if there is none."""
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
            continue  # the settings of a run, among the options of a command
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
    """Which model: a function of the user's that returns an nn.Module."""

    factory: values.Reference = option(
        ...,
        "--model FILE.py:FACTORY",
        _RUNS,
        f"A function that returns the model; or {FROM_CHECKPOINT}: the model that CHECKPOINT "
        "holds; or, of an adapter, the folder of its base model",
        f"{REFERENCE_FORMS}, a function that returns the model, or {FROM_CHECKPOINT}, the model "
        "that the checkpoint itself holds, or, of an adapter, the folder of its base model",
    )
    kwargs: values.Table = option({}, accepted="a table of the factory's keyword arguments")
    argv: tuple[str, ...] = option(
        (),
        accepted="a list of the command-line arguments that FILE.py parses when it is imported, "
        'such as ["--data", "cifar10"]',
    )
    mode: Literal["eval", "train"] = option("eval", "--mode", _RUNS, "The model's mode")


class CheckpointSpec(_Section):
    """Which weights."""

    path: values.SomePath = option(
        ...,
        "CHECKPOINT",
        _FILES,
        "A file with the model's weights, or its folder",
        "the path of a file with the weights, or of the folder that holds it",
    )
    key: values.Text | None = option(
        None,
        "--key KEY",
        _RUNS,
        "Where in CHECKPOINT the weights are, such as ema.module",
        'where in it the weights are, such as "ema.module"',
    )
    ignore: values.Globs | None = option(
        None,
        "--ignore GLOB",
        _RUNS,
        "Leave out names in CHECKPOINT that the model does not have",
        "a list of globs of names in it that the model does not have",
    )
    unsafe_pickle: values.Switch = option(
        False,
        "--unsafe-pickle",
        _RUNS,
        "Load CHECKPOINT even if it can execute code: pickled objects, programs",
        "true or false: the file may execute code as it is loaded",
    )


class DatasetSpec(_Section):
    """Which arrays of which file, and how they are made into tensors."""

    path: values.SomePath = option(
        ...,
        "DATASET",
        _FILES,
        "A data file, or a dataset spec (.toml)",
        "the path of a data file or folder, of a dataset spec ending in .toml, or "
        "FILE.py:FACTORY, a function that returns a torch Dataset",
    )
    kwargs: values.Table = option(
        {}, accepted="a table of the keyword arguments of FILE.py:FACTORY"
    )
    files: dict[values.Text, values.SomePath] = option(
        {}, accepted="a table from an array's name to another file that holds it"
    )
    columns: dict[values.Text, values.Glob | values.Globs] = option(
        {},
        accepted="a table from an array's name to a column, or to a list of columns that stand "
        'side by side in it, such as ["age", "pixel*", "table[0:3]"]',
    )
    inputs: Annotated[
        tuple[values.Text, ...] | dict[values.Text, values.Text], Field(min_length=1)
    ] = option(
        ("inputs",), accepted='a list of array names, or a table {keyword = "array"}; at least one'
    )
    targets: tuple[values.Text, ...] = option(
        ("targets",), accepted="a list of array names, [] for none"
    )
    whole: tuple[values.Text, ...] = option(
        (),
        accepted="a list of the inputs that every sample has whole, such as an adjacency matrix; "
        "with all inputs, row i of the model's answer is that of sample i",
    )
    dtype: dict[values.Text, values.ArrayDtype] = option(
        {},
        accepted="a table from an array's name to one of float32, float64, float16, bfloat16, "
        "bool, uint8, int8, int16, int32, int64, complex64, complex128",
    )
    scale: dict[values.Text, values.Number] = option(
        {}, accepted="a table from an array's name to the finite number it is times"
    )
    reshape: dict[values.Text, values.Shape] = option(
        {},
        accepted="a table from an array's name to the shape of one sample, such as [1, 8, 8]; one "
        "entry may be -1",
    )
    classes: dict[values.Text, values.Names] = option(
        {}, accepted="a table from an array of texts to the list of texts for 0, 1, ..."
    )
    tokenizer: dict[values.Text, values.SomePath] = option(
        {},
        accepted="a table from an array of texts to a tokenizer.json, or the folder of a Hugging "
        "Face tokenizer",
    )
    vocabulary: dict[values.Text, values.Text | values.Texts] = option(
        {},
        accepted="a table from an array of whole numbers to a text of the letters, or a list of "
        "the words, that 0, 1, ... stand for: to show samples by",
    )
    pad: dict[values.Text, values.Number] = option(
        {},
        accepted="a table from an array of sequences to the number that fills them up; the array "
        "NAME_mask says which entries are a sample's own",
    )
    length: dict[values.Text, values.Count] = option(
        {}, accepted="a table from an array of sequences to the length they are cut or padded to"
    )
    id: values.Text | None = option(
        None, accepted="the name of an array with one number or text a sample, no two the same"
    )
    select: values.Text | Annotated[tuple[values.Position, ...], Field(min_length=1)] | None = (
        option(None, accepted="a list of positions of samples, or the name of an array of booleans")
    )

    _mask: str | None = PrivateAttr(None)  # the target that says which of the first one's count

    @property
    def masks(self) -> dict[str, str]:
        """Of a target that says which entries of another count, that other one."""
        return {} if self._mask is None else {self._mask: self.targets[0]}

    @property
    def divided(self) -> tuple[str, ...]:
        """The names of the arrays that have a row for each sample, inputs first, each once."""
        whole = {*self.whole} - {*self.targets}
        return tuple(name for name in self.arrays if name not in whole)

    @property
    def factory(self) -> str | None:
        """FILE.py:FACTORY, or None where the data lie in a file."""
        text = str(self.path)
        return text if function_of(text) == text and ".py:" in text else None

    @property
    def sources(self) -> tuple[Path, ...]:
        """All files and folders that are read."""
        place = self.path if self.factory is None else Path(str(self.path).rpartition(":")[0])
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
    """Which loss."""

    name: values.LossName = option(
        ...,
        "--loss LOSS",
        _RUNS,
        "A name (`gradscope list losses`) or FILE.py:LOSS; :key=value,... may follow",
        f"a loss that `gradscope list losses` shows, or {REFERENCE_FORMS}; "
        ":key=value,... may follow",
    )
    kwargs: values.Table = option(
        {}, accepted="a table of the loss's arguments: numbers, text, lists of numbers"
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

    backend: values.Text = option(
        "auto", "--backend NAME", _CHAINS, "See `gradscope list backends`", "a backend's name"
    )
    transform: values.Texts = option(
        ("identity",),
        "--transform -t CHAIN",
        _CHAINS,
        'Such as "clip:max_norm=1.0 | mean"',
        'a list of chains such as ["clip:max_norm=1.0 | mean"]',
    )
    parameters: values.Globs | None = option(
        None,
        "--parameters GLOB",
        _RUNS,
        "Only parameters of these names",
        'a list of globs such as ["head.*"]',
    )
    samples: values.Samples | None = option(
        None, "--samples A:B", _RUNS, "Only samples A up to, not with, B"
    )
    shard: values.ShardText | None = option(
        None,
        "--shard I/N",
        _CHAINS,
        "Only part I, from 0, of N; workers of torchrun take theirs by themselves",
    )
    sharded: values.Switch = option(
        False,
        "--sharded",
        _CHAINS,
        "Divide the model over the workers of torchrun (fully_shard), for one result file",
    )
    batch_size: values.Count | None = option(
        None, "--batch-size N", _RUNS, "Samples computed at a time"
    )
    memory: values.Memory | None = option(
        None,
        "--memory SIZE",
        _CHAINS,
        "What a run may take beside model and data, such as 2GB; it sets the batch size",
    )
    dtype: values.Dtype | None = option(None, "--dtype", _RUNS, "What the model computes in")
    device: values.Device | None = option(
        None, "--device DEVICE", _RUNS, "Where it is computed: cpu, cuda or cuda:N [cpu]"
    )
    seed: values.Seed = option(0, "--seed N", _RUNS, "For anything random")
    compile: values.Switch = option(
        False,
        "--compile",
        _RUNS,
        "Compile gradient and reduction where that can be done; with auto, where it pays",
    )
    cache: values.Switch = option(
        True,
        "--cache",
        _CHAINS,
        "Measure which kernels are faster, and remember it on this machine",
    )
    layout: Literal["auto", "dense", "factored"] = option(
        "dense", "--layout", _CHAINS, "How rows are stored"
    )
    compression: values.Compressed | None = option(
        None,
        "--compression gzip|zstd|blosc2[:LEVEL]",
        _CHAINS,
        "Compress rows [they are stored as they are]",
    )
    labels: Literal["data", "sampled", "exact"] = option(
        "data",
        "--labels",
        _CHAINS,
        "The data's, drawn from the model's predictions, or all classes",
    )
    rows: Literal["sample", "token"] = option(
        "sample",
        "--rows",
        _RUNS,
        "What has a row of its own; token: each position of a loss (n, t) that counts",
    )
    predictions: values.Switch = option(
        True,
        "--predictions",
        _CHAINS,
        "Keep what the model predicts of each sample, and the margin of its class",
    )
    previews: values.Preview | None = option(
        None,
        "--previews BYTES",
        _CHAINS,
        "Keep a small picture of each sample, or the beginning of its text, in so many bytes",
    )
    coupling: Literal["refuse", "own-loss", "frozen"] = option(
        "refuse", "--coupling", _CHAINS, "What to do when samples depend on their batch"
    )
    randomness: Literal["refuse", "fixed"] = option(
        "refuse",
        "--randomness",
        _RUNS,
        "Of a model that draws random numbers: refuse it, or fix them by seed and sample",
    )
    nonfinite: Literal["skip", "fail", "keep"] = option(
        "skip", "--nonfinite", _CHAINS, "What reducers do with samples that are not finite"
    )
    verify: Literal["audit", "first", "always", "never"] = option(
        "audit",
        "--verify",
        _CHAINS,
        "Which batches are proved; audit: the first, the last, some between",
    )


class CompareSpec(_Section):
    """What `gradscope compare` runs."""

    backends: values.Names = option(
        ("loop", "hooks", "vmap", "expand"),
        "--backends --backend A,B,...",
        ("compare",),
        "The backends that are compared",
        "a list of backends' names, each once",
    )


class RunSpec(_Section):
    """Everything about a run, every path absolute."""

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
        """Let the column of `causal_lm:mask=COLUMN`, which tokens count, be the last target."""
        with suppress(SpecError):  # which is told when the loss is bound
            mask = self.loss.stage.arguments.get("mask")
            others = tuple(name for name in self.dataset.targets if name != mask)
            if self.loss.stage.name == "causal_lm" and mask is not None and others:
                data = self.dataset.model_copy(update={"targets": (*others, mask)})
                data._mask = mask
                object.__setattr__(self, "dataset", data)  # the spec is frozen
        return self

    def place(self, section: str, key: str) -> str | None:
        """Return "FILE: section.key" of a setting that a file made, else None."""
        return self._places.get((section, key))

    def computing(self, **settings: Any) -> "RunSpec":
        """Return this run with other settings in [compute]."""
        return self.model_copy(update={"compute": self.compute.model_copy(update=settings)})

    def is_flag(self, section: str, key: str) -> bool:
        """Whether a setting was given on the command line."""
        return self._places.get((section, key), "") is None
