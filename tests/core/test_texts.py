"""Texts that tell two numbers apart."""

import pytest

from gradscope.core.texts import unequal


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (2.638061, 0.007220718, ("2.64", "0.00722")),
        (1.0, 1.0 + 1e-7, ("1", "1.0000001")),
        (1e300, float("nan"), ("1e+300", "nan")),
        (0.1, 0.1 + 2**-56, ("0.10000000000000001", "0.10000000000000002")),
    ],
)
def test_numbers_that_differ_are_told_so(
    first: float, second: float, told: tuple[str, str]
) -> None:
    assert unequal(first, second) == told
