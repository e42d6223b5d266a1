"""Train the residual network on digits: `python sample_models/digits_batchnorm/train.py`."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import build
from training import accuracy, cross_entropy, digits, fit, report, save, start

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Write data.npz and weights.safetensors."""
    start()
    images, labels = digits()
    inputs = torch.from_numpy(images).reshape(-1, 1, 8, 8) / 16.0  # (1797, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    model = build()
    fit(model, cross_entropy, inputs, targets, epochs=20, rate=3e-3, stop_below=0.08)
    report(model, cross_entropy, inputs, targets)
    print(f"accuracy {accuracy(model, inputs, targets):.4f}")
    save(HERE / "weights.safetensors", model, images=images, labels=labels)


if __name__ == "__main__":
    main()
