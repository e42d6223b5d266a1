"""How much damping: a trust region, from the training gradients alone.

The curvature H is inverted as H + αΛ̄, with Λ̄ the mean eigenvalue of each layer. At the end of a
training the gradients' mean ḡ is about zero, and a small α is near the best. Where training stopped
earlier, ḡ is not: the Newton step (H + αΛ̄)⁻¹ḡ that is left would take the model far from where it
is, and the linearisation that scores stand on does not reach so far. Then α rises until the step
does no more than chance, the drawing of N samples, would do at the least α. Neither queries nor
retrained models are looked at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 0.1  # of the mean eigenvalue: of a converged model; a factor 5 either way changes little
_TIMES = 2.0  # the noise that the step may do as much as
_STEPS = 40  # halvings of an interval of a factor 2 in α


def trusted(
    eigenvalues: Sequence[Tensor], squares: Sequence[Tensor], n: int, least: float = LEAST
) -> float:
    """Return the smallest α ≥ `least` whose Newton step can be trusted.

    With eigenvalues Λ_k and squares ḡ_k² of the mean gradient along their eigenvectors:

        Σ_k ḡ_k² Λ_k / (Λ_k + αΛ̄)²  ≤  (2/N) Σ_k Λ_k² / (Λ_k + α₀Λ̄)²,  α₀ = `least`

    On the left is dᵀHd of the step d; on the right twice its expectation at α₀, if ḡ were the mean
    of N draws with mean zero and second moment H. The left side falls as α rises.

    Args:
        eigenvalues: Of each layer, (p,) or any shape, not negative.
        squares: Of the mean gradient in the same basis, shaped as they are.
        n: Number N of training samples.
        least: α₀.
    """
    each = [(e.double(), s.double()) for e, s in zip(eigenvalues, squares, strict=True) if e.any()]
    noise = _TIMES / n * sum(_step(e, e, least) for e, _ in each)

    def too_far(damping: float) -> bool:
        return sum(_step(e, s, damping) for e, s in each) > noise

    if not each or not too_far(least):
        return least
    high = least
    while too_far(high):
        high *= 2.0
    low = high / 2.0
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if too_far(middle) else (low, middle)
    return high


def _step(eigenvalues: Tensor, squares: Tensor, damping: float) -> float:
    """Return Σ_k s_k Λ_k / (Λ_k + αΛ̄)²."""
    raised = eigenvalues + damping * eigenvalues.mean()
    tiny = torch.finfo(torch.float64).tiny
    return float((squares * eigenvalues / raised.square().clamp_(min=tiny)).sum())


def along(gram: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of K = G Gᵀ / N, and the squares of the mean gradient along them.

    The eigenvectors of the empirical Fisher GᵀG / N are Gᵀu / √(Nλ) for those u of K, and the
    mean gradient is Gᵀ1 / N: so ḡ_k² = λ_k (u_k·1)² / N.

    Args:
        gram: K (N, N), symmetric; rows and columns of samples left out are zero.
        n: Number N of those that are not.

    Returns:
        (N,) and (N,), float64.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram.double())
    eigenvalues = eigenvalues.clamp_(min=0.0)
    return eigenvalues, eigenvalues * vectors.sum(0).square() / n
