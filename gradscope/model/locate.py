"""Locates errors of the user's model, loss or stage: layer, sample and remedy."""

import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import dropwhile
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from gradscope.core.batch import Batch, WholeInputs, tensors, wholes
from gradscope.core.texts import count
from gradscope.errors import GradscopeError, ModelError, UnsupportedError
from gradscope.model.randomness import Unplanned
from gradscope.process.shortage import is_device_lost, is_machine_error
from gradscope.process.stops import is_stop

_OURS = Path(__file__).parents[1]
_PACKAGES = (_OURS, Path(torch.__file__).parent)
_INSTALLED = {Path(sysconfig.get_path(k)) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
_SITES = {"site-packages", "dist-packages"}
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

_LABEL = re.compile(r"Target (-?\d+) is out of bounds")
_TARGET = re.compile(r"expected target dtype to be Long")
_COUNT = re.compile(
    r"positional arguments? but|required positional|unexpected keyword argument|"
    r"object is not callable"  # the outputs, by a loss that expects the model
)
_DEVICES = re.compile(r"on the same device|on the expected device|torch\.\w+\.\w+Tensor")
_INDEX = re.compile(r"index out of range in self")
_CHANNELS = re.compile(r"expected input\[[\d, ]+\] to have (\d+) channels")
_PRODUCT = re.compile(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
_UNBATCHED = re.compile(r"Expected \dD \(unbatched\) or (\d)D \(batched\) input")
_RECURRENT = re.compile(r"Expected input to be 2D or 3D, got \dD")
_STEP = re.compile(r"must be equal to input_size\. Expected (\d+), got \d+")
_IDS = re.compile(r"argument #1 'indices'")
_SIZES = re.compile(r"size|shape|length|split|expand|index", re.I)
_FIXED = re.compile(r"Guard failed|to be equal to \d+, but got")  # messages of exported programs
_ONE = re.compile(r"more than 1 value per channel")
_DTYPE = re.compile(r"dtype|scalar type|Input type .* and (weight|bias) type|not implemented for")


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost layer whose method was running when `error` was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")))
        found = found if name is None else name
    if not found:
        return None
    return f"layer {found!r} ({type(model.get_submodule(found)).__name__})"


def first_line(error: BaseException) -> str:
    """Return the exception's type and its first line; after a colon, also the second line."""
    try:
        text, _, rest = str(error).strip().partition("\n")
        if text.endswith(":"):
            text = f"{text} {rest.strip().partition(chr(10))[0]}".strip()
    except Exception:  # str() of a user's exception may fail
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_lines(error: BaseException, limit: int = 8) -> str:
    """Return the user's part of a traceback, as Python prints it, or ""."""
    theirs = []
    for frame in traceback.extract_tb(error.__traceback__):
        imports = frame.filename in (importlib.__file__,) or "<frozen importlib" in frame.filename
        if not imports and not any(Path(frame.filename).is_relative_to(p) for p in _PACKAGES):
            theirs.append(frame)
    # installed code before the user's first file only called the user's code
    shown = [*dropwhile(lambda frame: is_installed(Path(frame.filename)), theirs)] or theirs
    return "".join(traceback.format_list(shown[-limit:])).rstrip()


def is_installed(file: Path) -> bool:
    """Whether a file belongs to Python, to an installed package, or to gradscope."""
    if not file.is_absolute() or not _SITES.isdisjoint(file.parts):
        return True
    if any(file.is_relative_to(place) for place in (*_PACKAGES, *_INSTALLED)):
        return True
    folders = [folder for folder in sys.path if folder and file.is_relative_to(folder)]
    return any(
        not _recorded(folder).isdisjoint(file.relative_to(folder).parts[:1]) for folder in folders
    )


@cache
def _recorded(folder: str) -> frozenset[str]:
    """Return the packages and modules that were installed in a folder, as by pip --target."""
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text("utf-8", errors="replace").splitlines()
            found.update(re.split("[/,]", line, maxsplit=1)[0] for line in lines)
    return frozenset(found)


def is_users(error: BaseException) -> bool:
    """Whether the user's code raised, and not gradscope: decided by the last frame of either."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_OURS):
            return False
        if not is_installed(file):
            return True
    return False


def is_bug(error: BaseException) -> bool:
    """Whether an exception is a bug: a missing name that gradscope's own code asked for.

    A bug is neither a refusal nor an error of the model. A different torch may lack the name.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[-1].name in ("__getattr__", "__getattribute__"):
        frames.pop()  # find the caller
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(_OURS)
    return isinstance(error, AttributeError) and ours


def device_lost_error(error: BaseException, where: str | None = None) -> ModelError | None:
    """Return the error for a GPU that has failed, or None for other exceptions."""
    if not is_device_lost(error):
        return None
    return ModelError(
        f"the device has failed and cannot be used any more in this process: {first_line(error)}",
        where=where,
        remedy="The usual cause is an index out of range, such as a class label or a row of an "
        'embedding. Run on the CPU (model.cpu(), or device="cpu" in a run file): there the error '
        "names the sample.",
    )


def describe_raised(error: BaseException) -> str:
    """Return a text about the exception or exit of the user's code."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {first_line(error)}"


@contextmanager
def user_code(model: nn.Module, batch: Batch | None = None) -> Iterator[None]:
    """Convert exceptions of the user's model or loss to a `ModelError` with layer or sample.

    sys.exit counts as an exception, and so does a `KeyboardInterrupt` without Ctrl-C. Shortage of
    memory, failed GPUs and bugs of gradscope pass through unchanged.
    """

    def translated(error: BaseException) -> ModelError:
        sample, remedy = _hint(error, batch)
        where = ", ".join(filter(None, (layer_of(error, model), sample))) or None
        return ModelError(
            f"the model or its loss {describe_raised(error)}", where=where, remedy=remedy
        )

    with _translating(translated):
        yield


@contextmanager
def own_stage(what: str) -> Iterator[None]:
    """Convert exceptions of a user's stage, such as "transform soft_threshold", to `ModelError`."""
    with _translating(lambda error: ModelError(f"your code {describe_raised(error)}", where=what)):
        yield


@contextmanager
def unsupported(what: str, model: nn.Module, remedy: str) -> Iterator[None]:
    """Convert torch's exceptions to an `UnsupportedError` that names the layer.

    Other gradscope errors, bugs of gradscope, and errors of the machine pass through unchanged.
    """
    try:
        yield
    except GradscopeError as error:
        if isinstance(error, UnsupportedError):
            error.where = error.where or layer_of(error, model)
        raise
    except Exception as error:  # any exception of torch or the user's code
        if is_machine_error(error) or is_bug(error):
            raise
        where = layer_of(error, model)
        raise UnsupportedError(
            f"{what}: {first_line(error)}", where=where, remedy=remedy
        ) from error


@contextmanager
def _translating(translated: Callable[[BaseException], ModelError]) -> Iterator[None]:
    try:
        yield
    except (GradscopeError, Unplanned):
        raise
    except BaseException as error:
        if is_stop(error) or is_machine_error(error) or is_bug(error):
            raise
        found, lines = translated(error), own_lines(error, 3)
        if lines:
            found.remedy = f"{found.remedy or ''}\nIt came from:\n{lines}".lstrip()
        raise found from error


_EXPORTED = (
    "The program was exported for a fixed number of samples. Export it with a dynamic batch axis: "
    "torch.export.export(model, args, dynamic_shapes=[{0: torch.export.Dim('n')}, ...]), with one "
    "entry for each input."
)
PACKED = (
    "Inputs with the positions of all samples on one axis (packed sequences, offsets, graphs) have "
    "no sample axis. Pad them to (n, t, ...), and pack them in forward. If the samples are the "
    "nodes of one graph, give the graph whole (gradscope.Whole)."
)
WHOLE = (
    "If all samples share an input, such as the adjacency matrix or the edge list of a graph, give "
    'it whole: whole = ["NAME"] under [dataset], gradscope.Whole(x) in Python.'
)
_GRAPH = (
    "If the samples are the nodes of one graph, every node needs the whole graph. Give features "
    'and graph whole: whole = ["features", "adjacency"] under [dataset], with their names; '
    "(gradscope.Whole(x), gradscope.Whole(adjacency)) in Python. Row i of the model's answer is "
    "then node i."
)


def shapes_of(batch: Batch) -> str:
    """Return "3 samples: inputs (3, 4) float32; targets (3,) int64"."""
    samples = batch.sample_batch

    def describe(tree: object, more: str = "") -> list[str]:
        found = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors(tree))
        return [text + more for text in found]

    rows = [] if isinstance(samples.inputs, WholeInputs) else describe(samples.inputs)
    shared = [text for w in wholes(samples.inputs) for text in describe(w.value, " whole")]
    inputs = ", ".join([*rows, *shared]) or "none"
    targets = ", ".join(describe(samples.targets)) or "none"
    return f"{count(len(samples), 'sample')}: inputs {inputs}; targets {targets}"


def graph_remedy(model: nn.Module, batch: Batch) -> str | None:
    """Return how to give a graph whose nodes are the samples, or None if there is no sign of it.

    A sign is an (n, n) matrix among the inputs of n samples or the model's buffers. Another sign is
    a whole input next to inputs with a sample axis.
    """
    samples = batch.sample_batch
    n, held = len(samples), (*tensors(samples.inputs), *model.buffers())
    parted = bool(wholes(samples.inputs)) and not isinstance(samples.inputs, WholeInputs)
    square = n > 1 and any(t.shape[:2] == (n, n) for t in held)
    return _GRAPH if parted or square else None


def alone_remedy(error: ModelError, model: nn.Module, batch: Batch, one: Batch) -> str | None:
    """Return the remedy for a model that runs on a batch but not on one of its samples.

    Returns None if the model computes a statistic over the batch, which a single sample lacks.
    """
    if _ONE.search(error.what):
        return None
    if _FIXED.search(error.what):
        return _EXPORTED
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "A traced program keeps the number of samples of its trace. Pass the original model, "
            "or torch.jit.script of it."
        )
    graph = graph_remedy(model, batch)
    if graph is not None:
        return f"It was called with {shapes_of(one)}. {graph}"
    return (
        f"The model was called with {shapes_of(one)}. It must accept any number of samples: "
        "make masks and paddings as long as the inputs (x.shape[1]), not as long as the longest "
        "sample of the batch, and do not pass a fixed number of samples to view and reshape. "
        f"{PACKED}"
    )


