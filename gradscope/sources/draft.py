"""Writes a commented run file for a checkpoint and a data file, and marks guessed settings.

No user code is executed: Python files are parsed, not imported.
"""

import ast
import inspect
import json
import os
import re
import shlex
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradscope.config import (
    FROM_CHECKPOINT,
    NONE,
    RunSpec,
    file_of,
    function_of,
    is_folder,
    is_script,
)
from gradscope.core.grammar import resolve_paths
from gradscope.core.precision import dtype_name
from gradscope.core.texts import count, listed
from gradscope.errors import CheckpointError, DatasetError, located
from gradscope.sources.code import require_steps
from gradscope.sources.data.columns import SequenceColumn, StoredColumn, TextColumn
from gradscope.sources.data.files import open_arrays
from gradscope.sources.data.python import INDICES
from gradscope.sources.data.recipes import MASK
from gradscope.sources.loops import Loop
from gradscope.sources.scripts.command_line import command_line
from gradscope.sources.scripts.data import (
    changed_batch,
    keys_of_batch,
    loaders,
    reference_of,
    reshaped_batch,
    transforms_of,
)
from gradscope.sources.scripts.loops import draws, is_plain, loss_of_loop, models_of_loops
from gradscope.sources.scripts.losses import (
    is_complete,
    loss_is_summed,
    losses_called,
)
from gradscope.sources.scripts.models import (
    ONE_SAMPLE,
    FoundModel,
    arguments_of,
    defaults_left,
    find_built,
    find_models,
    find_trained,
    is_random,
)
from gradscope.sources.scripts.sample_loss import SampleLoss, step_loss
from gradscope.sources.scripts.stored import StoredArguments, stored_arguments
from gradscope.sources.scripts.syntax import DEFAULT, NOT_PROVED, Script
from gradscope.sources.variables import Variables
from gradscope.sources.weights import read
from gradscope.sources.weights.fit import Joined, state_dict_under, state_dicts, stored_modules
from gradscope.sources.weights.hugging_face import CONFIG
from gradscope.sources.weights.readers import ADAPTER

_COUNTER = "n_averaged"  # a tensor of torch's AveragedModel that the model does not have
_SHOWN = 6  # number of tensors named in a comment
_FEW = 10  # different texts that are classes in any case
_READ = 10_000  # number of targets to read for their texts
_TARGETS = {"target", "targets", "label", "labels", "y", "class", "classes", "following"}
# columns in which pandas stores row numbers
_OF_PANDAS = re.compile(r"unnamed: \d+|__index_level_\d+__|level_\d+")
# data that a script draws: torch.randint(4, (600,)), not noise of a batch's shape
_DRAWN = re.compile(r"torch\.(rand|randn|randint)\([\d, ()]+\)")
_WORDS = re.compile(r"[\W_]+")  # between the words of a name
_AVERAGED = {"ema", "avg", "averaged", "swa", "shadow", "teacher"}  # of keys of averaged weights
_GRAPHS = {"adj", "adjacency", "edge", "edges", "laplacian"}
_KEYWORDS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values", "position_ids"}
# {padded input: the keyword of its mask}
_PADDING = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
# the losses of transformers' classes, by the end of the class's name
_LOSS_OF_CLASS = {
    "ForSequenceClassification": "cross_entropy",
    "ForImageClassification": "cross_entropy",
    "ForAudioClassification": "cross_entropy",
    "ForMultipleChoice": "cross_entropy",
    "ForTokenClassification": "token_cross_entropy",
    "ForMaskedLM": "token_cross_entropy",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
# losses that are chosen from the targets only
_GENERAL = ("cross_entropy", "token_cross_entropy", "mse", "bce_with_logits")
_REAL = {"mse", "l1", "huber", "bce", "bce_with_logits"}  # losses with floating-point targets
# the least fit of a model, the largest difference of fits to show, and how many models to show
_LIKELY, _DOUBT, _OTHERS = 0.5, 0.1, 3
_TIE = 0.005  # models with such a difference of fits explain a checkpoint equally well
_DEPTH, _FOLDERS, _FILES = 3, 300, 200  # limits of the search for scripts
_SKIPPED = re.compile(r"[._]|site-packages$|node_modules$|tests?$")  # folders without a model
_FACTORIES = ("build", "build_model", "make_model", "create_model", "get_model", "model", "net")

_TEMPLATE = """\
# A run file for gradscope. Guessed settings are marked. Paths are relative to this file.
#   gradscope check --config FILE                loads, proves the first batch, writes nothing
#   gradscope compute --config FILE -o OUT.h5
version = 1

[model]
# FILE.py:NAME: a class or a function that returns the model
{model}
mode = {mode}
{argv}

[model.kwargs]                     # the keyword arguments of NAME, such as width = 64
{kwargs}

[checkpoint]
{checkpoint}

[dataset]
{dataset}

[loss]
# a name from `gradscope list losses`; FILE.py:FUNCTION, (outputs, targets) -> one number a sample;
# or the loss of the training loop in a function, FILE.py:FUNCTION.loss
{loss}

[compute]
{compute}
"""

_ARGV = '# argv = ["--width", "64"]         # command-line arguments, if the file parses any'
_REPLACE = "an example: replace it"
_NO_VALUE = "fill in: no value was found"
_NAMES_CODE = "not taken from the checkpoint: `factory` in a table names code to run"
_FILL_IN = "fill it in, or build the model in a function: --model FILE.py:FUNCTION"

_LOSSES = ("loss.py", "sample_loss.py")  # the names of a new file with a loss

# a loss of a script with parts that are not known
_OWN = """\
# Write this loss in {file}. It returns one number for each sample: without a mean or a sum over
# the samples."""

# [compute]: a line for each setting that is not given
_EXAMPLES = {
    "backend": 'backend = "auto"',
    "transform": 'transform = ["identity"]           # every sample\'s gradient; or, for example, '
    '"clip:max_norm=1.0 | mean"',
    "parameters": '# parameters = ["*"]               # only parameters with these names',
    "samples": '# samples = "0:100"                # only samples 0 to 99',
    "batch_size": "# batch_size = 32                  # number of samples in a batch",
}


@dataclass
class Draft:
    """A drafted run file."""

    text: str = ""  # TOML
    guessed: dict[str, str] = field(default_factory=dict)  # {key: "value: why"}
    # {key that could not be guessed: what to do}; its value is an example
    missing: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)  # {unused array: why}
    files: dict[str, str] = field(default_factory=dict)  # {name of a file to write: content}


