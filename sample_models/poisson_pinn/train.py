"""Solve a Poisson problem with a network: `python sample_models/poisson_pinn/train.py`.

The problem is -Δu = 2π² sin(πx) sin(πy) on the unit square, with u = xy on its boundary; the
solution is u = sin(πx) sin(πy) + xy. The package gradscope must be importable.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss import loss
from model import build
from training import fit, report, save, start

HERE = Path(__file__).resolve().parent
INSIDE, ON_BOUNDARY = 960, 240


def sample(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw points (n, 2) and what is known there (n, 2): f or g, and the boundary's flag."""
    points = generator.random((INSIDE + ON_BOUNDARY, 2))
    edge = np.arange(INSIDE, INSIDE + ON_BOUNDARY)
    points[edge, edge % 2] = edge // 2 % 2  # each of the four sides in turn
    on_boundary = np.arange(len(points)) >= INSIDE
    source = 2 * np.pi**2 * np.sin(np.pi * points).prod(1)
    conditions = np.stack([np.where(on_boundary, points.prod(1), source), on_boundary], 1)
    order = generator.permutation(len(points))
    return points[order].astype(np.float32), conditions[order].astype(np.float32)


def largest_error(model: torch.nn.Module) -> float:
    """Compare with the solution on a grid of 51 by 51 points."""
    axis = torch.linspace(0, 1, 51)
    grid = torch.cartesian_prod(axis, axis)  # (2601, 2)
    solution = (torch.pi * grid).sin().prod(1) + grid.prod(1)
    with torch.no_grad():
        return float((model(grid).squeeze(1) - solution).abs().max())


def main() -> None:
    """Write data.npz and weights.pt."""
    start()
    points, conditions = sample(np.random.default_rng(0))
    inputs, targets = torch.from_numpy(points), torch.from_numpy(conditions)
    model = build()
    fit(model, loss, inputs, targets, epochs=400, batch_size=120, rate=5e-3)
    report(model, loss, inputs, targets)
    print(f"largest error of u {largest_error(model):.2g}")
    save(HERE / "weights.pt", model, points=points, conditions=conditions)


if __name__ == "__main__":
    main()
