"""Packed sequences: the lengths steer Python code, so samples of one length go together."""

import torch
from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Common, PerSample, Samples


@rules.register("_pack_padded_sequence.default")
def pack(s: Samples, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the packed entries, and the batch sizes that all samples share.

    Raises:
        Differ: Samples have different lengths.
    """
    common = lengths.common() if isinstance(lengths, PerSample) else lengths
    packed = [aten._pack_padded_sequence(row, common, batch_first) for row in s.of(x)]
    return torch.stack([entries for entries, _ in packed]), packed[0][1].as_subclass(Common)
