"""Imports users' functions, "FILE.py:NAME" and "package.module:NAME", and digests their code.

A file is imported under a private name, so it hides no module and no file with the same name. While
the file is imported, its folder is first in `sys.path`; afterwards it is last. Two folders can
each have, for example, a `utils.py`.

The code of a function is its file and everything that the file imports. This includes imports in
the source (also inside functions that have not run yet) and modules that were loaded with the file
in any other way. Modules in the file's folder and below always belong to the code. Modules in
other places belong to it if they are loaded already and were not installed.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import linecache
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradscope.config import NONE, is_script, split_reference
from gradscope.core.batch import map_tensors, tensors
from gradscope.core.registry import suggestion
from gradscope.core.texts import article, listed
from gradscope.errors import CheckpointError, GradscopeError, ModelError, RefusedError
from gradscope.model.locate import (
    describe_raised,
    device_lost_error,
    first_line,
    is_installed,
    is_users,
    own_lines,
)
from gradscope.model.problem import model_loss
from gradscope.model.randomness import seeded
from gradscope.process.shortage import is_shortage
from gradscope.process.stops import is_stop
from gradscope.sources.first_steps import FirstSteps, Step, files_restored
from gradscope.sources.loops import Loop, loop_named
from gradscope.sources.training import (
    PARSERS,
    Known,
    is_main_block,
    parses_arguments,
    unordered_line,
    without_training,
)
from gradscope.sources.variables import Variables, last_name_of_call, names_in

# messages of torch on a machine without CUDA
_NO_CUDA = re.compile("not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|device\\(\\) is False")
_PRIVATE = "_gradscope_"  # prefix of the module names of imported files
_LOADS = {"load_state_dict", "load", "from_pretrained"}
_IMPORTERS = {"import_module", "__import__"}
_CORRECT = "Correct your code"
_ARGUMENTS = (  # of a script that parses them when it is imported
    "Write the arguments of the training under [model] in the run file: "
    'argv = ["ARGUMENT", "VALUE"]. '
)
_TRAINING = (b"backward", b"train", b".fit(", b".run(")  # one is in each script that trains
_SLOW = 3.0  # least seconds in one line of a script for a note
_POLL = 0.1  # seconds between two checks of the running line

_neighbours: dict[str, dict[str, ModuleType]] = {}  # {folder: {name: module in the folder}}
_codes: dict[str, dict[str, str]] = {}  # {module: {file: digest of its code}}
_notes: dict[str, dict[int, str]] = {}  # {module: {line: note on its import}}
_importing: list[dict[int, str]] = []  # the notes of the files that are being imported
_checkpoint = Path()  # the checkpoint that the user's code must not save
_steps: dict[str, Step] = {}  # {module of a script that was run: what it trains}
_arguments: tuple[str, ...] = ()  # the command-line arguments of the user's scripts


def load_function(reference: str, kind: str) -> Callable[..., Any]:
    """Import the function that a reference names; `load_value` has the arguments."""
    found: Callable[..., Any] = load_value(reference, kind, callable)
    return _on_cpu(found) if _asks_for_cuda(found) else found


def load_value(reference: str, kind: str, is_usable: Callable[[Any], bool]) -> Any:
    """Import the object that a reference names.

    Args:
        reference: "FILE.py:NAME" or "package.module:NAME"; NAME may have dots. The value of
            "FILE.py:x,y" is a tuple.
        kind: The purpose of the object in messages: "model factory", "loss".
        is_usable: Whether an object can be used. If not, the message asks for a function.

    Raises:
        SpecError: The reference has neither form.
        ModelError: The file or object is absent or not usable, or importing it raised.
    """
    if is_script(reference):
        step = _run_script(Path(reference), kind)[0]
        parts = {"loss": model_loss(_on_cpu(step.loss)), "data set": step.samples}
        return parts.get(kind, lambda: step.model)
    module, _, name = _load(reference, kind)
    where = f"{kind} {reference}"
    with user_file(where):  # the module may define __getattr__
        found: object = module
        *owners, last = name.split(".")
        for part in owners:
            found = getattr(found, part, None)
        several = tuple(getattr(found, part, None) for part in last.split(","))
        found = several if len(several) > 1 else several[0]
        found = None if any(part is None for part in several) else found
    if found is None or not is_usable(found):
        made = _variable(reference, module, kind)
        found = found if made is None else made
    if found is not None and is_usable(found):
        return found
    public = {k: v for k, v in vars(module).items() if is_usable(v) and not k.startswith("_")}
    own = [k for k, v in public.items() if getattr(v, "__module__", None) == module.__name__]
    known = own or list(public)
    if found is None:
        remedy = suggestion(name, known) if known else "The file defines no function."
        raise ModelError(f"there is no {name!r} in it", where=where, remedy=remedy)
    usable = [key for key, value in getattr(found, "__dict__", {}).items() if is_usable(value)]
    remedy = f"Name a function; it has: {', '.join(known) or 'none'}."
    if usable:
        remedy = f"Name a part of it: {', '.join(f'{reference}.{part}' for part in usable)}."
    what = f"{name!r} is {article(type(found).__name__)}, not a function"
    raise ModelError(what, where=where, remedy=remedy)


def _variable(reference: str, module: ModuleType, kind: str) -> object:
    """Return the variable NAME of FILE.py:FUNCTION.NAME, or None if it is not known.

    Only the statements that compute it are run, once. Several variables, "x,y", are a tuple. The
    name may go on with attributes of the variable, FUNCTION.NAME.model.
    """
    place, name = split_reference(reference)
    if not place.endswith(".py"):
        return None
    key = f"{_PRIVATE}{name}"
    path = Path(place).absolute()
    if key not in vars(module):
        tree = ast.parse(path.read_bytes(), str(path))
        if kind == "loss" and (loop := loop_named(tree, path, name)) is not None:
            vars(module)[key] = _loss_of_loop(loop, module, reference)
            return vars(module)[key]
        if kind == "loss":
            return None
        variables = Variables(tree, path)
        computed = _computed(variables, name)
        if computed is None:
            return None
        function, variable, found = computed
        lines = sorted({line.lineno for line in found if hasattr(line, "lineno")})
        shared = variables.globals_of(found)
        value = ast.parse(variable, mode="eval").body
        with _running_lines(path, f"{place}:{name}", kind):
            vars(module)[key] = _run(found, value, shared, module)
        shown = ", ".join(map(str, lines))
        _note_order(module.__name__, path, found)
        of = function or "the training"
        told = f"Of {of} in {path.name}, only the lines for {variable} were run: {shown}."
        _notes.setdefault(module.__name__, {})[lines[0]] = told
    return vars(module)[key]


def _computed(variables: Variables, name: str) -> tuple[str, str, list[ast.stmt]] | None:
    """Return the place of a variable, the variable with attributes, and its statements, or None."""
    parts = name.split(".")
    for k in reversed(range(len(parts))):
        place = ".".join(parts[:k])
        lines = variables.statements(place, parts[k])
        if lines:
            return place, ".".join(parts[k:]), lines
    return None


@contextmanager
def _running_lines(path: Path, reference: str, kind: str) -> Iterator[None]:
    """Run lines of a script in the body; an error names the arguments that the script may parse."""
    try:
        with user_file(f"{kind} {reference}"), loading(reference, kind):
            yield
    except ModelError as error:
        if any(name.encode() in path.read_bytes() for name in PARSERS):
            _name_arguments(error)
        raise


def _name_arguments(error: BaseException) -> None:
    """Add the arguments of the training, if there are none, to the remedy of the user's error."""
    wrong = isinstance(error, ModelError) and (error.remedy or "").startswith(_CORRECT)
    if wrong and not _arguments:
        text = error.remedy[1:]  # type: ignore[attr-defined]
        error.remedy = f"{_ARGUMENTS}Or c{text}"  # type: ignore[attr-defined]


