"""Compressed rows: the same numbers, the same promises, fewer bytes."""

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
import xarray

from gradscope.blocks import Block, DenseBlock, Gradients, MappedBlock, OuterBlock
from gradscope.config import Compression, parse_compression
from gradscope.errors import OutputError, ResultFileError, SpecError
from gradscope.storage import FilePlan, Writer, open_file, open_writer
from gradscope.storage.format.seal import NO_RECORDS, write_seal
from gradscope.storage.write.target import Target
from tests.storage.example import (
    BATCH,
    PLAN,
    N,
    expected,
    gradients,
    load,
    names,
    rows,
    same,
    unsealed,
    with_layout,
    write,
)

ALL = ["gzip", "zstd:7", "blosc2"]
CODES = {"gzip": 1, "zstd": hdf5plugin.ZSTD_ID, "blosc2": hdf5plugin.BLOSC2_ID}


def _plan(text: str = "gzip:1", layout: Any = "auto", **changes: Any) -> FilePlan:
    return with_layout(layout, compression=parse_compression(text), **changes)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("layout", ["dense", "auto"])
@pytest.mark.parametrize("size", [BATCH, 7])
def test_the_same_numbers(tmp_path: Path, text: str, layout: str, size: int) -> None:
    write(tmp_path / "plain.h5", with_layout(layout), size)
    write(tmp_path / "o.h5", _plan(text, layout), size)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "plain.h5"))
    assert names(tmp_path) == ["o.h5", "plain.h5"]
    with h5py.File(tmp_path / "o.h5") as file:
        codes = [file["chains/0/w"].id.get_create_plist().get_filter(k)[0] for k in range(2)]
        assert CODES[text.partition(":")[0]] in codes
        assert file["chains/0/w"].fletcher32
    with open_file(tmp_path / "o.h5") as opened:
        np.testing.assert_allclose(opened.chains[0]["emb"][7:9], expected()["emb"][7:9], rtol=1e-6)


def test_h5py_alone_reads_gzip(tmp_path: Path) -> None:
    write(tmp_path / "o.h5", _plan("gzip", "dense"))
    program = (
        "import sys, h5py, numpy as np\n"
        "with h5py.File(sys.argv[1]) as file:\n"
        "    np.save(sys.argv[2], file['chains/0/layer.weight'][...])\n"
        "assert not {'gradscope', 'hdf5plugin', 'torch'} & set(sys.modules)\n"
    )
    place = [str(tmp_path / "o.h5"), str(tmp_path / "w.npy")]
    subprocess.run([sys.executable, "-c", program, *place], check=True)
    np.testing.assert_allclose(
        np.load(tmp_path / "w.npy"), expected()["layer.weight"], rtol=2e-6, atol=1e-6
    )
    with xarray.open_dataset(tmp_path / "o.h5", engine="h5netcdf", group="/chains/0") as found:
        np.testing.assert_array_equal(found["w"].values, expected()["w"])
    with h5py.File(tmp_path / "o.h5") as file:
        plist = file["chains/0/w"].id.get_create_plist()
        filters = [plist.get_filter(k)[0] for k in range(plist.get_nfilters())]
    z = h5py.h5z
    assert filters == [z.FILTER_SHUFFLE, z.FILTER_DEFLATE, z.FILTER_FLETCHER32]


def _sparse(n: int = N) -> torch.Tensor:
    """As behind a ReLU: half of the numbers are zero."""
    return torch.randn(n, 300, 40, generator=torch.Generator().manual_seed(3)).relu()


def _write(path: Path, plan: FilePlan, block: Block, **more: Any) -> None:
    plan = replace(plan, n=block.n, parameters={"w": block.shape}, chains=PLAN.chains[:1])
    with open_writer(path, plan, **more) as writer:
        for start in range(writer.completed, block.n, 16):
            stop = min(start + 16, block.n)
            made = Gradients({"w": block.select(slice(start, stop))})
            writer.append(replace(rows(start, stop, made), chains=(made,)))
        writer.finish({}, {})


@pytest.mark.parametrize("text", ALL)
def test_it_takes_fewer_bytes(tmp_path: Path, text: str) -> None:
    values = _sparse()
    _write(tmp_path / "plain.h5", with_layout("dense"), DenseBlock(values))
    _write(tmp_path / "o.h5", _plan(text, "dense"), DenseBlock(values))
    sizes = [(tmp_path / name).stat().st_size for name in ("o.h5", "plain.h5")]
    assert sizes[0] < 0.65 * sizes[1]
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], values.numpy())
        np.testing.assert_array_equal(file.chains[0]["w"][[70, 3]], values[[70, 3]].numpy())
        assert file.chains[0]["w"].nbytes < sizes[0]


