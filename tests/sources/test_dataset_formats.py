"""Every data format against the arrays it was written from; each slice, in any order."""

import hashlib
import io
import json
import os
import re
import sys
import time
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
from PIL import Image

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import from_numpy
from gradscope.sources.formats import dataset_readers
from tests.sources.test_datasets import failure, opened

N = 700  # more than the records between two remembered places of a text file
RANDOM = np.random.default_rng(1)
TABLE = RANDOM.normal(size=(N, 3))
LABELS = RANDOM.integers(0, 9, N)
NAMES = [f"{'é' * (k % 3)}sample {k}, line\n{k % 7}" for k in range(N)]
RAGGED = [RANDOM.integers(1, 50, RANDOM.integers(1, 9)) for _ in range(N)]
SLICES = [(0, N), (300, 301), (255, 520), (0, 1), (N - 1, N), (3, 40)]


def npy_folder(path: Path) -> None:
    path.mkdir()
    np.save(path / "inputs.npy", TABLE)
    np.save(path / "targets.npy", LABELS)


def npy_fields(path: Path) -> None:
    rows = np.zeros(N, [("inputs", "<f8", (3,)), ("targets", ">i4"), ("größe €", "i8")])
    rows["inputs"], rows["targets"] = TABLE, LABELS
    with path.open("wb") as file:  # version 3: names beyond Latin-1
        np.lib.format.write_array(file, rows, version=(3, 0))


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=TABLE, chunks=(64, 3), compression="gzip")
        file["targets"] = LABELS


def as_jsonl(path: Path, inputs: Iterable[Any]) -> None:
    rows = zip(inputs, LABELS, strict=True)
    lines = [json.dumps({"inputs": x.tolist(), "targets": int(y)}) for x, y in rows]
    path.write_text("\n".join(lines))


def arrow_table() -> pa.Table:
    return pa.table({"inputs": list(TABLE), "targets": LABELS})


def parquet(path: Path) -> None:
    pq.write_table(arrow_table(), path, row_group_size=150)


def parquet_shards(path: Path) -> None:
    path.mkdir()
    for k in range(3):
        pq.write_table(arrow_table().slice(k * 250, 250), path / f"part-{k}.parquet")


def arrow_file(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, arrow_table().schema) as writer:
        writer.write_table(arrow_table(), max_chunksize=128)


def stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def hugging_face(path: Path) -> None:
    """As Dataset.save_to_disk(num_shards=2) writes it."""
    path.mkdir()
    files = [f"data-0000{k}-of-00002.arrow" for k in range(2)]
    stream(path / files[0], arrow_table().slice(0, 411))
    stream(path / files[1], arrow_table().slice(411))
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": f} for f in files]}))
    (path / "dataset_info.json").write_text("{}")