def draft(spec: RunSpec, data: Path, folder: Path) -> Draft:
    """Return a run file for a folder.

    Args:
        spec: The settings of the command line, which are written unchanged. The function guesses
            the remaining settings of the model, the checkpoint, the data and the loss.
        data: A data file, a dataset spec ending in .toml, or FILE.py:FACTORY.
        folder: The folder of the run file.
    """
    result = Draft()
    checkpoint = spec.checkpoint.path
    model = _given(spec, "model").get("factory")
    for script in filter(is_script, (str(data), model or "")):
        require_steps(Path(script))
    if is_script(str(data)):
        return _of_script(result, spec, data, folder)
    loss = _given(spec, "loss").get("name")
    near, below = _scripts((checkpoint.absolute().parent, data.absolute().parent, Path.cwd()))
    near += _imported(near)
    files = [*near, *(file for file in below if file not in near)]
    checkpoint_lines, stored = _checkpoint(result, spec, folder, files)
    made_by = Path(str(data).rpartition(":")[0])  # the script of FILE.py:NAME
    drafted = _model(result, model, checkpoint, folder, files, stored, made_by)
    if made_by.is_file():  # other scripts may train with another loss
        own = [made_by, *_imported([made_by])]
        near = own if any(b".backward" in file.read_bytes() for file in own) else near
    given = stored.given
    result.unused |= given.unread
    called = losses_called(near, drafted.file, given) or losses_called(files, drafted.file, given)
    made = function_of(str(data)) is not None and data.suffix.lower() != ".toml"
    known = loss or (drafted.loss and not made)  # scripts nearby may train other models
    step = None if known else _step(near, files, drafted, given, made_by if made else None)
    if step is not None and called and _DRAWN.search("\n".join(step.code)) and not made:
        step = None  # the script draws its data, and the file has them
    if step is not None and step.name:
        called = [step.name]
    found, why = "mse", "an example"
    described = data.suffix.lower() == ".toml"
    place, name = Path(), ""  # of data that a script makes
    # the samples of a function are not read
    if described or function_of(str(data)) is not None:
        if described:
            dataset_lines = [f"spec = {quoted(_relative(data, folder))}"]
        else:
            dataset_lines, place, name = _data_of_script(
                result, str(data), folder, files, stored.given
            )
        if not described and step is not None and step.of_inputs:
            of = f"the model's inputs are the targets of {step.line}"
            dataset_lines.append(f'targets = ["inputs"]  # guessed: {_comment(of)}')
            result.guessed["dataset.targets"] = f'["inputs"]: {of}'
        if drafted.loss:
            found, why = drafted.loss.split(": ")
        elif called:
            found, why = _loss_of_script(called, "", why)
        else:
            result.missing |= {} if loss else {"loss.name": _REPLACE}
    else:
        held = model == FROM_CHECKPOINT if model else _description(checkpoint) is not None
        with _naming_loaders(files):
            dataset_lines, found, why = _dataset(
                result,
                data,
                folder,
                keywords=held,
                forward=drafted.inputs,
                loss=loss or ("loss.py:loss" if step is not None and not step.name else None),
                called=called,
                group=spec.dataset.group,
                transforms=transforms_of(files),
            )
    changed = changed_batch(near, drafted.file)
    trained = (drafted.file, drafted.name)
    loop = loss_of_loop(files, trained, place, given) if name and loss is None else None
    named = step is not None and bool(step.name) and not step.reshaped
    plain = loop is None or (named and (is_plain(loop[1]) or (step is not None and step.mixed)))
    used = None if plain else loop
    changed = "" if used is not None else changed
    shape, view = reshaped_batch(near, drafted.file) if used is None else ([], "")
    if shape and name:  # the inputs of a script's data
        dataset_lines.append(f"reshape = {_value({'inputs': shape})}  # guessed: {_comment(view)}")
        result.guessed["dataset.reshape"] = f"{_value({'inputs': shape})}: {view}"
    keys: tuple[Any, Any] = step.keys if step is not None else ([], [])
    if name and used is None and not all(keys):
        keys = keys_of_batch(near, drafted.file, drafted.name)
    if name and used is None and all(keys):
        why_keys = "the training uses these keys"
        for side, chosen in zip(("inputs", "targets"), keys, strict=True):
            dataset_lines = [each for each in dataset_lines if not each.startswith(f"{side} = ")]
            dataset_lines.append(f"{side} = {_value(chosen)}  # guessed: {why_keys}")
            result.guessed[f"dataset.{side}"] = f"{_value(chosen)}: {why_keys}"
    if changed:
        result.missing["dataset"] = f"do this in the data set: {changed}"
        dataset_lines.append(f"# do this in the data set: {_comment(changed)}")
    if spec.dataset.group is not None:
        dataset_lines.append(f"group = {quoted(spec.dataset.group)}")
    written = step is not None and (not step.name or (step.reshaped and bool(name)))
    if used is not None:
        found, loss_lines, dataset_lines = _loss_of_loop(result, *used, dataset_lines, folder)
    elif step is not None and written:
        found, loss_lines = _own_loss(result, step, folder)
    else:
        summed = near if losses_called(near, drafted.file, given) else files
        adds = called and not known and loss_is_summed(summed, drafted.file, given)
        if adds and step is None:
            why = "AN EXAMPLE: a nearby script adds several losses; write a function, "
            why += "FILE.py:FUNCTION"
            result.missing["loss.name"] = _REPLACE
        if loss is None and "loss.name" not in result.missing:
            result.guessed["loss.name"] = f"{found}: {why}"
        if step is not None and step.notes and "loss.name" in result.guessed:
            result.guessed["loss.name"] += f"; {'; '.join(step.notes)}"
            why += f"; {'; '.join(step.notes)}"
        mark = "" if "loss.name" in result.missing else "guessed: "
        loss_lines = [] if loss else [f"# {mark}{_comment(why)}"]
    loss_lines.append(f"name = {quoted(_anchored(loss or found, folder))}")
    sections = (drafted.lines, drafted.arguments, checkpoint_lines, dataset_lines, loss_lines)
    names = ("model", "kwargs", "checkpoint", "dataset", "loss")
    texts = dict(zip(names, map("\n".join, sections), strict=True))
    mode = f"{quoted(spec.model.mode):<28}# eval or train"
    compute = _compute(spec, folder)
    random = drafted.random or (used is not None and draws(used[1], used[0]))
    if random and "randomness" not in _given(spec, "compute"):
        part = "model's forward" if drafted.random else "training loop"
        of = f"each sample has its own numbers: the {part} draws random numbers"
        compute.append(f'randomness = "fixed"  # guessed: {of}')
        result.guessed["compute.randomness"] = f"fixed: {of}"
    if drafted.alone and "batch_size" not in _given(spec, "compute"):
        compute = [line for line in compute if not line.startswith("# batch_size")]
        compute.append(f"batch_size = 1  # guessed: {ONE_SAMPLE}")
        result.guessed["compute.batch_size"] = f"1: {ONE_SAMPLE}"
    run: list[tuple[Path, str, Sequence[ast.stmt] | None]] = []
    run += [(drafted.file, drafted.name, None)] if drafted.file is not None else []
    run += [(place, name, None)] if name else []
    run += [(used[0], used[1].name, used[1].every)] if used is not None else []
    argv = _command_line(result, run, files, given, checkpoint)
    if spec.model.argv:
        argv = f"argv = {_value(spec.model.argv)}"
        result.missing.pop("model.argv", None)
        result.guessed.pop("model.argv", None)
    texts |= {"compute": "\n".join(compute), "argv": argv}
    result.text = _TEMPLATE.format(mode=mode, **texts)
    return result


