"""The gradients of a batch: one block per parameter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod

import torch
from torch import Tensor

from gradscope.blocks.base import Block
from gradscope.blocks.derived import ScaledBlock
from gradscope.core.precision import doubled

FORMED_BYTES = 2**28  # bytes of dense gradients kept at a time, over all parameters


class Gradients(Mapping[str, Block]):
    """Per-sample gradients of all selected parameters, by name, in the model's order.

    Args:
        blocks: At least one, all with the same n.
        index: (n,) int64, each sample's position in its data set, or None for an aggregate of
            samples. Random numbers depend on it.
        powers: The sums over samples that will be requested: 1 for Σ gᵢ, 2 for Σ |gᵢ|².
        weights: (samples, r), or None if each row is a sample. If each sample has r consecutive
            rows: the weights of the rows in Σ g gᵀ.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        index: Tensor | None = None,
        powers: frozenset[int] = frozenset(),
        weights: Tensor | None = None,
    ) -> None:
        self._blocks = dict(blocks)
        self.index, self.weights = index, weights
        self._powers = powers
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._squared: dict[str, Tensor] | None = None
        self._total: Tensor | None = None  # Σ of `_squared` (n,), if it is finite

    def __getitem__(self, name: str) -> Block:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def n(self) -> int:
        """The number of samples."""
        return next(iter(self._blocks.values())).n

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """‖gᵢ‖² (n,) for each parameter, computed once."""
        if self._squared is None:
            found = {name: block.squared_norms() for name, block in self.items()}
            self._squared = self._within_range(found)
        return self._squared

    @cached_property
    def norms(self) -> Tensor:
        """‖gᵢ‖ (n,) over all parameters together."""
        squared, total = self.squared_norms, self._total
        return (torch.stack([*squared.values()]).sum(0) if total is None else total).sqrt()

    def _within_range(self, squared: dict[str, Tensor]) -> dict[str, Tensor]:
        """Recompute squared norms that are not finite from dense rows.

        The square of a factor may overflow although the gradient, a product of factors, does not.
        """
        total = torch.stack([*squared.values()]).sum(0)
        if isfinite(float(total.sum())):
            self._total = total
            return squared
        found = {}
        for name, own in squared.items():
            lost = ~own.isfinite()
            found[name] = own
            if bool(lost.any()) and self[name].dense_if_formed is None:
                rows = Block.squared_norms(self[name].select(lost))
                found[name] = own.masked_scatter(lost, rows.to(own.dtype))
        return found

    @property
    def has_norms(self) -> bool:
        """Whether the norms have been computed."""
        return self._squared is not None

    def densify(self, always: bool = False) -> "Gradients":
        """Return the same gradients in the best form for norms followed by a weighted sum.

        Args:
            always: The dense gradients are needed in any case.
        """
        if self.has_norms:
            return self
        left, blocks = FORMED_BYTES, {}
        for name, block in self.items():
            size = block.n * prod(block.shape) * block.dtype.itemsize
            blocks[name] = block.densify(always) if size <= left else block
            left -= size if blocks[name] is not block else 0
        found = self.of(blocks)
        self._squared, self._total = found.squared_norms, found._total
        return found

    def has_finite_bounds(self) -> bool:
        """Whether a cheap bound on the norms proves that every gradient is finite."""
        bounds = torch.stack([doubled(block.norm_bound()) for block in self.values()])
        return bool((bounds < torch.finfo(torch.float32).max).all())

    def power_sum(self, name: str, power: int) -> Tensor:
        """Return Σᵢ gᵢ (power 1) or Σᵢ |gᵢ|² (power 2), (*shape), in the gradients' precision.

        If both will be requested, they are computed in one pass.
        """
        found = self._sums.pop((name, power), None)  # requested once, so not kept
        if found is not None:
            return found
        block = self[name]
        if self._powers >= {1, 2}:
            both = dict(zip((1, 2), block.sums(), strict=True))
            self._sums[name, 3 - power] = both[3 - power]
            return both[power]
        return block.weighted_sum() if power == 1 else block.squared_sum()

    def with_powers(self, powers: frozenset[int]) -> "Gradients":
        """Return the same gradients, with the sums over samples that will be requested."""
        return Gradients(self._blocks, self.index, powers, self.weights)

    def weighted(self, weights: Tensor) -> "Gradients":
        """Return the same gradients as several rows per sample, with `weights` (samples, r)."""
        found = Gradients(self._blocks, self.index, self._powers, weights)
        found._squared = self._squared
        return found

    def map(self, fn: Callable[[Block], Block]) -> "Gradients":
        """Apply `fn` to each parameter's block."""
        return self.of({name: fn(block) for name, block in self.items()})

    def of(self, blocks: Mapping[str, Block]) -> "Gradients":
        """Return a `Gradients` of other blocks for the same samples."""
        return Gradients(blocks, self.index)

    def scale(self, factors: Tensor) -> "Gradients":
        """Multiply sample i by `factors[i]`, (n,); dense blocks are not copied."""

        def scaled(block: Block) -> Block:
            dense = block.dense_if_formed is not None
            return ScaledBlock(block, factors) if dense else block.scale(factors)

        return self.map(scaled)

    def select(self, rows: slice | Tensor) -> "Gradients":
        """Return the samples `rows`."""
        blocks = {name: block.select(rows) for name, block in self.items()}
        return Gradients(blocks, None if self.index is None else self.index[rows])

    def dense(self, out: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return {name: (n, *shape)}, written into the buffers `out` if given."""
        return {
            name: block.dense(None if out is None else out[name]) for name, block in self.items()
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of a backend for a batch."""

    losses: Tensor  # (n,), detached
    gradients: Gradients  # the per-sample gradients
    new: bool = False  # whether the backend analysed the model for this batch
    # {key: state} of requested reductions that were computed together with the gradients
    states: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    compiled: bool = False  # whether a compiled program computed it
    note: str = ""  # a remark on how it was computed