def _run(
    lines: Sequence[ast.stmt], value: ast.expr, shared: Sequence[str], module: ModuleType
) -> Any:
    """Run statements in a function of a module, and return a value.

    The names `shared` are global.
    """
    body = [*([ast.Global([*shared])] if shared else []), *lines, ast.Return(value)]
    name = f"{_PRIVATE}lines"
    made = ast.FunctionDef(name, ast.arguments([], [], None, [], [], None, []), body, [])
    whole = ast.fix_missing_locations(ast.Module([made], []))
    exec(compile(whole, str(module.__file__), "exec", dont_inherit=True), vars(module))
    return vars(module).pop(name)()


def _loss_of_loop(loop: Loop, module: ModuleType, reference: str) -> Callable[..., Any]:
    """Return the loss (model, inputs, targets) -> (n,) of a training loop, one sample at a time."""
    path, names = Path(str(module.__file__)), vars(module)
    with _running_lines(path, reference, "loss"):
        variables = Variables(ast.parse(path.read_bytes(), str(path)), path)
        values: list[ast.expr] = [ast.Name(name, ast.Load()) for name in loop.parameters]
        held = ast.Dict([ast.Constant(name) for name in loop.parameters], values)
        given = _run(loop.outer, held, variables.globals_of(loop.outer), module)
        if loop.file != path:  # a function or a module that the script imports
            names = _globals_of(loop.file, module)
        exec(compile(loop.code, str(loop.file), "exec", dont_inherit=True), names)
        one = names.pop("make_loss")(**given)
    _require_own_weights(one, loop)
    first, last = loop.lines
    told = f"The loss is that of lines {first} to {last} of {loop.file.name}, for one sample each"
    told += f", with {listed(loop.first)} of the first round." if loop.first else "."
    _notes.setdefault(module.__name__, {})[first] = told

    @wraps(one)
    def loss(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        alone = (inputs,) if loop.unpacks and isinstance(inputs, Tensor) else inputs
        batch = alone if targets is None else (inputs, targets)
        sizes = {t.shape[:1] for t in tensors(batch)}
        n = next(iter(sizes), ()) if len(sizes) == 1 else ()
        rows = range(n[0]) if n else ()
        each = [_row(batch, k if loop.of_samples else slice(k, k + 1)) for k in rows] or [batch]
        with _without_cuda():
            return torch.stack([one(model, sample).reshape(()) for sample in each])

    loss.skips = ("hooks",)  # type: ignore[attr-defined]
    return model_loss(loss)


def _globals_of(file: Path, module: ModuleType) -> dict[str, Any]:
    """Return the global names of a file from which a module imports a function, a class or all."""
    for value in [*vars(module).values()]:
        own = value if isinstance(value, ModuleType) else None
        if isinstance(value, type | FunctionType):
            own = sys.modules.get(value.__module__)
        place = getattr(own, "__file__", None)
        if isinstance(place, str) and Path(place).absolute() == file.absolute():
            return vars(own)
    raise ModelError(f"{file.name} is not imported", where=str(module.__file__))


def _require_own_weights(one: Callable[..., Any], loop: Loop) -> None:
    """Raise if a loss uses other trained modules than its model, whose weights are not known."""
    code: CodeType = one.__code__
    cells = (cell.cell_contents for cell in one.__closure__ or ())
    values = dict(zip(code.co_freevars, cells, strict=True))
    values |= {k: v for k, v in one.__globals__.items() if k in code.co_names}
    values |= one.__kwdefaults__ or {}
    loading_lines = [
        line
        for line in loop.every
        if any(last_name_of_call(node) in _LOADS for node in ast.walk(line))
    ]
    for name, value in values.items():
        own = value.parameters() if isinstance(value, nn.Module) else ()
        loaded = any(name in names_in(line) for line in loading_lines)
        if any(p.requires_grad for p in own) and not loaded:
            raise ModelError(
                f"the lines {loop.lines[0]} to {loop.lines[1]} of {loop.file.name} use another "
                f"trained model, {name!r}, whose weights are not in the checkpoint",
                remedy="Write a function that builds one module of both, FILE.py:FUNCTION, and a "
                "loss of this module: (model, inputs, targets), with @gradscope.model_loss.",
            )


def _row(batch: Any, k: int | slice) -> Any:
    """Return one sample of a batch, or a batch with only this sample."""
    return map_tensors(lambda t: t[k], batch)


def code_digests(reference: str, kind: str) -> dict[str, str]:
    """Return the SHA-256 of the code of a reference, {file: digest}.

    The digests are of the files when they were imported. A file in the folder of the named file, or
    below, has its path relative to this folder as key. A file in another place has its module name
    as key. So the digests do not depend on the location of folders.
    """
    _, key, _ = _load(reference, kind)
    return dict(_codes.get(key, {}))


def give_arguments(arguments: Iterable[str]) -> None:
    """Set the command-line arguments that the user's scripts find in sys.argv."""
    global _arguments
    _arguments = tuple(arguments)


def keep_unchanged(checkpoint: Path) -> None:
    """Set the checkpoint that the user's code must not save while it is imported."""
    global _checkpoint
    _checkpoint = checkpoint.absolute()


@contextmanager
def _keeping_checkpoint() -> Iterator[None]:
    """Refuse calls of torch.save in the body that would overwrite the checkpoint."""
    save = torch.save

    @wraps(save)
    def checked(value: Any, f: Any, *args: Any, **options: Any) -> None:
        place = Path(f).absolute() if isinstance(f, str | os.PathLike) else None
        if place is not None and _checkpoint in (place, *place.parents):
            raise CheckpointError(
                "your code saves this checkpoint while it is imported: it trains again",
                where=str(f),
                remedy='Put the training under if __name__ == "__main__".',
            )
        save(value, f, *args, **options)

    torch.save = checked  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = save


class Config(dict[str, Any]):
    """A table of a factory's arguments, with its entries as attributes, like a config object."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the run file has no argument {name!r} in this table of kwargs. Add it. The value "
                "None is { none = true }"
            ) from None


def as_config(value: Any, entry: Callable[[Any], Any] | None = None) -> Any:
    """Return a table as a `Config`, and other values unchanged; `entry` converts the entries.

    The table { none = true } is None.
    """
    if value == NONE:
        return None
    if not isinstance(value, dict):
        return value
    return Config({name: (entry or as_config)(each) for name, each in value.items()})


def import_notes(reference: str, kind: str) -> tuple[str, ...]:
    """Return notes on the import of a file: skipped statements and slow lines."""
    _, key, _ = _load(reference, kind)
    return tuple(_notes.get(key, {}).values())


def class_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the code of loaded modules that were not installed, {file: digest}."""
    found: dict[str, str] = {}
    for name in sorted(set(names)):
        for path in _files_of([name]):
            depth = name.count(".") + (path.stem == "__init__")
            found |= _digests(path, path.parents[min(depth, len(path.parents) - 1)])
    return found


class _OnCpu(TorchFunctionMode):
    """Puts tensors on the CPU that code asks for on "cuda"."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with "cpu" in place of "cuda"."""
        if func is Tensor.cuda:
            return args[0]
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if func is torch.device and caller.partition(".")[0] == "torch":
            return func(*args, **(kwargs or {}))  # torch looks for the functions of a device
        return func(*map(_cpu, args), **{k: _cpu(v) for k, v in (kwargs or {}).items()})


def _cpu(value: Any) -> Any:
    """Return the device "cpu" for a CUDA device, or the value itself."""
    is_cuda = isinstance(value, torch.device | str) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value


def _without_cuda() -> AbstractContextManager[Any]:
    """Return a context in which "cuda" is the CPU, if this machine has no CUDA device."""
    return nullcontext() if torch.cuda.is_available() else _OnCpu()


def keep_on_cpu(model: nn.Module) -> None:
    """Let modules of the user's classes compute on the CPU where their code asks for "cuda".

    Nothing changes on a machine with CUDA, and for classes whose code does not.
    """
    for module in model.modules():
        own = type(module)
        methods = [f for name, f in vars(own).items() if name != "__init__"]
        stored = [v for v in vars(module).values() if isinstance(v, torch.device | str)]
        if any(_cpu(v) is not v for v in stored) or any(map(_asks_for_cuda, methods)):
            names: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__}
            module.__class__ = type(
                own.__name__, (own,), {"forward": _on_cpu(own.forward), **names}
            )