WRITERS = {
    "data.npz": lambda path: np.savez(path, inputs=TABLE, targets=LABELS),
    "packed.npz": lambda path: np.savez_compressed(path, inputs=TABLE, targets=LABELS),
    "npy": npy_folder,
    "fields.npy": npy_fields,
    "data.safetensors": lambda path: safetensors.numpy.save_file(
        {"inputs": TABLE, "targets": LABELS}, path
    ),
    "data.h5": hdf5,
    "data.jsonl": lambda path: as_jsonl(path, TABLE),
    "data.parquet": parquet,
    "parquet": parquet_shards,
    "data.arrow": arrow_file,
    "data.stream": lambda path: stream(path, arrow_table()),
    "saved": hugging_face,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_gives_back_what_was_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    data = opened(path)
    assert len(data) == N
    assert dataset_readers.summary(data.describe()["format"])
    for start, stop in SLICES:
        batch = data.batch(range(start, stop))
        np.testing.assert_array_equal(batch.inputs.numpy(), TABLE[start:stop])
        np.testing.assert_array_equal(batch.targets.numpy(), LABELS[start:stop])
        assert batch.targets.dtype == torch.int64
    np.testing.assert_array_equal(data.batch(range(5, N, 99)).inputs.numpy(), TABLE[5:N:99])
    assert data.sha256 == digest(path)


def digest(path: Path) -> str:
    """As sha256sum prints it of a file, or of the list of a folder's files."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{digest(file)}  {file.name}\n" for file in sorted(path.iterdir())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def csv_text(separator: str = ",", header: bool = True, end: str = "\n") -> str:
    def quoted(text: str) -> str:
        return f'"{text}"'

    lines = [["a", "b", "c", "label", "name"]] if header else []
    for row, label, name in zip(TABLE, LABELS, NAMES, strict=True):
        lines.append([*map(repr, row.tolist()), str(label), *([quoted(name)] if header else [])])
    return "".join(separator.join(line) + end for line in lines)


@pytest.mark.parametrize(("separator", "end"), [(",", "\n"), (";", "\n"), ("\t", "\r\n")])
def test_csv(tmp_path: Path, separator: str, end: str) -> None:
    path = tmp_path / "data.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        file.write(csv_text(separator, end=end))
    columns = {"inputs": ["a", "[1:3]"], "targets": "label", "one": ["label"], "far": "[3]"}
    data = opened(path, columns=columns, targets=["targets", "one", "far", "b"], id="name")
    assert len(data) == N
    for start, stop in SLICES:
        batch = data.batch(range(start, stop))
        np.testing.assert_array_equal(batch.inputs.numpy(), TABLE[start:stop])
        label, one, far, b = batch.targets
        np.testing.assert_array_equal(label.numpy(), LABELS[start:stop])
        np.testing.assert_array_equal(one.numpy(), LABELS[start:stop, None])
        np.testing.assert_array_equal(far.numpy(), label.numpy())
        np.testing.assert_array_equal(b.numpy(), TABLE[start:stop, 1])
        ids = data.ids(batch.index)
        texts = [bytes(row.tolist()).rstrip(b"\0").decode() for row in ids]
        assert texts == NAMES[start:stop]


def test_csv_without_names_of_one_column_and_with_gaps(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text(csv_text(header=False))
    data = opened(path, columns={"inputs": ["[0:3]"], "targets": "3"})
    np.testing.assert_array_equal(data.batch(range(N)).inputs.numpy(), TABLE)
    assert any("first line" in note for note in data.notes)
    path.write_text("x\n1\n2.5\n 3 \n")
    assert opened(path, inputs=["x"], targets=[]).batch(range(3)).inputs.tolist() == [1, 2.5, 3]
    path.write_text("x,y\n1,2\n,3\n4,nan\n")
    batch = opened(path, columns={"z": ["x", "y"]}, inputs=["z"], targets=[]).batch(range(3))
    assert batch.inputs.isnan().tolist() == [[False, False], [True, False], [False, True]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "inputs,targets\n1,2\n3\n" + "4,5\n" * 30,
            "line 3 has 1 fields, but the first line has 2",
        ),
        ("inputs,inputs\n1,2\n3,4\n", "several columns are called 'inputs'"),
        ("inputs,targets\n1,cat\n2,dog\n", "it has text, such as 'cat', 'dog'"),
        ("inputs,targets\n", "no samples"),
        ('inputs,targets\n1,2\n3,"4\n', "unexpected end of data"),
        ("inputs,targets\n1,2\n3,\xff\n".encode("latin-1"), "not UTF-8 text at byte 21"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert expected in failure(path)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"inputs": 1, "targets": 2}', "[1]"], "line 2 is not a JSON object"),
        (['{"inputs": 1, "targets": 2}', '{"inputs": 1,'], "line 2 is not a JSON object"),
        (["{" * 9000], "line 1 is not a JSON object"),
        (['{"inputs": 1, "targets": 2}', '{"inputs": "a", "targets": 2}'], "sample 1 is 'a'"),
        (['{"inputs": [[1], [1, 2]], "targets": 2}'], "sample 0 is [[1], [1, 2]]"),
        (['{"inputs": [1], "targets": 2}', '{"inputs": [[1]], "targets": 2}'], "sample 1 is"),
        (['{"inputs": {"a": 1}, "targets": 2}'], "sample 0 is {'a': 1}"),
        (['{"inputs": [1], "targets": 2}', '{"inputs": [1, 2], "targets": 2}'], "from 1 to 2 entr"),
        (['{"inputs": 1}'], "no array 'targets'"),
        (
            ['{"inputs": 1, "targets": 2}', "", '{"inputs": 1, "targets": 2, "new": 3}'],
            "line 3 has the key 'new', which the first line does not have",
        ),
        ([f'{{"inputs": {2**63}, "targets": 2}}'], f"sample 0 is {2**63}"),
        ([f'{{"inputs": [1, {2**63}], "targets": 2}}'], f"sample 0 is [1, {2**63}]"),
        ([f'{{"inputs": [-1, {2**63}], "targets": 2}}'], f"sample 0 is [-1, {2**63}]"),
        ([f'{{"inputs": [-1, {2**64}], "targets": 2}}'], f"sample 0 is [-1, {2**64}]"),
    ],
)
def test_bad_jsonl(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    assert expected in failure(path)


@pytest.mark.parametrize("number", [-(2**63), 2**53 + 1, 2**63 - 1])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_large_integers_are_exact(tmp_path: Path, suffix: str, number: int) -> None:
    path = tmp_path / f"data.{suffix}"
    row = json.dumps({"inputs": 1, "targets": number})
    path.write_text(row if suffix == "jsonl" else f"inputs,targets\n1,{number}\n2,7\n")
    assert opened(path).batch(range(1)).targets.tolist() == [number]


def test_integers_of_a_csv_that_int64_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text(f"inputs,targets,other\n1,2,{2**63}\n3,4,5\n")
    assert opened(path).batch(range(2)).inputs.tolist() == [1, 3]
    found = failure(path, inputs=["other"])
    assert f"it has the number {2**63}, which is too large for int64" in found
    path.write_text(f"inputs,targets\n{2**63},2\n0.5,4\n")  # a column of floats
    assert opened(path).batch(range(2)).inputs.tolist() == [2.0**63, 0.5]


def test_codes_with_an_underscore_are_texts(tmp_path: Path) -> None:
    """Python would read 2020_01 as the integer 202001."""
    path = tmp_path / "data.csv"
    path.write_text("inputs,targets,month\n1,2,2020_01\n3,4,2020_1\n")
    data = opened(path, id="month")
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in data.ids(torch.arange(2))]
    assert texts == [b"2020_01", b"2020_1"]


def test_lists_of_equal_length_need_no_object_for_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(array: np.ndarray) -> torch.Tensor:
        made.append(len(array))
        return from_numpy(array)

    lists = pa.array([*TABLE], pa.list_(pa.float64()))
    pq.write_table(pa.table({"inputs": lists, "targets": LABELS}), tmp_path / "lists.parquet")
    data = opened(tmp_path / "lists.parquet")
    monkeypatch.setattr("gradscope.sources.data.arrow.from_numpy", counted)
    batch = data.batch(range(100, 600))
    assert np.array_equal(batch.inputs.numpy(), TABLE[100:600])
    assert sorted(made) == [500, 1500]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"inputs": [0.5], "targets": pa.array([1], pa.int32())}, "int64 in a.* and int32 in b"),
        ({"inputs": [0.5]}, "'targets' is int64 in a.* and missing in b"),
        ({"inputs": [0.5], "targets": [1], "more": [2]}, "'more' is missing in a.* and int64 in b"),
    ],
)
def test_shards_of_other_types_are_refused(
    tmp_path: Path, kind: str, other: dict[str, Any], expected: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, columns in {"a": {"inputs": [0.5], "targets": [1]}, "b": other}.items():
        write = pq.write_table if kind == "parquet" else lambda t, path: stream(path, t)
        write(pa.table(columns), folder / f"{name}.{kind}")
    assert re.search(expected, failure(folder))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_shards_may_have_their_columns_in_another_order(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    columns = {"inputs": [[1, 2], [3, 4]], "other": [[5], [6]], "targets": [0, 1]}
    for name, order in {"a": columns, "b": [*columns][::-1]}.items():
        write = pq.write_table if kind == "parquet" else lambda t, path: stream(path, t)
        write(pa.table({k: columns[k] for k in order}), folder / f"{name}.{kind}")
    batch = opened(folder, inputs={"x": "inputs", "y": "other"}).batch(range(4))
    assert batch.inputs["x"].tolist() == [[1, 2], [3, 4]] * 2
    assert batch.inputs["y"].tolist() == [[5], [6]] * 2
    assert batch.targets.tolist() == [0, 1] * 2


def test_json_values(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"a": 1, "b": True, "c": [[1, 2], [3, 4]], "d": None}, {"a": 2, "b": False}]
    rows[1] |= {"c": [[5, 6.5], [7, 8]], "d": 3}
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    data = opened(path, inputs={name: name for name in "abcd"}, targets=[])
    found = data.batch(range(2)).inputs
    assert found["a"].tolist() == [1, 2]
    assert found["b"].tolist() == [True, False]
    assert found["c"].tolist() == [[[1, 2], [3, 4]], [[5, 6.5], [7, 8]]]
    assert found["d"].isnan().tolist() == [True, False]


def ragged_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("inputs", (N,), h5py.vlen_dtype(np.int64))
        for k, row in enumerate(RAGGED):
            rows[k] = row
        file["targets"] = LABELS


RAGGED_WRITERS = {
    "jsonl": lambda path: as_jsonl(path, RAGGED),
    "parquet": lambda path: pq.write_table(
        pa.table({"inputs": RAGGED, "targets": LABELS}), path, row_group_size=99
    ),
    "hdf5": ragged_hdf5,
}


@pytest.mark.parametrize("kind", RAGGED_WRITERS)
@pytest.mark.parametrize("length", [None, 5, 12])
def test_ragged_rows_are_padded_with_a_mask(tmp_path: Path, kind: str, length: int | None) -> None:
    path = tmp_path / "data"
    RAGGED_WRITERS[kind](path)
    width = length or max(map(len, RAGGED))
    data = opened(
        path,
        inputs={"ids": "inputs", "mask": "inputs_mask"},
        pad={"inputs": -1},
        length={} if length is None else {"inputs": length},
    )
    for start, stop in SLICES:
        found = data.batch(range(start, stop)).inputs
        expected = np.full((stop - start, width), -1)
        for k, row in enumerate(RAGGED[start:stop]):
            expected[k, : len(row)] = row[:width]
        np.testing.assert_array_equal(found["ids"].numpy(), expected)
        np.testing.assert_array_equal(found["mask"].numpy(), expected >= 0)
    assert "[dataset] pad" in failure(path)


def test_texts_become_numbers_by_the_classes_listed(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("inputs,targets\n1,cat\n2,dog\n3,cat\n")
    data = opened(path, classes={"targets": ["dog", "cat"]})
    assert data.batch(range(3)).targets.tolist() == [1, 0, 1]
    assert "'dog', which is not one of the classes" in failure(path, classes={"targets": ["cat"]})
    assert "it has numbers" in failure(path, classes={"inputs": ["cat"], "targets": ["dog"]})


def pictures(folder: Path, mode: str = "RGB") -> np.ndarray:
    """Six images of two classes; the pixels (6, c, h, w) in the order of their paths."""
    shape = (6, 5, 4) if mode == "L" else (6, 5, 4, 3)
    pixels = RANDOM.integers(0, 256, shape).astype(np.uint8)
    for k, values in enumerate(pixels):
        place = folder / ("cat" if k < 4 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place / f"{k}.png")
    return pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_image_folders(tmp_path: Path, mode: str) -> None:
    pixels = pictures(tmp_path / "images", mode)
    data = opened(tmp_path / "images", id="path", dtype={"inputs": "float32"})
    batch = data.batch(range(1, 6))
    np.testing.assert_array_equal(batch.inputs.numpy(), pixels[1:].astype(np.float32))
    assert batch.targets.tolist() == [0, 0, 0, 1, 1]
    ids = data.ids(batch.index)
    assert bytes(ids[4].tolist()).decode() == "dog/5.png"
    assert data.notes == ("classes: 0 cat, 1 dog",)
    Image.new("RGB", (9, 9)).save(tmp_path / "images" / "dog" / "9.png")
    message = failure(tmp_path / "images")
    assert "9.png: this image has shape" in message
    assert "FILE.py:FACTORY" in message
    (tmp_path / "images" / "dog" / "9.png").write_bytes(b"no image")
    assert "9.png: the file is damaged" in failure(tmp_path / "images")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("train-00000-of-00001", "test-00000-of-00001"), True),
        (("train", "validation", "test"), True),
        (("mnist_train_0", "mnist_test_0"), True),
        (("part-0", "dev-0"), True),
        (("train-00000-of-00002", "train-00001-of-00002"), False),
        (("latest-0", "contest-1"), False),
        (("part-0", "part-1"), False),
    ],
)
def test_a_folder_of_several_data_sets_is_refused(
    tmp_path: Path, kind: str, names: tuple[str, ...], refused: bool
) -> None:
    """Samples for training and samples for testing are not one data set."""
    folder = tmp_path / "data"
    folder.mkdir()
    for k, name in enumerate(names):
        table = pa.table({"inputs": [float(k), 1.0], "targets": [0, 1]})
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as sink:
                sink.write_table(table)
    if not refused:
        assert len(opened(folder)) == 2 * len(names)
        return
    message = failure(folder)
    assert "several data sets" in message and all(f"{name}.{kind}" in message for name in names)


def test_folders_of_images_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            Image.new("L", (4, 4)).save(folder / "0.png")
    message = failure(tmp_path / "images")
    assert "test, train are data sets, not classes" in message
    assert opened(tmp_path / "images" / "train").batch(range(2)).targets.tolist() == [0, 1]


def test_images_in_a_table(tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (3, 5, 4, 3)).astype(np.uint8)
    values = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        values.append({"bytes": buffer.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"inputs": pa.array(values, kind)}), tmp_path / "a.parquet")
    batch = opened(tmp_path / "a.parquet", targets=[]).batch(range(1, 3))
    np.testing.assert_array_equal(batch.inputs.numpy(), pixels[1:].transpose(0, 3, 1, 2))


def test_parts_of_tables_and_files_of_their_own(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.c_[TABLE, LABELS])
    np.save(tmp_path / "more.npy", LABELS)
    data = opened(
        tmp_path / "data.npy",
        columns={"inputs": ["data[0:2]", "data[2]"], "targets": "data[3]"},
        files={"labels": tmp_path / "more.npy"},
        targets=["targets", "labels"],
        dtype={"targets": "int64"},
    )
    batch = data.batch(range(9, 20))
    np.testing.assert_array_equal(batch.inputs.numpy(), TABLE[9:20])
    for target in batch.targets:
        np.testing.assert_array_equal(target.numpy(), LABELS[9:20])


def test_a_text_among_numbers_is_named(tmp_path: Path) -> None:
    """Of many columns and rows, what has to be found is the one that is no number."""
    path = tmp_path / "data.csv"
    rows = [f"{k},{'NA' if k == 7 else k / 2},{'' if k == 3 else k}" for k in range(20)]
    path.write_text("\n".join(["a,b,c", *rows]))
    told = failure(path, columns={"inputs": ["a", "b", "c"]}, targets=[])
    assert "the column 'b' cannot be joined with numbers: it has text, such as 'NA'\n" in told
    assert "it has text, such as 'NA'\n" in failure(path, inputs=["b"], targets=[])


def test_what_is_given_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=TABLE, targets=LABELS)
    assert "kwargs cannot be combined with a data file" in failure(path, kwargs={"n": 3})
    data = opened(path, files={"more": tmp_path / "none.npy"})  # it counts for the digest
    with pytest.raises(DatasetError, match=r"none\.npy: cannot be read: No such file"):
        assert data.sha256


@pytest.mark.parametrize("suffix", ["npy", "parquet", "arrow"])
def test_a_folder_with_a_pipe(tmp_path: Path, suffix: str) -> None:
    """It would be waited for."""
    os.mkfifo(tmp_path / f"a.{suffix}")
    with pytest.raises(DatasetError, match="not a regular file"):
        opened(tmp_path, inputs=["a"], targets=["a"])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (["data[0:9]"], "'data[0:9]' is out of range: there are 3 columns"),
        (["dta"], "there is no column 'dta' in the file\nDid you mean 'data'?"),
        (["labels[0]"], "without second axis"),
        ("*a*", "names 2 columns"),
        (["data", "deep"], "cannot be concatenated"),
        (["one"], "cannot be concatenated"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, inputs: Any, expected: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, data=TABLE, labels=LABELS, deep=np.zeros((N, 2, 2)), one=np.array(1))
    assert expected in failure(path, columns={"inputs": inputs}, targets=["labels"])


def test_samples_are_selected(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    mask = RANDOM.random(N) < 0.3
    np.savez(path, inputs=TABLE, targets=LABELS, train=mask, key=np.arange(N) * 10)
    chosen = np.flatnonzero(mask)
    data = opened(path, select="train", id="key")
    assert len(data) == len(chosen)
    batch = data.batch(range(2, 30))
    np.testing.assert_array_equal(batch.inputs.numpy(), TABLE[chosen[2:30]])
    assert batch.index.tolist() == list(range(2, 30))  # positions among those selected
    np.testing.assert_array_equal(data.ids(batch.index).numpy(), chosen[2:30] * 10)
    listed = opened(path, select=[5, 3, 4, 600])
    np.testing.assert_array_equal(listed.batch(range(4)).inputs.numpy(), TABLE[[5, 3, 4, 600]])
    assert "out of range" in failure(path, select=[0, N])
    assert "repeated" in failure(path, select=[1, 1])
    expected = "select: 'key' is neither an array of 700 booleans nor one of different positions"
    assert expected in failure(path, select="key")


@pytest.mark.parametrize(
    ("positions", "right"),
    [
        (np.array([5, 3, 699]), True),
        (np.array([0], np.uint8), True),
        (np.arange(N)[::-1].copy(), True),
        (np.array([0, N]), False),
        (np.array([-1, 2]), False),
        (np.array([4, 4]), False),
        (np.array([1.0, 2.0]), False),
        (np.zeros((2, 1), int), False),
    ],
)
def test_an_array_of_positions_selects(tmp_path: Path, positions: np.ndarray, right: bool) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=TABLE, targets=LABELS, chosen=positions)
    if not right:
        assert "nor one of different positions" in failure(path, select="chosen")
        return
    data = opened(path, select="chosen")
    rows = data.batch(range(len(positions))).inputs.numpy()
    np.testing.assert_array_equal(rows, TABLE[positions.astype(int)])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.array([3, 1, 3, 2]), "samples 0 and 2 have the same id 3"),
        (np.array(["a", "é", "a", "b"]), "samples 0 and 2 have the same id 'a'"),
        (np.ones(4), "an integer or a text for each sample"),
        (np.arange(3), "3 ids for 4 samples"),
        (np.array(3), "0 ids for 4 samples"),
    ],
)
def test_ids_that_name_no_sample(tmp_path: Path, ids: np.ndarray, expected: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.ones((4, 2)), targets=np.ones(4), key=ids)
    assert expected in failure(path, id="key")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=TABLE, targets=LABELS)
    data = opened(path)
    data.batch(range(3))
    np.savez(path, inputs=TABLE[:600], targets=LABELS[:600])
    with pytest.raises(DatasetError, match="has changed since it was opened"):
        data.batch(range(3))


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow.parquet", "data.parquet"), ("PIL.Image", "images")]
)
def test_what_to_install_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    (pictures if name == "images" else parquet)(tmp_path / name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetError, match="which is not installed") as caught:
        opened(tmp_path / name)
    assert caught.value.remedy == "pip install 'torch-gradscope[data]'"


def _wide(path: Path, n: int) -> None:
    """Write n columns and `y`, 4 rows, in the format that the suffix says."""
    names = [f"x{k:_>30}" for k in range(n)] + ["y"]
    rows = np.arange(4)[:, None] + np.arange(n + 1) % 5
    columns = dict(zip(names, rows.T, strict=True))
    if path.suffix == ".csv":
        lines = ["\t".join(map(str, row)) for row in (names, *rows)]
        path.write_text("\n".join(lines))
    elif path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".npy":
        table = np.zeros(4, [(name, "i8") for name in names])
        for name, values in columns.items():
            table[name] = values
        with path.open("wb") as file:
            np.lib.format.write_array(file, table, version=(2, 0))
    elif path.suffix == ".safetensors":
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(v) for name, v in columns.items()}, path
        )
    else:
        pq.write_table(pa.table({k: [[int(x)] for x in v] for k, v in columns.items()}), path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("suffix", "n"),
    [("csv", 4000), ("npz", 400), ("npy", 700), ("safetensors", 500), ("parquet", 150)],
)
def test_what_columns_cost_grows_as_their_number(tmp_path: Path, suffix: str, n: int) -> None:
    seconds = []
    for count in (n, 4 * n):
        path = tmp_path / f"{count}.{suffix}"
        _wide(path, count)
        begun = time.process_time()
        data = opened(path, columns={"inputs": ["x*"], "targets": ["y"]})
        batches = [data.batch(range(k, k + 2)) for k in (0, 2)]
        seconds.append(time.process_time() - begun)
        found = torch.cat([batch.inputs for batch in batches])
        wanted = np.arange(4)[:, None] + np.arange(count) % 5
        np.testing.assert_array_equal(found.numpy(), wanted)
    assert seconds[1] < 9 * seconds[0] + 0.5, seconds


def test_positions_in_any_order(tmp_path: Path) -> None:
    """A file that is read forwards only is gone through once a batch."""
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"inputs": TABLE[:, 0], "targets": LABELS}), path)
    chosen = RANDOM.permutation(N)[:50].tolist()
    data = opened(path, select=chosen)
    for start, stop in ((0, 20), (20, 50), (5, 6)):
        batch = data.batch(range(start, stop))
        np.testing.assert_array_equal(batch.inputs.numpy(), TABLE[chosen[start:stop], 0])
        np.testing.assert_array_equal(batch.targets.numpy(), LABELS[chosen[start:stop]])


def test_names_that_are_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (1, 2):
            with io.BytesIO() as file:
                np.save(file, np.full((4, 3), value))
                archive.writestr("inputs.npy", file.getvalue())
    assert "several arrays in it are called 'inputs'" in failure(path)
    path = tmp_path / "data.parquet"
    column = pa.array([1, 2])
    pq.write_table(pa.table([column, column], names=["inputs", "inputs"]), path)
    assert "several columns are called 'inputs'" in failure(path)
    path = tmp_path / "data.jsonl"
    path.write_text('{"inputs": 1, "targets": 2}\n{"inputs": 1, "targets": 2, "inputs": 3}\n')
    assert "line 2 has 'inputs' twice" in failure(path)
