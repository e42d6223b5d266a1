"""Norms of tokens beside norms of samples, of linear layers: `python -m benchmarks.tokens`."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradscope import Scope

SHORT = ((64, 16, 128), (64, 32, 256), (32, 128, 256))  # n, t, width
SIZES = (*SHORT, (16, 128, 512), (8, 512, 256), (1, 1024, 256))
LAYERS, REPEAT = 4, 7


def apart(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (n, t)."""
    return (outputs - targets).square().mean(-1)


def together(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (n,), the sums over positions."""
    return apart(outputs, targets).sum(1)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds on the processor that a call takes."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def measured(n: int, t: int, width: int) -> tuple[float, float, float]:
    """Return samples over a plain pass, tokens over a plain pass, tokens over samples."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(2, n, t, width)
    samples = Scope(model, together, backend="hooks", verify="first")
    tokens = Scope(model, apart, backend="hooks", verify="first", rows="token")

    def plain() -> object:
        return torch.autograd.grad(together(model(x), y).sum(), list(model.parameters()))

    calls = (plain, lambda: samples.norms(x, y), lambda: tokens.norms(x, y))
    for call in calls * 2:
        call()
    rows = [[seconds(call) for call in calls] for _ in range(REPEAT)]
    pairs = ((1, 0), (2, 0), (2, 1))
    first, second, third = (statistics.median(r[a] / r[b] for r in rows) for a, b in pairs)
    return first, second, third


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| n | t | width | samples | tokens | tokens / samples |")
    print("|---:|---:|---:|---:|---:|---:|")
    for sizes in SIZES:
        found = (*map(str, sizes), *(f"{ratio:.2f}" for ratio in measured(*sizes)))
        print(f"| {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
