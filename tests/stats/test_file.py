"""Statistics of real files, against those of the same gradients in memory."""

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients
from gradscope.stats import Record, summarize
from gradscope.storage import ChainPlan, FilePlan, Rows, open_file, open_writer
from tests.stats.fakes import fake


def write(path, file, dtype=torch.float64, layout="auto"):
    """Store the gradients of a fake file in two batches."""
    plan = FilePlan(
        run={"compute": {"backend": "auto"}},
        fingerprint={},
        attributes={},
        n=file.n,
        parameters=file.parameters,
        chains=(ChainPlan("identity", False),),
        dtype=dtype,
        layout=layout,
    )
    with open_writer(path, plan) as writer:
        for rows in (slice(0, file.n // 3), slice(file.n // 3, None)):
            part = {name: torch.from_numpy(g[rows]) for name, g in file.gradients.items()}
            samples = {k: torch.from_numpy(np.asarray(v[rows])) for k, v in file.samples.items()}
            norms = {name: torch.from_numpy(v[rows]) for name, v in file.norms.items()}
            chains = (Gradients({name: DenseBlock(g) for name, g in part.items()}),)
            writer.append(Rows(**samples, norms=norms, chains=chains), {})
        writer.finish(
            results={},
            certificate={"verified": True, "backend": "hooks"},
            norm_attributes=file.norm_attributes,
        )


def assert_close(found, expected):
    """Equal, numbers to the order in which they were added."""
    if isinstance(found, Record):
        assert type(found) is type(expected)
        for name in type(found).model_fields:
            assert_close(getattr(found, name), getattr(expected, name))
    elif isinstance(found, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    else:
        assert found == expected


@pytest.mark.parametrize("broken", [(), (2, 9)], ids=["finite", "broken"])
def test_a_stored_file_has_the_statistics_of_its_gradients(tmp_path, broken):
    memory = fake(25, broken=broken)
    write(tmp_path / "out.h5", memory)
    with open_file(tmp_path / "out.h5") as file:
        stored = summarize(file)
    expected = summarize(memory)
    assert stored.results.keys() == expected.results.keys()
    for name in stored.results.keys() - {"points", "cosines"}:
        assert_close(stored.results[name], expected.results[name])
    assert stored.file.backend == "hooks"
    assert stored.file.bytes == (tmp_path / "out.h5").stat().st_size
    assert [chain.text for chain in stored.file.chains] == ["identity"]
    assert (stored.file.samples, stored.file.entries) == (25, 71)
