"""One parameter's gradients as found beside those of the loop: what every detector looks at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Mistake(NamedTuple):
    """What is wrong with one parameter's gradients.

    Attributes:
        kind: One word, for programs.
        meaning: What it means and what to do, for people.
    """

    kind: str
    meaning: str


@dataclass(frozen=True)
class Pair:
    """Found and right gradients, both real and in float64.

    Attributes:
        found: (m, *shape), the rows looked at.
        loop: (m, *shape), what they should be.
        errors: (m,), ‖foundᵢ − loopᵢ‖ over the scale of sample i; infinite where not finite.
        samples: (m,) int64, the rows' positions in the batch.
        n: The number of samples of the whole batch.
        tolerance: The largest error that agrees.
        parameter: (*shape), the parameter, or None when only part of it is looked at.
        sizes: What has which size in the batch, to name an integer factor.
        coupled: Whether the batch's losses differ from those of batches of one.
    """

    found: Tensor
    loop: Tensor
    errors: Tensor
    samples: Tensor
    n: int
    tolerance: float
    parameter: Tensor | None = None
    sizes: Mapping[int, str] = field(default_factory=dict)
    coupled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.found.shape[1:])

    @property
    def slack(self) -> float:
        """How far from exact a relation between found and right gradients may be."""
        return max(1e-6, 3 * self.tolerance)

    @property
    def cosine(self) -> float:
        """⟨a, b⟩ / (‖a‖ ‖b‖)."""
        return cosine(self.found, self.loop)

    @property
    def factor(self) -> float | None:
        """⟨a, b⟩ / ⟨b, b⟩, None where b is zero."""
        return factor(self.found, self.loop)

    def near(self, x: float, y: float) -> bool:
        """Whether two factors are equal as far as the gradients are."""
        return abs(x - y) <= self.slack * abs(y)

    def multiple(self, x: Tensor, y: Tensor) -> float | None:
        """Return c where x = c·y, else None; neither may be zero.

        Two single numbers always have a factor, so there only one with a meaning counts.
        """
        c = factor(x, y)
        if c is None or c == 0.0 or not bool((x - c * y).norm() <= self.slack * x.norm()):
            return None
        if x.numel() == 1 and not any(self.near(abs(c), k) for k in (1.0, self.n, 1 / self.n)):
            return None
        return c

    def rows(self, rows: Tensor) -> "Pair":
        """Return the pair of some samples; `rows` is a mask (m,)."""
        parts = {k: getattr(self, k)[rows] for k in ("found", "loop", "errors", "samples")}
        return replace(self, **parts)


Detector = Callable[[Pair], Mistake | None]


def factor(a: Tensor, b: Tensor) -> float | None:
    """Return ⟨a, b⟩ / ⟨b, b⟩, None where b is zero."""
    square = float((b * b).sum())
    return float((a * b).sum()) / square if square > 0.0 else None


def cosine(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ / (‖a‖ ‖b‖): 1 when both are zero, 0 when one is."""
    norms = float(a.norm()), float(b.norm())
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return max(-1.0, min(1.0, float((a / norms[0] * (b / norms[1])).sum())))


def listed(numbers: Tensor, word: str, most: int = 5) -> str:
    """Return "sample 3" or "samples 3, 4, 9, ..." for a tensor of positions."""
    values = [int(v) for v in numbers]
    shown = ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")
    return f"{word} {shown}" if len(values) == 1 else f"{word}s {shown}"


def number(x: float) -> str:
    """Return a factor as text, short and without a false exactness."""
    return f"{x:.4g}"


def matched(a: Tensor, b: Tensor, slack: float) -> Tensor | None:
    """Return (k,) the row of b that each row of a equals, or None when one equals no row.

    Args:
        a: (k, p).
        b: (k, p).
        slack: How far apart equal rows may be, relative to the largest row of b.
    """
    if not bool(b.any()):
        return None
    lengths = a.norm(dim=1), b.norm(dim=1)
    allowed = slack * lengths[1].max()
    gaps = (lengths[0][:, None] - lengths[1]).abs().min(1).values
    if not bool((gaps <= allowed).all()):  # cheap, and most often the answer
        return None
    distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    own = torch.arange(len(a), device=a.device)
    best, at = distances.min(1)
    at = torch.where(distances.diagonal() <= allowed, own, at)  # equal rows of b: its own first
    return at if bool((best <= allowed).all()) else None
