"""What the six training scripts share: the loop, the digits and the two files that are written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

PerSampleLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each sample: inputs (n, ...), targets (n,) -> (n,)."""
    return functional.cross_entropy(model(inputs), targets, reduction="none")


def mse(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, mean over a sample's outputs: inputs (n, ...), targets (n, o) -> (n,)."""
    return functional.mse_loss(model(inputs), targets, reduction="none").flatten(1).mean(1)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the UCI handwritten digits that scikit-learn ships.

    Returns:
        Images (1797, 64) with values 0..16 and labels (1797,), both uint8.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.astype(np.uint8), labels.astype(np.uint8)


def start(seed: int = 0) -> None:
    """Fix the seed and the number of threads, so that a second run writes the same numbers."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def fit(
    model: nn.Module,
    loss: PerSampleLoss,
    inputs: Tensor,
    targets: Tensor,
    *,
    epochs: int,
    batch_size: int = 64,
    rate: float = 1e-3,
    stop_below: float = 0.0,
) -> None:
    """Train with Adam and a cosine schedule, in train mode, and leave the model in eval mode.

    Args:
        model: The network, changed in place.
        loss: (model, inputs, targets) -> (n,).
        inputs: (N, ...).
        targets: (N, ...).
        epochs: Passes over the data, at most.
        batch_size: Samples a step.
        rate: The first learning rate.
        stop_below: End early once an epoch's mean loss is below this, so that gradients stay alive.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(inputs)).split(batch_size):
            losses = loss(model, inputs[rows], targets[rows])
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            total += losses.sum().item()
        schedule.step()
        if total / len(inputs) < stop_below:
            break
    model.eval()


def report(model: nn.Module, loss: PerSampleLoss, inputs: Tensor, targets: Tensor) -> None:
    """Print the number of parameters and samples, and the mean loss over inputs (N, ...)."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mean = loss(model, inputs, targets).mean().item()
    print(f"{parameters:,} parameters, {len(inputs):,} samples, mean loss {mean:.4g}")


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Fraction of samples whose largest output is the target: inputs (N, ...), targets (N,)."""
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).double().mean())


def save(checkpoint: Path, model: nn.Module, **arrays: np.ndarray) -> None:
    """Write the state dict, and `data.npz` beside it.

    Args:
        checkpoint: Its suffix picks the format, `.safetensors` or `.pt`.
        model: The trained network.
        arrays: Numeric arrays (N, ...), under the names that dataset.toml uses.
    """
    state = model.state_dict()
    if checkpoint.suffix == ".safetensors":
        save_file(state, checkpoint)
    else:
        torch.save(state, checkpoint)
    np.savez_compressed(checkpoint.with_name("data.npz"), **arrays)  # type: ignore[arg-type]
