"""Whose code raised: layer, sample and remedy for what the user's model, loss or stage raises."""

import importlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path

import torch
from torch import Tensor, nn

from gradscope.core.batch import Batch, WholeInputs, tensors, whole_of, wholes
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
_COUNT = re.compile(r"positional arguments? but|required positional|unexpected keyword argument")
_DEVICES = re.compile(r"on the same device|on the expected device|torch\.\w+\.\w+Tensor")
_INDEX = re.compile(r"index out of range in self")
_CHANNELS = re.compile(r"expected input\[[\d, ]+\] to have (\d+) channels")
_PRODUCT = re.compile(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
_SIZES = re.compile(r"size|shape|length|split|expand|index", re.I)
_FIXED = re.compile(r"Guard failed|to be equal to \d+, but got")  # of exported programs
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
    """Return the exception's type and the first line of its message, and the next after a colon."""
    try:
        text, _, rest = str(error).strip().partition("\n")
        if text.endswith(":"):
            text = f"{text} {rest.strip().partition(chr(10))[0]}".strip()
    except Exception:  # a user's exception may be broken, too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_lines(error: BaseException, limit: int = 8) -> str:
    """Return the user's part of a traceback, as Python prints it; "" if there is none."""
    theirs = []
    for frame in traceback.extract_tb(error.__traceback__):
        imports = frame.filename in (importlib.__file__,) or "<frozen importlib" in frame.filename
        if not imports and not any(Path(frame.filename).is_relative_to(p) for p in _PACKAGES):
            theirs.append(frame)
    # what is installed and stands before the user's first file has only called us
    shown = [*dropwhile(lambda frame: is_installed(Path(frame.filename)), theirs)] or theirs
    return "".join(traceback.format_list(shown[-limit:])).rstrip()


def is_installed(file: Path) -> bool:
    """Whether a file is part of Python, of a package that was installed, or of ours."""
    if not file.is_absolute() or not _SITES.isdisjoint(file.parts):
        return True
    return any(file.is_relative_to(place) for place in (*_PACKAGES, *_INSTALLED))


def is_users(error: BaseException) -> bool:
    """Whether the user's code raised, and not ours: by the last frame that is either's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_OURS):
            return False
        if not is_installed(file):
            return True
    return False


def is_bug(error: BaseException) -> bool:
    """Whether an exception is a mistake of ours: a name that is not there, asked for by our files.

    That is neither a refusal nor the model's fault; another torch may no longer have the name.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[-1].name in ("__getattr__", "__getattribute__"):
        frames.pop()  # who asked?
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(_OURS)
    return isinstance(error, AttributeError) and ours


def device_error(error: BaseException, where: str | None = None) -> ModelError | None:
    """Return the error for a GPU that has stopped, None for any other."""
    if not is_device_lost(error):
        return None
    return ModelError(
        f"the device has stopped, and computes no more in this process: {first_line(error)}",
        where=where,
        remedy="Most often an index is out of range: a class label, or a number that a table is "
        'looked up by. On the CPU (model.cpu(), device="cpu" of a run) the error names the sample.',
    )


def describe_raised(error: BaseException) -> str:
    """Return what the user's code did."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {first_line(error)}"


@contextmanager
def user_code(model: nn.Module, batch: Batch | None = None) -> Iterator[None]:
    """Turn what the user's model or loss raises into a `ModelError` that names layer or sample.

    sys.exit is as good as an error, and so is a `KeyboardInterrupt` that is no Ctrl-C. Running out
    of memory, a GPU that has stopped and bugs of ours pass through unchanged.
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
    """Turn what a stage of the user's (such as "transform soft_threshold") raises likewise."""
    with _translating(lambda error: ModelError(f"your code {describe_raised(error)}", where=what)):
        yield


@contextmanager
def unsupported(what: str, model: nn.Module, remedy: str) -> Iterator[None]:
    """Turn what torch raises into an `UnsupportedError` that names the layer, as one of ours does.

    Other errors of gradscope, its bugs, and those of the machine pass through unchanged.
    """
    try:
        yield
    except GradscopeError as error:
        if isinstance(error, UnsupportedError):
            error.where = error.where or layer_of(error, model)
        raise
    except Exception as error:  # whatever torch or the user's code raises
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
    "torch.export.export(model, args, dynamic_shapes=[{0: torch.export.Dim('n')}, ...]), one entry "
    "an input."
)
PACKED = (
    "Inputs that hold the positions of all samples on one axis (packed sequences, offsets, graphs) "
    "have no sample axis: pad them to (n, t, ...), and pack them in forward. A graph whose nodes "
    "are the samples is given whole (gradscope.Whole)."
)
WHOLE = (
    "An input that all samples share, such as the adjacency matrix or the edge list of a graph, is "
    'given whole: whole = ["NAME"] under [dataset], gradscope.Whole(x) in Python.'
)
_GRAPH = (
    "If the samples are the nodes of one graph, every node needs all of it: give features and "
    'graph whole, whole = ["features", "adjacency"] under [dataset] with their names, '
    "(gradscope.Whole(x), gradscope.Whole(adjacency)) in Python. Row i of the model's answer is "
    "then that of node i."
)


def shapes_of(batch: Batch) -> str:
    """Return "3 samples: inputs (3, 4) float32; targets (3,) int64"."""
    samples = whole_of(batch)

    def listed(tree: object, more: str = "") -> list[str]:
        found = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors(tree))
        return [text + more for text in found]

    rows = [] if isinstance(samples.inputs, WholeInputs) else listed(samples.inputs)
    shared = [text for w in wholes(samples.inputs) for text in listed(w.value, " whole")]
    inputs = ", ".join([*rows, *shared]) or "none"
    targets = ", ".join(listed(samples.targets)) or "none"
    return f"{count(len(samples), 'sample')}: inputs {inputs}; targets {targets}"


