"""Merging files: the rows of the whole run, and nothing where a file is wrong or missing."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.config import Compression
from gradscope.errors import OutputError, RefusedError, ResultFileError
from gradscope.storage import FilePlan, check_files, open_file, open_joiner, open_writer
from gradscope.storage.format.seal import NO_RECORDS, write_seal
from tests.storage.disk import FULL, Disk, Stopped, operations
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
)

Make = Callable[[int, int], Gradients]
SHARES = {"two": (0, 48, N), "seven": (0, 16, 32, 48, 64, 80, 96, N), "uneven": (0, 13, 60, N)}


def plan(start: int, stop: int, index: int, count: int, base: FilePlan = PLAN) -> FilePlan:
    shard = {"index": index, "count": count, "samples": [0, N]}
    facts = base.fingerprint | {"samples": [start, stop], "shard": shard}
    return replace(base, n=stop - start, fingerprint=facts)


def whole_plan(base: FilePlan = PLAN) -> FilePlan:
    return replace(base, fingerprint=base.fingerprint | {"samples": [0, N]})


def sums(start: int, stop: int, make: Make = gradients) -> dict[str, dict[str, torch.Tensor]]:
    made = make(start, stop)
    total = {f"sum:{k}": block.dense().double().sum(0) for k, block in made.items()}
    return {"1": {"n": torch.tensor(float(stop - start)), **total}}


def write(path: Path, wanted: FilePlan, start: int, stop: int, make: Make = gradients) -> Path:
    """Write the samples of a file in the batches that the whole run has."""
    with open_writer(path, wanted) as writer:
        for at in range(start, stop, BATCH):
            until = min(at + BATCH, stop)
            writer.append(rows(at, until, make(at, until)))
        state = sums(start, stop, make)
        finish(writer.finish, state, stop - start)
    return path


def finish(done: Callable[..., None], state: dict[str, dict[str, torch.Tensor]], n: int) -> None:
    """Finish a file, with means that follow from its states alone."""
    means = {k.removeprefix("sum:"): v / n for k, v in state["1"].items() if k != "n"}
    norms = {name: {"mean_gradient_norm": float(means[name].norm())} for name in means}
    done(results={1: means}, certificate=CERTIFIED, norm_attributes=norms, states=state)


CERTIFIED = {"verified": True, "verdict": "exact"}


def shards(
    folder: Path, cuts: tuple[int, ...], base: FilePlan = PLAN, make: Make = gradients
) -> list[Path]:
    count = len(cuts) - 1
    return [
        write(folder / f"o.shard-{k}-of-{count}.h5", plan(a, b, k, count, base), a, b, make)
        for k, (a, b) in enumerate(pairwise(cuts))
    ]


def merge(files: list[Path], path: Path, base: FilePlan = PLAN, **options: Any) -> None:
    parts = check_files(files)
    with open_joiner(path, whole_plan(base), parts, BATCH, **options) as joiner:
        total: dict[str, torch.Tensor] = {}
        for part in parts.files:
            for key, value in joiner.add(part)["1"].items():
                total[key] = total.get(key, 0) + value
        finish(joiner.finish, {"1": total}, N)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Shards that nobody changes."""
    return shards(tmp_path_factory.mktemp("seven"), SHARES["seven"])