def _of_script(result: Draft, spec: RunSpec, script: Path, folder: Path) -> Draft:
    """Return a run file for what a script trains in its first steps.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    read(spec.checkpoint.path, unsafe_pickle=spec.checkpoint.unsafe_pickle)
    own = _relative(script, folder)
    model = _anchored(_given(spec, "model").get("factory") or str(script), folder)
    loss = _anchored(_given(spec, "loss").get("name") or str(script), folder)
    kept = {key: v for key, v in _given(spec, "checkpoint").items() if key != "path"}
    checkpoint = {"path": _relative(spec.checkpoint.path, folder), **kept}
    group = {} if spec.dataset.group is None else {"group": spec.dataset.group}
    told = " ".join([own, *map(shlex.quote, spec.model.argv)])
    why = f"`check` and `compute` run the first training steps of `{told}`"
    result.guessed["model.factory"] = f"{model}: {why}"
    result.text = _TEMPLATE.format(
        model=f"# {_comment(why)}\nfactory = {quoted(model)}",
        mode=f"{quoted(spec.model.mode):<28}# eval or train",
        argv=f"argv = {_value(spec.model.argv)}" if spec.model.argv else _ARGV,
        kwargs="",
        checkpoint="\n".join(f"{key} = {_value(value)}" for key, value in checkpoint.items()),
        dataset="\n".join(f"{k} = {_value(v)}" for k, v in ({"path": own} | group).items()),
        loss=f"name = {quoted(loss)}",
        compute="\n".join(_compute(spec, folder)),
    )
    return result


def _step(
    near: Sequence[Path],
    files: Sequence[Path],
    model: "_Model",
    given: Mapping[str, Any],
    data: Path | None,
) -> SampleLoss | None:
    """Return the loss of a training step in the nearest scripts, or in all scripts."""
    found = step_loss(near, model.file, model.name, given, data)
    return found or step_loss(files, model.file, model.name, given, data)


def _loss_of_loop(
    result: Draft, file: Path, loop: Loop, dataset: Sequence[str], folder: Path
) -> tuple[str, list[str], list[str]]:
    """Return FILE.py:FUNCTION.loss for a training loop, and the lines of the loss and the data."""
    first, last = loop.lines
    found = _anchored(f"{file}:{loop.name}", folder)
    why = f"lines {first} to {last} of {loop.file.name}, run for one sample at a time"
    why += f", with {listed(loop.first)} of the first round" if loop.first else ""
    kept = [line for line in dataset if not line.startswith(("inputs = ", "targets = "))]
    for side in ("inputs", "targets"):
        result.guessed.pop(f"dataset.{side}", None)
    if loop.keys:
        inputs = _value({key: key for key in loop.keys})
        kept += [f"inputs = {inputs}  # guessed: the keys that the loss uses", "targets = []"]
        result.guessed["dataset.inputs"] = f"{inputs}: the keys that the loss uses"
    result.missing.pop("loss.name", None)
    result.guessed["loss.name"] = f"{found}: {why}"
    return found, [f"# guessed: {why}"], kept


def _own_loss(result: Draft, step: SampleLoss, folder: Path) -> tuple[str, list[str]]:
    """Return FILE.py:loss, and the lines of a run file for a loss of the user's code.

    The code is written to loss.py, or to sample_loss.py if loss.py exists, if it is complete.

    Args:
        result: The draft, to which the file is added.
        step: The loss.
        folder: The folder of the run file.
    """
    imported = {f"{text.split()[1]}.py" for text in step.code if text.startswith("from ")}
    free = (name for name in _LOSSES if name not in imported and not (folder / name).exists())
    file = next(free, "")
    line = "; ".join([step.line, *step.notes])
    if file and not step.unknown and is_complete("\n".join(step.code)):
        result.files[file] = "\n".join([f"# {_comment(line)}", *step.code, ""])
        result.missing.pop("loss.name", None)  # an example is not needed
        result.guessed["loss.name"] = f"{file}:{step.function}, a new file, for {line}"
        return f"{file}:{step.function}", [f"# guessed: {file} is a new file, for {_comment(line)}"]
    file = file or _LOSSES[0]
    lost = f". Not found: {listed(step.unknown)}" if step.unknown else ""
    result.missing["loss.name"] = f"write {file}, as the run file shows, for {line}{lost}"
    shown = [f"# {_comment(line + lost)}", *_OWN.format(file=file).splitlines()]
    return f"{file}:{step.function}", [*shown, *(f"#     {_comment(text)}" for text in step.code)]


@contextmanager
def _naming_loaders(files: Sequence[Path]) -> Iterator[None]:
    """Add the data sets and loaders of scripts to the remedy of an error about a data file."""
    try:
        yield
    except DatasetError as error:
        known = [_anchored(each, Path.cwd()) for each in loaders(files)]
        if known:
            error.remedy = f"{error.remedy} Or give data that a script makes: {listed(known, 4)}."
        raise


def _data_of_script(
    result: Draft, data: str, folder: Path, files: Sequence[Path], stored: Mapping[str, Any]
) -> tuple[list[str], Path, str]:
    """Return the lines for the data set FILE.py:NAME of a script or a package, file and name."""
    place, _, name = data.rpartition(":")
    if not place.endswith(".py"):
        return [f"path = {quoted(data)}"], Path(), ""
    found, why = reference_of(Path(place), name, files)
    reference = _anchored(found, folder)
    if why:
        result.guessed["dataset.path"] = f"{reference}: {why}"
    lines = [*([f"# guessed: {_comment(why)}"] * bool(why)), f"path = {quoted(reference)}"]
    known, unknown = arguments_of(Path(place), name, files, stored)
    given: dict[str, Any] = {}
    for key, argument in known.items():
        table, _, last = key.rpartition(".")
        (given.setdefault(table, {}) if table else given)[last] = argument.value
        why = argument.why.partition(";")[0]
        result.guessed[f"dataset.kwargs.{key}"] = f"{_value(argument.value)}: {why}"
    if given or unknown:
        lines.append("# the arguments of NAME")
        lines += [f"# {key} =  # {_NO_VALUE}" for key in unknown]
        lines.append(f"kwargs = {_value(given)}")
    result.missing |= {f"dataset.kwargs.{key}": "fill it in" for key in unknown}
    return lines, Path(place), found.rpartition(":")[2]


def _command_line(
    result: Draft,
    code: Iterable[tuple[Path, str, Sequence[ast.stmt] | None]],
    files: Sequence[Path],
    given: Mapping[str, Any],
    checkpoint: Path,
) -> str:
    """Return the line `argv` for the scripts of a model, of data and of a loss.

    Each is (file, name, statements), where statements are None for a variable of the file.
    """
    every = (command_line(file, name, files, given, checkpoint, own) for file, name, own in code)
    lines = [line for line in every if line is not None]
    if not lines:
        return _ARGV
    found = next((line for line in lines if line.stored is not None), lines[0])
    if found.stored is None:
        read = list(dict.fromkeys(flag for line in lines for flag in line.read))
        used = listed(read[:_SHOWN] + ["others"] * (len(read) > _SHOWN))
        if required := list(dict.fromkeys(flag for line in lines for flag in line.required)):
            of = listed([*required, *(flag for flag in read if flag not in required)][:_SHOWN])
            result.missing["model.argv"] = f"the arguments of the training, for {of}"
            return f"argv = []  # fill in: {found.file.name} parses arguments when imported"
        why = f"the defaults of {used}. Write those of your training if they differ"
        result.guessed["model.argv"] = f"[]: {why}"
        return f"argv = []  # guessed: {why}"
    why = f"stored in {found.source}"
    result.guessed["model.argv"] = f"{_value(found.stored)}: {why}"
    return f"argv = {_value(found.stored)}  # guessed: {why}"


def _given(spec: RunSpec, section: str) -> dict[str, Any]:
    """Return the settings {key: value} of a table that the command line gives."""
    table: Any = getattr(spec, section)
    return {key: value for key, value in table if spec.is_flag(section, key)}


def _compute(spec: RunSpec, folder: Path) -> list[str]:
    """Return the lines of [compute]: the given settings, and examples of common settings."""
    given = _given(spec, "compute")
    here = Path(os.path.relpath(Path.cwd(), folder.absolute()))
    if "transform" in given:  # in a run file, paths are relative to it
        given["transform"] = [resolve_paths(text, here) for text in given["transform"]]
    lines = {key: f"{key} = {_value(value)}" for key, value in given.items()}
    return [*(_EXAMPLES | lines).values()]


def quoted(text: str) -> str:
    """Return a text as a TOML string."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'