@pytest.mark.parametrize("shape", [(), (3,), (700, 400), (3, 300_007), (1, 1, 5)])
@pytest.mark.parametrize("computed", [False, True])
def test_rows_of_any_shape(tmp_path: Path, shape: tuple[int, ...], computed: bool) -> None:
    values = torch.randn(5, *shape, generator=torch.Generator().manual_seed(8))
    block: Block = MappedBlock(DenseBlock(values), torch.clone) if computed else DenseBlock(values)
    _write(tmp_path / "o.h5", _plan(layout="dense"), block)
    with h5py.File(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file["chains/0/w"][...], values.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("text", ["gzip", "zstd"])
def test_every_number_format(tmp_path: Path, dtype: torch.dtype, text: str) -> None:
    values = torch.randn(40, 3, 4).to(dtype)
    norms = rows(0, 40, Gradients({"w": DenseBlock(torch.ones(40, 1))}))
    plan = _plan(text, "dense", n=40, dtype=dtype, parameters={"w": (3, 4)})
    plan = replace(plan, chains=PLAN.chains[:1])
    with open_writer(tmp_path / "o.h5", plan) as writer:
        writer.append(replace(norms, chains=(Gradients({"w": DenseBlock(values)}),)))
        writer.finish({}, {})
    wanted = (values.float() if dtype == torch.bfloat16 else values).numpy()
    with open_file(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file.chains[0]["w"][...], wanted)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("stop_at", [16, 48, 96])
def test_a_stopped_run_goes_on(tmp_path: Path, text: str, stop_at: int) -> None:
    write(tmp_path / "whole.h5", _plan(text))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", _plan(text), stop_at=stop_at)
    assert names(tmp_path) == ["o.h5.part", "o.h5.part.progress", "whole.h5"]
    write(tmp_path / "o.h5", _plan(text), resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


def test_another_compression_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "o.h5", _plan("gzip:1"), stop_at=32)
    for other in (_plan("gzip:2"), _plan("zstd"), with_layout("auto")):
        with pytest.raises(OutputError, match="compression"):
            write(tmp_path / "o.h5", other, resume=True)


_KILLED = """
import sys, random, os, signal, time
from pathlib import Path
from gradscope.config import parse_compression
from gradscope.storage.write import journal as commits
from tests.storage.example import with_layout, write, gradients
commits.COMMIT_SECONDS, commits.COMMIT_SHARE = 0.0, 0
def make(start, stop):
    time.sleep(0.004)
    print(start, flush=True)
    return gradients(start, stop)
plan = with_layout("auto", compression=parse_compression(sys.argv[2]))
write(Path(sys.argv[1]), plan, 4, make, resume=True)
"""


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """The process is killed again and again, and goes on each time from what it had committed."""
    text = "gzip:1"
    write(tmp_path / "whole.h5", _plan(text), 4)
    generator, kills = random.Random(6), 0
    for _ in range(30):
        command = [sys.executable, "-c", _KILLED, str(tmp_path / "o.h5"), text]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(generator.randrange(2, 9)):
                process.stdout.readline()
            time.sleep(generator.random() * 0.01)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        assert (tmp_path / "o.h5").exists() == (process.returncode == 0)
        if (tmp_path / "o.h5").exists():
            break
    assert kills >= 3
    write(tmp_path / "o.h5", _plan(text), 4, resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


class _StoppedError(Exception):
    """In place of a kill: nothing of ours runs afterwards."""


@pytest.mark.parametrize(
    "step",
    ["create_results", "attach_scales", "write_seal", "_verify"],
)
def test_a_stop_while_finishing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write(tmp_path / "whole.h5", _plan())

    def stop(*given: object, **more: object) -> None:
        raise _StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("gradscope.storage.write.journal.COMMIT_SECONDS", 0.0)
        patch.setattr("gradscope.storage.write.journal.COMMIT_SHARE", 0)
        patch.setattr(Writer, "close", lambda writer: writer._target.close())
        patch.setattr(f"gradscope.storage.write.finish.{step}", stop)
        with pytest.raises(_StoppedError):
            write(tmp_path / "o.h5", _plan())
    with open_writer(tmp_path / "o.h5", _plan(), resume=True) as writer:
        assert writer.completed == N
    write(tmp_path / "o.h5", _plan(), resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


@pytest.mark.parametrize("at", [30_000, 60_000, 120_000, 200_000, 300_000])
def test_a_full_disk(tmp_path: Path, at: int) -> None:
    """A limit on the file's size, in the structure, in the middle and near the end."""
    plan = _plan("gzip:1", "dense")
    write(tmp_path / "whole.h5", plan)
    assert (tmp_path / "whole.h5").stat().st_size > 400_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, before[1]))
    try:
        with pytest.raises(OutputError, match="the disk is full"):
            write(tmp_path / "o.h5", plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "o.h5").exists()
    write(tmp_path / "o.h5", plan, resume=True)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))