def graph_remedy(model: nn.Module, batch: Batch) -> str | None:
    """Return how to give a graph whose nodes are the samples, or None if there is no sign of it.

    A sign is an (n, n) matrix among the inputs of n samples or the model's buffers. Another sign is
    a whole input beside inputs with a sample axis.
    """
    samples = whole_of(batch)
    n, held = len(samples), (*tensors(samples.inputs), *model.buffers())
    parted = bool(wholes(samples.inputs)) and not isinstance(samples.inputs, WholeInputs)
    square = n > 1 and any(t.shape[:2] == (n, n) for t in held)
    return _GRAPH if parted or square else None


def alone_remedy(error: ModelError, model: nn.Module, batch: Batch, one: Batch) -> str | None:
    """Return what to do where a model that runs on a batch does not run on one sample of it.

    Returns None where the model computes a statistic over the batch: a single sample has none.
    """
    if _ONE.search(error.what):
        return None
    if _FIXED.search(error.what):
        return _EXPORTED
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "A traced program keeps the number of samples that it was traced with: give the model "
            "itself, or torch.jit.script of it."
        )
    graph = graph_remedy(model, batch)
    if graph is not None:
        return f"It was called with {shapes_of(one)}. {graph}"
    return (
        f"It was called with {shapes_of(one)}. Let it take any number of samples: make masks and "
        "paddings as long as the inputs (x.shape[1]), not as the longest sample of the batch, and "
        f"give view and reshape no fixed number of samples. {PACKED}"
    )


def _channels_hint(text: str, batch: Batch) -> str | None:
    """Return what to do about images without channels, or with channels last, for a convolution."""
    wanted = _CHANNELS.search(text)
    images = [t for t in tensors(batch.inputs) if t.is_floating_point()]
    if wanted is None or len(images) != 1:
        return None
    channels, (n, *size) = int(wanted[1]), images[0].shape
    if channels == 1 and size and size[0] != 1 and len(size) in (1, 2, 3):
        shape = [1, *size] if size[-1] != 1 or len(size) < 3 else [1, *size[:-1]]
        return (
            f"The layer takes 1 channel on the axis after the samples: ({n}, 1, ...). A dataset "
            f"spec says reshape = {{ NAME = {shape} }}."
        )
    if len(size) > 1 and size[-1] == channels:
        axes = (0, len(size), *range(1, len(size)))
        return (
            f"The layer takes {channels} channels on the axis after the samples, and here they are "
            f"on the last axis. Store the array as x.transpose{axes}."
        )
    return None


def _hint(error: BaseException, batch: Batch | None) -> tuple[str | None, str]:
    """Return which sample an error of the model or its loss is about, if known, and a remedy."""
    general = "Check that the data fit the model: shapes, dtypes and the order of inputs."
    if batch is None:
        return None, general
    general = f"It was called with {shapes_of(batch)}. {general}"
    if (fits := _channels_hint(str(error), batch)) is not None:
        return None, f"It was called with {shapes_of(batch)}. {fits}"
    product = _PRODUCT.search(str(error))
    if product is not None and int(product[2]) == len(whole_of(batch)) != int(product[1]):
        general = f"{general} {_GRAPH}"  # the rows of the second matrix are samples
    elif _SIZES.search(str(error)):
        general = f"{general} {PACKED}"
    text, whole = str(error), [t for t in tensors(batch.inputs) if t.dtype in _WHOLE]
    if label := _LABEL.search(text):
        remedy = "Class labels go from 0 to one less than the model's outputs; -100 is ignored."
        return _sample(batch.targets, batch, int(label[1])), remedy
    if _INDEX.search(text):
        largest = max((int(t.max()) for t in whole if t.numel()), default=0)
        return (
            _sample(batch.inputs, batch, largest),
            f"An index is not in the table it looks up; the largest among the inputs is {largest}.",
        )
    if _COUNT.search(text):
        given = len(tensors(batch.inputs))
        none = ", here None" if batch.targets is None else ""
        return None, (
            f"The model is called with {given} {'input' if given == 1 else 'inputs'} and the loss "
            f"with (outputs, targets{none}): [dataset] inputs and targets say which arrays these "
            "are; several targets are one tuple. A loss (model, inputs, targets) is marked with "
            "@gradscope.model_loss."
        )
    if _FIXED.search(text):
        return None, _EXPORTED
    if _DEVICES.search(text):
        return None, (
            "Inputs, targets, the model and the tensors that it makes must be on one device: "
            "inputs.to(device), torch.zeros(..., device=x.device)."
        )
    if _TARGET.search(text):
        return None, (
            'Class labels are integers: a dataset spec says dtype = { NAME = "int64" }. A '
            "missing one makes floating-point numbers of its whole column: leave that sample out."
        )
    if whole and _DTYPE.search(text):
        kind = "truth values" if whole[0].dtype == torch.bool else "integers"
        return None, (
            f"The inputs hold {kind}. For a model that computes with floating-point numbers, a "
            'dataset spec says dtype = { NAME = "float32" }.'
        )
    return None, general


def _sample(tree: object, batch: Batch, value: int) -> str | None:
    """Return the first sample among whose integers there is `value`."""
    samples = whole_of(batch)
    for tensor in tensors(tree):
        if tensor.dtype in _WHOLE and tensor.dim() and len(tensor) == len(samples):
            rows: Tensor = (tensor == value).reshape(len(samples), -1).any(1)
            if rows.any():
                return samples.one(int(rows.nonzero()[0])).told
    return None
