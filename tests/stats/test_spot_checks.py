"""A few samples of a file whose numbers belong together, or do not."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradscope.errors import ResultFileError
from gradscope.stats import require_consistent, spot_check_rows, summarize
from tests.stats.fakes import FakeFile, fake


def spoilt(file: FakeFile, norms: Any = None, **samples: Any) -> FakeFile:
    """Return the file with other columns of /samples or /norms."""
    return replace(file, wrong={"samples": samples, "norms": norms or {}})


def test_what_belongs_together_passes() -> None:
    for file in (fake(30), fake(30, broken=(3, 5)), fake(2), fake(3, broken=(0, 1, 2))):
        for seed in range(5):
            require_consistent(file, seed)
            require_consistent(replace(file, rows=False), seed)


def test_samples_are_drawn_by_seed() -> None:
    file = fake(200, broken=(3,))
    drawn = [spot_check_rows(file, seed).tolist() for seed in range(30)]
    assert drawn == [spot_check_rows(file, seed).tolist() for seed in range(30)]
    assert len({tuple(rows) for rows in drawn}) > 25
    assert all(len(set(rows)) == 4 and 3 not in rows for rows in drawn)
    assert len({row for rows in drawn for row in rows}) > 60
    assert all(rows[-1] == 199 for rows in drawn)
    assert spot_check_rows(fake(2), 0).tolist() == [0, 1]
    assert spot_check_rows(fake(1), 0).tolist() == [0]


def test_norms_of_parameters_that_do_not_make_up_the_norm() -> None:
    file = replace(fake(30), rows=False)
    norm = file.samples["norm"]
    with pytest.raises(ResultFileError, match=r"fake\.h5: the numbers of sample 1\d+ contradict"):
        require_consistent(spoilt(file, norm=1.01 * norm))
    require_consistent(spoilt(file, norm=(1 + 1e-6) * norm))


def test_rows_that_do_not_have_the_recorded_norms() -> None:
    file = fake(30)
    name = next(iter(file.gradients))
    wrong = 1.5 * file.norms[name]
    others = sum(np.square(norms) for key, norms in file.norms.items() if key != name)
    consistent = spoilt(file, norms={name: wrong}, norm=np.sqrt(others + np.square(wrong)))
    with pytest.raises(
        ResultFileError, match=re.escape(f"for '{name}'") + ".*norm of its stored row"
    ):
        require_consistent(consistent)
    require_consistent(replace(consistent, rows=False))  # there is nothing to compare with


def test_rows_in_half_precision_are_held_less_tightly() -> None:
    file = replace(fake(30), run={"dtype": "bfloat16"})
    rounded = {k: g.astype(np.float16).astype(np.float64) for k, g in file.gradients.items()}
    norms = file.norms
    mixed = spoilt(replace(file, gradients=rounded), norms=norms, norm=file.samples["norm"])
    require_consistent(mixed)


def test_expectations_over_labels_of_norms_do_not_add_up() -> None:
    exact = {"spec": {"compute": {"labels": "exact"}}}
    file = spoilt(replace(fake(30), run=exact, rows=False), norm=fake(30).samples["norm"] * 1.1)
    require_consistent(file)
    names = [check.name for check in summarize(file).checks]
    assert not any(name.startswith("‖gᵢ‖²") for name in names)
    data = spoilt(replace(fake(30), rows=False), norm=fake(30).samples["norm"] * 1.1)
    assert not next(c for c in summarize(data).checks if c.name.startswith("‖gᵢ‖²")).passed