@pytest.mark.parametrize("at", [0, 32])
def test_a_batch_that_failed_halfway_can_be_written_again(tmp_path: Path, at: int) -> None:
    write(tmp_path / "whole.h5", _plan())
    calls = [0]

    def failing(values: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("out of memory")
        return values

    plan = replace(_plan(), chains=PLAN.chains[:1])
    with open_writer(tmp_path / "o.h5", plan) as writer:
        for start in range(0, N, BATCH):
            part = rows(start, min(start + BATCH, N))
            found = part.chains[0]
            assert found is not None
            if start == at:
                last = list(found)[-1]
                spoilt = Gradients({**found, last: MappedBlock(found[last], failing)})
                with pytest.raises((RuntimeError, OutputError)):
                    writer.append(replace(part, chains=(spoilt,)))
            writer.append(replace(part, chains=(found,)))
        writer.finish({}, {})
    assert calls[0] == 1
    found_rows, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    for key in (k for k in wanted if k.startswith("chains/0")):
        np.testing.assert_array_equal(found_rows[key], wanted[key])


@pytest.mark.parametrize("stop_at", [None, 32, 48])
def test_factors_that_become_dense(tmp_path: Path, stop_at: int | None) -> None:
    def make(start: int, stop: int) -> Gradients:
        found = gradients(start, stop)
        return found if start < 32 else found.map(lambda block: DenseBlock(block.dense()))

    if stop_at is not None:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "o.h5", _plan("zstd"), make=make, stop_at=stop_at)
    write(tmp_path / "o.h5", _plan("zstd"), make=make, resume=True)
    write(tmp_path / "plain.h5", with_layout("auto"), make=make)
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "plain.h5"))
    with h5py.File(tmp_path / "o.h5") as file:
        plist = file["chains/0/layer.weight"].id.get_create_plist()
        assert hdf5plugin.ZSTD_ID in [plist.get_filter(k)[0] for k in range(plist.get_nfilters())]


@pytest.mark.parametrize("text", ALL)
def test_a_flipped_byte_anywhere_is_an_error(tmp_path: Path, text: str) -> None:
    generator, path = random.Random(5), tmp_path / "o.h5"
    write(path, _plan(text, "dense"))
    good, wanted, caught = path.read_bytes(), load(path), 0
    for _ in range(150):
        data, at = bytearray(good), generator.randrange(len(good))
        data[at] ^= generator.randrange(1, 256)
        path.write_bytes(data)
        try:
            found = load(path)
        except ResultFileError as error:
            caught += 1
            assert error.where and error.remedy
        else:
            assert same(found, wanted), f"byte {at}"
    assert caught > 140


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
    [("gzip", "gzip:4"), ("gzip:9", "gzip:9"), ("zstd", "zstd:3"), ("blosc2:1", "blosc2:1")],
)
def test_names(text: str, found: str) -> None:
    assert str(parse_compression(text)) == found