def _asks_for_cuda(function: Any) -> bool:
    """Whether a function of the user has "cuda" in its code, and this machine has no CUDA."""
    code = getattr(function, "__code__", None)
    if code is None or is_installed(Path(code.co_filename)) or torch.cuda.is_available():
        return False
    texts = (c for c in code.co_consts if isinstance(c, str))
    return "cuda" in code.co_names or any(_cpu(text) is not text for text in texts)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes on the CPU where its code asks for "cuda"."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _without_cuda():
            return function(*args, **kwargs)

    return called


@contextmanager
def loading(reference: str, kind: str) -> Iterator[None]:
    """Add everything that the body imports to the code of a reference."""
    _, key, _ = _load(reference, kind)
    with _recording_code(key), _without_cuda():
        yield


@contextmanager
def user_file(what: str, file: Path | str = "") -> Iterator[None]:
    """Turn an exception of the user's code, including sys.exit, into a `ModelError` that shows it.

    `what` names the code in messages, such as "model factory model.py:build". The code's output is
    sent to stderr, because stdout is for results. `sys.argv` is `file` with the arguments of
    `give_arguments`, so the code does not read the arguments of gradscope.
    """
    arguments = sys.argv
    sys.argv = [str(file), *_arguments]
    try:
        with redirect_stdout(sys.stderr):
            yield
    except MemoryError:
        raise
    except BaseException as error:  # the user's code can raise anything
        if is_stop(error) or isinstance(error, CheckpointError):
            raise
        raise _users(error).at(what) from error
    finally:
        sys.argv = arguments