def _channels_hint(text: str, batch: Batch) -> str | None:
    """Return the remedy for images without channels, or with channels last, in a convolution."""
    wanted = _CHANNELS.search(text)
    images = [t for t in tensors(batch.inputs) if t.is_floating_point()]
    if wanted is None or len(images) != 1:
        return None
    channels, (n, *size) = int(wanted[1]), images[0].shape
    if channels == 1 and size and size[0] != 1 and len(size) in (1, 2, 3):
        shape = [1, *size] if size[-1] != 1 or len(size) < 3 else [1, *size[:-1]]
        return (
            f"The layer expects 1 channel on the axis after the samples: ({n}, 1, ...). In a "
            f"dataset spec, write reshape = {{ NAME = {shape} }}."
        )
    if len(size) > 1 and size[-1] == channels:
        axes = (0, len(size), *range(1, len(size)))
        return (
            f"The layer expects {channels} channels on the axis after the samples, but they are on "
            f"the last axis. Store the array as x.transpose{axes}."
        )
    return None


def _width_hint(text: str, batch: Batch) -> str | None:
    """Return what to do about inputs of another width, or without axes, for the first layer."""
    inputs = [t for t in tensors(batch.inputs) if t.is_floating_point()]
    if len(inputs) != 1:
        return None
    size = inputs[0].shape[1:]
    product, axes, step = _PRODUCT.search(text), _UNBATCHED.search(text), _STEP.search(text)
    most = 3 if _RECURRENT.search(text) else int(axes[1]) if axes is not None else 0
    single = [k for k, n in enumerate(size) if n == 1]
    extra = len(size) + 1 - most
    if most and 0 < extra <= len(single):
        kept = [n for k, n in enumerate(size) if k not in single[:extra]]
        return (
            f"The layer takes {most} axes, the samples' among them. A dataset spec says reshape = "
            f"{{ NAME = {kept} }}."
        )
    if step is not None and size and prod(size) % int(step[1]) == 0:
        kept = [prod(size) // int(step[1]), int(step[1])]
        return (
            f"The layer takes {step[1]} numbers at each step of a sequence. A dataset spec says "
            f"reshape = {{ NAME = {kept} }}, if a sample is such a sequence."
        )
    if axes is not None and len(size) < int(axes[1]) - 1:
        wanted = "[channels, height, width]" if axes[1] == "4" else "[channels, ...]"
        return (
            f"The layer takes {axes[1]} axes, the samples' among them. A dataset spec says "
            f"reshape = {{ NAME = {wanted} }} with the numbers of one sample, whose product is "
            f"{prod(size)}."
        )
    if product is None or (size[-1:] != (int(product[1]),) and size != ()):
        return None
    width = int(product[2])
    if prod(size) == width and len(size) > 1:
        return (
            f"The layer takes {width} numbers on the last axis. A dataset spec says reshape = "
            f"{{ NAME = [{width}] }}."
        )
    given = prod(size[-1:])
    columns = f' (columns = {{ NAME = ["ARRAY[0:{width}]"] }})' if width < given else ""
    return (
        f"The layer takes {width} numbers on the last axis, and a sample has {given}: name the "
        f"columns that the model was trained on{columns}, or build the model for these."
    )


def _hint(error: BaseException, batch: Batch | None) -> tuple[str | None, str]:
    """Return the sample that caused an error of the model or loss, if known, and a remedy."""
    general = "Check that the data match the model: shapes, dtypes and the order of inputs."
    if batch is None:
        return None, general
    general = f"The model was called with {shapes_of(batch)}. {general}"
    if (fits := _channels_hint(str(error), batch)) is not None:
        return None, f"The model was called with {shapes_of(batch)}. {fits}"
    product = _PRODUCT.search(str(error))
    if product is not None and int(product[2]) == len(batch.sample_batch) != int(product[1]):
        return None, f"{general} {_GRAPH}"  # the rows of the second matrix are samples
    if (fits := _width_hint(str(error), batch)) is not None:
        return None, f"The model was called with {shapes_of(batch)}. {fits}"
    if _IDS.search(str(error)):
        return None, (
            f"The model was called with {shapes_of(batch)}. Token ids are integers: a dataset "
            'spec says dtype = { NAME = "int64" }.'
        )
    if _SIZES.search(str(error)):
        general = f"{general} {PACKED}"
    text, whole = str(error), [t for t in tensors(batch.inputs) if t.dtype in _WHOLE]
    if label := _LABEL.search(text):
        remedy = (
            "Class labels must be 0 to (number of outputs - 1), or -100 to be ignored. If the "
            "first class is 1, subtract 1 from the labels."
        )
        return _sample(batch.targets, batch, int(label[1])), remedy
    if _INDEX.search(text):
        largest = max((int(t.max()) for t in whole if t.numel()), default=0)
        return (
            _sample(batch.inputs, batch, largest),
            f"An index is out of range for its embedding; the largest in the inputs is {largest}.",
        )
    if _COUNT.search(text):
        given = len(tensors(batch.inputs))
        none = ", here None" if batch.targets is None else ""
        return None, (
            f"The model is called with {given} {'input' if given == 1 else 'inputs'} and the loss "
            f"with (outputs, targets{none}). In a dataset spec, [dataset] inputs and targets "
            "select these arrays; several targets form one tuple. Decorate a loss (model, "
            "inputs, targets) with @gradscope.model_loss."
        )
    if _FIXED.search(text):
        return None, _EXPORTED
    if _DEVICES.search(text):
        return None, (
            "Inputs, targets, the model and tensors that the model creates must be on one "
            "device: use inputs.to(device) and torch.zeros(..., device=x.device)."
        )
    if _TARGET.search(text):
        return None, (
            'Class labels must be integers: in a dataset spec, write dtype = { NAME = "int64" }. A '
            "missing label turns its whole column into floating-point numbers: remove that sample."
        )
    if whole and _DTYPE.search(text):
        kind = "booleans" if whole[0].dtype == torch.bool else "integers"
        return None, (
            f"The inputs are {kind}. If the model needs floating-point numbers, write "
            'dtype = { NAME = "float32" } in the dataset spec.'
        )
    return None, general


def _sample(tree: object, batch: Batch, value: int) -> str | None:
    """Return the first sample whose integers contain `value`."""
    samples = batch.sample_batch
    for tensor in tensors(tree):
        if tensor.dtype in _WHOLE and tensor.dim() and len(tensor) == len(samples):
            rows: Tensor = (tensor == value).reshape(len(samples), -1).any(1)
            if rows.any():
                return samples.one(int(rows.nonzero()[0])).description
    return None
