"""Is the batch large enough? The tests of adaptive sampling, and the batch size of CABS.

Byrd et al. 2012 (norm test), Bollapragada et al. 2018 (inner-product and orthogonality test),
Balles et al. 2017 (CABS).
"""

import numpy as np

from gradscope.stats.base import Floats, Record, number, ratio

_SMALLEST, _LARGEST = 16, 2048  # as published


class BatchTests(Record):
    """Variance of the mean gradient against its length; a batch passes with θ when it is ≤ θ².

    Attributes:
        norm: θ² of the norm test.
        inner_product: θ² of the inner-product test; None without products with the mean.
        orthogonality: ν² of the orthogonality test, likewise. norm = inner_product + orthogonality.
        plug_in_noise_scale: N · norm, in samples: the batch that passes the norm test with θ = 1.
    """

    norm: float | None
    inner_product: float | None
    orthogonality: float | None
    plug_in_noise_scale: float | None


def batch_tests(
    norms: Floats, mean_gradient_squared: float | None, dots: Floats | None
) -> BatchTests:
    """Take the tests on n samples as one batch.

    Args:
        norms: ‖gᵢ‖ (n,).
        mean_gradient_squared: ‖G‖².
        dots: ⟨gᵢ, G⟩ (n,).
    """
    n, big = norms.size, mean_gradient_squared
    if n < 2 or big is None:
        return BatchTests(
            norm=None, inner_product=None, orthogonality=None, plug_in_noise_scale=None
        )
    with np.errstate(over="ignore"):
        squares = float(np.square(norms).sum())
    norm = ratio(squares - n * big, n * (n - 1) * big)
    inner = orthogonal = None
    if dots is not None and big > 0:
        with np.errstate(over="ignore"):
            along = float(np.square(dots / big).sum())  # Σ⟨gᵢ, G⟩² / ‖G‖⁴
        inner = number((along - n) / (n * (n - 1)))
        orthogonal = number((squares / big - along) / (n * (n - 1)))
    return BatchTests(
        norm=norm,
        inner_product=inner,
        orthogonality=orthogonal,
        plug_in_noise_scale=None if norm is None else number(n * norm),
    )


class Cabs(Record):
    """The batch size that balances variance and descent for plain SGD.

    Attributes:
        variance: ξ = mean‖gᵢ‖² − ‖G‖².
        loss: L, the mean loss.
        per_learning_rate: ξ / L.
        learning_rate: As given.
        unclipped: learning rate · ξ / L.
        batch_size: `unclipped`, rounded and clipped to [16, 2048]; None without a learning rate.
        flag: Why there is none, or None.
    """

    variance: float | None
    loss: float | None
    per_learning_rate: float | None
    learning_rate: float | None
    unclipped: float | None
    batch_size: int | None
    flag: str | None


def cabs(
    norms: Floats, losses: Floats, mean_gradient_squared: float | None, rate: float | None
) -> Cabs:
    """Couple the batch size to the learning rate `rate`."""
    variance = loss = None
    if norms.size and mean_gradient_squared is not None:
        with np.errstate(over="ignore"):
            variance = number(max(np.mean(np.square(norms)) - mean_gradient_squared, 0.0))
        loss = number(losses.mean())
    each = None if variance is None or loss is None else ratio(variance, loss)
    unclipped = None if each is None or rate is None else number(rate * each)
    flag = None
    if each is None:
        flag = "the mean loss is not positive" if variance is not None else "no finite samples"
    size = None if unclipped is None else min(max(round(unclipped), _SMALLEST), _LARGEST)
    return Cabs(
        variance=variance,
        loss=loss,
        per_learning_rate=each,
        learning_rate=rate,
        unclipped=unclipped,
        batch_size=size,
        flag=flag,
    )
