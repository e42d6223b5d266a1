"""Planted mistakes: each must be named, and the right gradients must agree."""

import math

import pytest
import torch

from gradscope.comparison.agreement import DOUBLE, Oracle, agreements, relative_errors
from gradscope.comparison.mistakes import wrong_shape

N, SHAPE = 6, (4, 5)
_G = torch.Generator().manual_seed(0)
# uneven samples, so that neither order nor scale can hide
B = torch.randn(N, *SHAPE, generator=_G, dtype=torch.float64) * torch.logspace(
    -1, 1, N, dtype=torch.float64
).reshape(N, 1, 1)
SQUARE = torch.randn(N, 4, 4, generator=_G, dtype=torch.float64)
KERNEL = torch.randn(N, 2, 3, 3, 3, generator=_G, dtype=torch.float64)
ORDER = torch.tensor([2, 0, 1, 5, 3, 4])


def judged(found, loop=B, **facts):
    loop = loop if isinstance(loop, torch.Tensor) else torch.as_tensor(loop)
    norms = loop.abs().flatten(1).norm(dim=1).double()
    norms = torch.nan_to_num(norms, nan=0.0, posinf=0.0)
    (result,) = agreements({"w": found}, Oracle({"w": loop}, norms, **facts))
    return result


def changed(rows, value):
    found = B.clone()
    found[rows] = value
    return found


PLANTED = [
    (B / N, "mean_loss", "c = 1/n with n = 6"),
    (-B / N, "mean_loss", "the sign is flipped; in addition"),
    (B * N, "times_n", "c = n with n = 6"),
    (-B, "sign", "c = -1"),
    (B / 10, "factor", "a mean instead of a sum over 10"),
    (B * 0.3141, "factor", "c = 0.3141"),
    (B[ORDER], "permuted", "row 0 is the gradient of sample 2"),
    (B[ORDER] / N, "permuted", "c = 1/n with n = 6"),
    (B[[0, 1, 2, 3, 4, 4]], "permuted", "row 5 is the gradient of sample 4"),
    (B.sum(0).expand(N, *SHAPE), "summed", "every row is the sum of"),
    (B.mean(0).expand(N, *SHAPE), "summed", "every row is the mean of"),
    (B.mT.reshape(B.shape), "layout", "transposed and then reshaped"),
    (B.mT.reshape(B.shape) / N, "layout", "In addition, c = 1/n"),
    (B.movedim(0, -1).reshape(B.shape), "layout", "the sample axis was last"),
    (torch.zeros_like(B), "zero", "all zero"),
    (changed([1, 4], math.nan), "not_finite", "NaN or infinity in samples 1, 4 (2 of 6)"),
    (B.float().double(), "rounded", "lower precision"),
    (changed([2], 0.0), "some_samples", "only sample 2 of 6 differs: all zero"),
    (changed([0, 5], -B[[0, 5]]), "some_samples", "only samples 0, 5 of 6 differ: c = -1"),
    (B * 0.5 + B.abs() * 0.2, "unknown", "no simple relation"),
    (torch.randn(B.shape, generator=_G), "unrelated", "different weights"),
]


@pytest.mark.parametrize(("found", "kind", "words"), PLANTED, ids=lambda x: str(x)[:40])
def test_a_planted_mistake_is_named(found, kind, words):
    result = judged(found)
    assert not result.agrees
    assert (result.kind, words in result.meaning) == (kind, True), result.meaning


@pytest.mark.parametrize(
    ("found", "loop", "kind", "words"),
    [
        (SQUARE.mT, SQUARE, "layout", "axes 0 and 1 of the parameter are transposed."),
        (KERNEL.transpose(3, 4), KERNEL, "layout", "axes 2 and 3"),
        (KERNEL.flip(3, 4), KERNEL, "layout", "the kernel is flipped"),
        (B, torch.zeros_like(B), "not_zero", "the loop has zeros"),
        (B, changed([3], math.nan), "hides_not_finite", "sample 3 is not finite in the loop"),
    ],
)
def test_mistakes_that_the_loop_tells(found, loop, kind, words):
    result = judged(found, loop)
    assert (result.kind, words in result.meaning) == (kind, True), result.meaning


