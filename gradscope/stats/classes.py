"""A row a class, and how much of the noise lies between the classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.base import Floats, Record, number, ratio
from gradscope.stats.table import Positions, Table

MOST = 100  # more distinct targets than these are not taken for classes


class ClassRow(Record):
    """The samples of one class.

    Attributes:
        target: The class.
        samples: How many.
        mean_loss: Their mean loss.
        mean_norm: mean ‖gᵢ‖.
        mean_cosine: The mean cosine of the samples with G.
        opposing: The share of them with ⟨gᵢ, G⟩ < 0.
        mean_gradient_norm: ‖G_c‖, G_c their mean gradient.
        cosine: Of G_c with G.
        trace_covariance: (mean‖gᵢ‖² − ‖G_c‖²) · n/(n − 1); None for one sample.
    """

    target: bool | int | float | str
    samples: int
    mean_loss: float | None
    mean_norm: float | None
    mean_cosine: float | None
    opposing: float | None
    mean_gradient_norm: float | None
    cosine: float | None
    trace_covariance: float | None


class Classes(Record):
    """All classes. `between` + `within` is the variance mean‖gᵢ‖² − ‖G‖².

    Attributes:
        rows: In the order of the targets.
        between: Σ_c n_c/N · ‖G_c − G‖²; None without rows.
        within: Σ_c n_c/N · (mean‖gᵢ‖² − ‖G_c‖²), likewise.
    """

    rows: tuple[ClassRow, ...]
    between: float | None
    within: float | None


@dataclass(frozen=True)
class Groups:
    """Which class each sample is of.

    Attributes:
        targets: The classes, sorted (k,).
        of: (n,), positions in `targets`.
    """

    targets: NDArray[Any]
    of: Positions


def groups(table: Table) -> Groups | None:
    """Return the classes if the targets are some: whole numbers or text, few, each more than once.

    At most 100 distinct ones, and on average at least two samples of each.
    """
    target = table.target
    if target is None or target.ndim != 1 or target.dtype.kind not in "biuSUO" or not table.n:
        return None
    found, of = np.unique(target, return_inverse=True)
    if len(found) < 2 or len(found) > min(MOST, table.n // 2):
        return None
    return Groups(found, of)


def classes(
    table: Table, members: Groups, found: Floats | None, squares: Floats | None, dots: Floats | None
) -> Classes:
    """Summarise every class.

    Args:
        table: The samples.
        members: Their classes.
        found: Their cosines with G (n,), NaN where there is none.
        squares: ‖G_c‖² (k,).
        dots: ⟨gᵢ, G⟩ (n,).
    """
    rows, between, within = [], 0.0, 0.0
    big = 0.0 if dots is None else float(dots.mean())  # ‖G‖²
    for k, target in enumerate(members.targets):
        mine = members.of == k
        n, small = int(mine.sum()), float(np.square(table.norm[mine]).mean())
        length = along = None
        if squares is not None and dots is not None:
            length, along = float(squares[k]), float(dots[mine].mean())
            between += n / table.n * (length - 2 * along + big)
            within += n / table.n * (small - length)
        rows.append(
            ClassRow(
                target=_plain(target),
                samples=n,
                mean_loss=number(table.loss[mine].mean()),
                mean_norm=number(table.norm[mine].mean()),
                mean_cosine=None if found is None else _mean(found[mine]),
                opposing=None if dots is None else float(np.mean(dots[mine] < 0)),
                mean_gradient_norm=None if length is None else number(np.sqrt(length)),
                cosine=None
                if length is None or along is None
                else ratio(along, np.sqrt(length * big)),
                trace_covariance=number((small - length) * n / (n - 1))
                if length is not None and n > 1
                else None,
            )
        )
    known = squares is not None and dots is not None
    return Classes(
        rows=tuple(rows),
        between=number(max(between, 0.0)) if known else None,
        within=number(max(within, 0.0)) if known else None,
    )


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return number(known.mean()) if known.size else None


def _plain(target: Any) -> bool | int | float | str:
    value = target.item() if hasattr(target, "item") else target
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
