"""Files that are damaged, foreign or made to harm: one clear error, and never a wrong number.

Whoever makes such a file can seal it, too; so every hostile one here is sealed.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.config import parse_compression
from gradscope.errors import GradscopeError, ResultFileError
from gradscope.stats import summarize
from gradscope.storage import export, open_file
from gradscope.storage.format.seal import NO_RECORDS, write_seal
from gradscope.storage.write.target import Target, fletcher32
from tests.cli.conftest import Gradscope, gradscope  # noqa: F401 (a fixture)
from tests.storage.example import SHAPES, load, same, unsealed, with_layout, write

Change = Callable[[h5py.File], Any]
SCALE, LEFT, OUTER = "chains/0/scale", "chains/0/layer.weight/left", "chains/0/layer.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "o.h5"
    write(path)
    return path


def _sealed(good: Path, path: Path, change: Change) -> Path:
    path.write_bytes(unsealed(good.read_bytes()))
    with path.open("r+b") as raw:
        with Target(raw.fileno()).editing() as file:
            change(file)
        write_seal(raw.fileno(), NO_RECORDS)
    return path


def _read(path: Path) -> None:
    """Everything that gradscope does with a result."""
    with open_file(path) as file:
        for k, chain in enumerate(file.chains):
            for array in chain.values():
                array[...]
                array[-1:]
                assert array.overflowed >= 0
            if not chain.reduced:
                list(file.iterate(k))
        list(file.norms.values())
        summarize(file)
        export(file, path.with_suffix(".csv"), parameters=["*"], overwrite=True)
        export(file, path.with_suffix(".safetensors"), overwrite=True)


def _array(path: str, value: Any = None, **more: Any) -> Change:
    """Return what puts another array in a place, or takes it away."""

    def change(file: h5py.File) -> None:
        if path in file:
            del file[path]
        if more or value is not None:
            file.create_dataset(path, data=value, **more)

    return change


def _attribute(path: str, name: str, value: Any) -> Change:
    return lambda file: file[path].attrs.__setitem__(name, value)


def _declared(change: Change, **shapes: list[int]) -> Change:
    """Return what makes another change, and declares parameters' shapes that fit to it."""

    def both(file: h5py.File) -> None:
        change(file)
        file.attrs["parameters"] = json.dumps(json.loads(file.attrs["parameters"]) | shapes)
        del file["chains/1"]

    return both


def _claimed_product(file: h5py.File) -> None:
    shape: Any = {"shape": (100, 1, 1, 2**22), "chunks": (1, 1, 1, 2**20)}
    for name in ("left", "right"):
        _array(f"{OUTER}/{name}", dtype="i1", fletcher32=True, **shape)(file)
    file[OUTER].attrs["shape"] = np.array([2**22, 2**22])


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((100,), "f4")
    layout[:] = h5py.VirtualSource("secret.h5", "x", (100,))
    del file[SCALE]
    file["chains/0"].create_virtual_dataset("scale", layout)


def _filters(*filters: str) -> Change:
    """Return what stores an array with these filters, in this order."""

    def change(file: h5py.File) -> None:
        del file[SCALE]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((10,))
        for name in filters:
            if name == "fletcher32":
                plist.set_fletcher32()
            else:
                plist.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (4,))
        space = h5py.h5s.create_simple((100,))
        made = h5py.h5d.create(file["chains/0"].id, b"scale", h5py.h5t.IEEE_F32LE, space, plist)
        h5py.Dataset(made)[...] = np.ones(100, "f4")

    return change


def _ragged(file: h5py.File) -> None:
    made = file["samples"].create_dataset("ragged", (100,), h5py.vlen_dtype(np.float32))
    made[0] = np.ones(5, "f4")


def _huge_attribute(file: h5py.File) -> None:
    group = file.create_group("chains/2", track_order=True)
    group.attrs["chain"], group.attrs["reduced"] = "identity", False
    group.attrs["big"] = np.zeros(10**6)


def _axis(file: h5py.File) -> None:
    _array(SCALE, dtype="f4", shape=(100, 10**13))(file)
    file[SCALE].make_scale("axis")


def _linked(path: str, make: Callable[[h5py.File], Any]) -> Change:
    def change(file: h5py.File) -> None:
        if path in file:
            del file[path]
        file[path] = make(file)

    return change