@dataclass(frozen=True)
class _Stored:
    """The content of a checkpoint."""

    content: Any
    shapes: Mapping[str, tuple[int, ...]]  # {name: shape} of its largest state dict
    given: StoredArguments  # the arguments of the training


@dataclass(frozen=True)
class _Model:
    """The lines of a run file for its model, and what is known about the model."""

    lines: list[str]
    arguments: list[str]  # the lines of [model.kwargs]
    inputs: Sequence[str] = ()  # the names of the parameters of forward, if they are known
    file: Path | None = None
    name: str = ""  # the name of the model in the file
    loss: str = ""  # the loss of a class of transformers, with the class
    random: bool = False  # whether its forward draws random numbers
    alone: bool = False  # whether it is built for batches of one sample


def _model(
    result: Draft,
    model: str | None,
    checkpoint: Path,
    folder: Path,
    files: Sequence[Path],
    stored: _Stored,
    data: Path,
) -> _Model:
    """Return the lines for the factory and its arguments, and what is known about the model.

    Of classes that fit equally well, a class in the script `data` is preferred.

    The factory is the given factory; the model that config.json describes; a class or function with
    parts named like the checkpoint's tensors; or a function with a common name.
    """
    if model is not None:
        file, _, name = (function_of(model) or "").rpartition(":")
        if file.endswith(".py") and Path(file).exists():
            model, _ = reference_of(Path(file), name, files, "model")
            name = model.rpartition(":")[2]
        given = Path(file).resolve()  # its layers and its arguments may be in other scripts
        rest = [other for other in files if other.resolve() != given]
        known = find_models([given, *rest], stored.shapes, stored.given) if file else []
        own = next((each for each in known if (each.file, each.name) == (given, name)), None)
        lines = [f"factory = {quoted(_anchored(model, folder))}"]
        inputs = own.inputs if own else _forward(stored.content)
        arguments, place = _arguments(result, own, folder, files), Path(file) if file else None
        random = is_random(place, name, files) if place is not None else False
        random |= own is not None and own.random
        return _Model(lines, arguments, inputs, place, name, random=random)
    held = _description(checkpoint)
    if len(stored_modules(stored.content)) == 1:
        held = "pickled model"
    found = [] if held else find_models(files, stored.shapes, stored.given)
    likely = [each for each in found if each.fit > max(_LIKELY, found[0].fit - _DOUBT)]
    usual = [
        (file.name != "model.py", _FACTORIES.index(name), f"{file}:{name}")
        for file in files
        for name in _functions(file)
        if name in _FACTORIES
    ]
    likely.sort(key=lambda each: (-round(each.fit, 2), each.file.resolve() != data.resolve()))
    tied = {each.file for each in likely if likely[0].fit - each.fit < _TIE}  # different classes
    tie = len(tied) > 1 and data.resolve() not in map(Path.resolve, tied)
    if likely[0].unknown or tie if likely else not usual:
        examined = {(each.file, each.name) for each in found}  # others explain no tensor
        trained = [
            each
            for each in find_trained(files, stored.given, stored.shapes)
            if ((each.file, each.name) in examined and not likely)
            or (not each.is_class and (not likely or _builds(each.file, likely)))
        ]
        likely = [*trained, *likely]
    if likely and held is None and (built := find_built(files, likely[0], data)) is not None:
        options = command_line(built.file, built.name, files, {}, checkpoint)
        # the training may have set other options than the defaults
        assumed = any(each.why == DEFAULT for each in likely[0].arguments.values())
        config = any("." in k and NOT_PROVED in v.why for k, v in likely[0].arguments.items())
        config &= _is_called(built)
        certain = not (likely[0].unknown or _reads_block(likely[0]) or config)
        if not certain or (assumed and options is not None):
            likely = [built, *likely]
    if not held and (not _builds(data, likely[:1]) if likely else not usual):
        likely = [*models_of_loops(data), *likely]
    if held is not None:
        value, why = FROM_CHECKPOINT, f"the checkpoint's {held} describes the model"
    elif likely:
        value, why = _anchored(likely[0].reference, folder), likely[0].why
    elif usual:
        value = _anchored(min(usual, key=lambda each: each[:2])[2], folder)
        why = "the name of a function in a nearby file"
    else:
        result.missing["model.factory"] = _REPLACE
        line = f"factory = {quoted(_anchored('model.py:build', folder))}"
        what = "# AN EXAMPLE: no model was found in your scripts; write your own"
        return _Model([what, line], [])
    result.guessed["model.factory"] = f"{value}: {why}"
    others = [
        f"# or {_comment(_anchored(each.reference, folder))}: {_comment(each.why)}"
        for each in likely[1:_OTHERS]
    ]
    lines = [f"# guessed: {_comment(why)}", *others, f"factory = {quoted(value)}"]
    if held is not None or not likely:
        loss = _loss_of_class(_architecture(checkpoint))
        return _Model(lines, [], _forward(stored.content), loss=loss)
    best = likely[0]
    loss = "" if "num_labels" in best.arguments else _loss_of_class(best.name.partition(".")[0])
    arguments = _arguments(result, best, folder, files)
    alone = any(argument.why == ONE_SAMPLE for argument in best.arguments.values())
    random = best.random or is_random(best.file, best.name, files)
    return _Model(lines, arguments, best.inputs, best.file, best.name, loss, random, alone)


