"""`torch.compile` with manners: nothing on stderr, no process left behind, no second compilation.

A compiled function serves the facts it was compiled for: shapes, dtypes, the model's and the loss's
own Python values, all of which torch guards. Once one of them is another, it raises, rather than
compile again and again.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch

from gradscope.core.locate import first_line

T = TypeVar("T")


class NotCompiledError(Exception):
    """A function cannot be compiled; it says why."""


def compiled(fn: Callable[..., T], *arguments: Any) -> Callable[..., T]:
    """Return a function compiled for arguments such as these; it raises where it does not serve.

    Args:
        fn: A plain function.
        arguments: What it is called with at first.

    Raises:
        NotCompiledError: It cannot be compiled; of the function: it does not serve.
    """
    from torch._dynamo.utils import counters

    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace()  # torch counts compilations by code, over all that share it
    own = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    call: Callable[..., T] = torch.compile(own, fullgraph=True, dynamic=False)
    before = counters["stats"]["unique_graphs"]
    try:
        _require_compiler(arguments)
        with _discreet():
            call(*arguments)
    except Exception as error:  # whatever torch or the code that it traces raises
        raise NotCompiledError(first_line(error)) from error
    if counters["stats"]["unique_graphs"] == before:
        raise NotCompiledError("torch.compile is switched off")

    def serve(*arguments: Any) -> T:
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                return call(*arguments)
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                raise NotCompiledError("what it was compiled for has changed") from error

    return serve


def traced(fn: Callable[..., Any], *arguments: Any) -> None:
    """Trace a function for arguments such as these, and compile nothing.

    Raises:
        NotCompiledError: It has no graph.
    """
    assert isinstance(fn, FunctionType)
    own = FunctionType(fn.__code__.replace(), fn.__globals__, "traced", None, fn.__closure__)
    try:
        with _discreet():
            torch.compile(own, fullgraph=True, dynamic=False, backend="eager")(*arguments)
    except Exception as error:  # whatever torch or the code that it traces raises
        raise NotCompiledError(first_line(error)) from error


def _require_compiler(arguments: Any) -> None:
    """Look for a C++ compiler before minutes are spent on a graph."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


@contextmanager
def _discreet() -> Iterator[None]:
    """Compile in this process alone, without warnings and log messages."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in ("torch", *names)]
    levels = [logger.level for logger in loggers]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(inductor.patch(compile_threads=1))
        # a hook that is attached later must be noticed
        stack.enter_context(dynamo.patch(skip_nnmodule_hook_guards=False, suppress_errors=False))
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
