"""Rows on their way to the disk: whatever the shapes, and whatever stops a batch halfway."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from gradscope.blocks import Block, DenseBlock, Gradients, MappedBlock
from gradscope.config import parse_compression
from gradscope.errors import OutputError
from gradscope.storage import open_file, open_writer
from tests.storage.example import BATCH, PLAN, N, load, rows, same, with_layout, write, write_block


def _random(n: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(n, *shape, generator=generator)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("n", "shape", "batch"),
    [
        (30, (25_600,), 13),  # ten rows a chunk, which do not divide the batch
        (5, (3, 701, 211), 2),  # a row of several chunks, equal ones
        (3, (7, 300_000), 3),  # cut along the second axis, with a shorter last chunk
        (3, (5, 100_003), 1),
        (4, (262_144,), 2),  # a row of 1 MiB
        (1000, (3,), 7),  # many batches a chunk
        (5000, (), 512),
        (9, (1, 1, 5), 4),
        (5, (0, 4), 2),
    ],
)
@pytest.mark.parametrize(
    ("computed", "text"), [(False, None), (True, None), (False, "gzip:1"), (True, "gzip:1")]
)
def test_rows_of_any_shape(
    tmp_path: Path, n: int, shape: tuple[int, ...], batch: int, computed: bool, text: str | None
) -> None:
    values = _random(n, *shape)
    block: Block = MappedBlock(DenseBlock(values), torch.clone) if computed else DenseBlock(values)
    plan = with_layout("dense", compression=None if text is None else parse_compression(text))
    write_block(tmp_path / "o.h5", plan, block, batch)
    with h5py.File(tmp_path / "o.h5") as file:  # HDF5 verifies every checksum
        np.testing.assert_array_equal(file["chains/0/w"][...], values.numpy())
        assert np.prod(file["chains/0/w"].chunks or 0) * 4 <= 2**20
    stop = n // 2 // batch * batch
    if stop:
        write_block(tmp_path / "r.h5", plan, block, batch, stop_at=stop)
        write_block(tmp_path / "r.h5", plan, block, batch, resume=True)
        assert same(load(tmp_path / "r.h5"), load(tmp_path / "o.h5"))


def test_rows_that_are_scattered_in_memory(tmp_path: Path) -> None:
    values = _random(6, 40, 30).mT
    assert not values.is_contiguous()
    write_block(tmp_path / "o.h5", with_layout("dense"), DenseBlock(values), 4)
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], values.numpy())


@pytest.mark.parametrize("stop_at", [None, 32])
def test_the_operating_system_may_take_and_give_less_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None
) -> None:
    write(tmp_path / "whole.h5")
    take, give = os.pwrite, os.preadv

    def few(descriptor: int, parts: Sequence[Any], offset: int) -> int:
        return give(descriptor, [memoryview(parts[0])[:700]], offset)

    monkeypatch.setattr("os.pwrite", lambda d, data, at: take(d, data[:1500], at))
    monkeypatch.setattr("os.preadv", few)
    if stop_at is not None:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", stop_at=stop_at)
    write(tmp_path / "o.h5", resume=stop_at is not None)
    monkeypatch.undo()
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 32])
@pytest.mark.parametrize("kind", [RuntimeError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("text", [None, "gzip:1"])
def test_a_batch_that_failed_halfway_can_be_written_again(
    tmp_path: Path, at: int, kind: type[BaseException], text: str | None
) -> None:
    """For instance in smaller parts, when memory ran out."""
    write(tmp_path / "whole.h5")
    calls = [0]

    def failing(values: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 1:
            raise kind("out of memory")
        return values

    compression = None if text is None else parse_compression(text)
    plan = replace(PLAN, chains=PLAN.chains[:1], compression=compression)
    with open_writer(tmp_path / "o.h5", plan) as writer:
        for start in range(0, N, BATCH):
            part = rows(start, min(start + BATCH, N))
            gradients = part.chains[0]
            assert gradients is not None
            if start == at:
                last = list(gradients)[-1]
                broken = MappedBlock(gradients[last], failing)
                spoilt = Gradients({**gradients, last: broken})
                with pytest.raises((kind, OutputError)):
                    writer.append(replace(part, chains=(spoilt,)))
            writer.append(replace(part, chains=(gradients,)))
        writer.finish({}, {})
    assert calls[0] == 1
    found, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    for key in (k for k in wanted if k.startswith(("samples", "norms", "chains/0"))):
        np.testing.assert_array_equal(found[key], wanted[key])
