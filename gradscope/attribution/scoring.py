"""Scores of every query with every training sample, a tile of queries at a time.

s(q, i) = (1/N) g_qᵀ (H + λ)⁻¹ gᵢ over N training samples: to first order, by how much the loss of
query q would be higher, had sample i been left out of the training (Koh & Liang 2017,
arXiv:1703.04730, equation 2 with its sign and ε = −1/N). Positive: it helps. Negative: it harms.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from gradscope.attribution.curvature import (
    Curvature,
    adam_curvature,
    diagonal_curvature,
    ekfac_curvature,
    kfac_curvature,
)
from gradscope.attribution.fisher import Gram, Moments
from gradscope.attribution.products import Groups, Part, Tile, tiles
from gradscope.attribution.sides import Side, require_same
from gradscope.blocks import DenseBlock, Gradients
from gradscope.blocks.layers import bias_of
from gradscope.errors import SpecError

Method = Literal["identity", "fisher", "blockfisher", "kfac", "ekfac", "diagonal", "adam"]
Damping = float | Literal["auto"]

UNIT = (
    "the change of the query's loss if the training sample had been left out, to first order: "
    "positive helps, negative harms"
)
TILE_BYTES = 2**30  # of queries, their dense rows and their scores, unless the caller says how many
_CURVATURES: dict[str, tuple[str, Callable[..., Curvature]]] = {
    "kfac": ("kfac:bias=column", kfac_curvature),
    "ekfac": ("ekfac", ekfac_curvature),
    "diagonal": ("second_moment", diagonal_curvature),
    "adam": ("second_moment", adam_curvature),
}
_LARGEST = 20_000  # samples of a Gram matrix: 3.2 GB in float64
_SHORT = 8192  # numbers of an entry whose Fisher matrix is inverted as it is: 0.5 GB
_EXACT = 2**24  # scores that are kept in float64; more of them in float32
_LONG = 1e12  # multiplications from which on products are taken in float32


@dataclass(frozen=True)
class Settings:
    """What is asked for.

    Attributes:
        curvature: H: `identity`; `fisher`, the empirical Fisher of all parameters together;
            `blockfisher`, that of each layer by itself; `kfac`, `ekfac`, `diagonal`, its
            approximations; `adam`, the root of the diagonal.
        damping: λ, relative to the mean eigenvalue (of each layer where H has layers); or "auto".
        memory: Bytes for a tile of queries; more of them cost more walks through the training side.
    """

    curvature: Method = "fisher"
    damping: Damping = "auto"
    memory: int = TILE_BYTES

    def __post_init__(self) -> None:
        if self.damping != "auto" and not 0 <= self.damping < float("inf"):
            raise SpecError(
                f"the damping is a number that is not negative, or auto, not {self.damping}"
            )


@dataclass
class Pair:
    """The two sides at one checkpoint, with the curvature of the training side.

    Args:
        train: The training samples.
        query: The queries.
        weight: What its scores are times, where several are added.
    """

    train: Side
    query: Side
    weight: float = 1.0
    before: Callable[[Gradients], Gradients] = field(default=lambda rows: rows)
    after: Callable[[dict[str, Tensor]], Tensor] = field(default=lambda products: products[""])
    groups: Groups | None = None  # of parameters whose products `after` needs apart
    own: Callable[[], Tensor] | None = None  # gᵢᵀ (H + λ)⁻¹ gᵢ (N,), where it costs little
    record: dict[str, Any] = field(default_factory=dict)  # what was chosen
    notes: tuple[str, ...] = ()

    def bind(self, asked: Settings) -> None:
        """Find the curvature of the training side."""
        self.notes = require_same(self.train.facts, self.query.facts)
        method = asked.curvature
        self.record = {"curvature": method}
        if method == "identity":
            self.own = lambda: _own_products(self.train, lambda rows: rows)
        elif method in ("fisher", "blockfisher"):
            self._bind_fisher(asked)
        else:
            found, relative = curvature_of(self.train, method, asked.damping)
            self.before = _applied(found)
            self.record |= {"damping": relative, "lambda": found.damping}

    def scores(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Return the scores (m, N) of a tile of queries, in float64."""
        parts = [Part(p.places, self.before(p.gradients)) for p in tile.parts]
        found = products_of(Tile(parts, dtype), self.train, self.groups)
        n = int(self.train.table()["finite"].sum())
        return self.after(found).mul_(self.weight / max(1, n))

    def precision(self, rows: int) -> torch.dtype:
        """Return what products of so many rows with the training side are taken in."""
        work = float(rows) * self.train.n * self.train.width
        return torch.float64 if work <= _LONG else torch.float32

    def _bind_fisher(self, asked: Settings) -> None:
        widest = max(self._widths())
        if self.train.width <= self.train.n or (self.train.n > _LARGEST and widest <= _SHORT):
            self._bind_moments(asked)
            return
        if self.train.n > _LARGEST:
            raise SpecError(
                f"the Fisher matrix of {self.train.n:,} samples is inverted by their Gram matrix "
                f"up to {_LARGEST:,}",
                where=self.train.facts.name,
                remedy="Project each parameter (-t project:dim=4096,kind=kronecker,per=parameter), "
                "or use --curvature ekfac.",
            )
        if asked.curvature == "blockfisher":
            self.groups = layers_of(self.train.facts.parameters)
        products = gram_of(self.train, self.precision(self.train.n), asked.memory, self.groups)
        n = max(1, int(self.train.table()["finite"].sum()))
        grams = {}
        for group, gram in products.items():
            mean = float(gram.diagonal().sum()) / n**2
            grams[group] = Gram(gram, n, chosen(asked.damping, gram / n) * mean)
        self.after = lambda found: sum_of(gram.solved(found[k]) for k, gram in grams.items())
        self.own = lambda: sum_of(gram.self_influence() for gram in grams.values())
        damping = {k: gram.damping for k, gram in grams.items()}
        self.record |= {"fisher": "gram", "lambda": damping.get("", damping)}

    def _bind_moments(self, asked: Settings) -> None:
        moments = Moments()
        for part in self.train.parts():
            moments.add(part)
        means = moments.mean_eigenvalues()
        relative = {k: chosen(asked.damping, b / moments.n) for k, b in moments.blocks.items()}
        inverse = moments.inverted({k: relative[k] * mean for k, mean in means.items()})
        self.before = lambda rows: rows.of({k: DenseBlock(v) for k, v in inverse(rows).items()})
        self.own = lambda: _own_products(self.train, self.before)
        one = next(iter(relative.values())) if len(relative) == 1 else relative
        self.record |= {"fisher": "moments", "damping": one}

    def _widths(self) -> list[int]:
        part = next(iter(self.train.parts()))
        return [block.dense()[0].numel() for block in part.gradients.select(slice(0, 1)).values()]


