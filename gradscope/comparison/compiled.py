"""The compiled backend as an implementation to hold against the loop."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradscope.comparison.run import Implementation
from gradscope.core.problem import Loss
from gradscope.errors import UnsupportedError
from gradscope.scope import Scope

LABEL = "vmap compiled"


def compiled(parameters: Sequence[str] | None = None) -> Implementation:
    """Return (model, loss, inputs, targets) -> {name: (n, *shape)}, compiled once for each model.

    Args:
        parameters: Globs that select parameters by name; all trainable ones when None.
    """
    scopes: dict[int, Scope] = {}  # each keeps its model, so no other gets its number
    globs = None if parameters is None else list(parameters)

    def rows(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> dict[str, Tensor]:
        scope = scopes.get(id(model))
        if scope is None:
            scope = scopes[id(model)] = Scope(model, loss, globs, "vmap", compile=True)
            scope.per_sample_gradients(inputs, targets)  # proved, then compiled
        if not scope.compiler.in_use:
            raise UnsupportedError(
                scope.notes[-1], remedy="The backends' own rows need no compiler."
            )
        return scope.per_sample_gradients(inputs, targets)

    return rows