_OUT = _linked("samples/more", lambda file: h5py.ExternalLink("/etc/passwd", "/"))
_FEW_LOSSES = _array("samples/loss", np.ones(99, "f4"))
_CHECKED: Any = {"dtype": "f4", "fletcher32": True}
_GROWS = _array(SCALE, shape=(100,), chunks=(2**29,), maxshape=(None,), **_CHECKED)
_TABLE = [("a", "i4"), ("b", "f8")]
HARMFUL: dict[str, tuple[Change, str]] = {
    "a chunk of 2 GB for ten numbers": (_GROWS, "is resizable"),
    "few rows": (_array(SCALE, np.ones(99, "f4")), "not 100 rows"),
    "few losses": (_FEW_LOSSES, "not a column of 100 samples"),
    "square losses": (_array("samples/loss", np.ones((100, 1), "f4")), "/samples/loss"),
    "float index": (_array("samples/index", np.arange(100.0)), "/samples/index"),
    "scalar index": (_array("samples/index", np.int64(3)), "/samples/index"),
    "no index": (_array("samples/index"), "index"),
    "finite as numbers": (_array("samples/finite", np.ones(100)), "/samples/finite"),
    "text as target": (_array("samples/target", ["a"] * 100), "not numbers"),
    "an array as chain": (_array("chains/1", np.ones(3)), "no chain 1"),
    "a chain skipped": (lambda file: file.move("chains/1", "chains/7"), "no chain 1"),
    "an array as table": (_array("norms", np.ones(3)), "no group /norms"),
    "a group as norm": (
        lambda f: (f.__delitem__("norms/w"), f.create_group("norms/w")),
        "not a column",
    ),
    "a name twice": (_array("chains/0/%77", np.ones((100, 7, 5), "f4")), "twice"),
    "another parameter": (
        _array("chains/0/v", np.ones((100, 7, 5), "f4")),
        "the parameters",
    ),
    "another shape": (_array("chains/1/w", np.ones((5, 7))), "the parameters"),
    "another table": (
        _attribute("chains/0/emb", "shape", [10**9, 10**9]),
        "the parameters",
    ),
    "factors that do not fit": (
        _declared(_attribute(OUTER, "shape", [40, 31]), **{"layer.weight": [40, 31]}),
        "do not match rows",
    ),
    "an embedding of a petabyte": (
        _declared(_attribute("chains/0/emb", "shape", [10**14, 8]), emb=[10**14, 8]),
        "too little memory",
    ),
    "a product of petabytes": (
        _declared(_claimed_product, **{"layer.weight": [2**22, 2**22]}),
        "too little memory|claims",
    ),
    "an outer product of scalars": (_array(LEFT, np.float32(3)), "not an array of factors"),
    "no factor": (_array(LEFT), "left"),
    "an index outside": (
        lambda file: file["chains/0/emb/index"].__setitem__((3, 0), -4),
        "outside the table",
    ),
    "an unknown kind": (_attribute(OUTER, "kind", "exec"), "exec"),
    "an unknown format": (_attribute(OUTER, "dtype", "float128"), "float128"),
    "a function as format": (_attribute(OUTER, "dtype", "load"), "number format .* is unknown"),
    "many overflows": (_attribute("chains/0/w", "overflowed", np.zeros(5, int)), "overflowed"),
    "a list of versions": (_attribute("/", "format_version", np.zeros(5, int)), "format version"),
    "a version as text": (_attribute("/", "format_version", "1"), "format version"),
    "a newer version": (_attribute("/", "format_version", 2), "format version 2"),
    "a list of flags": (_attribute("chains/0", "reduced", np.zeros(2, bool)), "reduced"),
    "a number as chain": (_attribute("chains/0", "chain", 5), "'chain'"),
    "a list at the root": (_attribute("/", "DIMENSION_LIST", np.zeros(3, _TABLE)), "DIMENSION"),
    "a table as attribute": (_attribute("chains/0", "table", np.zeros(3, _TABLE)), "'table'"),
    "a huge attribute": (_huge_attribute, "attribute 'big'"),
    "a document that is none": (_attribute("/", "run", "[1, 2]"), "not a JSON document"),
    "shapes that are none": (_attribute("/", "parameters", '{"w": 3}'), "does not hold shapes"),
    "a loop": (_linked("chains/0/again", lambda file: file["chains"]), "in a loop"),
    "a link out": (_OUT, "external link"),
    "a link out as rows": (
        _linked("chains/0/w", lambda file: h5py.ExternalLink("secret.h5", "/x")),
        "soft or external link 'w'",
    ),
    "a soft link": (
        _linked("chains/0/x", lambda f: h5py.SoftLink("/chains")),
        "external link",
    ),
    "a named type": (_linked("chains/0/x", lambda f: np.dtype("f4")), "which is not an array"),
    "references": (
        _linked("samples/x", lambda f: np.array([f["samples"].ref] * 100, h5py.ref_dtype)),
        "not numbers",
    ),
    "ragged": (_ragged, "not numbers"),
    "external storage": (
        _array(SCALE, shape=(100,), dtype="f4", external=[("secret.bin", 0, 400)]),
        "other files",
    ),
    "virtual": (_virtual, "other files"),
    "a petabyte": (
        _array(SCALE, shape=(100, 10**13), chunks=(1, 1024), **_CHECKED),
        "claims",
    ),
    "a petabyte unallocated": (_array(SCALE, shape=(100, 10**13), dtype="f4"), "claims"),
    "a petabyte as axis": (_axis, "claims"),
    "unchecked": (
        _array(SCALE, np.ones(100, "f4"), chunks=(10,)),
        "without checksums",
    ),
    "a few bytes that become a gigabyte": (
        _array(SCALE, shape=(100, 2**20), chunks=(100, 2**20), compression="gzip", **_CHECKED),
        "claim 419,430,400 bytes",
    ),
    "compressed chunks that nobody stored": (
        _array(SCALE, shape=(100,), chunks=(10,), compression="gzip", **_CHECKED),
        "not all stored",
    ),
    "compressed and unchecked": (_filters("gzip"), "filters"),
    "a checksum of what comes out": (_filters("fletcher32", "gzip"), "filters"),
    "two compressions": (_filters("gzip", "gzip", "fletcher32"), "filters"),
    "another filter": (
        _array(SCALE, np.ones(100, "f4"), chunks=(10,), compression="lzf", fletcher32=True),
        "filters",
    ),
}


