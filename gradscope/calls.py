"""What a `Scope` does, in one call."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from gradscope.scope import Scope


def per_sample_gradients(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    inputs: Any,
    targets: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return {name: (n, *shape)} in one call; `options` are those of `Scope`."""
    with Scope(model, loss, **options) as scope:
        return scope.per_sample_gradients(inputs, targets)


def norms(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    inputs: Any,
    targets: Any = None,
    per: Literal["sample", "parameter"] = "sample",
    **options: Any,
) -> Any:
    """Return the L2 norms of the per-sample gradients in one call; see `Scope.norms`."""
    with Scope(model, loss, **options) as scope:
        return scope.norms(inputs, targets, per)


def expectation(
    model: nn.Module,
    loss: str | Callable[..., Tensor],
    chain: str,
    inputs: Any,
    targets: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return E[T(g)] in one call; see `Scope.expectation`."""
    with Scope(model, loss, **options) as scope:
        return scope.expectation(chain, inputs, targets)