def _is_called(built: FoundModel) -> bool:
    """Whether the values of the parameters are known in the function that builds a model."""
    script, place = Script.read(built.file), built.name.rpartition(".")[0]
    return script is not None and Variables(script.tree, built.file).is_called(place)


def _reads_block(model: FoundModel) -> bool:
    """Whether a class reads variables of its script's block if __name__ == "__main__"."""
    script = Script.read(model.file)
    return script is not None and Variables(script.tree, model.file).reads_block(model.name)


def _builds(file: Path, models: Sequence[FoundModel]) -> bool:
    """Whether a script has or imports the class of one of several models."""
    script = Script.read(file)
    others = [found for each in models if (found := Script.read(each.file)) is not None]
    same = [o.file.resolve() == file.resolve() for o in others]
    return script is not None and (any(same) or any(map(script.imports, others)))


def _architecture(checkpoint: Path) -> str:
    """Return the name of the class that a checkpoint folder's config.json names, "" without one."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((checkpoint / CONFIG).read_bytes())
        if len(config.get("id2label", "01")) > 1 and "problem_type" not in config:
            return str(config["architectures"][0])
    return ""


def _loss_of_class(name: str) -> str:
    """Return the loss of a class of transformers and why, "LOSS: WHY", or ""."""
    loss = next((loss for end, loss in _LOSS_OF_CLASS.items() if name.endswith(end)), "")
    return f"{loss}: the loss of {name}" if loss else ""


def _forward(content: Any) -> Sequence[str]:
    """Return the names of the parameters of a pickled model's forward, () without such a model."""
    models = [*stored_modules(content).values()]
    return list(inspect.signature(models[0].forward).parameters) if len(models) == 1 else ()


def _arguments(
    result: Draft, found: FoundModel | None, folder: Path, files: Sequence[Path]
) -> list[str]:
    """Return the lines for the known arguments of a model, and for the arguments to fill in."""
    if found is None:
        return []
    lines: dict[str, list[str]] = {"": []}  # {table: lines}, "" for the arguments themselves
    for name, argument in found.arguments.items():
        table, _, key = name.rpartition(".")
        if table and key == "factory" and not argument.names_code:
            lines.setdefault(table, []).append(f"# {_key(key)} =  # {_NAMES_CODE}")
            result.missing[f"model.kwargs.{name}"] = _NAMES_CODE
            continue
        code = argument.names_code
        value = _value(_anchored(argument.value, folder) if code else argument.value)
        lines.setdefault(table, []).append(
            f"{_key(key)} = {value}  # guessed: {_comment(argument.why)}"
        )
        result.guessed[f"model.kwargs.{name}"] = f"{value}: {argument.why}"
    for name in found.unknown:
        table, _, key = name.rpartition(".")
        lines.setdefault(table, []).append(f"# {_key(key)} =  # {_NO_VALUE}")
        result.missing[f"model.kwargs.{name}"] = _FILL_IN
    if left := defaults_left(found, files) if found.is_class else {}:
        why = f"defaults of {found.name}, which no tensor confirms"
        lines[""] += [f"# {_key(k)} = {_value(v)}  # one of the {why}" for k, v in left.items()]
        held = listed(f"{k} = {_value(v)}" for k, v in left.items())
        result.guessed["model.kwargs"] = f"{held}: {why}"
    tables = [".".join(["model.kwargs", *map(_key, t.split("."))]) if t else "" for t in lines]
    blocks = zip(tables, lines.values(), strict=True)
    return [line for table, own in blocks for line in ([f"\n[{table}]"] * bool(table) + own)]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


