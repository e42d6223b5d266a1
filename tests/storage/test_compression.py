"""Compressed rows: the same numbers in fewer bytes, for whoever reads HDF5.

What holds for all rows is tested with compressed ones where it is tested: `test_crash`,
`test_formats`, `test_hostile`, `test_merge`, `test_writing`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
import xarray

from gradscope.blocks import DenseBlock, Gradients
from gradscope.config import parse_compression
from gradscope.errors import OutputError, ResultFileError, SpecError
from gradscope.storage import FilePlan, open_file, open_writer
from tests.storage.example import (
    PLAN,
    N,
    expected,
    load,
    names,
    rows,
    same,
    with_layout,
    write,
    write_block,
)

ALL = ["gzip", "zstd:7", "blosc2"]
CODES = {"gzip": 1, "zstd": hdf5plugin.ZSTD_ID, "blosc2": hdf5plugin.BLOSC2_ID}


def _plan(text: str = "gzip:1", layout: Any = "auto", **changes: Any) -> FilePlan:
    return with_layout(layout, compression=parse_compression(text), **changes)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("layout", ["dense", "auto"])
def test_the_same_numbers(tmp_path: Path, text: str, layout: str) -> None:
    write(tmp_path / "plain.h5", with_layout(layout), 7)
    write(tmp_path / "o.h5", _plan(text, layout), 7)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "plain.h5"))
    assert names(tmp_path) == ["o.h5", "plain.h5"]
    with h5py.File(tmp_path / "o.h5") as file:
        codes = [file["chains/0/w"].id.get_create_plist().get_filter(k)[0] for k in range(2)]
        assert CODES[text.partition(":")[0]] in codes
        assert file["chains/0/w"].fletcher32
    with open_file(tmp_path / "o.h5") as opened:
        np.testing.assert_allclose(opened.chains[0]["emb"][7:9], expected()["emb"][7:9], rtol=1e-6)


def test_hdf5_and_xarray_read_gzip_alone(tmp_path: Path) -> None:
    write(tmp_path / "o.h5", _plan("gzip", "dense"))
    with xarray.open_dataset(tmp_path / "o.h5", engine="h5netcdf", group="/chains/0") as found:
        np.testing.assert_array_equal(found["w"].values, expected()["w"])
    with h5py.File(tmp_path / "o.h5") as file:
        plist = file["chains/0/w"].id.get_create_plist()
        filters = [plist.get_filter(k)[0] for k in range(plist.get_nfilters())]
    z = h5py.h5z  # those that every HDF5 has
    assert filters == [z.FILTER_SHUFFLE, z.FILTER_DEFLATE, z.FILTER_FLETCHER32]


@pytest.mark.parametrize("text", ALL)
def test_it_takes_fewer_bytes(tmp_path: Path, text: str) -> None:
    values = torch.randn(N, 300, 40, generator=torch.Generator().manual_seed(3)).relu()
    write_block(tmp_path / "plain.h5", with_layout("dense"), DenseBlock(values))
    write_block(tmp_path / "o.h5", _plan(text, "dense"), DenseBlock(values))
    sizes = [(tmp_path / name).stat().st_size for name in ("o.h5", "plain.h5")]
    assert sizes[0] < 0.65 * sizes[1]
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], values.numpy())
        np.testing.assert_array_equal(file.chains[0]["w"][[70, 3]], values[[70, 3]].numpy())
        assert file.chains[0]["w"].nbytes < sizes[0]


def test_another_compression_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", _plan("gzip:1"), stop_at=32)
    for other in (_plan("gzip:2"), _plan("zstd"), with_layout("auto")):
        with pytest.raises(OutputError, match="compression"):
            write(tmp_path / "o.h5", other, resume=True)


@pytest.mark.parametrize("text", ["zstd", "blosc2:9"])
def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    write(tmp_path / "o.h5", _plan(text))
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(ResultFileError, match="needs hdf5plugin") as caught:
        load(tmp_path / "o.h5")
    assert caught.value.remedy is not None and "gradscope[compression]" in caught.value.remedy
    with pytest.raises(SpecError, match="needs hdf5plugin") as refused:
        write(tmp_path / "new.h5", _plan(text))
    assert refused.value.remedy is not None and "gzip" in refused.value.remedy
    assert names(tmp_path) == ["o.h5"]
    write(tmp_path / "new.h5", _plan("gzip"))
    assert load(tmp_path / "new.h5")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("gzip", "gzip:4"), ("gzip:9", "gzip:9"), ("zstd", "zstd:3"), ("blosc2:1", "blosc2:1")],
        *((text, None) for text in ("", "gzip:", "gzip:0", "gzip:10", "zstd:x", "lz4", "zstd:99")),
        *((text, None) for text in ("gzip:²", "zstd:-1")),
    ],
)
def test_names(text: str, found: str | None) -> None:
    if found is not None:
        assert str(parse_compression(text)) == found
        return
    with pytest.raises(SpecError, match="compression") as caught:
        parse_compression(text)
    assert caught.value.remedy is not None and "zstd:1 to 22" in caught.value.remedy


def test_the_writer_needs_little_memory_and_no_second_file(tmp_path: Path) -> None:
    """Nothing lies beside the file but the progress, and the part itself stays small."""
    plan = _plan("zstd", "dense", n=64, parameters={"w": (512, 512)}, chains=PLAN.chains[:1])
    with open_writer(tmp_path / "o.h5", plan) as writer:
        for start in range(0, 64, 16):
            made = Gradients({"w": DenseBlock(torch.zeros(16, 512, 512))})
            writer.append(replace(rows(start, start + 16, made), chains=(made,)))
            assert (tmp_path / "o.h5.part").stat().st_size < 10**6
        writer.finish({}, {})
    assert names(tmp_path) == ["o.h5"]
