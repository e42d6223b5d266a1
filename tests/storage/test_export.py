"""Exports, read by the programs they are for, against numbers made without any of ours."""

import csv
import io
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import load_file

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.errors import OutputError, ResultFileError, SpecError
from gradscope.storage import GradientFile, export, open_file, open_writer
from tests.storage.disk import BROKEN, Disk
from tests.storage.example import (
    PLAN,
    SHAPES,
    N,
    expected,
    names,
    rows,
    with_layout,
    write,
    write_block,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("export") / "o.h5"
    write(path, with_layout("auto"))
    return path.read_bytes()


@pytest.fixture
def result(tmp_path: Path, written: bytes) -> Iterator[GradientFile]:
    (tmp_path / "o.h5").write_bytes(written)
    with open_file(tmp_path / "o.h5") as file:
        yield file


def test_npy_of_rows_and_of_an_aggregate(result: GradientFile, tmp_path: Path) -> None:
    for name, wanted in expected().items():
        made = export(result, tmp_path / "rows.npy", "0", [name], overwrite=True)[0]
        found = np.load(tmp_path / "rows.npy", allow_pickle=False)
        assert found.dtype == np.float32
        assert found.shape == made.shape == wanted.shape
        assert made.bytes == (tmp_path / "rows.npy").stat().st_size
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
        export(result, tmp_path / "mean.npy", " mean ", [name], overwrite=True)
        mean = np.load(tmp_path / "mean.npy", allow_pickle=False)
        assert (mean.dtype, mean.shape) == (np.float64, SHAPES[name])
        np.testing.assert_allclose(mean, wanted.mean(0), rtol=1e-4, atol=1e-6)


def test_a_folder_takes_one_npy_a_parameter(result: GradientFile, tmp_path: Path) -> None:
    made = export(result, tmp_path / "all", samples=slice(10, 20))
    assert names(tmp_path / "all") == sorted(f"{name}.npy" for name in SHAPES)
    assert [one.names for one in made] == [(name,) for name in SHAPES]
    for name, wanted in expected().items():
        found = np.load(tmp_path / "all" / f"{name}.npy")
        np.testing.assert_allclose(found, wanted[10:20], rtol=2e-6, atol=1e-6)
    with pytest.raises(OutputError, match="exists already"):
        export(result, tmp_path / "all", samples=slice(0, 5))
    (tmp_path / "all" / "mine.txt").write_text("stays")
    export(result, tmp_path / "all", parameters=["w"], samples=slice(0, 5), overwrite=True)
    assert len(np.load(tmp_path / "all" / "w.npy")) == 5
    assert len(np.load(tmp_path / "all" / "emb.npy")) == 10
    assert (tmp_path / "all" / "mine.txt").exists()


def test_safetensors_reads_it(result: GradientFile, tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    made = export(result, path, parameters=["layer.*", "scale", "emb"])[0]
    assert made.bytes == path.stat().st_size
    found = load_file(path)
    assert set(found) == {"layer.weight", "scale", "emb"} == set(made.names)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected()[name], rtol=2e-6, atol=1e-6)
    export(result, path, "1", overwrite=True)
    assert {name: values.shape for name, values in load_file(path).items()} == SHAPES


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16, torch.complex64])
def test_every_number_format(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    values = torch.randn(N, 3, 4, generator=generator, dtype=wide).to(dtype)
    write_block(tmp_path / "o.h5", with_layout("dense", dtype=dtype), DenseBlock(values))
    plain = (values.float() if dtype == torch.bfloat16 else values).numpy()
    with open_file(tmp_path / "o.h5") as file:
        export(file, tmp_path / "w.npy")
        export(file, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), plain)
    found = load_file(tmp_path / "w.safetensors")["w"]
    assert found.dtype == plain.dtype
    np.testing.assert_array_equal(found, plain)