@pytest.mark.parametrize(("change", "said"), HARMFUL.values(), ids=HARMFUL)
def test_it_is_refused(good: Path, tmp_path: Path, change: Change, said: str) -> None:
    path = _sealed(good, tmp_path / "o.h5", change)
    with pytest.raises(ResultFileError, match=said) as caught:
        _read(path)
    assert "o.h5" in str(caught.value) and caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 3
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.full
def test_a_document_nested_too_deeply(good: Path, tmp_path: Path) -> None:
    """In a process of its own: what runs at the end of the stack may be anything."""
    path = _sealed(good, tmp_path / "o.h5", _attribute("/", "run", "[" * 100_000))
    done = subprocess.run(
        [sys.executable, "-m", "gradscope", "stats", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "o.h5" in done.stderr and "Traceback" not in done.stderr


def test_bytes_that_are_no_compressed_ones(tmp_path: Path) -> None:
    """With a checksum that fits, as a hostile writer would add it."""
    path = tmp_path / "o.h5"
    write(path, with_layout("dense", compression=parse_compression("gzip")))
    body = np.arange(500, dtype=np.uint8)
    chunk = body.tobytes() + fletcher32(body, 500)
    _sealed(path, path, lambda file: file["chains/0/w"].id.write_direct_chunk((0, 0, 0), chunk))
    with open_file(path) as file, pytest.raises(ResultFileError, match="damaged"):
        file.chains[0]["w"][0]


def test_an_index_of_chunks_that_is_wrong(good: Path, tmp_path: Path) -> None:
    """HDF5 would follow it anywhere; an index of the older kind has no checksum of its own."""
    path = tmp_path / "o.h5"
    path.write_bytes(unsealed(good.read_bytes()))
    with h5py.File(path, "r+", libver=("earliest", "v108")) as file:
        del file["chains/0/scale"]
        made = file["chains/0"].create_dataset(
            "scale", (100,), "f4", chunks=(100,), fletcher32=True, data=np.ones(100)
        )
        first = made.id.get_chunk_info(0)
    data, address = path.read_bytes(), first.byte_offset.to_bytes(8, "little")
    at = data.index(address, data.index(b"TREE"))
    path.write_bytes(data[:at] + (2**40).to_bytes(8, "little") + data[at + 8 :])
    with path.open("r+b") as raw:
        write_seal(raw.fileno(), NO_RECORDS)
    with pytest.raises(ResultFileError, match="index of chunks") as caught:
        _read(path)
    assert "o.h5" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("command", ["stats", "export", "merge"])
def test_every_command_refuses_it(
    good: Path,
    gradscope: Gradscope,  # noqa: F811
    tmp_path: Path,
    command: str,
) -> None:
    path = _sealed(good, tmp_path / "o.h5", _OUT)
    more = {"stats": [], "export": ["-o", tmp_path / "x.csv"], "merge": ["-o", tmp_path / "m.h5"]}
    done = gradscope(command, path, *more[command])
    assert (done.code, done.out) == (3, "")
    assert "o.h5" in done.err and "Traceback" not in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["o.h5"]


_NONE: dict[str, Any] = {"run": {}, "certificate": {}, "identity": {}}
_STRANGE = {
    "run": {"spec": 3, "chains": {"a": 1}, "samples": "x", "versions": []},
    "certificate": {"verdict": [1], "unused": 7, "verified": "x"},
    "identity": {"stored": [1]},
}


@pytest.mark.parametrize("documents", [_NONE, _STRANGE], ids=["none", "strange"])
def test_documents_of_another_form_do_no_harm(
    good: Path,
    gradscope: Gradscope,  # noqa: F811
    tmp_path: Path,
    documents: dict[str, Any],
) -> None:
    """They are told, or refused; the numbers are the same."""
    texts = {name: json.dumps(value) for name, value in documents.items()}
    path = _sealed(good, tmp_path / "o.h5", lambda file: file.attrs.update(texts))
    for command in (["stats"], ["stats", "--json"]):
        done = gradscope(*command, path)
        assert done.code in (0, 3), done.err
        assert "Traceback" not in done.err
    with open_file(path) as file:
        assert set(file.chains[0]) == set(SHAPES)


ATTRIBUTES: list[Any] = [
    0, -1, 2.5, True, "text", "", np.zeros(0), np.zeros(3), np.zeros((2, 2), int),
    np.array(["a", "b"], dtype=h5py.string_dtype()), np.bytes_("fixed"), h5py.Empty("f4"),
    np.array([10**18, 10**18]), np.array([-1, 5]), 10**18, np.nan, np.complex64(1j), None,
]  # fmt: skip
ARRAYS: list[Any] = [
    np.zeros(100), np.zeros(99), np.zeros((100, 1)), np.float32(1), np.zeros(0),
    np.zeros(100, int), np.zeros(100, bool), np.zeros(100, complex), np.zeros(100, "u1"),
    np.zeros((100, 7, 5), "f2"), np.array([b"a"] * 100), np.zeros(100, [("a", "i4")]),
    h5py.Empty("f4"), np.full(100, np.nan), np.zeros(100, ">f8"), np.zeros((0, 3)), None,
]  # fmt: skip
PLACES = {
    "/": ["format", "format_version", "status", "run", "certificate", "identity", "parameters"],
    "chains/0": ["chain", "reduced"],
    "chains/0/w": ["name", "representation", "overflowed"],
    "chains/0/layer.weight": ["kind", "shape", "dtype", "name", "representation"],
    "chains/0/emb": ["kind", "shape", "dtype"],
    "norms/w": ["mean_gradient_norm", "name"],
    "states/1": ["keys"],
}


def _replaced(place: str, value: Any) -> Change:
    """Return what puts a value in the place of an array, or takes it away."""

    def change(file: h5py.File) -> None:
        if place in file:
            del file[place]
        if value is not None:
            file[place] = value
            file[place].attrs["representation"] = "dense"

    return change


def _refusals(good: Path, folder: Path, changes: Iterable[Change]) -> int:
    """Read changed files: each is read or refused, never with another exception."""
    refused = 0
    for k, change in enumerate(changes):
        try:
            _read(_sealed(good, folder / f"o{k}.h5", change))
        except GradscopeError as error:
            assert error.exit_code in (2, 3), error
            refused += 1
    return refused


@pytest.mark.sampled
@pytest.mark.parametrize(("place", "name"), [(p, n) for p, names in PLACES.items() for n in names])
def test_an_attribute_of_any_type(good: Path, tmp_path: Path, place: str, name: str) -> None:
    changes = [
        (lambda file: file[place].attrs.pop(name, None))
        if value is None
        else _attribute(place, name, value)
        for value in ATTRIBUTES
    ]
    refused = _refusals(good, tmp_path, changes)
    assert refused or name in ("name", "representation", "mean_gradient_norm", "overflowed")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "place",
    [
        *("samples/index", "samples/loss", "samples/norm", "samples/finite", "samples/target"),
        *("samples/other", "norms/w", "norms/other", "chains/0/w", "chains/0/other", "chains/1/w"),
        *("chains/0/layer.weight/left", "chains/0/layer.weight/other", "chains/0/emb/index"),
        *("chains/0/emb", "chains/0/emb/rows", "chains/2", "chains", "samples", "norms", "other"),
    ],
)
def test_an_array_of_any_type_and_shape(good: Path, tmp_path: Path, place: str) -> None:
    _refusals(good, tmp_path, [_replaced(place, value) for value in ARRAYS])


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.h5")
    for name, told in (("fifo.h5", "not a regular file"), (".", "a directory")):
        with pytest.raises(ResultFileError, match=told):
            open_file(tmp_path / name)
    (tmp_path / "link.h5").symlink_to(tmp_path / "link.h5")
    with pytest.raises(ResultFileError):
        open_file(tmp_path / "link.h5")


def test_a_file_of_a_petabyte_of_nothing(good: Path, tmp_path: Path) -> None:
    """A sparse file can be as large as it says; its tables cannot be read at once."""
    path = tmp_path / "o.h5"
    path.write_bytes(unsealed(good.read_bytes()))
    with path.open("r+b") as raw:
        with Target(raw.fileno()).editing() as file:
            del file["samples/index"]
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple((2**40,))
            made = h5py.h5d.create(file["samples"].id, b"index", h5py.h5t.STD_I64LE, space, plist)
            place = made.get_offset()
        write_seal(raw.fileno(), np.array([[place, 2**43, 0]]))
    assert path.stat().st_size > 2**43
    with pytest.raises(ResultFileError):
        open_file(path)


def test_a_flipped_byte_in_a_row_harms_only_its_chunk(good: Path, tmp_path: Path) -> None:
    path, wanted = tmp_path / "o.h5", load(good)
    for parameter, part in (("w", ""), ("emb", "/rows"), ("layer.weight", "/left")):
        data = bytearray(good.read_bytes())
        with h5py.File(good) as file:
            dataset = file[f"chains/0/{parameter}{part}"]
            rows = dataset.chunks[0]
            data[dataset.id.get_chunk_info(0).byte_offset + 5] ^= 4
        path.write_bytes(data)
        with open_file(path) as opened:
            array = opened.chains[0][parameter]
            with pytest.raises(ResultFileError, match="data are damaged") as caught:
                array[0]
            assert f"/chains/0/{parameter}" in str(caught.value)
            np.testing.assert_array_equal(array[rows:], wanted[f"chains/0/{parameter}"][rows:])
        with pytest.raises(ResultFileError, match="closed"):
            array[0]


@pytest.mark.parametrize(
    "text", [None, *(pytest.param(t, marks=pytest.mark.full) for t in ("gzip", "zstd", "blosc2"))]
)
def test_a_flipped_byte_anywhere_is_an_error(tmp_path: Path, text: str | None) -> None:
    generator, path = random.Random(5), tmp_path / "o.h5"
    compression = None if text is None else parse_compression(text)
    write(path, with_layout("auto" if text is None else "dense", compression=compression))
    good, wanted, caught = path.read_bytes(), load(path), 0
    for _ in range(60):
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
    assert caught > 40


def test_a_seal_whose_table_claims_petabytes_is_refused_at_once(good: Path, tmp_path: Path) -> None:
    path, sound = tmp_path / "o.h5", good.read_bytes()
    count = int.from_bytes(sound[-48:-40], "little")
    for k in range(0, 3 * count, 5):
        for byte in (6, 7):
            data = bytearray(sound)
            data[-48 - 24 * count + 8 * k + byte] ^= 0x81
            path.write_bytes(data)
            with pytest.raises(ResultFileError, match="changed"):
                open_file(path)


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


OTHERS: list[tuple[Callable[[Path, bytes], Any], str]] = [
    (lambda path, good: None, "no such file"),
    (lambda path, good: path.with_name("o.h5.part").write_bytes(b""), "o.h5.part exists"),
    (lambda path, good: path.write_text("not a result"), "not an HDF5 file"),
    (lambda path, good: path.write_bytes(b""), "not an HDF5 file"),
    (lambda path, good: path.write_bytes(good[: len(good) // 2]), "truncated"),
    (lambda path, good: path.write_bytes(good[:-1]), "has no seal"),
    (lambda path, good: path.write_bytes(good + b"\0"), "has no seal"),
    (_foreign, "not written by gradscope"),
    (_changed, "has no seal|was changed"),
    (_part, "not finished"),
]


@pytest.mark.parametrize(("make", "what"), OTHERS)
def test_what_is_no_complete_result(
    tmp_path: Path, good: Path, make: Callable[[Path, bytes], Any], what: str
) -> None:
    path = tmp_path / "o.h5"
    make(path, good.read_bytes())
    with pytest.raises(ResultFileError, match=what) as caught:
        open_file(path)
    assert "o.h5" in str(caught.value) and caught.value.remedy
    assert caught.value.exit_code == 3
