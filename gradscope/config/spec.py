"""The settings of a run: what the run file may hold, checked strictly and all at once.

    spec = resolve(Path("run.toml"), {"compute": {"backend": "loop"}})

Nothing is loaded here, and torch is not imported.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from gradscope.config import settings
from gradscope.config.complaints import combined, complaints, salvaged
from gradscope.config.references import HELD, REFERENCE_FORMS, function_of, parse_loss
from gradscope.config.runfile import Layer, contradictions, gather, merge
from gradscope.config.settings import parse_samples as parse_samples
from gradscope.core.grammar import Stage
from gradscope.errors import SpecError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """Which model: a function of the user's that returns an nn.Module."""

    factory: settings.Reference = Field(
        description=f"{REFERENCE_FORMS}, a function that returns the model, or {HELD}, the model "
        "that the checkpoint itself holds (--model)"
    )
    kwargs: settings.Table = Field(
        default={}, description="a table of the factory's keyword arguments"
    )
    mode: Literal["eval", "train"] = Field(default="eval", description="eval or train (--mode)")


class CheckpointSpec(_Section):
    """Which weights."""

    path: settings.SomePath = Field(
        description="the path of a file with the weights, or of the folder that holds it "
        "(CHECKPOINT)"
    )
    key: settings.Text | None = Field(
        default=None, description='where in it the weights are, such as "ema.module" (--key)'
    )
    ignore: settings.Globs | None = Field(
        default=None,
        description="a list of globs of names in it that the model does not have (--ignore)",
    )
    unsafe_pickle: settings.Switch = Field(
        default=False,
        description="true or false: the file may execute code as it is loaded (--unsafe-pickle)",
    )


class DatasetSpec(_Section):
    """Which arrays of which file, and how they are made into tensors."""

    path: settings.SomePath = Field(
        description="the path of a data file or folder, of a dataset spec ending in .toml, or "
        "FILE.py:FACTORY, a function that returns a torch Dataset (DATASET)"
    )
    kwargs: settings.Table = Field(
        default={}, description="a table of the keyword arguments of FILE.py:FACTORY"
    )
    files: dict[settings.Text, settings.SomePath] = Field(
        default={}, description="a table from an array's name to another file that holds it"
    )
    columns: dict[settings.Text, settings.Glob | settings.Globs] = Field(
        default={},
        description="a table from an array's name to a column, or to a list of columns that stand "
        'side by side in it, such as ["age", "pixel*", "table[0:3]"]',
    )
    inputs: Annotated[
        tuple[settings.Text, ...] | dict[settings.Text, settings.Text], Field(min_length=1)
    ] = Field(
        default=("inputs",),
        description='a list of array names, or a table {keyword = "array"}; at least one',
    )
    targets: tuple[settings.Text, ...] = Field(
        default=("targets",), description="a list of array names, [] for none"
    )
    dtype: dict[settings.Text, settings.ArrayDtype] = Field(
        default={},
        description="a table from an array's name to one of float32, float64, float16, bfloat16, "
        "bool, uint8, int8, int16, int32, int64, complex64, complex128",
    )
    scale: dict[settings.Text, settings.Number] = Field(
        default={}, description="a table from an array's name to the finite number it is times"
    )
    reshape: dict[settings.Text, settings.Shape] = Field(
        default={},
        description="a table from an array's name to the shape of one sample, such as [1, 8, 8]; "
        "one entry may be -1",
    )
    classes: dict[settings.Text, settings.Names] = Field(
        default={}, description="a table from an array of texts to the list of texts for 0, 1, ..."
    )
    tokenizer: dict[settings.Text, settings.SomePath] = Field(
        default={},
        description="a table from an array of texts to a tokenizer.json, or the folder of a "
        "Hugging Face tokenizer",
    )
    pad: dict[settings.Text, settings.Number] = Field(
        default={},
        description="a table from an array of sequences to the number that fills them up; the "
        "array NAME_mask says which entries are a sample's own",
    )
    length: dict[settings.Text, settings.Count] = Field(
        default={},
        description="a table from an array of sequences to the length they are cut or padded to",
    )
    id: settings.Text | None = Field(
        default=None,
        description="the name of an array with one number or text a sample, no two the same",
    )
    select: settings.Text | Annotated[tuple[settings.Place, ...], Field(min_length=1)] | None = (
        Field(
            default=None,
            description="a list of positions of samples, or the name of an array of booleans",
        )
    )

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
    def arrays(self) -> tuple[str, ...]:
        """The names of all arrays that are read, inputs first, each once."""
        inputs = self.inputs.values() if isinstance(self.inputs, dict) else self.inputs
        return tuple(dict.fromkeys((*inputs, *self.targets)))


