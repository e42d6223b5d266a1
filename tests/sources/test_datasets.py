"""Data sets: batches equal what numpy makes of the arrays; anything unclear is an error."""

import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradscope.config import DatasetSpec
from gradscope.errors import DatasetError, SpecError
from gradscope.sources.data import Dataset, open_dataset
from gradscope.sources.data.files import FileSamples

N = 11
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "inputs": RANDOM.normal(size=(N, 12)).astype(np.float32),
    "targets": RANDOM.integers(0, 5, size=N).astype(np.uint8),
    "wide": RANDOM.normal(size=(N, 2, 3)),
    "mask": RANDOM.random((N, 4)) > 0.5,
    "fortran": np.asfortranarray(RANDOM.normal(size=(N, 3))),
    "big_endian": RANDOM.normal(size=(N, 3)).astype(">f4"),
    "ushort": RANDOM.integers(0, 2**16, size=(N, 2)).astype(np.uint16),
    "ulong": np.arange(N, dtype=np.uint64),
    "half": RANDOM.normal(size=(N, 2)).astype(np.float16),
    "complex": (RANDOM.normal(size=(N, 2)) + 1j).astype(np.complex64),
}
DTYPES = {"targets": "int64", "ushort": "int64", "ulong": "int64", "big_endian": "float32"}


