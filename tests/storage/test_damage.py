"""Files that are damaged, unfinished, foreign or hostile: an error, and never a wrong number."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope.errors import ResultFileError
from gradscope.storage import open_file
from gradscope.storage.format.seal import NO_RECORDS, write_seal
from gradscope.storage.write.target import Target
from tests.storage.example import load, same, unsealed, write


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "o.h5"
    write(path)
    return path.read_bytes()


def test_a_flipped_byte_anywhere_is_an_error(tmp_path: Path, good: bytes) -> None:
    generator, path = random.Random(5), tmp_path / "o.h5"
    path.write_bytes(good)
    wanted = load(path)
    for _ in range(200):
        data, at = bytearray(good), generator.randrange(len(good))
        data[at] ^= generator.randrange(1, 256)
        path.write_bytes(data)
        try:
            found = load(path)
        except ResultFileError as error:
            assert error.where and error.remedy
        else:
            assert same(found, wanted), f"byte {at}"


@pytest.mark.parametrize(
    ("parameter", "part"), [("w", ""), ("emb", "/rows"), ("layer.weight", "/left")]
)
def test_a_flipped_byte_in_a_row_harms_only_its_chunk(
    tmp_path: Path, good: bytes, parameter: str, part: str
) -> None:
    path = tmp_path / "o.h5"
    path.write_bytes(good)
    wanted = load(path)[f"chains/0/{parameter}"]
    with h5py.File(path) as file:
        dataset = file[f"chains/0/{parameter}{part}"]
        rows = dataset.chunks[0]
        place = dataset.id.get_chunk_info(0).byte_offset
    data = bytearray(good)
    data[place + 5] ^= 4
    path.write_bytes(data)
    with open_file(path) as file:
        with pytest.raises(ResultFileError, match="data are damaged") as caught:
            file.chains[0][parameter][0]
        assert f"/chains/0/{parameter}" in str(caught.value)
        np.testing.assert_array_equal(file.chains[0][parameter][rows:], wanted[rows:])


def test_a_seal_whose_table_claims_petabytes_is_refused_at_once(
    tmp_path: Path, good: bytes
) -> None:
    path, count = tmp_path / "o.h5", int.from_bytes(good[-48:-40], "little")
    for k in range(3 * count):
        for byte in (6, 7):
            data = bytearray(good)
            data[-48 - 24 * count + 8 * k + byte] ^= 0x81
            path.write_bytes(data)
            with pytest.raises(ResultFileError, match="changed"):
                open_file(path)


def _missing(path: Path, good: bytes) -> None:
    pass


def _unfinished_beside(path: Path, good: bytes) -> None:
    path.with_name("o.h5.part").write_bytes(b"")


def _text(path: Path, good: bytes) -> None:
    path.write_text("not a result")


def _empty(path: Path, good: bytes) -> None:
    path.write_bytes(b"")


def _cut(path: Path, good: bytes) -> None:
    path.write_bytes(good[: len(good) // 2])


def _cut_by_one(path: Path, good: bytes) -> None:
    path.write_bytes(good[:-1])


def _lengthened(path: Path, good: bytes) -> None:
    path.write_bytes(good + b"\0")


def _foreign(path: Path, good: bytes) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)


def _changed(path: Path, good: bytes) -> None:
    path.write_bytes(good)
    with h5py.File(path, "r+") as file:
        file.attrs["checkpoint_sha256"] = "0" * 64


def _part(path: Path, good: bytes) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_at=32)
    path.with_name("o.h5.part").rename(path)


CASES: list[tuple[Callable[[Path, bytes], None], str]] = [
    (_missing, "no such file"),
    (_unfinished_beside, "o.h5.part is there"),
    (_text, "not an HDF5 file"),
    (_empty, "not an HDF5 file"),
    (_cut, "cut short"),
    (_cut_by_one, "seal is missing"),
    (_lengthened, "seal is missing"),
    (_foreign, "not written by gradscope"),
    (_changed, "seal is missing|was changed"),
    (_part, "not finished"),
]


@pytest.mark.parametrize(("make", "what"), CASES)
def test_what_is_no_complete_result(
    tmp_path: Path, good: bytes, make: Callable[[Path, bytes], None], what: str
) -> None:
    path = tmp_path / "o.h5"
    make(path, good)
    with pytest.raises(ResultFileError, match=what) as caught:
        open_file(path)
    assert "o.h5" in str(caught.value) and caught.value.remedy
    assert caught.value.exit_code == 3


def _newer(file: h5py.File) -> None:
    file.attrs["format_version"] = 3


def _external_link(file: h5py.File) -> None:
    del file["chains/0/w"]
    file["chains/0/w"] = h5py.ExternalLink("secret.h5", "/x")


def _soft_link(file: h5py.File) -> None:
    file["chains/0/more"] = h5py.SoftLink("/chains")


def _loop(file: h5py.File) -> None:
    file["chains/0/again"] = file["chains"]


def _external_storage(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", (100,), "f4", external=[("secret.bin", 0, 400)])


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((100,), "f4")
    layout[:] = h5py.VirtualSource("secret.h5", "x", (100,))
    del file["chains/0/scale"]
    file["chains/0"].create_virtual_dataset("scale", layout)


def _petabyte(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", (100, 10**13), "f4", chunks=(1, 1024), fletcher32=True)


def _petabyte_unallocated(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", (100, 10**13), "f4")


def _petabyte_as_scale(file: h5py.File) -> None:
    _petabyte_unallocated(file)
    file["chains/0/scale"].make_scale("axis")


def _text_data(file: h5py.File) -> None:
    del file["samples/target"]
    file["samples"]["target"] = np.array(["a"] * 100, dtype=h5py.string_dtype())


def _unchecked(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", (100,), "f4", chunks=(10,), data=np.ones(100))


def _filter(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0"].create_dataset("scale", (100,), "f4", compression="gzip", data=np.ones(100))


def _attribute(file: h5py.File) -> None:
    file["chains/0"].attrs["long"] = np.zeros(9000, "f4")
    file["chains/0"].attrs["table"] = np.zeros(3, [("a", "i4"), ("b", "f4")])


def _factors(file: h5py.File) -> None:
    file["chains/0/emb"].attrs["shape"] = np.array([10**9, 10**9])


def _index(file: h5py.File) -> None:
    file["chains/0/emb/index"][3, 0] = -4


def _no_tables(file: h5py.File) -> None:
    del file["samples/index"]


def _document(file: h5py.File) -> None:
    file.attrs["run"] = json.dumps([1, 2])


def _shapes(file: h5py.File) -> None:
    file.attrs["parameters"] = json.dumps({"w": 3})


HOSTILE: list[tuple[Callable[[h5py.File], None], str]] = [
    (_newer, "format version 3"),
    (_external_link, "link 'w' to somewhere else"),
    (_soft_link, "link 'more' to somewhere else"),
    (_loop, "in a loop"),
    (_external_storage, "other files"),
    (_virtual, "other files"),
    (_petabyte, "claims"),
    (_petabyte_unallocated, "claims"),
    (_petabyte_as_scale, "claims"),
    (_text_data, "not numbers"),
    (_unchecked, "without checksums"),
    (_filter, "filters"),
    (_attribute, "attribute 'table'"),
    (_factors, "are not the parameters"),
    (_index, "outside the table"),
    (_no_tables, "index"),
    (_document, "not a JSON document"),
    (_shapes, "does not hold shapes"),
]


@pytest.mark.parametrize(("change", "what"), HOSTILE)
def test_a_hostile_file_is_refused(
    tmp_path: Path, good: bytes, change: Callable[[h5py.File], None], what: str
) -> None:
    """Whoever makes such a file can seal it too."""
    path = tmp_path / "o.h5"
    path.write_bytes(unsealed(good))
    with path.open("r+b") as raw:
        with Target(raw.fileno()).editing() as file:
            change(file)
        write_seal(raw.fileno(), NO_RECORDS)
    with pytest.raises(ResultFileError, match=what), open_file(path) as opened:
        for chain in opened.chains:
            for array in chain.values():
                array[...]


def test_a_closed_file_says_so(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "o.h5").write_bytes(good)
    with open_file(tmp_path / "o.h5") as file:
        array = file.chains[0]["w"]
    with pytest.raises(ResultFileError, match="closed"):
        array[0]
