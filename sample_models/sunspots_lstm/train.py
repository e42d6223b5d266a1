"""Train the LSTM on yearly sunspot numbers: `python sample_models/sunspots_lstm/train.py`."""

import sys
from pathlib import Path

import numpy as np
import torch
from statsmodels.datasets import sunspots

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import build
from training import fit, mse, report, save, start

HERE = Path(__file__).resolve().parent
LENGTH = 24


def main() -> None:
    """Write data.npz and weights.pt."""
    start()
    series = sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(np.float32)  # (309,)
    rows = np.lib.stride_tricks.sliding_window_view(series, LENGTH + 1)  # (285, 25)
    windows, following = rows[:, :LENGTH], rows[:, LENGTH:]
    inputs = torch.tensor(windows)[..., None] * 0.01  # (285, 24, 1)
    targets = torch.tensor(following) * 0.01  # (285, 1)
    model = build()
    fit(model, mse, inputs, targets, epochs=200, batch_size=32, rate=5e-3)
    report(model, mse, inputs, targets)
    save(HERE / "weights.pt", model, windows=windows, following=following)


if __name__ == "__main__":
    main()
