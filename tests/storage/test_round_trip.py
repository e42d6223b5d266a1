"""What is written comes back, through our reader, plain h5py and xarray."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.errors import SpecError
from gradscope.storage import FinishedBatch, open_file, open_writer
from gradscope.storage.format.numbers import escape, unescape
from gradscope.storage.write.create import attach_scales
from tests.storage.example import (
    DATA,
    PLAN,
    SHAPES,
    N,
    batches,
    expected,
    names,
    rows,
    with_layout,
    write,
    write_block,
)


@pytest.mark.parametrize("layout", ["auto", "dense", "factored"])
def test_rows_come_back(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "o.h5", with_layout(layout))
    with open_file(tmp_path / "o.h5") as file:
        assert (file.n, file.parameters, file.run) == (N, SHAPES, PLAN.run)
        assert [(c.text, c.reduced) for c in file.chains] == [("identity", False), ("mean", True)]
        assert list(file.chains[0]) == list(SHAPES)
        for name, wanted in expected().items():
            array = file.chains[0][name]
            assert (array.shape, array.dtype) == (wanted.shape, np.float32)
            np.testing.assert_allclose(array[...], wanted, rtol=2e-6, atol=1e-6)
            np.testing.assert_allclose(
                file.chains[1][name][...], wanted.astype(float).mean(0), rtol=1e-5, atol=1e-7
            )
            flat = wanted.reshape(N, -1)
            np.testing.assert_allclose(file.norms[name], np.linalg.norm(flat, axis=1), rtol=1e-5)
        np.testing.assert_array_equal(file.samples["index"], np.arange(N))
        np.testing.assert_array_equal(file.samples["finite"], np.arange(N) % 5 > 0)
        np.testing.assert_array_equal(file.samples["target"], np.arange(N) % 3)
        assert file.norm_attributes["emb"] == {"mean_gradient_norm": 3.5}
        assert file.certificate == {"verdict": "exact"}
        assert file.attributes["checkpoint_sha256"] == "c" * 64
    assert names(tmp_path) == ["o.h5"]


def test_layout_decides_the_representation(tmp_path: Path) -> None:
    kinds, sizes = {}, {}
    for layout in ("auto", "dense", "factored"):
        write(tmp_path / f"{layout}.h5", with_layout(layout))
        with open_file(tmp_path / f"{layout}.h5") as file:
            kinds[layout] = [a.representation for a in file.chains[0].values()]
            sizes[layout] = file.chains[0]["layer.weight"].nbytes
    assert kinds["dense"] == ["dense"] * 4
    assert kinds["auto"] == kinds["factored"] == ["dense", "factored", "factored", "dense"]
    assert sizes["auto"] * 5 < sizes["dense"]


def test_auto_keeps_dense_what_factors_would_enlarge(tmp_path: Path) -> None:
    def make(start: int, stop: int) -> Gradients:
        wide = torch.ones(stop - start, 1, 30, 3)  # 30 positions for a 3 by 3 matrix
        return Gradients({"w": OuterBlock(wide, wide, (3, 3))})

    for layout, kind in (("auto", "dense"), ("factored", "factored")):
        plan = with_layout(layout, parameters={"w": (3, 3)})
        write(tmp_path / f"{layout}.h5", plan, make=make)
        with open_file(tmp_path / f"{layout}.h5") as file:
            assert file.chains[0]["w"].representation == kind
            np.testing.assert_array_equal(file.chains[0]["w"][...], np.full((N, 3, 3), 30.0))


@pytest.mark.parametrize(
    "selection",
    [
        3,
        -1,
        slice(10, 20),
        slice(None, None, -7),
        [5, 90, 5, 0],
        np.arange(N) % 9 == 0,
        slice(5, 5),
    ],
)
def test_any_rows_of_any_layout(tmp_path: Path, selection: object) -> None:
    write(tmp_path / "o.h5")
    with open_file(tmp_path / "o.h5") as file:
        for name, wanted in expected().items():
            found = file.chains[0][name][selection]  # type: ignore[index]
            np.testing.assert_allclose(found, wanted[selection], rtol=2e-6, atol=1e-6)  # type: ignore[index]


def test_iterate_goes_through_all_rows_once(tmp_path: Path) -> None:
    write(tmp_path / "o.h5")
    with open_file(tmp_path / "o.h5") as file:
        batches = list(file.iterate(batch_size=33))
        assert [len(b["w"]) for b in batches] == [33, 33, 33, 1]
        joined = {name: np.concatenate([b[name] for b in batches]) for name in SHAPES}
        for name in SHAPES:
            np.testing.assert_array_equal(joined[name], file.chains[0][name][...])
        for chain in (1, 2):
            with pytest.raises(SpecError, match=r"aggregate|no chain"):
                next(file.iterate(chain))


NAMES = ["a/b", "a%2Fb", ".", "..", "tab\there", "ünï", "new\nline", "nul\0cut", "%", "del\x7f"]


def test_names_with_odd_characters(tmp_path: Path) -> None:
    assert [unescape(escape(name)) for name in NAMES] == NAMES
    assert len({escape(name) for name in NAMES}) == len(NAMES)
    assert all(not set(escape(name)) & set("/\0\n\t\x7f") for name in NAMES)

    def make(start: int, stop: int) -> Gradients:
        return Gradients(
            {name: DenseBlock(DATA["w"][start:stop] + k) for k, name in enumerate(NAMES)}
        )

    write(tmp_path / "o.h5", replace(PLAN, parameters=dict.fromkeys(NAMES, (7, 5))), make=make)
    with open_file(tmp_path / "o.h5") as file:
        assert list(file.chains[0]) == list(file.norms) == list(file.chains[1]) == NAMES
        for k, name in enumerate(NAMES):
            np.testing.assert_array_equal(file.chains[0][name][...], DATA["w"].numpy() + k)
    with h5py.File(tmp_path / "o.h5") as plain:
        assert plain["chains/0/a%2Fb"].attrs["name"] == "a/b"
        assert len(plain["chains/0"]) == len(NAMES)


@pytest.mark.parametrize("stored", ["float64", "float32", "float16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_number_formats(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    made = torch.randn(9, 3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    plan = with_layout("auto", dtype=getattr(torch, stored))
    write_block(tmp_path / "o.h5", plan, DenseBlock(made))
    wanted = made.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
    if dtype.is_complex:
        stored = "complex128" if stored == "float64" else "complex64"
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
        assert array.dtype == stored
        np.testing.assert_array_equal(array[...], wanted.astype(stored))


def test_a_block_that_changes_its_structure_becomes_dense(tmp_path: Path) -> None:
    def make(start: int, stop: int) -> Gradients:
        left, right = DATA["left"][start:stop], DATA["right"][start:stop]
        whole = OuterBlock(left, right, (40, 30))
        cut = OuterBlock(left[:, :, :1], right[:, :, :1], (40, 30))
        plain = DenseBlock(whole.dense())
        return Gradients({"layer.weight": whole if start < 32 else cut if start < 64 else plain})

    write(tmp_path / "o.h5", replace(PLAN, parameters={"layer.weight": (40, 30)}), make=make)
    wanted = expected()["layer.weight"]
    d = {k: v.numpy() for k, v in DATA.items()}
    wanted[32:64] = np.einsum("nr,nc->nrc", d["left"][32:64, 0, 0], d["right"][32:64, 0, 0])
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["layer.weight"]
        assert array.representation == "dense"
        np.testing.assert_allclose(array[...], wanted, rtol=2e-6, atol=1e-6)
    assert names(tmp_path) == ["o.h5"]
    with h5py.File(tmp_path / "o.h5") as plain:
        assert "replaced" not in plain


@pytest.mark.parametrize(
    ("group", "dims"),
    [
        ("/samples", {"index": ("sample",), "finite": ("sample",), "loss": ("sample",)}),
        ("/norms", {"w": ("sample",), "layer.weight": ("sample",)}),
        ("/chains/0", {"w": ("sample", "axis0_7", "axis1_5"), "scale": ("sample",)}),
        ("/chains/1", {"emb": ("axis0_50", "axis1_8"), "scale": ()}),
        ("/chains/0/emb", {"index": ("sample", "t"), "rows": ("sample", "t", "d")}),
        ("/chains/0/layer.weight", {"left": ("sample", "k", "t", "r")}),
    ],
)
def test_xarray_opens_every_group(
    tmp_path: Path, group: str, dims: dict[str, tuple[str, ...]]
) -> None:
    write(tmp_path / "o.h5")
    with xarray.open_dataset(tmp_path / "o.h5", engine="h5netcdf", group=group) as found:
        assert {name: found[name].dims for name in dims} == dims
        with h5py.File(tmp_path / "o.h5") as plain:
            for name in dims:
                np.testing.assert_array_equal(found[name].values, plain[group][name][()])


def test_many_parameters_share_the_sample_axis(tmp_path: Path) -> None:
    """More than 4,085 data sets on one scale, where an ordinary attribute would be full."""
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for name in ("samples", "chains"):
            file.create_group(name)
        for k in range(4100):
            file.create_dataset(f"norms/p{k}", (2,), "f4")
        attach_scales(file)
        assert len(file["sample"].attrs["REFERENCE_LIST"]) == 4100
        assert file["norms/p4099"].dims[0][0] == file["sample"]


def test_long_documents(tmp_path: Path) -> None:
    run = {"text": "é" * 300_000}
    write(tmp_path / "o.h5", replace(PLAN, run=run))
    with open_file(tmp_path / "o.h5") as file:
        assert file.run == run


TEXTS = [f"{'ü' * (k % 4)}sample {k}" for k in range(N)]
WIDTH = max(len(name.encode()) for name in TEXTS)


def _named(kind: str, start: int, stop: int) -> FinishedBatch:
    if kind == "integers":
        return rows(start, stop, id=1000 - torch.arange(start, stop))
    padded = b"".join(name.encode().ljust(WIDTH, b"\0") for name in TEXTS[start:stop])
    ids = torch.frombuffer(bytearray(padded), dtype=torch.uint8).reshape(-1, WIDTH)
    return rows(start, stop, id=ids)


def _write_named(path: Path, kind: str, stop_at: int = N, **options: bool) -> None:
    with open_writer(path, PLAN, **options) as writer:
        for start, stop in batches(writer.completed, 16):
            if start >= stop_at:
                raise KeyboardInterrupt
            writer.append(_named(kind, start, stop))
        writer.finish({}, {})


@pytest.mark.parametrize("kind", ["integers", "texts"])
@pytest.mark.parametrize("stop_at", [N, 48])
def test_ids(tmp_path: Path, kind: str, stop_at: int) -> None:
    path = tmp_path / "o.h5"
    if stop_at < N:
        with pytest.raises(KeyboardInterrupt):
            _write_named(path, kind, stop_at)
    _write_named(path, kind, resume=True)
    expected = 1000 - np.arange(N) if kind == "integers" else np.array(TEXTS)
    with open_file(path) as file:
        np.testing.assert_array_equal(file.samples["id"], expected)
        assert file.samples["id"].dtype.kind == expected.dtype.kind
    with h5py.File(path) as plain:
        column = plain["samples/id"]
        found = column[:] if kind == "integers" else column.asstr()[:]
        assert list(found) == list(expected)