def _table(path: Path) -> pandas.DataFrame:
    return pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_sample_table(result: GradientFile, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    export(result, path, samples=slice(5, 50))
    found = _table(path)
    assert list(found.columns) == ["finite", "index", "loss", "norm", "target"]
    at = np.arange(5, 50)
    np.testing.assert_array_equal(found["index"], at)
    np.testing.assert_array_equal(found["finite"], at % 5 > 0)
    np.testing.assert_array_equal(found["target"], at % 3)
    np.testing.assert_array_equal(found["loss"].astype(np.float32), at.astype(np.float32) / 7)
    square = sum((v[5:50].reshape(45, -1).astype(float) ** 2).sum(1) for v in expected().values())
    np.testing.assert_allclose(found["norm"], np.sqrt(square), rtol=1e-5)
    export(result, path, parameters=["w", "e*"], overwrite=True)
    wide = _table(path)
    assert len(wide) == N
    if suffix == ".parquet":
        types = [str(field.type) for field in pyarrow.parquet.read_schema(path)][:5]
        assert types == ["bool", "int64", "float", "float", "int64"]
    norms = np.linalg.norm(expected()["w"].reshape(N, -1), axis=1)
    np.testing.assert_allclose(wide["norm:w"], norms, rtol=1e-5)
    assert "norm:emb" in wide and "norm:scale" not in wide


def test_csv_of_what_is_not_finite_and_of_strange_names(tmp_path: Path) -> None:
    name = 'a,"b\n'
    values = torch.tensor([[1.0], [torch.nan], [torch.inf]])
    _one_batch(tmp_path / "o.h5", Gradients({name: DenseBlock(values)}))
    with open_file(tmp_path / "o.h5") as file:
        export(file, tmp_path / "t.csv", parameters=["*"])
    text = (tmp_path / "t.csv").read_text(encoding="utf-8")
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row[f"norm:{name}"] for row in read] == ["1.0", "nan", "inf"]
    assert np.float32(read[1]["loss"]) == np.float32(1) / np.float32(7)


def test_parquet_without_pyarrow(
    result: GradientFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecError, match="pyarrow") as caught:
        export(result, tmp_path / "t.parquet")
    assert caught.value.remedy is not None and "gradscope[data]" in caught.value.remedy
    assert names(tmp_path) == ["o.h5"]


OLD = bytes(8) + b'{"w"'  # as a .safetensors begins

BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no such chain": ("x.npy", {"chain": "median"}, SpecError, "1 .mean."),
    "no such chain number": ("x.npy", {"chain": "7"}, SpecError, "no chain '7'"),
    "no such parameter": ("x.npy", {"parameters": ["v*"]}, SpecError, "Supported: w"),
    "several in one npy": ("x.npy", {}, SpecError, "4 parameters"),
    "no such format": ("x.mat", {}, SpecError, ".safetensors"),
    "no such samples": ("x", {"samples": slice(100, 200)}, SpecError, "samples 0 to 99"),
    "samples of an aggregate": ("x", {"chain": "1", "samples": slice(2)}, SpecError, "aggregate"),
    "a table of a chain": ("x.csv", {"chain": "0"}, SpecError, "--chain"),
    "no such norm": ("x.csv", {"parameters": ["v"]}, SpecError, "'v'"),
    "its own source": ("o.h5", {"overwrite": True}, OutputError, "would replace an input"),
    "no folder": ("nowhere/x.csv", {}, OutputError, "does not exist"),
    "no folder for a folder": ("nowhere/x", {}, OutputError, "cannot be created"),
    "a file there": ("there.csv", {}, OutputError, "overwrite=True"),
    "a file of another kind": ("there.csv", {"overwrite": True}, OutputError, "export to .csv"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_exported(result: GradientFile, tmp_path: Path, name: str) -> None:
    place, options, kind, said = BAD[name]
    (tmp_path / "there.csv").write_text("old")
    with pytest.raises(kind, match=said.replace("[", r"\[")) as caught:
        try:
            export(result, tmp_path / place, **options)
        except (SpecError, OutputError) as error:
            raise kind(str(error)) from error  # the remedy counts, too
    assert caught.value.__cause__ is not None
    assert names(tmp_path) == ["o.h5", "there.csv"]
    assert (tmp_path / "there.csv").read_text() == "old"


def _one_batch(path: Path, made: Gradients) -> None:
    shapes = {name: block.shape for name, block in made.items()}
    plan = with_layout("dense", n=3, parameters=shapes, chains=PLAN.chains[:1])
    with open_writer(path, plan) as writer:
        writer.append(replace(rows(0, 3, made), chains=(made,)))
        writer.finish({}, {})


def test_names_that_a_disk_may_not_tell_apart(tmp_path: Path) -> None:
    _one_batch(tmp_path / "o.h5", Gradients({k: DenseBlock(torch.ones(3, 2)) for k in ("W", "w")}))
    with open_file(tmp_path / "o.h5") as file:
        with pytest.raises(SpecError, match="upper and lower case"):
            export(file, tmp_path / "all")
        assert set(export(file, tmp_path / "all.safetensors")[0].names) == {"W", "w"}


def test_a_damaged_chunk_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "o.h5", with_layout("dense"))
    with h5py.File(tmp_path / "o.h5") as file:
        chunk = file["chains/0/layer.weight"].id.get_chunk_info(4)
    data = bytearray((tmp_path / "o.h5").read_bytes())
    data[chunk.byte_offset + 17] ^= 1
    (tmp_path / "o.h5").write_bytes(data)
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    with open_file(tmp_path / "o.h5") as opened:
        for place in ("x.npy", "x.safetensors"):
            with pytest.raises(ResultFileError, match="damaged"):
                export(opened, tmp_path / place, parameters=["layer.weight"], overwrite=True)
    assert (tmp_path / "x.npy").read_bytes() == b"\x93NUMPY"
    assert names(tmp_path) == ["o.h5", "x.npy"]