def exact(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether all but the aggregates agree to the last bit."""
    light = [k for k in a if not k.startswith("chains/1/") and k != "documents"]
    return same({k: a[k] for k in light}, {k: b[k] for k in light}) and list(a) == list(b)


GZIP = Compression("gzip", 3)


@pytest.mark.parametrize(
    ("cuts", "layout", "packed"),
    [
        (SHARES["two"], "dense", None),
        (SHARES["seven"], "auto", None),
        (SHARES["uneven"], "factored", None),
        (SHARES["uneven"], "auto", GZIP),
    ],
)
def test_the_whole_run(
    tmp_path: Path, cuts: tuple[int, ...], layout: Any, packed: Compression | None
) -> None:
    base = replace(PLAN, layout=layout, compression=packed)
    write(tmp_path / "whole.h5", whole_plan(base), 0, N)
    merge(shards(tmp_path, cuts, base)[::-1], tmp_path / "o.h5", base)
    found, wanted = load(tmp_path / "o.h5"), load(tmp_path / "whole.h5")
    assert exact(found, wanted)
    for name, value in expected().items():
        np.testing.assert_allclose(found[f"chains/1/{name}"], value.mean(0), rtol=1e-4, atol=1e-6)
    with open_file(tmp_path / "o.h5") as file, open_file(tmp_path / "whole.h5") as single:
        assert file.identity == single.identity and file.certificate == single.certificate
        assert {k: a.representation for k, a in file.chains[0].items()} == {
            k: a.representation for k, a in single.chains[0].items()
        }
        for k, numbers in single.norm_attributes.items():
            assert file.norm_attributes[k] == pytest.approx(numbers, rel=1e-12)
        for key, array in single.states["1"].items():
            np.testing.assert_allclose(file.states["1"][key][...], array[...], rtol=1e-12)
    with h5py.File(tmp_path / "o.h5") as file, h5py.File(tmp_path / "whole.h5") as single:
        for path in ("chains/0/w", "samples/loss", "chains/0/layer.weight"):
            if isinstance(file[path], h5py.Dataset):
                assert file[path].chunks == single[path].chunks
        assert file["chains/0/w"].compression == (packed and "gzip")
        assert file["chains/0/w"].compression_opts == (packed and 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_number_formats(tmp_path: Path, dtype: torch.dtype) -> None:
    base = replace(PLAN, dtype=dtype, layout="auto")

    def make(start: int, stop: int) -> Gradients:
        found = gradients(start, stop)
        return found.map(lambda b: DenseBlock(b.dense() * 1e5)) if dtype == torch.float16 else found

    write(tmp_path / "whole.h5", whole_plan(base), 0, N, make)
    files = shards(tmp_path, SHARES["uneven"], base, make)
    merge(files, tmp_path / "o.h5", base)
    assert exact(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    with open_file(tmp_path / "o.h5") as file, open_file(tmp_path / "whole.h5") as single:
        lost = {name: array.overflowed for name, array in single.chains[0].items()}
        assert {name: array.overflowed for name, array in file.chains[0].items()} == lost
        assert (max(lost.values()) > 0) == (dtype == torch.float16)


def test_factors_of_other_sizes_become_dense(tmp_path: Path) -> None:
    base = replace(PLAN, layout="auto")

    def make(start: int, stop: int) -> Gradients:
        found = dict(gradients(start, stop))
        if start >= 48:  # one more position, of zeros
            block = found["layer.weight"]
            assert isinstance(block, OuterBlock)
            left, right = (
                torch.nn.functional.pad(f, (0, 0, 0, 1)) for f in (block.left, block.right)
            )
            found["layer.weight"] = OuterBlock(left, right, block.shape)
        return Gradients(found)

    write(tmp_path / "whole.h5", whole_plan(base), 0, N, make)
    files = shards(tmp_path, SHARES["two"], base, make)
    merge(files, tmp_path / "o.h5", base)
    assert exact(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
    with pytest.raises(RefusedError, match=r"layer\.weight: the sizes of the factors differ"):
        merge(files, tmp_path / "v.h5", base, virtual=True)
    assert "v.h5" not in names(tmp_path)


def _changed(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _flipped(path: Path, at: int) -> None:
    _changed(path, lambda data: data.__setitem__(at, data[at] ^ 4))


def _row_of(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["chains/0/w"].id.get_chunk_info(0).byte_offset) + 3


def _replaced(path: Path, wanted: FilePlan) -> None:
    path.unlink()
    write(path, wanted, 32, 48)


def _no_states(files: list[Path]) -> None:
    files[1].unlink()
    with open_writer(files[1], plan(16, 32, 1, 7)) as writer:
        writer.append(rows(16, 32))
        means = {name: value[16:32].mean(0) for name, value in expected().items()}
        writer.finish({1: {k: torch.as_tensor(v) for k, v in means.items()}}, CERTIFIED)


OTHER = replace(PLAN, fingerprint=PLAN.fingerprint | {"checkpoint": "c2"})
OLD = b"\x89HDF of gradscope"  # how an earlier result begins

WRONG: list[tuple[Callable[[list[Path]], Any], str]] = [
    (lambda f: f.pop(3), r"samples are missing: 48 to 64 \(shard 3\)"),
    (lambda f: f.pop(), r"samples are missing: 96 to 100 \(shard 6\)"),
    (lambda f: f.append(f[2]), "o.shard-2-of-7.h5: the file is given twice"),
    (
        lambda f: f.append(write(f[0].with_name("more.h5"), plan(16, 48, 1, 7), 16, 48)),
        "samples 16 to 32 are in two files",
    ),
    (
        lambda f: _replaced(f[2], plan(32, 48, 2, 7, OTHER)),
        "different runs.* checkpoint is 'c1' there, 'c2' here",
    ),
    (
        lambda f: _replaced(f[2], plan(32, 48, 2, 8)),
        "different runs.* shard.count is 7 there, 8 here",
    ),
    (lambda f: _flipped(f[4], _row_of(f[4])), "data are damaged"),
    (lambda f: _flipped(f[4], 100), "structure of the file was changed"),
    (lambda f: _changed(f[5], lambda data: data.__delitem__(slice(-200, None))), "truncated|seal"),
    (lambda f: f[6].unlink(), "no such file"),
    (_no_states, "does not store the reducers"),
    (lambda f: f.clear(), "no file to merge"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_wrong_files_are_refused_and_nothing_is_written(
    tmp_path: Path, seven: list[Path], spoil: Callable[[list[Path]], Any], message: str
) -> None:
    files, out = [Path(shutil.copy(path, tmp_path)) for path in seven], tmp_path / "out"
    out.mkdir()
    spoil(files)
    with pytest.raises(ResultFileError, match=message):
        merge(files, out / "o.h5")
    assert names(out) == []
    (out / "o.h5").write_bytes(OLD)
    with pytest.raises(ResultFileError, match=message):
        merge(files, out / "o.h5", overwrite=True)
    assert names(out) == ["o.h5"] and (out / "o.h5").read_bytes() == OLD


def test_an_unfinished_shard_is_named(tmp_path: Path) -> None:
    files = shards(tmp_path, SHARES["two"])
    files[1].unlink()
    with pytest.raises(KeyboardInterrupt), open_writer(files[1], plan(48, N, 1, 2)) as writer:
        writer.append(rows(48, 64))
        raise KeyboardInterrupt
    with pytest.raises(ResultFileError, match=r"shard 1; not finished: o\.shard-1-of-2\.h5"):
        merge(files[:1], tmp_path / "o.h5")


def test_where_it_may_be_written(tmp_path: Path) -> None:
    files = shards(tmp_path, SHARES["two"])
    kept = [path.read_bytes() for path in files]
    (tmp_path / "o.h5").write_bytes(OLD)
    (tmp_path / "model.py").write_text("# not of gradscope")
    os.mkfifo(tmp_path / "fifo")
    for path, overwrite, message in (
        (tmp_path / "o.h5", False, "exists already"),
        (files[0], True, "the output would replace an input"),
        (tmp_path / "no" / "o.h5", False, "does not exist"),
        (tmp_path, True, "this is a folder"),
        (Path(), True, "this is a folder"),
        (tmp_path / "model.py", True, "is of another kind .expected: result"),
        (tmp_path / "fifo", True, "is of another kind .expected: result"),
    ):
        with pytest.raises(OutputError, match=message):
            merge(files, path, overwrite=overwrite)
    assert (tmp_path / "o.h5").read_bytes() == OLD
    assert [path.read_bytes() for path in files] == kept
    merge(files, tmp_path / "o.h5", overwrite=True)
    np.testing.assert_array_equal(load(tmp_path / "o.h5")["chains/0/w"], expected()["w"])


def test_an_unfinished_run_is_not_given_up(tmp_path: Path) -> None:
    files, path = shards(tmp_path, SHARES["two"]), tmp_path / "o.h5"
    with pytest.raises(KeyboardInterrupt), open_writer(path, whole_plan()) as writer:
        writer.append(rows(0, 16))
        raise KeyboardInterrupt
    kept = (tmp_path / "o.h5.part").read_bytes()
    with pytest.raises(OutputError, match="an unfinished file of a stopped run"):
        merge(files, path)
    assert (tmp_path / "o.h5.part").read_bytes() == kept
    (tmp_path / "o.h5.part.progress").unlink()  # now it is what a killed merge leaves
    merge(files, path)
    np.testing.assert_array_equal(load(path)["chains/0/w"], expected()["w"])


@pytest.mark.parametrize("number", [0, FULL])
def test_a_stop_at_any_moment(tmp_path: Path, number: int) -> None:
    """Nothing is there but what was; what a kill leaves beside it is cleared by the next merge."""
    files, path = shards(tmp_path, SHARES["two"]), tmp_path / "out" / "o.h5"
    path.parent.mkdir()
    with Disk(path.parent).inserted() as disk:
        merge(files, path)
    wanted = path.read_bytes()
    for k in operations(len(disk.seen), 6):
        path.write_bytes(OLD)
        with (
            pytest.raises((Stopped, OutputError), match="disk is full" if number else None),
            Disk(path.parent, k, number).inserted(),
        ):
            merge(files, path, overwrite=True)
        assert path.read_bytes() in (OLD, wanted)
        merge(files, path, overwrite=True)
        assert path.read_bytes() == wanted and names(path.parent) == ["o.h5"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, seven: list[Path]) -> Path:
    """A folder with a whole run and, in another one, a virtual file and its seven shards."""
    folder = tmp_path_factory.mktemp("virtual")
    base = replace(PLAN, layout="auto")
    write(folder / "whole.h5", whole_plan(base), 0, N)
    files = [Path(shutil.copy(path, folder)) for path in seven]
    (folder / "run").mkdir()
    files = [path.rename(folder / "run" / path.name) for path in files]
    merge(files, folder / "run" / "o.h5", base, virtual=True)
    return folder


@pytest.fixture
def virtual(tmp_path: Path, prepared: Path) -> Path:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def test_a_virtual_file_reads_as_the_whole(virtual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact(load(virtual / "o.h5"), load(virtual.parent / "whole.h5"))
    moved = virtual.rename(virtual.with_name("moved"))
    monkeypatch.chdir(moved.parent.parent)
    with open_file(moved / "o.h5") as file:
        w = file.chains[0]["w"]
        np.testing.assert_array_equal(w[[99, 3, 50, 50]], expected()["w"][[99, 3, 50, 50]])
        np.testing.assert_array_equal(w[40:70:-1], expected()["w"][40:70:-1])
        parts = [batch["emb"] for batch in file.iterate(batch_size=33)]
        np.testing.assert_allclose(np.concatenate(parts), expected()["emb"], rtol=1e-6)
        assert (moved / "o.h5").stat().st_size < (virtual.parent / "whole.h5").stat().st_size


def test_other_programs_read_a_virtual_file(virtual: Path) -> None:
    with h5py.File(virtual / "o.h5") as file:
        np.testing.assert_array_equal(file["chains/0/w"][...], expected()["w"])
        left, right = (file[f"chains/0/layer.weight/{k}"][...] for k in ("left", "right"))
    made = np.einsum("nktr,nktc->nrc", left, right)
    np.testing.assert_allclose(made, expected()["layer.weight"], rtol=2e-5, atol=1e-5)
    (virtual / "o.shard-3-of-7.h5").unlink()
    with h5py.File(virtual / "o.h5") as file:  # never zeros
        assert np.isnan(file["chains/0/w"][48:64]).all()
        assert (file["chains/0/emb/index"][48:64] == -1).all()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "is missing"),
        (lambda path: _flipped(path, 100), "has changed"),
        (lambda path: _flipped(path, _row_of(path)), "data are damaged"),
        (lambda path: _replaced(path, plan(32, 48, 2, 7, OTHER)), "has changed"),
    ],
)
def test_a_source_that_is_not_as_it_was(
    virtual: Path, spoil: Callable[[Path], Any], message: str, when: str
) -> None:
    file = open_file(virtual / "o.h5") if when == "after" else None
    spoil(virtual / "o.shard-2-of-7.h5")
    with (
        pytest.raises(ResultFileError, match=message) as caught,
        file or open_file(virtual / "o.h5") as opened_file,
    ):
        opened_file.chains[0]["w"][30:60]
    assert "o.shard-2-of-7.h5" in str(caught.value)


def test_a_virtual_file_is_no_part(virtual: Path) -> None:
    with pytest.raises(ResultFileError, match="virtual file"):
        check_files([virtual / "o.h5"])


def _resealed(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a file and seal it again, as whoever means harm would."""
    path.write_bytes(unsealed(path.read_bytes()))
    with h5py.File(path, "r+") as file:
        change(file)
    with path.open("r+b") as raw:
        write_seal(raw.fileno(), NO_RECORDS)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ('[{"path": "/etc/passwd", "seal": "00", "rows": [0, 100]}]', "not a list of files"),
        ('[{"path": "o.h5", "seal": "00", "rows": [0, 100]}]', "has changed"),
        ('[{"path": "none.h5", "seal": "00", "rows": [0, 100]}]', "is missing"),
        ('[{"path": "none.h5", "seal": "00", "rows": [5, 100]}]', "do not cover all rows"),
        ("[]", "do not cover all rows"),
        ("{", "not a list of files"),
        ('{"a": 1}', "not a list of files"),
    ],
)
def test_hostile_lists_of_sources(virtual: Path, sources: str, message: str) -> None:
    def change(file: h5py.File) -> None:
        file.attrs["sources"] = sources

    _resealed(virtual / "o.h5", change)
    with pytest.raises(ResultFileError, match=message):
        open_file(virtual / "o.h5")


