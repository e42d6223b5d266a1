"""What a backend is: bound once to a problem, applied to many batches.

A backend is a function of a problem that returns a context manager, so that clean-up is
structural; inside it, the bound function maps a batch to its losses and per-sample gradients:

    with backend(problem) as evaluate:
        evaluation = evaluate(batch)

It is exact, or it raises a `RefusedError` that names the layer and the remedy.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.core.locate import first_line, layer_of
from gradscope.core.problem import Problem
from gradscope.core.registry import Registry
from gradscope.core.shortage import is_shortage
from gradscope.errors import GradscopeError, UnsupportedError

Evaluate = Callable[[Batch], Evaluation]
Backend = Callable[[Problem], AbstractContextManager[Evaluate]]

backends: Registry[Backend] = Registry("backend")


def require_unhooked(backend: str, problem: Problem) -> None:
    """Refuse parameters with a hook on their gradient, which this backend would not run.

    Raises:
        UnsupportedError: There is one.
    """
    for name, p in problem.parameters.items():
        if p._backward_hooks:
            raise UnsupportedError(
                f"the parameter has a hook on its gradient, which {backend} does not run",
                where=f"parameter {name!r}",
                remedy="Use backend loop, as auto does, or remove the hook.",
            )


@contextmanager
def refusing(backend: str, model: nn.Module, remedy: str) -> Iterator[None]:
    """Turn what torch raises inside a backend into an `UnsupportedError` that names the layer.

    Errors of gradscope and running out of memory pass through unchanged.
    """
    try:
        yield
    except GradscopeError:
        raise
    except Exception as error:  # whatever torch or the user's code raises
        if is_shortage(error):
            raise
        raise UnsupportedError(
            f"the {backend} backend cannot run this model: {first_line(error)}",
            where=layer_of(error, model),
            remedy=remedy,
        ) from error
