"""What stages make infinite or NaN of finite gradients is counted, told, and refused if asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradscope.errors import NonFiniteError
from gradscope.run import compute, merge, prepare, start
from gradscope.storage import open_file
from tests.run.project import SAMPLES, spec, write

OVERFLOWING = (
    "scale:by=1e300",
    "scale:by=1e300 | mean",
    "scale:by=1e30 | square | sum",
    "scale:by=1e300 | sum | sign",
    "mean | scale:by=1e300 | scale:by=1e300",
    "scale:by=1e18 | power:p=9 | norm",
    "scale:by=1e300 | max",
    "scale:by=1e300 | norm | quantile:q=0.5",
    "moment:k=900",
    "std:ddof=60",
    "noise:std=1e308 | mean",
)
HARMLESS = (
    "identity",
    "square",
    "square | mean",
    "scale:by=1e300 | nonfinite",
    "scale:by=1e300 | histogram:bins=4",
    "sign | sum",
    "clip:max_norm=1e-30",
    "mean:standard_error=true",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def recounted(path: Path) -> list[int]:
    """Count what is not finite in a file, by numpy."""
    with open_file(path) as file:
        finite = file.samples["finite"].astype(bool)
        return [
            sum(
                int((~np.isfinite(a[...] if chain.reduced else a[...][finite])).sum())
                for a in chain.values()
            )
            for chain in file.chains
        ]


@pytest.mark.parametrize("batch_size", [60, 7])
def test_what_overflows_is_counted(folder: Path, batch_size: int) -> None:
    out = folder / "o.h5"
    chains = [*OVERFLOWING, *HARMLESS]
    job = prepare(spec(folder, transform=chains, dtype="float32", batch_size=batch_size))
    found = compute(job, out).chains_nonfinite
    counted = recounted(out)
    hidden = OVERFLOWING.index("scale:by=1e300 | sum | sign")
    assert counted[hidden] == 0 < found[hidden]  # the signs of what is no number
    assert [n for k, n in enumerate(found) if k != hidden] == [
        n for k, n in enumerate(counted) if k != hidden
    ]
    assert all(found[: len(OVERFLOWING)]) and not any(found[len(OVERFLOWING) :])
    again = compute(job, out, resume=True)  # it was complete before
    assert again.chains_nonfinite == found


@pytest.mark.parametrize("layout", ["dense", "factored"])
def test_what_the_stored_format_is_too_small_for_is_counted(folder: Path, layout: str) -> None:
    chains = ["identity", "scale:by=3e4 | square", "scale:by=1e4 | square | mean"]
    options = {"transform": chains, "dtype": "float16", "layout": layout}
    found = compute(prepare(spec(folder, **options)), folder / "o.h5").chains_nonfinite
    assert found[0] == found[2] == 0 < found[1]
    assert list(found) == recounted(folder / "o.h5")


def test_samples_that_are_not_finite_are_not_counted_twice(folder: Path) -> None:
    with np.load(folder / "data.npz") as data:
        inputs, targets = data["inputs"].copy(), data["targets"]
    inputs[3] = np.nan
    np.savez(folder / "data.npz", inputs=inputs, targets=targets)
    chains = ["identity", "square", "square | mean", "scale:by=1e300"]
    found = compute(prepare(spec(folder, transform=chains, dtype="float32")), folder / "o.h5")
    assert found.nonfinite == 1
    assert found.chains_nonfinite[:3] == (0, 0, 0)
    assert found.chains_nonfinite[3] == recounted(folder / "o.h5")[3] > 0


@pytest.mark.parametrize("chain", OVERFLOWING[:4])  # in rows, after a reducer, before one
def test_to_fail_leaves_no_result(folder: Path, chain: str) -> None:
    options: dict[str, Any] = {"transform": [chain], "dtype": "float32", "nonfinite": "fail"}
    with pytest.raises(NonFiniteError) as caught:
        compute(prepare(spec(folder, **options)), folder / "o.h5")
    assert caught.value.exit_code == 7
    assert chain.partition(":")[0] in str(caught.value)
    assert not (folder / "o.h5").exists()


def test_stopped_and_in_parts_the_counts_are_the_same(folder: Path) -> None:
    chains = ["scale:by=1e300", "scale:by=1e300 | mean", "scale:by=1e300 | sum | sign", "square"]
    options: dict[str, Any] = {"transform": chains, "dtype": "float32", "batch_size": 7}
    whole = compute(prepare(spec(folder, **options)), folder / "whole.h5").chains_nonfinite
    with start(prepare(spec(folder, **options)), folder / "stopped.h5") as run:
        for k, batch in enumerate(run.remaining()):
            run.add(batch)
            if k == 3:
                break
    stopped = compute(prepare(spec(folder, **options)), folder / "stopped.h5", resume=True)
    assert stopped.chains_nonfinite == whole
    parts = []
    for k in range(3):
        job = prepare(spec(folder, shard=f"{k}/3", **options))
        parts.append(job.place(folder / "part.h5"))
        compute(job, parts[-1])
    for virtual in (False, True):
        merged = merge(parts, folder / f"merged{virtual}.h5", virtual=virtual)
        assert merged.chains_nonfinite == whole
        assert merged.samples == SAMPLES
    assert (whole[0], whole[3]) == (recounted(folder / "mergedTrue.h5")[0], 0)