class Scoring:
    """An attribution under way: tiles of queries in, rows of scores out.

    Args:
        pairs: One a checkpoint; the scores are the sum over them, each by its weight.
        asked: What is asked for.
        done: Queries that are scored already.
    """

    def __init__(self, pairs: Sequence[Pair], asked: Settings, done: int = 0) -> None:
        self.pairs, self.asked, self.done = pairs, asked, done
        for pair in pairs:
            pair.bind(asked)
        sizes = {(pair.train.n, pair.query.n) for pair in pairs}
        if len(sizes) > 1:
            raise SpecError("the checkpoints are of different numbers of samples")
        first = pairs[0]
        each = 8 * first.train.width + 12 * first.train.n
        self.step = max(1, min(first.query.n, asked.memory // each))

    @property
    def dtype(self) -> torch.dtype:
        """What the scores are kept in."""
        few = self.pairs[0].train.n * self.pairs[0].query.n <= _EXACT
        return torch.float64 if few else torch.float32

    @property
    def record(self) -> dict[str, Any]:
        """What was chosen, for the result."""
        return {
            "unit": UNIT,
            "checkpoints": [{**pair.record, "weight": pair.weight} for pair in self.pairs],
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth a line."""
        left_out = (
            f"{int((~pair.train.table()['finite']).sum())} training samples without a finite "
            "gradient are left out"
            for pair in self.pairs[:1]
            if not bool(pair.train.table()["finite"].all())
        )
        return tuple(dict.fromkeys([*(n for p in self.pairs for n in p.notes), *left_out]))

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, their scores (m, N) in float64); NaN of what is left out."""
        walks = [
            tiles(p.query.parts(), p.query.n, self.step, p.precision(self.step)) for p in self.pairs
        ]
        n, m = self.pairs[0].train.n, self.pairs[0].query.n
        for start in range(0, m, self.step):
            each = [next(walk) for walk in walks]
            queries = slice(start, min(start + self.step, m))
            if queries.stop <= self.done:
                continue
            found = torch.full((queries.stop - start, n), 0.0, dtype=torch.float64)
            for pair, tile in zip(self.pairs, each, strict=True):
                own = torch.full_like(found, torch.nan)
                if tile.n:
                    own[tile.places - start] = pair.scores(tile, pair.precision(self.step))
                own[:, ~pair.train.table()["finite"]] = torch.nan
                found += own
            yield queries, found

    def self_influence(self) -> Tensor | None:
        """Return s(i, i) (N,) where it costs little, NaN of what is left out."""
        found: Tensor | None = None
        for pair in self.pairs:
            if pair.own is None:
                return None
            finite = pair.train.table()["finite"]
            own = pair.own().double() * (pair.weight / max(1, int(finite.sum())))
            own[~finite] = torch.nan
            found = own if found is None else found + own
        return found


def products_of(tile: Tile, side: Side, groups: Groups | None = None) -> dict[str, Tensor]:
    """Return the products (m, N) of a tile with a side by group, 0 where a sample is left out."""
    found = _zeros(tile.n, side, groups)
    for part in side.parts():
        for group, products in tile.with_each(part.gradients, groups).items():
            found[group][:, part.places] = products
    return found


def gram_of(
    side: Side, dtype: torch.dtype, memory: int, groups: Groups | None = None
) -> dict[str, Tensor]:
    """Return ⟨gᵢ, gⱼ⟩ (N, N) of all samples of a side by group, 0 where one is left out."""
    found = _zeros(side.n, side, groups)
    step = max(1, memory // (2 * dtype.itemsize * side.width))
    for tile in tiles(side.parts(), side.n, step, dtype):
        whole = step >= side.n  # then every sample is in the tile
        for part in tile.parts if whole else side.parts():
            for group, products in tile.with_each(part.gradients, groups).items():
                found[group][tile.places.unsqueeze(1), part.places] = products
    return found


def _zeros(rows: int, side: Side, groups: Groups | None) -> dict[str, Tensor]:
    names = [""] if groups is None else dict.fromkeys(groups.values())
    return {name: torch.zeros(rows, side.n, dtype=torch.float64) for name in names}


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    return reduce(torch.add, tensors)


def layers_of(names: Iterable[str]) -> Groups:
    """Return {parameter: layer}: a bias belongs to the weight of its name."""
    found = {name: name for name in names}
    biases = {bias_of(name): name for name in found}
    return {name: biases.get(name, name) for name in found}


def curvature_of(train: Side, method: str, damping: Damping) -> tuple[Curvature, float]:
    """Return the inverse of an approximate curvature of the training side, and its damping.

    Raises:
        SpecError: The rows are not gradients as they are.
    """
    if train.facts.chain != "identity":
        raise SpecError(
            f"{method} is a curvature of parameters, and the rows are {train.facts.chain!r}",
            where=train.facts.name,
            remedy="Use rows of the chain identity (--chain), or --curvature fisher.",
        )
    chain, made = _CURVATURES[method]
    relative = chosen(damping, None)
    return made(train.aggregate(chain), relative), relative


def chosen(damping: Damping, matrix: Tensor | None) -> float:
    """Return the relative damping."""
    return 0.1 if damping == "auto" else float(damping)


def _applied(found: Curvature) -> Callable[[Gradients], Gradients]:
    def apply(rows: Gradients) -> Gradients:
        made = found.apply(rows, None)
        return rows.of({name: DenseBlock(values) for name, values in made.items()})

    return apply


def _own_products(side: Side, before: Callable[[Gradients], Gradients]) -> Tensor:
    """Return gᵢᵀ H⁻¹ gᵢ (N,) by one more walk, 0 of what is left out."""
    found = torch.zeros(side.n, dtype=torch.float64)
    for part in side.parts():
        made = before(part.gradients)
        for name, block in part.gradients.items():
            own, other = block.dense(), made[name].dense()
            found[part.places] += (own.flatten(1).double() * other.flatten(1).double()).sum(1)
    return found