def blamed(error: BaseException) -> GradscopeError | None:
    """Return the error to show for an uncaught exception, or None if it is a bug in gradscope."""
    if is_users(error) or isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return _users(error)
    if (gone := device_lost_error(error)) is not None:
        return gone
    told, remedy = f"memory ran out: {first_line(error)}", "Free memory, or use smaller batches."
    return RefusedError(told, remedy=remedy) if is_shortage(error) else None


def _users(error: BaseException) -> ModelError:
    """Return the error for an exception of the user's code, with the user's traceback lines."""
    if isinstance(error, SystemExit) and (refused := _argparse_message(error)) is not None:
        return ModelError(
            f"your script parses command-line arguments and refuses {sys.argv[1:]}: {refused}",
            remedy=f"{_ARGUMENTS}`gradscope init` writes a run file. Or call parse_args() only "
            'under if __name__ == "__main__".',
        )
    last = traceback.format_exception_only(error) if isinstance(error, SyntaxError) else []
    shown = "\n".join(filter(None, (own_lines(error), "".join(last).rstrip())))
    remedy = f"{_CORRECT}:\n{shown}" if shown else f"{_CORRECT}."
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = (
            f"Install {error.name.partition('.')[0]} for {sys.executable}, or put its folder on "
            f"PYTHONPATH.\n{shown}"
        )
    if isinstance(error, FileNotFoundError) and (folder := _folder_with(error)) is not None:
        remedy = (
            f"The script opens {error.filename!r} relative to the working folder, and the file is "
            f"below {folder}: run the command there.\n{shown}"
        )
    if isinstance(error, AssertionError | RuntimeError) and _NO_CUDA.search(str(error)):
        remedy = (
            "This machine has no CUDA device. If an argument of the script selects the device, "
            'give it under [model] in the run file: argv = ["ARGUMENT"]. Or name the class of the '
            f"model, FILE.py:CLASS, instead of a function.\n{shown}"
        )
    return ModelError(f"your code {describe_raised(error)}", remedy=remedy)


