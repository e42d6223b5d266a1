"""Defects that no guard can tell from another wish: a wrong formula, of which the tests know."""

from collections.abc import Callable

import torch

from gradscope.stages import labels
from gradscope.stages.reducers import moments
from gradscope.stages.transforms import elementwise, norms
from tests.mutants.base import Install, after, around, before, mutant
from tests.mutants.scenarios import Asked, ExactLabels, Expected, clipped, each, variance
from tests.stages import test_labels, test_reducers, test_transforms


def _told(
    name: str,
    room: str,
    defect: str,
    what: str,
    expected: Expected,
    test: Callable[[], None],
    install: Install,
) -> None:
    mutant(name, room, defect, Asked("mlp", what=what, expected=expected), "tests", install, test)


_told(
    "variance by n",
    "reducers",
    "a variance is divided by the number of samples, whatever ddof says",
    "var",
    variance,
    lambda: test_reducers.test_at_once_and_in_any_split("var", torch.float64),
    around(moments, "variance", before(lambda part, n, ddof: (part, n, 0))),
)
_told(
    "clipped by the square",
    "transforms",
    "a gradient is clipped by its squared norm",
    "clip:max_norm=0.5 | mean",
    clipped,
    lambda: test_transforms.test_rows("clip:max_norm=0.5", ()),
    around(norms, "whole", after(lambda found, *_: found.square())),
)
_told(
    "mean added",
    "transforms",
    "centring adds the mean instead of taking it off",
    "center | square | mean",
    each(lambda g: g.var(0, correction=0)),
    lambda: test_transforms.test_rows("center", ()),
    around(elementwise, "CenteredBlock", before(lambda block, mean: (block, -mean))),
)
mutant(
    "probabilities of other classes",
    "labels",
    "the expectation over labels gives each class the probability of the one before it",
    ExactLabels("classifier", what="second_moment"),
    "tests",
    around(labels, "ExpectedBlock", before(lambda b, weights: (b, weights.roll(1, 1)))),
    lambda: test_labels.test_exact_is_the_closed_form("hooks", "square | mean"),
)