class LossSpec(_Section):
    """Which loss."""

    name: settings.LossName = Field(
        description=f"a loss that `gradscope list losses` shows, or {REFERENCE_FORMS}; "
        ":key=value,... may follow (--loss)"
    )
    kwargs: settings.Table = Field(
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

    backend: settings.Text = Field(default="auto", description="a backend's name (--backend)")
    transform: settings.Texts = Field(
        default=("identity",),
        description='a list of chains such as ["clip:max_norm=1.0 | mean"] (--transform)',
    )
    parameters: settings.Globs | None = Field(
        default=None, description='a list of globs such as ["head.*"] (--parameters)'
    )
    samples: settings.Samples | None = Field(
        default=None, description='"A:B" with 0 ≤ A < B, either may be left out (--samples)'
    )
    shard: settings.Part | None = Field(
        default=None, description='"I/N" with 0 ≤ I < N: part I, from 0, of N (--shard)'
    )
    batch_size: settings.Count | None = Field(
        default=None, description="an integer of at least 1 (--batch-size)"
    )
    memory: settings.Memory | None = Field(
        default=None, description='a size such as "2GB", "500MB" or "1.5GiB" (--memory)'
    )
    dtype: settings.Dtype | None = Field(
        default=None, description="float32, float64, float16 or bfloat16 (--dtype)"
    )
    compile: settings.Switch = Field(default=False, description="true or false (--compile)")
    device: settings.Device | None = Field(
        default=None, description="cpu, cuda or cuda:N (--device)"
    )
    seed: settings.Seed = Field(default=0, description="an integer from 0 to 2^63 - 1 (--seed)")
    layout: Literal["auto", "dense", "factored"] = Field(
        default="dense", description="auto, dense or factored (--layout)"
    )
    compression: settings.Compressed | None = Field(
        default=None, description="gzip, zstd or blosc2; :LEVEL may follow (--compression)"
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
    verify: Literal["audit", "first", "always", "never"] = Field(
        default="audit", description="audit, first, always or never (--verify)"
    )


class CompareSpec(_Section):
    """What `gradscope compare` runs."""

    backends: settings.Names = Field(
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
    _places: dict[tuple[str, ...], str] = PrivateAttr({})

    def place(self, section: str, key: str) -> str | None:
        """Return "FILE: section.key" of a setting that a file made, else None."""
        return self._places.get((section, key))


def resolve(
    config: Path | None,
    overrides: Mapping[str, Any],
    also: Callable[[RunSpec], Iterable[SpecError]] = lambda _: (),
) -> RunSpec:
    """Return the settings of a run file with those of the command line over them.

    Args:
        config: The run file, or None. Paths in it are relative to it.
        overrides: {section: {key: value}}, only the flags that were given. Paths in it are
            relative to the working directory. A dataset path ending in .toml is a dataset spec.
        also: Where settings are not of the form they must have: what else is wrong with the rest.

    Raises:
        SpecError: Anything is wrong; one error tells everything that is.
    """
    layers, problems = gather(config, overrides)
    merged, origin = merge(layers)
    opposed = contradictions(merged, origin)
    for section in ("model", "checkpoint", "dataset", "loss"):
        merged.setdefault(section, {})  # so that the missing key is named, not only its table
    try:
        spec = RunSpec.model_validate(merged)
    except ValidationError as failure:
        origin[()] = next(layer for layer in layers if not layer.flat)
        missing = not problems  # what is missing may be in the file that could not be read
        problems += complaints(failure, RunSpec, merged, origin, missing=missing)
        if missing:
            problems += also(
                _placed(RunSpec.model_validate(salvaged(merged, failure)), layers, origin)
            )
    problems += opposed
    if problems:
        raise combined(problems)
    return _placed(spec, layers, origin)


def _placed(spec: RunSpec, layers: list[Layer], origin: Mapping[tuple[str, ...], Layer]) -> RunSpec:
    spec._places = {
        parts: f"{layer.source}: {layer.key(parts)}"
        for parts, layer in origin.items()
        if parts and layer is not layers[-1]  # the command line
    }
    return spec


def load(path: Path) -> RunSpec:
    """Return the settings of a run file.

    Raises:
        SpecError: It cannot be read, or anything in it is wrong.
    """
    return resolve(path, {})