@pytest.mark.parametrize(
    "text", ["", "gzip:", "gzip:0", "gzip:10", "zstd:x", "lz4", "zstd:99", "gzip:²", "zstd:-1"]
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(SpecError, match="compression") as caught:
        parse_compression(text)
    assert caught.value.remedy is not None and "zstd:1 to 22" in caught.value.remedy


def _sealed(path: Path, change: Callable[[h5py.File], None]) -> None:
    path.write_bytes(unsealed(path.read_bytes()))
    with path.open("r+b") as raw:
        with Target(raw.fileno()).editing() as file:
            change(file)
        write_seal(raw.fileno(), NO_RECORDS)


def _large_chunks(file: h5py.File) -> None:
    """A few bytes that become a gigabyte."""
    del file["chains/0/scale"]
    file["chains/0"].create_dataset(
        "scale", (100, 2**20), "f4", chunks=(100, 2**20), compression="gzip", fletcher32=True
    )


def _missing_chunks(file: h5py.File) -> None:
    """Numbers that nobody stored: HDF5 would read zeros."""
    del file["chains/0/scale"]
    file["chains/0"].create_dataset(
        "scale", (100,), "f4", chunks=(10,), compression="gzip", fletcher32=True
    )


def _without_checksums(file: h5py.File) -> None:
    values = file["chains/0/scale"][...]
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", data=values, compression="gzip")


def _checksum_first(file: h5py.File) -> None:
    """The checksum of what comes out: everything is taken apart before it is checked."""
    del file["chains/0/scale"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((10,))
    plist.set_fletcher32()
    plist.set_deflate(4)
    space = h5py.h5s.create_simple((100,))
    made = h5py.h5d.create(file["chains/0"].id, b"scale", h5py.h5t.IEEE_F32LE, space, plist)
    h5py.Dataset(made)[...] = np.ones(100, "f4")


def _other_filter(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset(
        "scale", data=np.ones(100, "f4"), chunks=(10,), compression="lzf", fletcher32=True
    )


def _two_filters(file: h5py.File) -> None:
    del file["chains/0/scale"]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((10,))
    for level in (4, 5):
        plist.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (level,))
    plist.set_fletcher32()
    space = h5py.h5s.create_simple((100,))
    h5py.h5d.create(file["chains/0"].id, b"scale", h5py.h5t.IEEE_F32LE, space, plist)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_large_chunks, "claim 419,430,400 bytes"),
        (_missing_chunks, "not all stored"),
        (_without_checksums, "filters"),
        (_checksum_first, "filters"),
        (_other_filter, "filters"),
        (_two_filters, "filters"),
    ],
)
def test_a_hostile_file_is_refused(
    tmp_path: Path, change: Callable[[h5py.File], None], said: str
) -> None:
    write(tmp_path / "o.h5", _plan())
    _sealed(tmp_path / "o.h5", change)
    with pytest.raises(ResultFileError, match=said):
        load(tmp_path / "o.h5")


def test_bytes_that_are_no_compressed_ones(tmp_path: Path) -> None:
    """With a checksum that fits, as a hostile writer would add it."""
    write(tmp_path / "o.h5", _plan("gzip", "dense"))

    def change(file: h5py.File) -> None:
        from gradscope.storage.write.target import fletcher32

        body = np.arange(500, dtype=np.uint8)
        file["chains/0/w"].id.write_direct_chunk((0, 0, 0), body.tobytes() + fletcher32(body, 500))

    _sealed(tmp_path / "o.h5", change)
    with open_file(tmp_path / "o.h5") as file, pytest.raises(ResultFileError, match="damaged"):
        file.chains[0]["w"][0]


def test_overflow_is_counted(tmp_path: Path) -> None:
    block = DenseBlock(torch.full((40, 3), 1e6))
    _write(tmp_path / "o.h5", _plan("gzip", "dense", dtype=torch.float16), block)
    with open_file(tmp_path / "o.h5") as file:
        assert file.chains[0]["w"].overflowed == 120


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


def test_it_is_a_compression_of_outer_products_too(tmp_path: Path) -> None:
    left, right = torch.zeros(N, 1, 1, 400), torch.ones(N, 1, 1, 250)
    plan = _plan("gzip", "factored")
    _write(tmp_path / "o.h5", plan, OuterBlock(left, right, (400, 250)))
    with open_file(tmp_path / "o.h5") as file:
        assert file.chains[0]["w"].representation == "factored"
        assert file.chains[0]["w"].nbytes < 10_000
        np.testing.assert_array_equal(file.chains[0]["w"][5], np.zeros((400, 250)))


def test_a_copy_is_as_good(tmp_path: Path) -> None:
    write(tmp_path / "o.h5", _plan())
    shutil.copy(tmp_path / "o.h5", tmp_path / "copy.h5")
    assert same(load(tmp_path / "copy.h5"), load(tmp_path / "o.h5"))
    assert Compression("gzip", 1) == parse_compression("gzip:1")