def _folder_with(error: FileNotFoundError) -> Path | None:
    """Return the folder of the user's code, or above it, with the file that it did not find."""
    name = error.filename
    if not isinstance(name, str | os.PathLike) or Path(name).is_absolute():
        return None
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [place for file in files if not is_installed(file) for place in file.parents[:2]]
    return next((place for place in places if (place / name).exists()), None)


def _argparse_message(error: SystemExit) -> str | None:
    """Return argparse's error message if argparse ended the user's code, else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "error" and Path(code.co_filename).stem == "argparse":
            return str(frame.f_locals.get("message"))
    return None


def _load(reference: str, kind: str) -> tuple[ModuleType, str, str]:
    """Return the module that a reference names, its key in `_codes`, and the name in the module."""
    place, name = split_reference(reference)
    if is_script(reference):
        _, key = _run_script(Path(place), kind)
        return sys.modules[key], key, name
    if place.endswith(".py"):
        return *_import_file(Path(place), kind), name
    what = f"{kind} {place}"
    with user_file(what), importable(Path.cwd()):
        try:
            with _recording_code(place):
                return importlib.import_module(place), place, name
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but a module that it imports does not
    remedy = "Install the module, run in the folder that contains it, or give FILE.py:NAME."
    raise ModelError("there is no such module", where=what, remedy=remedy)


def _import_file(path: Path, kind: str) -> tuple[ModuleType, str]:
    """Import a file and return its module and key; the same content is imported once."""
    path = path.absolute()
    what = f"{kind} {path}"
    content, name = _content_of(path, what)
    if name in sys.modules:
        return sys.modules[name], name
    loaded = _loaded(path)
    if loaded is not None:
        with _recording_code(loaded):
            return sys.modules[loaded], loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    tree = ast.Module([], [])
    try:
        with user_file(what, path), ExitStack() as around:
            tree, line = without_training(ast.parse(content, str(path)), path)
            if line is not None:
                _notes.setdefault(name, {})[line] = _training_note(path, line)
            _note_order(name, path, (n for n in tree.body if not is_main_block(n)))
            package, folders = _package(path, tree)
            if package:  # for relative imports; importlib reads the name
                spec.name, module.__package__ = f"{package}.{name}", package
            for folder in folders:
                around.enter_context(importable(folder))
            around.enter_context(_recording_code(name))
            around.enter_context(_watching_slow_lines(name, path))
            around.enter_context(_without_cuda())
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if parses_arguments(tree):
            _name_arguments(error)
        raise
    return module, name


def _content_of(path: Path, what: str) -> tuple[bytes, str]:
    """Return the content of a file, and the name of its module for the given arguments."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(None, "this is not a regular file")
        content = path.read_bytes()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ModelError(reason, where=what, remedy="Check the path.") from error
    told = "\0".join((str(path), *_arguments)).encode("utf-8", "surrogateescape")
    return content, f"{_PRIVATE}{hashlib.sha256(told + content).hexdigest()[:16]}"


