"""Files made to harm: refused with one clear message, before anything of them is believed.

Whoever makes such a file can seal it, too; so every one here is sealed.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.errors import GradscopeError, ResultFileError
from gradscope.stats import summarize
from gradscope.storage import export, open_file
from gradscope.storage.format.seal import NO_RECORDS, write_seal
from gradscope.storage.write.target import Target
from tests.cli.conftest import Gradscope, gradscope  # noqa: F401 (a fixture)
from tests.storage.example import SHAPES, unsealed, write

Change = Callable[[h5py.File], None]


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


def _grows(file: h5py.File) -> None:
    """A chunk of 2 GB for ten numbers."""
    del file["chains/0/scale"]
    file["chains/0"].create_dataset(
        "scale", (100,), "f4", chunks=(2**29,), maxshape=(None,), fletcher32=True
    )


def _few_rows(file: h5py.File) -> None:
    del file["chains/0/scale"]
    file["chains/0/scale"] = np.ones(99, "f4")


def _few_losses(file: h5py.File) -> None:
    del file["samples/loss"]
    file["samples/loss"] = np.ones(99, "f4")


def _square_losses(file: h5py.File) -> None:
    del file["samples/loss"]
    file["samples/loss"] = np.ones((100, 1), "f4")


def _float_index(file: h5py.File) -> None:
    del file["samples/index"]
    file["samples/index"] = np.arange(100.0)


def _scalar_index(file: h5py.File) -> None:
    del file["samples/index"]
    file["samples/index"] = np.int64(3)


def _number_finite(file: h5py.File) -> None:
    del file["samples/finite"]
    file["samples/finite"] = np.ones(100)


def _array_as_chain(file: h5py.File) -> None:
    del file["chains/1"]
    file["chains/1"] = np.ones(3)


def _skipped_chain(file: h5py.File) -> None:
    file.move("chains/1", "chains/7")


def _array_as_tables(file: h5py.File) -> None:
    del file["norms"]
    file["norms"] = np.ones(3)


def _group_as_norm(file: h5py.File) -> None:
    del file["norms/w"]
    file.create_group("norms/w")


def _same_name(file: h5py.File) -> None:
    file["chains/0/%77"] = np.ones((100, 7, 5), "f4")


def _another_parameter(file: h5py.File) -> None:
    file["chains/0/v"] = np.ones((100, 7, 5), "f4")


def _another_shape(file: h5py.File) -> None:
    del file["chains/1/w"]
    file["chains/1/w"] = np.ones((5, 7))


def _factors_that_do_not_fit(file: h5py.File) -> None:
    file["chains/0/layer.weight"].attrs["shape"] = np.array([40, 31])
    _declare(file, **{"layer.weight": [40, 31]})


def _declare(file: h5py.File, **shapes: list[int]) -> None:
    file.attrs["parameters"] = json.dumps(json.loads(file.attrs["parameters"]) | shapes)
    del file["chains/1"]


def _claimed_table(file: h5py.File) -> None:
    """An embedding of a petabyte: a row needs only to say so."""
    file["chains/0/emb"].attrs["shape"] = np.array([10**14, 8])
    _declare(file, emb=[10**14, 8])


def _claimed_product(file: h5py.File) -> None:
    group = file["chains/0/layer.weight"]
    for name in ("left", "right"):
        del group[name]
        group.create_dataset(
            name, (100, 1, 1, 2**22), "i1", chunks=(1, 1, 1, 2**20), fletcher32=True
        )
    group.attrs["shape"] = np.array([2**22, 2**22])
    _declare(file, **{"layer.weight": [2**22, 2**22]})


def _outer_of_scalars(file: h5py.File) -> None:
    group = file["chains/0/layer.weight"]
    del group["left"]
    group["left"] = np.float32(3)


def _no_factor(file: h5py.File) -> None:
    del file["chains/0/layer.weight/left"]


def _unknown_kind(file: h5py.File) -> None:
    file["chains/0/layer.weight"].attrs["kind"] = "exec"


def _unknown_dtype(file: h5py.File) -> None:
    file["chains/0/layer.weight"].attrs["dtype"] = "float128"


def _dtype_of_another_kind(file: h5py.File) -> None:
    file["chains/0/layer.weight"].attrs["dtype"] = "load"


def _many_overflows(file: h5py.File) -> None:
    file["chains/0/w"].attrs["overflowed"] = np.zeros(5, int)


def _list_of_versions(file: h5py.File) -> None:
    file.attrs["format_version"] = np.zeros(5, int)


def _text_version(file: h5py.File) -> None:
    file.attrs["format_version"] = "1"


def _list_reduced(file: h5py.File) -> None:
    file["chains/0"].attrs["reduced"] = np.zeros(2, bool)


def _number_as_chain_text(file: h5py.File) -> None:
    file["chains/0"].attrs["chain"] = 5


def _reference_list_of_root(file: h5py.File) -> None:
    file.attrs.create("DIMENSION_LIST", np.zeros(3, [("a", "i4"), ("b", "f8")]))


def _deep_document(file: h5py.File) -> None:
    file.attrs["run"] = "[" * 100_000


def test_a_document_nested_too_deeply(good: Path, tmp_path: Path) -> None:
    """In a process of its own: what runs at the end of the stack may be anything."""
    path = _sealed(good, tmp_path / "o.h5", _deep_document)
    done = subprocess.run(
        [sys.executable, "-m", "gradscope", "stats", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "o.h5" in done.stderr and "Traceback" not in done.stderr


def _no_documents(file: h5py.File) -> None:
    for name in ("run", "certificate", "identity"):
        file.attrs[name] = "{}"


def _strange_documents(file: h5py.File) -> None:
    file.attrs["run"] = json.dumps({"spec": 3, "chains": {"a": 1}, "samples": "x", "versions": []})
    file.attrs["certificate"] = json.dumps({"verdict": [1], "unused": 7, "verified": "x"})
    file.attrs["identity"] = json.dumps({"stored": [1]})


def _loop_of_groups(file: h5py.File) -> None:
    file["chains/0/w2"] = file["chains/0"]


def _link_that_leaves(file: h5py.File) -> None:
    file["samples/more"] = h5py.ExternalLink("/etc/passwd", "/")


def _named_type(file: h5py.File) -> None:
    file["chains/0/type"] = np.dtype("f4")


def _references(file: h5py.File) -> None:
    file["samples/ref"] = np.array([file["samples"].ref] * 100, h5py.ref_dtype)


def _ragged(file: h5py.File) -> None:
    made = file["samples"].create_dataset("ragged", (100,), h5py.vlen_dtype(np.float32))
    made[0] = np.ones(5, "f4")


def _huge_attribute(file: h5py.File) -> None:
    group = file.create_group("chains/2", track_order=True)
    group.attrs["chain"], group.attrs["reduced"] = "identity", False
    group.attrs["big"] = np.zeros(10**6)


HARMFUL: list[tuple[Change, str]] = [
    (_grows, "can grow"),
    (_few_rows, "has not 100 rows"),
    (_few_losses, "no column of 100 samples"),
    (_square_losses, "/samples/loss"),
    (_float_index, "/samples/index"),
    (_scalar_index, "/samples/index"),
    (_number_finite, "/samples/finite"),
    (_array_as_chain, "no chain 1"),
    (_skipped_chain, "no chain 1"),
    (_array_as_tables, "no group /norms"),
    (_group_as_norm, "no column"),
    (_same_name, "twice"),
    (_another_parameter, "not the parameters"),
    (_another_shape, "not the parameters"),
    (_factors_that_do_not_fit, "do not make an array"),
    (_claimed_table, "memory does not suffice"),
    (_claimed_product, "memory does not suffice|claims"),
    (_outer_of_scalars, "no factor"),
    (_no_factor, "left"),
    (_unknown_kind, "exec"),
    (_unknown_dtype, "float128"),
    (_dtype_of_another_kind, "no number format"),
    (_many_overflows, "overflowed"),
    (_list_of_versions, "format version"),
    (_text_version, "format version"),
    (_list_reduced, "reduced"),
    (_number_as_chain_text, "'chain'"),
    (_reference_list_of_root, "DIMENSION_LIST"),
    (_loop_of_groups, "in a loop"),
    (_link_that_leaves, "somewhere else"),
    (_named_type, "which is no array"),
    (_references, "not numbers"),
    (_ragged, "not numbers"),
    (_huge_attribute, "attribute 'big'"),
]


@pytest.mark.parametrize(("change", "said"), HARMFUL, ids=lambda c: getattr(c, "__name__", ""))
def test_it_is_refused(good: Path, tmp_path: Path, change: Change, said: str) -> None:
    path = _sealed(good, tmp_path / "o.h5", change)
    with pytest.raises(ResultFileError, match=said) as caught:
        _read(path)
    assert "o.h5" in str(caught.value) and caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 3
    assert not list(tmp_path.glob("*.part"))


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
@pytest.mark.parametrize(
    "change", [_link_that_leaves, _few_losses, _grows], ids=lambda c: c.__name__
)
def test_every_command_refuses_it(
    good: Path,
    gradscope: Gradscope,  # noqa: F811
    tmp_path: Path,
    change: Change,
    command: str,
) -> None:
    path = _sealed(good, tmp_path / "o.h5", change)
    more = {"stats": [], "export": ["-o", tmp_path / "x.csv"], "merge": ["-o", tmp_path / "m.h5"]}
    done = gradscope(command, path, *more[command])
    assert (done.code, done.out) == (3, "")
    assert "o.h5" in done.err and "Traceback" not in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["o.h5"]


@pytest.mark.parametrize("change", [_no_documents, _strange_documents], ids=lambda c: c.__name__)
def test_documents_of_another_form_do_no_harm(
    good: Path,
    gradscope: Gradscope,  # noqa: F811
    tmp_path: Path,
    change: Change,
) -> None:
    """They are told, or refused; the numbers are the same."""
    path = _sealed(good, tmp_path / "o.h5", change)
    for command in (["stats"], ["stats", "--json"]):
        done = gradscope(*command, path)
        assert done.code in (0, 3), done.err
        assert "Traceback" not in done.err
    with open_file(path) as file:
        assert set(file.chains[0]) == set(SHAPES)


def _values() -> list[Any]:
    """One of every kind of attribute."""
    return [
        0, -1, 2.5, True, "text", "", np.zeros(0), np.zeros(3), np.zeros((2, 2), int),
        np.array(["a", "b"], dtype=h5py.string_dtype()), np.bytes_("fixed"), h5py.Empty("f4"),
        np.array([10**18, 10**18]), np.array([-1, 5]), 10**18, np.nan, np.complex64(1j),
    ]  # fmt: skip


PLACES = {
    "": ["format", "format_version", "status", "run", "certificate", "identity", "parameters"],
    "chains/0": ["chain", "reduced"],
    "chains/0/w": ["name", "representation", "overflowed"],
    "chains/0/layer.weight": ["kind", "shape", "dtype", "name", "representation"],
    "chains/0/emb": ["kind", "shape", "dtype"],
    "norms/w": ["sha256", "mean_gradient_norm", "name"],  # sha256: of the first version
    "samples/loss": ["sha256"],
}


@pytest.mark.parametrize(("place", "name"), [(p, n) for p, names in PLACES.items() for n in names])
def test_an_attribute_of_any_type(good: Path, tmp_path: Path, place: str, name: str) -> None:
    """It is read, or refused: never another exception."""
    refused = 0
    for k, value in enumerate([*_values(), None]):

        def change(file: h5py.File, value: Any = value) -> None:
            attributes = file[place or "/"].attrs
            if value is None:
                attributes.pop(name, None)
            else:
                attributes[name] = value

        try:
            _read(_sealed(good, tmp_path / f"o{k}.h5", change))
        except GradscopeError as error:
            assert error.exit_code in (2, 3), error
            refused += 1
    if name not in ("name", "representation", "mean_gradient_norm", "overflowed"):
        assert refused


def _arrays() -> list[Any]:
    return [
        np.zeros(100), np.zeros(99), np.zeros((100, 1)), np.float32(1), np.zeros(0),
        np.zeros(100, int), np.zeros(100, bool), np.zeros(100, complex), np.zeros(100, "u1"),
        np.zeros((100, 7, 5), "f2"), np.array([b"a"] * 100), np.zeros(100, [("a", "i4")]),
        h5py.Empty("f4"), np.full(100, np.nan), np.zeros(100, ">f8"), np.zeros((0, 3)),
    ]  # fmt: skip


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
    """It is read, or refused: never another exception."""
    for k, value in enumerate([*_arrays(), None]):

        def change(file: h5py.File, value: Any = value) -> None:
            if place in file:
                del file[place]
            if value is not None:
                file[place] = value
                file[place].attrs["representation"] = "dense"
                if place.startswith(("samples", "norms")) and not isinstance(value, h5py.Empty):
                    file[place].attrs["sha256"] = hashlib.sha256(
                        np.asarray(value).tobytes()
                    ).hexdigest()

        try:
            _read(_sealed(good, tmp_path / f"o{k}.h5", change))
        except GradscopeError as error:
            assert error.exit_code in (2, 3), error


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.h5")
    for name in ("fifo.h5", "."):
        with pytest.raises(ResultFileError):
            open_file(tmp_path / name)
    (tmp_path / "link.h5").symlink_to(tmp_path / "link.h5")
    with pytest.raises(ResultFileError):
        open_file(tmp_path / "link.h5")


def test_a_file_of_a_petabyte_of_nothing(good: Path, tmp_path: Path) -> None:
    """A sparse file can be as large as it says; its tables cannot be read at once."""

    def change(file: h5py.File) -> None:
        del file["samples/index"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((2**40,))
        h5py.h5d.create(file["samples"].id, b"index", h5py.h5t.STD_I64LE, space, plist)

    path = tmp_path / "o.h5"
    path.write_bytes(unsealed(good.read_bytes()))
    with path.open("r+b") as raw:
        with Target(raw.fileno()).editing() as file:
            change(file)
            place = file["samples/index"].id.get_offset()
        write_seal(raw.fileno(), np.array([[place, 2**43, 0]]))
    assert path.stat().st_size > 2**43
    with pytest.raises(ResultFileError):
        open_file(path)