def _scripts(places: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the Python files in some folders, and in the folders below them, nearest first."""
    near: dict[Path, None] = {}
    below: dict[Path, None] = {}
    waiting = deque((place, 0) for place in dict.fromkeys(places))
    for _ in range(_FOLDERS):
        if not waiting or len(below) > _FILES:
            break
        place, depth = waiting.popleft()
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        if depth and "pyvenv.cfg" in (entry.name for entry in entries):
            continue
        files = [entry for entry in entries if entry.suffix == ".py" and entry.is_file()]
        if depth:
            below.update(dict.fromkeys(file for file in files if _mentions_torch(file)))
        else:
            near.update(dict.fromkeys(files))
        if depth < _DEPTH:
            folders = (entry for entry in entries if not _SKIPPED.match(entry.name))
            waiting.extend((folder, depth + 1) for folder in folders if folder.is_dir())
    return list(near), [file for file in below if file not in near]


def _imported(files: Sequence[Path]) -> list[Path]:
    """Return the files that scripts import from the folder above them."""
    found = list(files)
    for file in found:  # it grows: an imported file also imports
        script = Script.read(file)
        for dotted in script.imported.values() if script is not None else ():
            name = f"{dotted.partition('.')[0]}.py"
            near = (folder / name for folder in file.absolute().parents[:2])
            other = next((place for place in near if place.is_file()), file)
            if other.resolve() not in map(Path.resolve, found):
                found.append(other)
    return found[len(files) :]


def _mentions_torch(file: Path) -> bool:
    with suppress(OSError):
        return b"torch" in file.read_bytes()
    return False


def _loss_of_script(called: Sequence[str], of_data: str, why: str) -> tuple[str, str]:
    """Return the loss that scripts call, and why; `of_data` is the guess from the targets."""
    of_tokens = of_data == "token_cross_entropy"
    name = "cross_entropy" if of_tokens else of_data
    own = [each for each in called if each.partition(":")[0] == name]
    found = (own or called)[0]
    if of_tokens and own:
        return f"token_{found}", why
    rest = [each for each in called if each != found]
    others = f"; it also calls {listed(rest)}: for a sum write a function" if rest else ""
    return found, f"a nearby script calls it{others}"


def _description(checkpoint: Path) -> str | None:
    """Return the name of the file that describes the model of a checkpoint folder, if any."""
    return next((name for name in (CONFIG, ADAPTER) if (checkpoint / name).exists()), None)


def _functions(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the error is reported when the file is used
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _checkpoint(
    result: Draft, spec: RunSpec, folder: Path, files: Sequence[Path]
) -> tuple[list[str], _Stored]:
    """Return the lines for the checkpoint, and its content.

    Of several state dicts, the best is the one that a model in `files` explains best. Parts of one
    model may be stored under several keys.
    """
    checkpoint, given = spec.checkpoint.path, _given(spec, "checkpoint")
    content, report = read(checkpoint, unsafe_pickle=spec.checkpoint.unsafe_pickle)
    found = []
    if isinstance(content, Mapping | nn.Module):
        found = state_dicts(content, joined=True)
    if spec.checkpoint.key is not None:
        with located(checkpoint):
            found = [state_dict_under(content, found, spec.checkpoint.key)]
    weights = [
        (key, state, {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)})
        for key, state in found
        if all(isinstance(k, str) for k in state)
    ]
    if not any(shapes for *_, shapes in weights):
        what, remedy = "the checkpoint has no named tensors", "Save model.state_dict()."
        raise CheckpointError(what, where=str(checkpoint), remedy=remedy)
    stored = stored_arguments(content, checkpoint)
    file, _, name = (_given(spec, "model").get("factory") or "").rpartition(":")

    def rank(each: tuple[str, Any, Mapping[str, tuple[int, ...]]]) -> tuple[Any, ...]:
        key, state, shapes = each
        fits = [
            model.fit
            for model in (find_models(files, shapes, stored) if several else ())
            if not name or (model.name, model.file.resolve()) == (name, Path(file).resolve())
        ]
        fit = round(max(fits, default=0.0), 2)
        joined = isinstance(state, Joined)
        size = len({*shapes} - {_COUNTER})
        return (joined and fit < _LIKELY, -fit, bool(_AVERAGED & {*_words(key)}), -size)

    plain = [each for each in weights if not isinstance(each[1], Joined)]
    several = len({frozenset(shapes.items()) for *_, shapes in plain}) > 1 and len(plain) <= _FEW
    key, state, shapes = min(weights, key=rank)
    names = [f"{k} {shape}" for k, shape in shapes.items() if k != _COUNTER]
    lines = [f"# {report.format}, {len(names)} tensors: {_comment(listed(names, _SHOWN))}"]
    lines.append(f"path = {quoted(_relative(checkpoint, folder))}")
    lines += [f"{k} = {_value(value)}" for k, value in given.items() if k != "path"]
    keys = [name for name, *_ in plain if name]
    if isinstance(state, Joined):
        lines.append(f"# the parts of the model are under {_comment(listed(state.keys_of_parts))}")
    elif spec.checkpoint.key is None and len(keys) > 1 and key:
        others = listed(each for each in keys if each != key)
        result.guessed["checkpoint.key"] = f"{key}; the checkpoint also has {others}"
        lines.append(f"key = {quoted(key)}  # guessed: the checkpoint also has {_comment(others)}")
    return lines, _Stored(content, shapes, stored)


def _words(name: str) -> list[str]:
    return re.split(_WORDS, name.lower())


@dataclass(frozen=True)
class _DataArray:
    """The length, sample shape and dtype of an array, known before its rows are read."""

    length: int
    sample: tuple[int, ...] | None  # the shape; for texts and sequences of different lengths None
    dtype: str  # or "text"
    unique: bool = False  # whether it is named as an id, and no two samples have the same number

    @classmethod
    def of(cls, stored: StoredColumn, name: str) -> "_DataArray":
        if isinstance(stored, SequenceColumn):
            return cls(len(stored.lengths), None, dtype_name(stored.dtype))
        if isinstance(stored, TextColumn):
            return cls(stored.n, None, "text")
        length, *sample = stored.shape or (0,)
        found = cls(int(length), tuple(map(int, sample)), dtype_name(stored.dtype))
        words = {*re.split(_WORDS, name.lower())}
        if sample or "int" not in found.dtype or words.isdisjoint({"id", "uid"}):
            return found
        first = stored[0 : min(found.length, _READ)].tolist()
        return replace(found, unique=len(set(first)) == len(first) > _FEW)

    def __str__(self) -> str:
        shape = " of different lengths" if self.sample is None else f" {self.sample}"
        return f"{self.dtype}{'' if self.dtype == 'text' else shape} x {self.length:,}"


def _dataset(
    result: Draft,
    data: Path,
    folder: Path,
    *,
    keywords: bool,
    forward: Sequence[str],
    loss: str | None,
    called: Sequence[str],
    group: str | None,
    transforms: Collection[str],
) -> tuple[list[str], str, str]:
    """Return the lines for a data file, a loss for its targets, and why.

    Args:
        result: The draft. What is guessed is added to it.
        data: The data file.
        folder: The folder of the run file.
        keywords: Whether the model takes each input by its name.
        forward: The names of the parameters of the model's forward, as far as they are known.
        loss: The loss that was given on the command line, if any.
        called: The losses that scripts call.
        group: The array of the ids of groups, which is no input.
        transforms: The transforms of pictures that scripts use.
    """
    kind, opened = open_arrays(data)
    arrays = {
        name: _DataArray.of(opened.load(name), name) for name in opened.names if name != group
    }
    held = listed(f"{name} {array}" for name, array in arrays.items())
    lines = [f"# {kind}: {_comment(held)}", f"path = {quoted(_relative(data, folder))}"]

    def guess(key: str, value: Any, why: str) -> None:
        result.guessed[f"dataset.{key}"] = f"{_value(value)}: {why}"
        lines.append(f"{key} = {_value(value)}  # guessed: {_comment(why)}")

    inputs, targets, why = _columns(arrays, forward, keywords=keywords)
    graph = _graph(arrays, arrays[targets[0]].length) if targets else []
    graph = [] if isinstance(inputs, dict) else graph
    flags = [k for k, a in arrays.items() if graph and a.dtype == "bool" and a.sample == ()]
    nodes = flags if {*targets} - {*flags} else []
    targets = [k for k in targets if k not in nodes]
    result.unused = _unused(arrays, {*targets, *inputs}, graph)
    if graph:
        inputs = [k for k in arrays if k in {*inputs, *graph} - {*nodes}]
    nodes += [k for k in result.unused if graph and _are_positions(arrays[k])]
    train = next((name for name in nodes if "train" in name.lower()), "")
    result.unused.pop(train, None)
    if isinstance(inputs, dict):
        _require_inputs(data, arrays, result.unused)
    if result.unused and kind != "images":
        told = listed(f"{name} ({reason})" for name, reason in result.unused.items())
        lines.insert(1, f"# not used: {_comment(told)}")
    padded = [k for k in inputs if arrays[k].sample is None and arrays[k].dtype != "text"]
    masks = {}
    if isinstance(inputs, dict):
        known = _PADDING if keywords else {"input_ids": "attention_mask"}
        free = [k for k in known if k in padded and known[k] not in inputs]
        masks = {known[k]: f"{k}{MASK}" for k in free}
        guess("inputs", {**inputs, **masks}, why)
    elif len(inputs) > 1 and inputs != [*forward] and all(arrays[k].sample == () for k in inputs):
        guess("columns", {"table": inputs}, "columns with one number a sample")
        guess("inputs", ["table"], why)
    else:
        guess("inputs", inputs, why)
    guess("targets", targets, why)
    if graph:
        guess("whole", inputs, "the samples are the nodes of a graph")
    if train:
        guess("select", train, "the nodes to train on")
    if padded:
        of = "different lengths; NAME_mask marks the entries that are not padding"
        guess("pad", dict.fromkeys(padded, 0), of)
    found = "mse"
    if targets:
        target = arrays[targets[0]]
        alike = [arrays[k] for k in inputs if arrays[k].sample == target.sample]
        of_tokens = len(alike) == len(inputs) == 1 and "int" in alike[0].dtype
        found, why = _loss(target, inputs, of_tokens=of_tokens)
        if found in _GENERAL and called:
            found, why = _loss_of_script(called, found, why)
        elif found in _GENERAL and len(targets) > 1 and loss is None:
            found, why = "loss.py:loss", f"the targets are a tuple: ({', '.join(targets)})"
            result.missing["loss.name"] = f"write loss.py: {why}"
    real = (loss or found).partition(":")[0] in _REAL
    labels = [k for k in targets if real and "int" in arrays[k].dtype]
    lines += _pixels(arrays, inputs, labels, guess, scaled="ToTensor" in transforms)
    others = sorted({*transforms} - {"ToTensor"}) if kind == "images" else []
    if others:
        what = f"a script uses {listed(others)}: name its data set instead, FILE.py:NAME"
        result.missing["dataset.path"] = what
    texts = opened.load(targets[0]) if targets else None
    if isinstance(texts, TextColumn):
        read = texts.read(0, min(texts.n, _READ))
        first = sorted(set(read))
        if len(first) > max(_FEW, len(read) // 2):
            what = f"{len(first):,} of {len(read):,} texts of {targets[0]!r} differ"
            result.missing["dataset.targets"] = f"{what}: they are no classes. Name the targets"
        else:
            why_classes = f"the texts of the first {_READ:,} samples, sorted"
            guess("classes", {targets[0]: first}, why_classes)
    if not targets:
        return lines, "mse", "there are no targets: write your own function, FILE.py:LOSS"
    masked = "attention_mask" in masks and found == "causal_lm"
    return lines, f"{found}:mask=input_ids{MASK}" if masked else found, why


def _graph(arrays: Mapping[str, _DataArray], n: int) -> list[str]:
    """Return the arrays whose names and shapes describe a graph of n nodes.

    These are adjacency matrices (n, n), lists of edges (2, E), and values of edges (E, ...).
    """
    words = {name: {*re.split(_WORDS, name.lower())} for name in arrays}
    named = {name: a for name, a in arrays.items() if words[name] & _GRAPHS}
    square = [name for name, a in named.items() if (a.length, a.sample) == (n, (n,))]
    edges = [k for k, a in named.items() if a.length == 2 and "int" in a.dtype and a.sample]
    counts = {sum(arrays[name].sample or ()) for name in edges}
    return square + edges + [k for k, a in named.items() if a.length in counts and k not in edges]


def _unused(
    arrays: Mapping[str, _DataArray], used: set[str], graph: Collection[str]
) -> dict[str, str]:
    """Return {name: why} for the arrays that are neither used nor part of a graph."""
    n = next(arrays[name].length for name in used)

    def why(name: str, array: _DataArray) -> str:
        if array.dtype == "text":
            return "texts"
        if array.length != n:
            return f"{count(array.length, 'sample')}, not {n:,}"
        return "the name of a sample index"

    used = {*used, *graph}
    return {name: why(name, array) for name, array in arrays.items() if name not in used}


def _are_positions(array: _DataArray) -> bool:
    return "int" in array.dtype and array.sample == ()


def _numbers_samples(name: str, arrays: Mapping[str, _DataArray]) -> bool:
    """Whether the name is a table's index, or the array is the unnamed first column."""
    unnamed = name == "0" and not all(other.isdigit() for other in arrays)
    known = name.lower() in INDICES or _OF_PANDAS.fullmatch(name.lower()) is not None
    return unnamed or known or arrays[name].unique


def _require_inputs(
    data: Path, arrays: Mapping[str, _DataArray], unused: Mapping[str, str]
) -> None:
    """Raise if an unused array has numbers that a model with keyword inputs might need."""
    dropped = [
        f"{name} ({why})"
        for name, why in unused.items()
        if arrays[name].dtype != "text" and not _numbers_samples(name, arrays)
    ]
    if dropped:
        raise DatasetError(
            f"not all arrays can be inputs: {listed(dropped)}",
            where=str(data),
            remedy="Give each array one entry a sample. Or write a dataset.toml with path, inputs "
            "and targets, and give it as DATASET.",
        )


def _pixels(
    arrays: Mapping[str, _DataArray],
    inputs: Iterable[str],
    labels: Sequence[str],
    guess: Callable[[str, Any, str], None],
    *,
    scaled: bool,
) -> list[str]:
    """Guess the dtype float32 for pixels and for `labels`; return a comment with the scale.

    With `scaled`, the scale of bytes is 1/255, as by torchvision's ToTensor.
    """
    pixels = [k for k in inputs if arrays[k].dtype in ("uint8", "bool") and arrays[k].sample]
    if isinstance(inputs, dict):  # the mask of a keyword is not a picture
        pixels = [k for k in pixels if "mask" not in k]
    kinds = listed(sorted({arrays[k].dtype for k in pixels}))
    whys = [f"inputs are {kinds}"] if pixels else []
    whys += ["the loss takes real numbers"] if labels else []
    if whys:
        guess("dtype", dict.fromkeys([*pixels, *labels], "float32"), "; ".join(whys))
    if not pixels:
        return []
    if scaled and all(arrays[k].dtype == "uint8" for k in pixels):
        guess("scale", dict.fromkeys(pixels, 1 / 255), "a script uses ToTensor")
        return []
    scales = _value(dict.fromkeys(pixels, 1 / 255))
    return [f"# scale = {scales}  # the factor used in training, if any"]


def _loss(
    target: _DataArray, inputs: Collection[str], *, of_tokens: bool = False
) -> tuple[str, str]:
    """Return a loss for the targets of inputs with these names, and why.

    With `of_tokens`, the inputs are integers of the targets' shape.
    """
    if "int" in target.dtype and "input_ids" in inputs and target.sample != ():
        if "decoder_input_ids" in inputs:
            return "token_cross_entropy", "targets are the decoder's token ids, one a position"
        return "causal_lm", "targets are token ids, one a position"
    if "int" in target.dtype and len(target.sample or ()) == 1 and of_tokens:
        return "token_cross_entropy", "targets are token ids, one a position of the inputs"
    if "int" in target.dtype or target.dtype == "text":
        kind = "texts" if target.dtype == "text" else "integers"
        return "cross_entropy", f"targets are {kind}, read as classes"
    if target.dtype == "bool":
        return "bce_with_logits", "targets are true or false"
    return "mse", f"targets are {target.dtype}"


def _columns(
    arrays: Mapping[str, _DataArray], forward: Sequence[str], *, keywords: bool
) -> tuple[list[str] | dict[str, str], list[str], str]:
    """Return the input arrays (a list or {keyword: name}), the target arrays, and why.

    Either all inputs have a keyword (the array's name) or no input has. No array is dropped.
    If the parameters of the model's forward are names of arrays, these arrays are the inputs.
    """
    lengths = Counter(array.length for array in arrays.values())
    n = max(lengths, key=lambda length: (lengths[length], length), default=0)  # train, not test
    usable = [name for name, array in arrays.items() if array.length == n]
    targets = [name for name in usable if _TARGETS & set(re.split(_WORDS, name.lower()))]
    rest = [k for k in usable if k not in targets and not _numbers_samples(k, arrays)]
    inputs = [k for k in rest if arrays[k].dtype != "text"] or rest  # texts need a tokenizer
    if not inputs:  # one array, or only names that look like targets
        inputs, targets = targets[:1] or usable[:1], targets[1:]
    if "input_ids" in inputs and not targets:
        targets = ["input_ids"]
    known = not _KEYWORDS.isdisjoint(inputs)
    many = [arrays[k].sample for k in inputs]
    if len(inputs) > len(forward) > 0 and any(many) and not (known or keywords):
        taken = "the parameters of the model's forward"
        return inputs[: len(forward)], [*inputs[len(forward) :], *targets], taken
    if len(forward) > 1 and sorted(forward) == sorted(inputs) and not (known or keywords):
        return [*forward], targets, "the parameters of the model's forward"
    if targets or known or len(rest) < 2:
        why = "by their names"
    elif all(arrays[k].sample == () or arrays[k].dtype == "text" for k in rest):
        *others, last = rest
        inputs = [k for k in others if arrays[k].dtype != "text"] or others
        targets, why = [last], "the last column of a table is the target"
    elif len(inputs) == 2:
        inputs, targets, why = inputs[:1], inputs[1:], "the first and the second of two arrays"
    else:
        why = "by their names"
    return {k: k for k in inputs} if keywords or known else inputs, targets, why


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quoted(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return _value(NONE)
    return quoted(value) if isinstance(value, str) else repr(value)


def _comment(text: str) -> str:
    """Return a text for a comment, on one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _anchored(reference: str, folder: Path) -> str:
    """Make FILE.py of FILE.py:FUNCTION, or a base model's folder, relative to `folder`."""
    if is_folder(Path(reference)) and reference != FROM_CHECKPOINT:
        return _relative(Path(reference), folder)
    file = file_of(reference)
    if file is None or (reference == "model.py:build" and not Path(file).exists()):
        return reference
    return _relative(Path(file), folder) + reference[len(file) :]


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
