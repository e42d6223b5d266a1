"""Embedding tables: each sample touches the rows it looked up."""

import torch
from torch import Tensor

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, ScatterBlock


@node_rules.register("EmbeddingBackward0")
def embedding(site: Site) -> Block | None:
    """`weight[indices]`; the padding row gets nothing."""
    if site.saved("scale_grad_by_freq"):  # frequencies count over the whole batch
        return None
    index = site.first(site.saved("indices")).flatten(1)
    rows = site.first(site.gradient).flatten(1, -2)
    return scatter(index, rows, site.shape[0], site.saved("padding_idx"))


def scatter(index: Tensor, rows: Tensor, size: int, padding: int) -> ScatterBlock:
    """Return the block of a table of `size` rows with the padding row left out."""
    rows = torch.where((index == padding).unsqueeze(-1), torch.zeros_like(rows), rows)
    return ScatterBlock(index, rows, size)