def require_steps(path: Path) -> None:
    """Raise if a script cannot be read, or does nothing when it is run.

    Raises:
        ModelError: There is no such file, or it has only imports, functions and classes.
    """
    tree = ast.parse(_content_of(path, str(path))[0], str(path))
    idle = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    texts = (node for node in tree.body if not isinstance(getattr(node, "value", 0), ast.Constant))
    if all(isinstance(node, idle) for node in texts):
        raise ModelError(
            "this file trains nothing when it is run: it has only definitions",
            where=str(path),
            remedy=f"Name a part of it, {path.name}:NAME, or give the script that trains. It has: "
            f"{listed(named) or 'nothing'}.",
        )


def _run_script(path: Path, kind: str) -> tuple[Step, str]:
    """Run a script up to its second training step; return what it trains, and its module's name.

    The same content is run once with the same arguments.
    """
    path = path.absolute()
    what = f"{kind} {path}"
    content, name = _content_of(path, what)
    name += "_run"
    if name in _steps:
        return _steps[name], name
    module = ModuleType("__main__")
    module.__file__ = str(path)
    main, here, steps = sys.modules["__main__"], Path.cwd(), FirstSteps(path)
    known, written = multiprocessing.active_children(), list[str]()
    tree = ast.Module([], [])
    try:
        with user_file(what, path):
            tree = ast.parse(content, str(path))
        require_steps(path)
        with user_file(what, path), ExitStack() as around:
            _note_order(name, path, tree.body)
            package, folders = _package(path, tree)
            module.__package__ = package or None
            for folder in folders:
                around.enter_context(importable(folder))
            sys.modules[name] = sys.modules["__main__"] = module
            around.enter_context(_recording_code(name, trains=True))
            around.enter_context(_without_cuda())
            around.enter_context(seeded(0))
            around.enter_context(files_restored(written))
            code = compile(tree, str(path), "exec", dont_inherit=True)
            steps.run(lambda: exec(code, vars(module)))
        with _without_cuda():
            _steps[name] = steps.step()
    except BaseException as error:
        sys.modules.pop(name, None)
        remedy = (isinstance(error, ModelError) and error.remedy) or ""
        if remedy.startswith(_CORRECT):
            told = "The script stopped before its second training step. Give it other arguments, "
            error.remedy = f"{told}after -- or as argv under [model]. Or c{remedy[1:]}"  # type: ignore[attr-defined]
        raise
    finally:
        sys.modules["__main__"] = main
        os.chdir(here)
        for child in multiprocessing.active_children():
            if child not in known:
                child.kill()
    _notes.setdefault(name, {}).update(enumerate([*_steps[name].notes, *written]))
    return _steps[name], name


def _note_order(key: str, path: Path, nodes: Iterable[ast.AST]) -> None:
    """Record a note if code uses the order of a set, which differs between processes."""
    line = unordered_line(nodes)
    if line is not None and os.environ.get("PYTHONHASHSEED", "random") == "random":
        text = linecache.getline(str(path), line).strip()
        _notes.setdefault(key, {})[-line] = (  # other notes on this line have the key `line`
            f"{path.name}, line {line}: {text} Each process has another order of texts in a set. "
            "If a vocabulary depends on it, words have other numbers than in the training: sort "
            "the set and train again, or set PYTHONHASHSEED as in the training."
        )


