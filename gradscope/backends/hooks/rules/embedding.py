"""Embedding tables: each sample touches the rows it looked up."""

import torch
from torch import Tensor

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, ScatterBlock


@node_rules.register("EmbeddingBackward0")
def embedding(site: Site) -> Block | None:
    """`weight[indices]`; the padding row gets nothing.

    With scale_grad_by_freq a row's gradient is divided by how often the sample looks it up, as in
    a batch of one.
    """
    index = site.first(site.saved("indices")).flatten(1)
    rows = site.first(site.gradient).flatten(1, -2)
    if site.saved("scale_grad_by_freq"):
        again = index.unsqueeze(1) == index.unsqueeze(2)  # (n, t, t)
        rows = rows / again.sum(2).unsqueeze(-1).to(rows.dtype)
    return scatter(index, rows, site.shape[0], site.saved("padding_idx"))


def scatter(index: Tensor, rows: Tensor, size: int, padding: int) -> ScatterBlock:
    """Return the block of a table of `size` rows with the padding row left out."""
    rows = torch.where((index == padding).unsqueeze(-1), torch.zeros_like(rows), rows)
    return ScatterBlock(index, rows, size)
