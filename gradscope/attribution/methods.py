"""Methods of attribution: the inverse curvature between two gradients, by its name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gradscope.attribution.curvature import (
    LEAST,
    Curvature,
    Gram,
    Moments,
    RemainingGradient,
    Ridge,
    adam_curvature,
    along,
    diagonal_curvature,
    ekfac_curvature,
    kfac_curvature,
    trusted,
)
from gradscope.attribution.products import Groups, Tile, row_products, sum_of, tiles
from gradscope.attribution.sources import GradientSource, stored_factors
from gradscope.blocks import DenseBlock, Gradients
from gradscope.blocks.layers import bias_of
from gradscope.core.registry import suggestion
from gradscope.errors import GradscopeError, SpecError
from gradscope.process.memory import available, slices

Method = Literal[
    "auto",
    "mean",
    "shrunk",
    "fisher",
    "blockfisher",
    "ekfac",
    "kfac",
    "diagonal",
    "adam",
    "identity",
]
Damping = float | Literal["auto"]
Form = Literal["influence", "relative", "cosine"]
Before = Callable[[Gradients], Gradients]
Spectrum = tuple[Tensor, Tensor]  # eigenvalues, and squares of the mean gradient along them

_READ_BYTES = 2**30  # the size of a tile if further tiles cost little
_PARTS = 4  # otherwise a tile takes 1 / _PARTS of the available memory
CURVATURES: dict[str, tuple[str, Callable[..., Curvature]]] = {
    "kfac": ("kfac:bias=column", kfac_curvature),
    "ekfac": ("ekfac", ekfac_curvature),
    "diagonal": ("second_moment", diagonal_curvature),
    "adam": ("second_moment", adam_curvature),
}
_OF_MATRICES = ("ekfac", "kfac")  # curvatures in eigenbases of layers
_SHARES = {"shrunk": 0.95, "mean": 0.4}  # the (least) share of EK-FAC, the rest is the Fisher
_POWER = 1.5  # of the directions for each sample, by which ρ / (1 − ρ) is multiplied
_LEAST = {"fisher": 0.5, "blockfisher": 0.3}  # the least relative damping
_SPECTRA = 4096  # the most rows of a Fisher or Gram matrix for its eigenvectors to be computed
_DENSE_BYTES = 2**24  # dense rows of a Gram matrix at a time, if all samples are in the tile
_LARGEST = 20_000  # the most samples of a Gram matrix: 3.2 GB in float64
_SHORT = 8192  # the most entries of a row whose Fisher matrix is inverted: 0.5 GB
_PAIRS = 1e14  # the most multiplications of a Gram matrix with `auto`
_TILED = 12  # bytes of a tile for each number: stored, and converted for products
_LONG = 3e11  # products with more multiplications are computed in float32


@dataclass(frozen=True)
class AttributionSettings:
    """The settings of an attribution.

    Attributes:
        curvature: H: `fisher`, the empirical Fisher of all parameters; `blockfisher`, one Fisher
            for each layer; its approximations `ekfac`, `kfac` and `diagonal`; `shrunk`, the Fisher
            shrunk towards EK-FAC; `mean`, the mean of the inverses of EK-FAC and a shrunk Fisher;
            `adam`, the root of the diagonal; `identity`. `auto` means `fisher` for projections.
            For full gradients it means `mean`, or `ekfac` if the Gram matrix of the samples is too
            large.
        damping: λ, relative to the mean eigenvalue (of each layer if H has layers). "auto" selects
            it by the trust region of `gradscope.attribution.curvature`.
        memory: Bytes for a tile of queries or of a Gram matrix. With few bytes, the training
            samples are iterated more often. The default is 1 GiB for a file, and a quarter of the
            available memory (at least 1 GiB) for computed gradients.
        factors: A result file of the same model with the chain of the curvature: `ekfac`,
            `kfac:bias=column` or `second_moment`. Its samples or labels may differ. With None
            the factors are computed from the training samples.
        refine: The k most helpful and the k most harmful samples of each query are scored again
            with full gradients and this curvature; 0 for none.
        score: The form of a score: `influence`, `relative` or `cosine`. See
            `gradscope.attribution.scoring`.
        query_rank: R: each matrix of a query's row H⁻¹g is kept as R outer products, its best
            approximation of rank R. 0 keeps all numbers. For `ekfac` and `kfac`.

    Raises:
        SpecError: A name is unknown, a number is out of range, or two settings do not fit.
    """

    curvature: Method = "auto"
    damping: Damping = "auto"
    memory: int | None = None
    factors: str | None = None
    refine: int = 0
    score: Form = "influence"
    query_rank: int = 0

    def __post_init__(self) -> None:
        for what, value, kind in (
            ("curvature", self.curvature, Method),
            ("score", self.score, Form),
        ):
            if value not in get_args(kind):
                remedy = suggestion(value, [*get_args(kind)])
                raise SpecError(f"unknown {what} {value!r}", remedy=remedy)
        if self.damping != "auto" and not 0 <= self.damping < float("inf"):
            raise SpecError(
                f"the damping is {self.damping}, which is negative or not finite",
                remedy="Give a `damping` of at least 0, such as 0.1, or auto.",
            )
        if self.query_rank < 0:
            what, accepted = f"found {self.query_rank}", "Accepted: 0 or more."
            raise SpecError(what, where="`query_rank`", remedy=accepted)
        if self.query_rank and self.curvature not in ("auto", *_OF_MATRICES):
            raise SpecError(
                f"curvature {self.curvature} has no matrices of layers whose rank can be reduced",
                where="`query_rank`",
                remedy=f"Set `curvature` to {' or '.join(_OF_MATRICES)}; or leave `query_rank` "
                "out.",
            )
        if self.query_rank and self.refine:
            raise SpecError(
                "`refine` scores rows of a projection, and these have no matrices of layers",
                where="`query_rank`",
                remedy="Leave `refine` or `query_rank` out.",
            )

    def room(self, train: GradientSource) -> int:
        """Return the bytes for a tile: few if iterating over the training samples costs little."""
        if self.memory or train.cheap:
            return self.memory or _READ_BYTES
        return max(_READ_BYTES, (available(torch.device("cpu")) or 0) // _PARTS)


def _as_it_is(rows: Gradients) -> Gradients:
    return rows


def _squares(squares: dict[str, Tensor], _: dict[str, Tensor]) -> Tensor:
    return squares[""]


@dataclass(frozen=True)
class CurvatureSteps:
    """A curvature, as three steps from gradients to scores without the factor 1/N."""

    record: dict[str, Any]  # the settings and their values
    before: Before = _as_it_is  # applied to queries before their products with training samples
    # the same with matrices of low rank, and ‖dropped‖ / ‖H⁻¹g‖ (m,); None: not asked for
    truncate: Callable[[Gradients], tuple[Gradients, Tensor]] | None = None
    groups: Groups | None = None  # parameters by group; products are summed in each; None: one
    # from the products {group: (m, N)} to scores (m, N)
    after: Callable[[dict[str, Tensor]], Tensor] = itemgetter("")
    # gᵢᵀ H⁻¹ gᵢ (N,) of the training samples; None: by one more iteration, which costs much
    own: Callable[[], Tensor] | None = None
    # from the products {group: (m,)} of queries before and after `before`, and the products
    # {group: (m, N)}, to qᵀ H⁻¹ q (m,)
    own_query: Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor] = _squares


def curved(train: GradientSource, asked: AttributionSettings) -> CurvatureSteps:
    """Return the curvature of the training samples.

    Raises:
        SpecError: The curvature does not fit the rows, or there are too many samples.
    """
    method = method_of(train, asked)
    record: dict[str, Any] = {"curvature": method}
    if method == "identity":
        return CurvatureSteps(record, own=lambda: own_products(train))
    if method in ("fisher", "blockfisher"):
        return _fisher(train, asked, record)
    if method in _SHARES:
        _require_whole(train, method)
        try:
            return _shrunk(train, asked, record)
        except GradscopeError as error:  # no factors, or no run
            if asked.curvature != "auto":
                raise
            return _fisher(train, asked, {"curvature": "fisher", "without": error.head})
    found = _approximate(train, method, asked)
    record |= {"damping": found.chosen.relative, "lambda": found.damping}
    if not asked.query_rank:
        return CurvatureSteps(record, before=_applied(found))

    def truncate(rows: Gradients) -> tuple[Gradients, Tensor]:
        blocks, dropped = found.truncate(rows, asked.query_rank)
        return rows.of(blocks), dropped

    return CurvatureSteps(
        {**record, "query_rank": asked.query_rank}, before=_applied(found), truncate=truncate
    )


def method_of(train: GradientSource, asked: AttributionSettings) -> Method:
    """Return the curvature of some settings, with a choice for "auto".

    Raises:
        SpecError: The rows are groups, and there are no factors of samples.
    """
    method = asked.curvature
    if train.facts.rows == "group" and method != "identity":
        method = _of_samples(train, asked)
    if method == "auto" and asked.query_rank:
        return "ekfac"
    if method == "auto" and train.facts.chain != "identity":
        return "fisher"
    if method == "auto":
        return "mean" if _pairs_pay(train, asked.room(train)) else "ekfac"
    return method


def _of_samples(train: GradientSource, asked: AttributionSettings) -> Method:
    """Return the curvature for groups: stored factors of samples, because H is that of samples.

    Raises:
        SpecError: The curvature would be computed from the rows of groups.
    """
    method: Method = "ekfac" if asked.curvature == "auto" else asked.curvature
    if asked.factors is None or method not in CURVATURES:
        raise SpecError(
            f"curvature {asked.curvature} cannot be computed from rows of groups: the Fisher needs "
            "the gradients of single samples",
            where=train.facts.name,
            remedy="Compute factors without group (gradscope compute -t ekfac), and give them as "
            '`factors` with curvature="ekfac". Or use curvature="identity". Or score samples, and '
            "add up the scores: gradscope stats SCORES.h5 --by COLUMN.",
        )
    return method


def _require_whole(train: GradientSource, method: str) -> None:
    """Raise if this process has a shard of the training samples."""
    if train.part is not None:
        raise SpecError(
            f"curvature {method} needs the products of all pairs of training samples, and shard "
            f"{train.part.shard} has some of the samples",
            where=train.facts.name,
            remedy='Use curvature="ekfac", or score all samples in one process.',
        )


def _pairs_pay(train: GradientSource, room: int) -> bool:
    """Whether products of all pairs of training samples cost about as much as the gradients."""
    n = train.total
    walks = 1 if train.cheap else -(-n * train.width * _TILED // room)
    return n <= _LARGEST and walks == 1 and float(n) ** 2 * train.width <= _PAIRS


def _fisher(
    train: GradientSource, asked: AttributionSettings, record: dict[str, Any]
) -> CurvatureSteps:
    """Return the Fisher of all entries or of layers, by moments for short rows, else by Gram."""
    shapes, many = train.shapes(), train.total > _LARGEST
    layers, joint = layers_of(shapes), dict.fromkeys(shapes, "")
    groups = layers if record["curvature"] == "blockfisher" else joint
    if many and _widest(shapes, joint) > _SHORT:
        record, groups = {**record, "curvature": "blockfisher"}, layers
    widest = _widest(shapes, groups)
    if widest <= _SHORT and (many or widest <= train.total):
        return _moments(train, asked, record, groups)
    _require_whole(train, record["curvature"])
    return _grams(train, asked, record, groups)


def _widest(shapes: Mapping[str, tuple[int, ...]], groups: Groups) -> int:
    widths = dict.fromkeys(groups.values(), 0)
    for name, shape in shapes.items():
        widths[groups[name]] += prod(shape)
    return max(widths.values())


def _grams(
    train: GradientSource, asked: AttributionSettings, record: dict[str, Any], groups: Groups
) -> CurvatureSteps:
    n, products = _gram(train, asked, groups)

    def spectra() -> list[Spectrum]:
        return [along(gram / n, n) for gram in products.values()]

    relative = _relative(asked, record["curvature"], n, n, spectra)
    means = [float(gram.diagonal().sum()) / n**2 for gram in products.values()]
    damping = dict(zip(products, relative.of(means, [n] * len(means)), strict=True))
    grams = {group: Gram(gram, n, damping[group]) for group, gram in products.items()}
    return CurvatureSteps(
        {**record, "damping": relative.relative, "lambda": damping.get("", damping)},
        groups=groups,
        after=lambda found: sum_of([gram.solved(found[k]) for k, gram in grams.items()]),
        own=lambda: sum_of([gram.self_influence() for gram in grams.values()]),
        own_query=lambda squares, found: sum_of(
            [gram.own(squares[k], found[k]) for k, gram in grams.items()]
        ),
    )


def _relative(
    asked: AttributionSettings,
    method: str,
    n: int,
    size: int,
    spectra: Callable[[], Sequence[Spectrum]],
) -> Ridge:
    """Return the damping of Fisher matrices of n samples with at most `size` rows.

    `spectra` returns the eigenvalues of each, and the squares of the mean gradient along them.
    """
    if asked.damping != "auto":
        return Ridge(float(asked.damping))
    if size > _SPECTRA:
        return Ridge(_LEAST[method])
    found = spectra()
    return trusted([values for values, _ in found], [s for _, s in found], n, _LEAST[method])


def _moments(
    train: GradientSource, asked: AttributionSettings, record: dict[str, Any], groups: Groups
) -> CurvatureSteps:
    moments = Moments(groups)
    for batch in train.all_batches():
        moments.add(batch.gradients)
    size = max(map(len, moments.sums.values()))
    relative = _relative(asked, record["curvature"], moments.n, size, moments.spectra)
    means = moments.mean_eigenvalues()
    sizes = [min(moments.n, len(total)) for total in moments.sums.values()]
    damping = dict(zip(means, relative.of([*means.values()], sizes), strict=True))
    inverse = moments.inverted(damping)
    solving = train.total * sum(float(len(total)) ** 2 for total in moments.sums.values())

    def before(rows: Gradients) -> Gradients:
        return rows.of({name: DenseBlock(values) for name, values in inverse(rows).items()})

    return CurvatureSteps(
        {**record, "damping": relative.relative, "lambda": damping.get("", damping)},
        before,
        own=(lambda: own_products(train, before)) if solving <= _LONG else None,
    )


def _shrunk(
    train: GradientSource, asked: AttributionSettings, record: dict[str, Any]
) -> CurvatureSteps:
    """Return H = (1 − ρ) F + ρ T, with T the damped EK-FAC of F, or the mean of H⁻¹ and T⁻¹.

    With Woodbury's identity, q H⁻¹ Gᵀ = q T⁻¹ Gᵀ (ρ + (1 − ρ) K)⁻¹, where K = G T⁻¹ Gᵀ / N. For the
    mean, H⁻¹ is scaled: both inverses have the same sum of self-influences. The effective number of
    directions d is the trace of K. If d > N, the N gradients span few of the directions, and the
    mean has a larger share ρ: ρ / (1 − ρ) is multiplied by (d/N)^1.5.
    """
    mean, share = record["curvature"] == "mean", _SHARES[record["curvature"]]
    found = _approximate(train, "ekfac", asked, raised=mean)
    before = _applied(found)
    n, products = _gram(train, asked, None, before)
    whole = products[""].diagonal().clone()
    odds = share / (1 - share)
    if mean:
        odds *= max(1.0, float(whole.sum()) / n**2) ** _POWER
        share = odds / (1 + odds)
    gram = Gram(products[""], n, odds)
    first, second = 0.0, 1 + odds  # the weights of T⁻¹ and of the Gram matrix's inverse
    if mean:
        own = float(gram.self_influence().sum())
        first, second = 0.5, 0.5 * (float(whole.sum()) / own if own else 1.0)
    return CurvatureSteps(
        {**record, "damping": found.chosen.relative, "share": share, "lambda": found.damping},
        before,
        after=lambda rows: first * rows[""] + second * gram.solved(rows[""]),
        own=lambda: first * whole + second * gram.self_influence(),
        own_query=lambda squares, rows: (
            first * squares[""] + second * gram.own(squares[""], rows[""])
        ),
    )


def _gram(
    train: GradientSource,
    asked: AttributionSettings,
    groups: Groups | None,
    before: Before = _as_it_is,
) -> tuple[int, dict[str, Tensor]]:
    """Return N, and {group: Gram matrix} of the training samples."""
    if train.n > _LARGEST:
        raise SpecError(
            f"the Fisher of full gradients supports up to {_LARGEST:,} training samples, and there "
            f"are {train.n:,}",
            where=train.facts.name,
            remedy="Project each parameter (project:dim=4096,kind=kronecker,per=parameter), or "
            'use curvature="ekfac".',
        )
    found = gram_of(train, precision(train, train.n), asked.room(train), groups, before)
    return max(1, int(train.table()["finite"].sum())), found


def _approximate(
    train: GradientSource, method: str, asked: AttributionSettings, *, raised: bool = False
) -> Curvature:
    """Return the inverse of an approximate curvature; see `RemainingGradient` for `raised`."""
    if train.facts.chain != "identity":
        raise SpecError(
            f"curvature {method} needs full gradients, and the rows are {train.facts.chain!r}",
            where=train.facts.name,
            remedy='Select rows of the chain identity (`chain`), or use curvature="fisher".',
        )
    chain, made = CURVATURES[method]
    damping = LEAST if asked.damping == "auto" else float(asked.damping)
    fixed = asked.damping != "auto" or method == "adam"  # Adam has roots of moments
    mean: dict[str, Tensor] | None = None
    if asked.factors is not None:
        moments, mean = stored_factors(asked.factors, train.facts, chain)
    else:
        moments, *means = train.aggregates([chain] if fixed else [chain, "mean"])
        mean = means[0] if means else None
    if fixed or (mean is None and not raised):
        return made(moments, damping)
    return made(moments, damping, RemainingGradient(mean or {}, train.total, raised))


def precision(train: GradientSource, rows: int) -> torch.dtype:
    """Return the dtype for products of that many rows with the training samples."""
    work = float(rows) * train.total * train.width
    return torch.float64 if work <= _LONG else torch.float32


def products_of(
    tile: Tile, source: GradientSource, groups: Groups | None = None
) -> dict[str, Tensor]:
    """Return {group: products (m, N)} of a tile with a source, 0 for samples left out."""
    found = _zeros(tile.n, source, groups)
    for batch in source.batches():
        for group, products in tile.with_each(batch.gradients, groups).items():
            found[group][:, batch.places] = products.cpu()
    return found


def gram_of(
    source: GradientSource,
    dtype: torch.dtype,
    memory: int,
    groups: Groups | None = None,
    before: Before = _as_it_is,
) -> dict[str, Tensor]:
    """Return {group: ⟨gᵢ, gⱼ⟩ (N, N)} of the samples of a source, 0 for samples left out.

    With `before` the products are ⟨H⁻¹gᵢ, gⱼ⟩.
    """
    found = _zeros(source.n, source, groups)
    step = max(1, memory // (_TILED * source.width))
    for tile in tiles(source.batches(), source.n, step, dtype):
        whole = step >= source.n  # every sample is in the tile: no second iteration
        few = max(1, _DENSE_BYTES // (_TILED * source.width))
        for some in tiles(tile.batches, source.n, few, dtype) if whole else [tile]:
            own = some.map(before)
            for batch in tile.batches if whole else source.batches():
                for group, products in own.with_each(batch.gradients, groups).items():
                    found[group][own.places.unsqueeze(1), batch.places] = products.cpu()
    return found


def _zeros(rows: int, source: GradientSource, groups: Groups | None) -> dict[str, Tensor]:
    names = [""] if groups is None else dict.fromkeys(groups.values())
    return {name: torch.zeros(rows, source.n, dtype=torch.float64) for name in names}


def layers_of(names: Iterable[str]) -> Groups:
    """Return {parameter: layer}: a bias belongs to the weight of its name."""
    found = {name: name for name in names}
    biases = {bias_of(name): name for name in found}
    return {name: biases.get(name, name) for name in found}


def _applied(found: Curvature) -> Before:
    def apply(rows: Gradients) -> Gradients:
        made = found.apply(rows, None)
        return rows.of({name: DenseBlock(values) for name, values in made.items()})

    return apply


def own_products(source: GradientSource, before: Before = _as_it_is) -> Tensor:
    """Return gᵢᵀ H⁻¹ gᵢ (N,) in float64 in one more iteration, 0 for samples left out."""
    found = torch.zeros(source.n, dtype=torch.float64)
    for batch in source.batches():
        few = slices(len(batch.places), _TILED * source.width, _READ_BYTES)
        for part in [batch] if before is _as_it_is else map(batch.select, few):
            found[part.places] = row_products(part.gradients, before(part.gradients))[""].cpu()
    return found