def _package(path: Path, tree: ast.Module) -> tuple[str, list[Path]]:
    """Return the package of a file ("" if it has no package), and the folders to import from.

    The folders are the working directory if the file is below it, the folders above it with
    packages that it imports, the file's folder, and the folder that contains the package. The last
    folder is searched first.
    """
    levels = [n.level for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    depth = max(levels, default=0)
    while depth < len(path.parents) and (path.parents[depth] / "__init__.py").is_file():
        depth += 1
    depth = min(depth, len(path.parents) - 1)
    here = Path.cwd()
    folders = [here] if path.is_relative_to(here) else []
    folders += _folders_above(path)
    folders += [path.parent, path.parents[depth]]
    return ".".join(path.parent.relative_to(path.parents[depth]).parts), list(
        reversed(dict.fromkeys(reversed(folders)))
    )


def _folders_above(path: Path) -> list[Path]:
    """Return the folders above a file with modules that it imports and that are found nowhere else.

    Scripts append such a folder to sys.path, as "..", relative to where they are run.
    """
    tops = {name.partition(".")[0] for name, level in _imports(path.read_bytes()) if not level}
    found = []
    with suppress(ValueError):  # a loaded module without a spec
        for top in sorted(tops - sys.modules.keys()):
            holds = [p for p in path.parents if (p / top).is_dir() or (p / f"{top}.py").is_file()]
            if holds and holds[0] != path.parent and importlib.util.find_spec(top) is None:
                found.append(holds[0])
    return found


def _loaded(path: Path) -> str | None:
    """Return the name of the module that has already run a file, such as __main__, or None."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not name.startswith(_PRIVATE) and Path(file) == path:
            return name
    return None


class _WithoutTraining(importlib.machinery.SourceFileLoader):
    """Runs a module without the statements that train.

    `known` has the files that were analysed before.
    """

    known: Known

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module; code that trains is not cached."""
        path = Path(self.get_filename(fullname))
        content = path.read_bytes()
        if not any(word in content for word in _TRAINING):  # the analysis reads many files
            return super().get_code(fullname)
        tree, line = without_training(ast.parse(content, str(path)), path, self.known)
        if line is None:
            return super().get_code(fullname)
        for notes in _importing[-1:]:
            notes[line] = _training_note(path, line)
        return compile(tree, str(path), "exec", dont_inherit=True)


class _UserModules:
    """Finds the user's modules, which are not installed, for `_WithoutTraining`."""

    def __init__(self) -> None:
        self.known: Known = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a user's module, or None for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if type(loader) is not importlib.machinery.SourceFileLoader:
            return None
        if is_installed(Path(loader.path).absolute()):
            return None
        own = _WithoutTraining(loader.name, loader.path)
        own.known, spec.loader = self.known, own  # type: ignore[union-attr]
        return spec


def _training_note(path: Path, line: int) -> str:
    text = linecache.getline(str(path), line).strip()
    return (
        f"{path.name} trains when it is imported, from line {line}: {text} From this line on, only "
        "definitions and imports were run."
    )


@contextmanager
def _recording_code(key: str, *, trains: bool = False) -> Iterator[None]:
    """Record the code of the module `key`, including the modules that the body imports.

    The user's modules are imported without their training, unless the body `trains`.
    """
    before, finder = set(sys.modules), _UserModules()
    _importing.append(_notes.setdefault(key, {}))
    sys.meta_path.insert(len(sys.meta_path) if trains else 0, finder)
    try:
        with nullcontext() if trains else _keeping_checkpoint():
            yield
    finally:
        sys.meta_path.remove(finder)
        _importing.pop()
    file = getattr(sys.modules.get(key), "__file__", None)
    fresh = _files_of(sys.modules.keys() - before)
    if file is not None and (fresh or key not in _codes):
        path = Path(file).absolute()
        named = key.startswith(_PRIVATE)  # a file: paths are relative to its folder
        depth = 0 if named else key.count(".") + (path.stem == "__init__")
        _codes[key] = _codes.get(key, {}) | _digests(path, path.parents[depth], fresh)


@contextmanager
def _watching_slow_lines(key: str, path: Path) -> Iterator[None]:
    """Record a note on the slowest line of a file during the import in the body, if it is slow.

    Lines with imports are ignored. While the line runs, a message is printed once to stderr.
    """
    stopped, importing = threading.Event(), threading.get_ident()
    seconds: dict[int, float] = defaultdict(float)  # {line of the module: seconds}

    def watch() -> None:
        last, told = time.perf_counter(), False
        while not stopped.wait(_POLL):
            now = time.perf_counter()
            line = _module_line(sys._current_frames().get(importing), path)
            seconds[line] += now - last
            last = now
            if not told and seconds[line] > _SLOW and _is_slow_code(path, line):
                told = True
                print(f"importing {path.name}: line {line} is still running", file=sys.stderr)

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()
    except RuntimeError:  # the system cannot start a thread
        yield
        return
    try:
        yield
    finally:
        stopped.set()
        watcher.join()
    line, longest = max(seconds.items(), key=lambda item: item[1], default=(0, 0.0))
    if longest > _SLOW and _is_slow_code(path, line):
        text = linecache.getline(str(path), line).strip()
        _notes.setdefault(key, {})[line] = (
            f"Importing {path.name} ran line {line} for {longest:.1f} s: {text} If this line "
            'trains, put it under if __name__ == "__main__".'
        )


def _module_line(frame: FrameType | None, path: Path) -> int:
    """Return the line of the module's top-level code in a stack of frames, or 0."""
    while frame is not None:
        if frame.f_code.co_filename == str(path) and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return 0


def _is_slow_code(path: Path, line: int) -> bool:
    """Whether a line of a file is not an import."""
    return line > 0 and "import " not in linecache.getline(str(path), line)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make the modules of a folder importable: first in sys.path here, last afterwards."""
    text = str(folder)
    for other, known in _neighbours.items():
        if other != text:
            for name, module in known.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
    mine = _neighbours.setdefault(text, {})
    sys.modules.update(mine)
    before = set(sys.modules)
    importlib.invalidate_caches()
    sys.path.insert(0, text)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(text)
        if text not in sys.path:
            sys.path.append(text)
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None)
            own = name.partition(".")[0] not in before  # not a submodule of a known package
            if own and file is not None and _is_below(Path(file), folder):
                mine[name] = sys.modules[name]


def _digests(file: Path, folder: Path, loaded: Iterable[Path] = ()) -> dict[str, str]:
    """Return the SHA-256 of a file, of the files it imports and of `loaded` files in its folder."""
    found: dict[str, str] = {}
    waiting = {file: ""} | {path: "" for path in loaded if _is_below(path, folder)}
    while waiting:
        path, module = waiting.popitem()
        place = module or path.relative_to(folder).as_posix()
        if place in found:
            continue
        with suppress(OSError):  # the module is not a file
            content = path.read_bytes()
            found[place] = hashlib.sha256(content).hexdigest()
            own = module.split(".") if module else []
            for name, level in _imports(content):
                waiting |= dict(_files(name, level, path, folder, own))
    return dict(sorted(found.items()))


def _imports(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the dotted names that a source imports, each with its number of leading dots.

    `from a import b` yields `a` and `a.b`, because b may be a module.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the file may not be Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [node.module] if node.module else []
            names = [".".join([*above, alias.name]) for alias in node.names]
            yield from ((name, node.level) for name in (*above, *names))
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            first = node.args[0]
            text = first.value if isinstance(first, ast.Constant) else None
            if called in _IMPORTERS and isinstance(text, str):
                yield text.lstrip("."), len(text) - len(text.lstrip("."))


def _files(
    name: str, level: int, path: Path, folder: Path, own: list[str]
) -> Iterator[tuple[Path, str]]:
    """Yield the files that an import in `path` runs, with "" or the module of an outside file.

    Args:
        name: The dotted name to import.
        level: The number of leading dots.
        path: The importing file.
        folder: The folder of the named file. Other files are outside.
        own: The parts of the importing module's name if it is outside, else [].
    """
    if level:
        root = path.parents[min(level, len(path.parents)) - 1]
        package = own if path.stem == "__init__" else own[:-1]
        known = package[: len(package) + 1 - level]
        for depth, file in _modules_below(root, name):
            parts = [*known, *name.split(".")[:depth]]
            if own or _is_below(file, folder):
                yield file, ".".join(parts) if own else ""
        return
    top, parts = name.partition(".")[0], name.split(".")
    if top in sys.stdlib_module_names and not any(_is_below(f, folder) for f in _files_of([top])):
        return  # Python's own module hides a module of the folder with the same name
    roots = [folder, *(p for p in map(Path, sys.path) if p != folder and _is_below(p, folder))]
    places = (file for root in roots for _, file in _modules_below(root, name))
    inside = [file for file in places if _is_below(file, folder)]
    yield from ((file, "") for file in inside)
    if not inside:
        for module in (".".join(parts[:k]) for k in range(1, len(parts) + 1)):
            yield from ((f, "" if _is_below(f, folder) else module) for f in _files_of([module]))


def _modules_below(root: Path, name: str) -> Iterator[tuple[int, Path]]:
    """Yield (number of parts, file) for the files below a folder that a dotted import runs."""
    for depth, part in enumerate(name.split("."), 1):
        module, package = root / f"{part}.py", root / part
        if (package / "__init__.py").is_file():
            yield depth, package / "__init__.py"
        elif module.is_file():
            yield depth, module
            return
        root = package


def _files_of(names: Iterable[str]) -> set[Path]:
    """Return the files of loaded modules, without installed modules."""
    places = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    found = {Path(place) for place in places if isinstance(place, str)}
    return {path for path in found if not is_installed(path)}


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) and not is_installed(path)
