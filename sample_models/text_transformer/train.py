"""Train the transformer on a book: `python sample_models/text_transformer/train.py TEXT`.

TEXT is `devil.dict.dz` of the Debian package dict-devil: The Devil's Dictionary by Ambrose Bierce.
"""

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss import loss
from model import build
from training import fit, report, save, start

HERE = Path(__file__).resolve().parent
LENGTH = 64
KEPT = slice(3500, 4012)  # 512 sequences free of the slurs that an author of 1906 would print


def read_text(path: Path) -> np.ndarray:
    """Read the dictionary's entries, without the preface, as characters (t,): 0 is a space."""
    text = gzip.decompress(path.read_bytes()).decode("ascii")
    entries = " ".join(text[text.index("ABASEMENT, n.") :].split())
    return np.frombuffer(entries.encode("ascii"), np.uint8) - 32


def mean_over_tokens(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each sequence: inputs (n, t), targets (n, t) -> (n,)."""
    return loss(model(inputs), targets)


def main() -> None:
    """Train on all sequences; write data.npz (those KEPT) and weights.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="devil.dict.dz, from the package dict-devil")
    text = read_text(parser.parse_args().text)
    start()
    count = (len(text) - 1) // LENGTH
    characters = text[: count * LENGTH].reshape(count, LENGTH)
    following = text[1 : count * LENGTH + 1].reshape(count, LENGTH)
    inputs, targets = torch.tensor(characters).long(), torch.tensor(following).long()
    model = build()
    fit(model, mean_over_tokens, inputs, targets, epochs=12, batch_size=64, rate=3e-3)
    report(model, mean_over_tokens, inputs[KEPT], targets[KEPT])
    kept = {"characters": characters[KEPT], "following": following[KEPT]}
    save(HERE / "weights.safetensors", model, **kept)


if __name__ == "__main__":
    main()