def saved(folder: Path, **arrays: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "data.bin"
    with path.open("wb") as file:  # a file, so that numpy adds no suffix
        np.savez_compressed(file, **(arrays or ARRAYS))
    return path


def opened(path: Path, **spec: Any) -> Dataset:
    return open_dataset(DatasetSpec(path=path, **spec))


def failure(path: Path, **spec: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        data = opened(path, **spec)
        data.batch(range(len(data)))
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_plain_npz_needs_nothing_more(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = opened(path)
    batch = data.batch(range(3, 8))
    assert len(data) == N
    np.testing.assert_array_equal(batch.inputs.numpy(), ARRAYS["inputs"][3:8])
    np.testing.assert_array_equal(batch.targets.numpy(), ARRAYS["targets"][3:8])
    assert batch.targets.dtype == torch.int64  # what class labels must be
    assert torch.equal(batch.index, torch.arange(3, 8))
    assert batch.index.dtype == torch.int64
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    batch.inputs.zero_()  # it is the model's to write to
    for rows in (slice(None), slice(2, 100), slice(-3, None), slice(1, 9, 3), range(10, 11)):
        batch = data.batch(rows)
        expected = np.arange(N)[rows] if isinstance(rows, slice) else np.array(rows)
        np.testing.assert_array_equal(batch.index.numpy(), expected)
        np.testing.assert_array_equal(batch.inputs.numpy(), ARRAYS["inputs"][expected])


@pytest.mark.parametrize("name", ARRAYS)
def test_every_kind_of_number(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    tensor = opened(saved(tmp_path), inputs=[name], targets=[]).batch(slice(None)).inputs
    assert str(tensor.dtype) == f"torch.{DTYPES.get(name, array.dtype.name)}"
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_dtype_scale_and_reshape(tmp_path: Path) -> None:
    data = opened(
        saved(tmp_path),
        inputs=["inputs"],
        targets=["targets", "ushort"],
        dtype={"inputs": "float64", "targets": "float32"},
        scale={"inputs": 0.1, "ushort": 0.5},
        reshape={"inputs": [3, -1], "targets": [1]},
    )
    large = saved(tmp_path / "large", x=np.full((2, 1), 1e6))  # scaled before it is cast
    spec = {"dtype": {"x": "float16"}, "scale": {"x": 1e-3}}
    assert opened(large, inputs=["x"], targets=[], **spec).batch(range(1)).inputs.item() == 1000
    batch = data.batch(range(N))
    np.testing.assert_allclose(
        batch.inputs.numpy(), ARRAYS["inputs"].reshape(N, 3, 4).astype(float) * 0.1, rtol=1e-15
    )
    targets, ushort = batch.targets
    assert (targets.dtype, targets.shape) == (torch.float32, (N, 1))
    np.testing.assert_array_equal(ushort.numpy(), ARRAYS["ushort"].astype(np.float32) / 2)
    assert ushort.dtype == torch.float32
    assert data.describe()["arrays"]["inputs"] == {
        "stored": [N, 12],
        "stored_dtype": "float32",
        "sample": [3, 4],
        "dtype": "float64",
    }


def test_inputs_and_targets_take_the_form_the_spec_gives_them(tmp_path: Path) -> None:
    path = saved(tmp_path)
    several = opened(path, inputs=["inputs", "wide"], targets=[]).batch(range(2))
    assert [tuple(t.shape) for t in several.inputs] == [(2, 12), (2, 2, 3)]
    assert isinstance(several.inputs, tuple)
    assert several.targets is None
    named = opened(path, inputs={"x": "inputs", "mask": "mask"}, targets=["wide", "targets"])
    assert {k: tuple(t.shape) for k, t in named.batch(range(3)).inputs.items()} == {
        "x": (3, 12),
        "mask": (3, 4),
    }
    assert [tuple(t.shape) for t in named.batch(range(3)).targets] == [(3, 2, 3), (3,)]


def test_samples_and_rows(tmp_path: Path) -> None:
    data = opened(saved(tmp_path))
    for samples, expected in ((None, (0, N)), ("3:", (3, N)), (":4", (0, 4)), ("0:11", (0, N))):
        assert data.rows(samples) == range(*expected)
    for samples in ("0:12", "11:", ":999999999"):
        with pytest.raises(DatasetError, match=f"samples {samples} are out of range.* has 11"):
            data.rows(samples)
    with pytest.raises(SpecError):
        data.rows("5:2")
    for rows in (range(0), range(9, 12), range(-1, 3), [3, 11], slice(11, 12)):
        with pytest.raises(DatasetError, match="the data set has 11 samples"):
            data.batch(rows)
    whole, some = data.batch(range(N)), data.batch([5, 2, 9])  # in any order
    assert some.index.tolist() == [5, 2, 9]
    assert torch.equal(some.inputs, whole.inputs[some.index])
    held = data.in_any_order
    assert isinstance(held.samples, FileSamples)
    assert all(isinstance(column, torch.Tensor) for column in held.samples.columns.values())
    assert torch.equal(held.batch([5, 2, 9]).inputs, some.inputs)
    assert isinstance(data.samples, FileSamples)
    assert data.samples.in_memory(100) is data.samples


X, Y = np.ones((4, 6)), np.zeros(4, dtype=np.int64)


@pytest.mark.parametrize(
    ("arrays", "spec", "expected"),
    [
        ({"inputs": X, "labels": Y}, {}, "there is no array 'targets' in the file"),
        ({"inputs": X, "labels": Y}, {}, "without targets, write targets = []"),
        ({"image": X, "targets": Y}, {"inputs": ["images"]}, "Did you mean 'image'? It has: "),
        ({"inputs": X, "targets": Y}, {"dtype": {"input": "int64"}}, "no array 'input'"),
        ({"inputs": X, "targets": Y[:3]}, {}, "inputs 4, targets 3"),
        ({"inputs": X[:0], "targets": Y[:0]}, {}, "there are no samples"),
        ({"inputs": X, "targets": np.array(3)}, {}, "has no axis"),
        ({"inputs": X, "targets": np.array([1, "a", None, 2], object)}, {}, "Python objects"),
        ({"inputs": X, "targets": np.array(["a"] * 4)}, {}, "it has text, such as 'a', 'a'"),
        (
            {"inputs": X, "targets": np.zeros(4, "M8[s]")},
            {},
            "dtype datetime64[s] cannot be converted",
        ),
        (
            {"inputs": X, "targets": np.full(4, 2**63, np.uint64)},
            {},
            "which is too large for int64",
        ),
        ({"inputs": X, "targets": Y}, {"reshape": {"inputs": [4]}}, "of shape (6,) (6 numbers)"),
        ({"inputs": X, "targets": Y}, {"reshape": {"inputs": [4, -1]}}, "reshaped to (4, -1)"),
        ({"inputs": X, "targets": X[:, 0] / 3}, {"dtype": {"targets": "int64"}}, "4 values cannot"),
        ({"inputs": X, "targets": Y + 300}, {"dtype": {"targets": "uint8"}}, "the first is 300"),
        ({"inputs": X * np.nan, "targets": Y}, {"dtype": {"inputs": "int32"}}, "first is nan"),
        ({"inputs": X * 1j, "targets": Y}, {"dtype": {"inputs": "float32"}}, "complex numbers"),
    ],
)
def test_data_that_do_not_fit_the_spec(
    tmp_path: Path, arrays: dict, spec: dict, expected: str
) -> None:
    assert expected in failure(saved(tmp_path, **arrays), **spec)


def zipped(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, content)
            archive.writestr("targets.npy", content)

    return write


def single_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, X)


def claims_too_much(path: Path) -> None:
    """An array whose header claims more bytes than any machine can address."""
    content = io.BytesIO()
    np.save(content, X)
    shape, claimed = b"(4, 6), }" + b" " * 16, b"(4, 10000000000000000), }"
    assert shape in content.getvalue()
    zipped("inputs.npy", content.getvalue().replace(shape, claimed))(path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "this directory has no data"),
        (lambda p: p.write_text("Dear reader,\nthis is no table.\n" * 9), "this is a text file"),
        (lambda p: p.write_bytes(b"\x80\x04" + bytes(40)), "a Python pickle"),
        (single_array, "It has: data."),
        (lambda p: torch.save({"a": torch.ones(2)}, p), "It has: a."),
        (zipped("inputs.npy", "hello"), "is not a numpy array"),
        (
            claims_too_much,
            "declares 320,000,000,000,000,000 bytes of numbers, but the file has 192",
        ),
    ],
)
def test_a_file_that_holds_no_data(
    tmp_path: Path, write: Callable[[Path], object], expected: str
) -> None:
    path = tmp_path / "data.npz"
    write(path)
    assert expected in failure(path)


def test_any_missing_or_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, inputs=ARRAYS["wide"], targets=ARRAYS["targets"])
    whole, refused = path.read_bytes(), 0
    for size in (1, 5, 40, *(len(whole) * k // 8 for k in range(1, 8)), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert any(word in failure(path) for word in ("cut off", "damaged"))
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            batch = opened(path).batch(slice(None))
        except DatasetError:
            refused += 1
        else:
            np.testing.assert_array_equal(batch.inputs.numpy(), ARRAYS["wide"])
            np.testing.assert_array_equal(batch.targets.numpy(), ARRAYS["targets"])
    assert refused > 50


def test_a_length_and_a_batch_that_no_machine_holds(tmp_path: Path) -> None:
    """Nothing is allocated, also not lazily; too large a batch is not tried, so that fewer are."""
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.ones((64, 3), np.float32), targets=np.arange(64))
    absurd = {"length": {"inputs": 10**10}, "pad": {"inputs": 0}}
    for inputs in (["inputs"], ["inputs_mask"]):
        told = failure(path, inputs=inputs, **absurd)
        assert "a sample of shape (10000000000,) is too large" in told
        assert "[dataset] length" in told
    data = opened(path, length={"inputs": 2**20}, pad={"inputs": 0})
    data = replace(data, samples=replace(data.samples, memory=lambda device: 2**28))
    with pytest.raises(MemoryError, match="are needed, but"):
        data.batch(range(64))
    assert data.batch(range(2)).inputs.shape == (2, 2**20)


@pytest.mark.parametrize(
    ("dtype", "pad", "held"),
    [
        ("uint8", 255, True),
        ("uint8", 256, False),
        ("uint8", -1, False),
        ("int64", 0.5, False),
        ("int64", 2.0**52, True),
        ("float16", 1e300, False),
        ("bool", 2, False),
    ],
)
def test_what_sequences_are_filled_up_with_is_never_wrapped(
    tmp_path: Path, dtype: str, pad: float, held: bool
) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.ones((4, 3), dtype), targets=np.arange(4))
    spec = {"length": {"inputs": 5}, "pad": {"inputs": float(pad)}}
    if held:
        assert opened(path, **spec).batch(range(1)).inputs[0, -1].item() == pad
    else:
        assert "cannot represent the padding value" in failure(path, **spec)