def test_no_space_is_seen_beforehand(
    result: GradientFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 999})())
    with pytest.raises(OutputError, match="the disk has 999"):
        export(result, tmp_path / "x.npy", parameters=["w"])


@pytest.mark.full
def test_a_killed_export_leaves_the_old_file(tmp_path: Path) -> None:
    """The process dies in the middle of the second parameter."""
    write(tmp_path / "o.h5", with_layout("dense"))
    (tmp_path / "x.safetensors").write_bytes(OLD)
    program = (
        "import os, sys\n"
        "from gradscope.storage import StoredArray, export, open_file\n"
        "from pathlib import Path\n"
        "plain = StoredArray.block\n"
        "def get(self, start, stop):\n"
        "    if self.name == 'layer.weight':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return plain(self, start, stop)\n"
        "StoredArray.block = get\n"
        "with open_file(sys.argv[1]) as file:\n"
        "    export(file, Path(sys.argv[2]), overwrite=True)\n"
    )
    place = [str(tmp_path / "o.h5"), str(tmp_path / "x.safetensors")]
    done = subprocess.run([sys.executable, "-c", program, *place], check=False)
    assert done.returncode == -9
    assert (tmp_path / "x.safetensors").read_bytes() == OLD
    with open_file(tmp_path / "o.h5") as file:
        export(file, tmp_path / "x.safetensors", overwrite=True)
    assert set(load_file(tmp_path / "x.safetensors")) == set(SHAPES)
    assert names(tmp_path) == ["o.h5", "x.safetensors"]


@pytest.mark.full
def test_memory_is_bounded(tmp_path: Path) -> None:
    """160 MB of dense rows, stored as factors, by blocks of 32 MB."""
    left, right = torch.randn(100, 1, 1, 400), torch.randn(100, 1, 1, 1000)
    block = OuterBlock(left, right, (400, 1000))
    write_block(tmp_path / "o.h5", with_layout("factored"), block)
    wanted = np.einsum("nr,nc->nrc", left[:, 0, 0].numpy(), right[:, 0, 0].numpy())
    with open_file(tmp_path / "o.h5") as file:
        tracemalloc.start()
        export(file, tmp_path / "w.npy")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 120 * 2**20  # three blocks
    np.testing.assert_allclose(np.load(tmp_path / "w.npy"), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["e.csv", "e.safetensors"])
def test_a_disk_that_fails_at_any_moment(result: GradientFile, tmp_path: Path, name: str) -> None:
    """It is told of once; and a file that is there stays, or is replaced by all of the new one."""
    folder = tmp_path / "made"
    folder.mkdir()
    with Disk(folder).inserted() as disk:
        export(result, folder / name)
    wanted = (folder / name).read_bytes()
    old = wanted[: len(wanted) // 2]
    for k in range(len(disk.seen)):
        (folder / name).write_bytes(old)
        with (
            pytest.raises(OutputError, match="cannot be written: Input/output error"),
            Disk(folder, k, BROKEN).inserted(),
        ):
            export(result, folder / name, overwrite=True)
        assert (folder / name).read_bytes() in (old, wanted)
        export(result, folder / name, overwrite=True)
        assert (folder / name).read_bytes() == wanted
        assert names(folder) == [name]