def test_coupling_is_named_where_nothing_surer_fits():
    assert judged(B * 0.5 + B.abs() * 0.2, coupled=True).kind == "coupled"
    assert judged(B / N, coupled=True).kind == "mean_loss"


def test_nan_in_the_loop_must_be_found_too():
    loop = changed([3], math.nan)
    same = judged(loop.clone(), loop)
    assert same.agrees
    assert same.absolute == 0.0
    assert judged(loop / N, loop).kind == "mean_loss"


def test_complex_gradients():
    loop = torch.complex(B, B.flip(0))
    assert judged(loop.clone(), loop).agrees
    conjugated = judged(loop.conj(), loop)
    assert not conjugated.agrees
    assert judged(loop / N, loop).kind == "mean_loss"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_right_gradients_agree_in_every_dtype(dtype):
    result = judged(B.to(dtype))
    assert (result.agrees, result.kind) == (True, "agrees")
    assert not judged((B / N).to(dtype)).agrees
    assert judged((B / N).to(dtype)).kind == "mean_loss"


def test_the_numbers_against_numpy():
    import numpy as np

    found = (B + 0.1 * torch.randn(B.shape, generator=_G)).numpy()
    result = judged(found)
    a, b = found.reshape(N, -1), B.numpy().reshape(N, -1)
    relative = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    assert result.relative == pytest.approx(relative.max())
    assert result.worst_sample == relative.argmax()
    assert result.absolute == pytest.approx(np.abs(a - b).max())
    assert result.factor == pytest.approx((a * b).sum() / (b * b).sum())
    assert result.cosine == pytest.approx((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_rounding_noise_around_zero_agrees():
    """A gradient that is zero in theory is noise in both, and unrelated noise."""
    big = torch.full((N,), 100.0, dtype=torch.float64)
    noise, other = (1e-16 * torch.randn(N, 3, generator=_G, dtype=torch.float64) for _ in "ab")
    (result,) = agreements({"w": other}, Oracle({"w": noise}, big))
    assert result.agrees
    errors = relative_errors(1e3 * noise + 1e-5, noise, DOUBLE, big)
    assert bool((errors > 1e-8).all())


def test_a_vanishing_sample_is_held_to_the_scale_of_the_others():
    loop = changed([0], 1e-20)
    assert judged(changed([0], 3e-20), loop).agrees
    assert not judged(changed([0], 1e-10), loop).agrees


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((4, 5), "there is no sample axis"),
        ((1, 4, 5), "there is no sample axis"),
        ((4, 5, 6), "the sample axis is last"),
        ((6, 5, 4), "in another order (transposed)"),
        ((6, 20), "the number of entries is right"),
        ((5, 4, 5), "5 rows for 6 samples"),
        ((6, 7, 4, 5), "an axis (positions?) was not summed over"),
        ((3, 3), "another parameter"),
        ((0, 4, 5), "0 rows for 6 samples"),
    ],
)
def test_a_wrong_shape_is_explained(found, words):
    mistake = wrong_shape(found, N, SHAPE)
    assert words in mistake.meaning
    assert f"{found} instead of (6, 4, 5)" in mistake.meaning


@pytest.mark.parametrize("n", [1, 2])
def test_few_samples_and_single_numbers(n):
    loop = B[:n, 0, :1]
    assert judged(loop.clone(), loop).agrees
    assert judged(3.3 * loop + 0.1, loop).kind in ("unknown", "unrelated")
    assert judged(B[:n] * 3, B[:n]).kind == "factor"


def test_the_input_is_left_alone():
    found, copy = (-B).clone(), (-B).clone()
    judged(found)
    assert torch.equal(found, copy)