def test_virtual_data_sets_elsewhere_are_refused(virtual: Path) -> None:
    """Aggregates and tables are read through HDF5, so they may not be virtual."""

    def change(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((7, 5), "f4")
        layout[...] = h5py.VirtualSource("o.shard-3-of-7.h5", "chains/1/w", (7, 5))
        del file["chains/1/w"]
        made = file["chains/1"].create_virtual_dataset("w", layout)
        made.attrs["representation"] = "dense"

    _resealed(virtual / "o.h5", change)
    with pytest.raises(ResultFileError, match="takes its data from other files"):
        open_file(virtual / "o.h5")


def test_a_name_with_a_percent_sign(tmp_path: Path) -> None:
    """HDF5 reads %b in the names of a virtual data set as a number."""
    name = "a/%b"
    base = replace(PLAN, parameters={name: (7, 5)})

    def make(start: int, stop: int) -> Gradients:
        return Gradients({name: gradients(start, stop)["w"]})

    (tmp_path / "50%b").mkdir()
    files = shards(tmp_path / "50%b", SHARES["two"], base, make)
    merge(files, tmp_path / "o.h5", base, virtual=True)
    with h5py.File(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file["chains/0/a%2F%25b"][...], expected()["w"])
    with open_file(tmp_path / "o.h5") as opened:
        np.testing.assert_array_equal(opened.chains[0][name][...], expected()["w"])


def test_text_columns(tmp_path: Path) -> None:
    """Names of samples are texts of one width."""
    texts = np.array([f"näme {i:03d}" for i in range(N)])
    raw = np.char.encode(texts, "utf-8")
    table = torch.from_numpy(raw.view(np.uint8).reshape(N, -1).copy())
    files = []
    for k, (start, stop) in enumerate(((0, 48), (48, N))):
        files.append(tmp_path / f"o.shard-{k}-of-2.h5")
        with open_writer(files[k], plan(start, stop, k, 2)) as writer:
            writer.append(rows(start, stop, id=table[start:stop]))
            finish(writer.finish, sums(start, stop), stop - start)
    merge(files, tmp_path / "o.h5")
    with open_file(tmp_path / "o.h5") as file:
        assert file.samples["id"].tolist() == texts.tolist()


def test_own_loss_batches_are_not_cut(tmp_path: Path) -> None:
    facts = PLAN.fingerprint | {"batch_size": BATCH}
    base = replace(PLAN, fingerprint=facts)
    files = shards(tmp_path, SHARES["uneven"], base)
    with pytest.raises(ResultFileError, match="begins in the middle of a batch of 16"):
        merge(files, tmp_path / "o.h5", base)
    merge(shards(tmp_path, SHARES["seven"], base), tmp_path / "o.h5", base)


def test_a_file_changed_between_check_and_copy(tmp_path: Path) -> None:
    files = shards(tmp_path, SHARES["two"])
    parts = check_files(files)
    shutil.copy(files[0], files[1])
    with (
        pytest.raises(ResultFileError, match="has changed since it was first opened"),
        open_joiner(tmp_path / "o.h5", whole_plan(), parts, BATCH) as joiner,
    ):
        for part in parts.files:
            joiner.add(part)
    assert "o.h5.part" not in names(tmp_path)
