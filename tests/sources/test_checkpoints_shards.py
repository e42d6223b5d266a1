"""Checkpoints in several files: all of them, each tensor once, none from elsewhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gradscope.errors import CheckpointError
from gradscope.sources import load_into
from tests.sources.test_checkpoints import model, state

WRITERS = {
    "safetensors": safetensors.torch.save_file,
    "bin": lambda content, path: torch.save(content, path),
}
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}


def sharded(folder: Path, kind: str = "safetensors") -> tuple[Path, dict[str, str]]:
    """Write a checkpoint in three files, and return its index and its weight map."""
    names = list(state())
    table = {}
    for k in range(3):
        file = f"model-{k + 1:05}-of-00003.{kind}"
        part = {name: state()[name] for name in names[k::3]}
        WRITERS[kind](part, folder / file)
        table |= dict.fromkeys(part, file)
    return write(folder / INDEX[kind], table), table


def write(path: Path, table: Any) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}, indent=2))
    return path


def refusal(path: Path) -> str:
    net = model()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(net, path)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert caught.value.remedy
    assert str(path.parent) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("by", ["index", "folder"])
def test_all_shards_are_loaded(tmp_path: Path, kind: str, by: str) -> None:
    index, _ = sharded(tmp_path, kind)
    (tmp_path / "config.json").write_text("{}")
    net = model()
    report = load_into(net, index if by == "index" else tmp_path)
    torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)
    assert (report.format, report.path, report.tensors) == ("index", index, len(state()))
    assert report.notes == (
        () if by == "index" else (f"The weights of the folder are those in {index.name}.",)
    )
    files = [index, *sorted(tmp_path.glob("model-*"))]
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    assert report.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index, _ = sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    told = refusal(index)
    assert "1 of its 3 files are missing: model-00002-of-00003.safetensors" in told
    index.unlink()
    assert "index.json that lists the parts of the checkpoint is missing" in refusal(tmp_path / ".")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    index, _ = sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"{shard}: the file is damaged or cut off" in refusal(index)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "\\x", "", 3, None, "a\nb"],
)
def test_an_index_that_points_outside_its_folder(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    index, table = sharded(folder)
    (tmp_path / "x.safetensors").write_bytes(next(folder.glob("model-*")).read_bytes())
    table["0.weight"] = file
    assert "which is no file of its own folder" in refusal(write(index, table))


def test_a_shard_may_be_a_link_as_in_a_download_cache(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    index, _ = sharded(folder)
    shard = folder / "model-00001-of-00003.safetensors"
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    load_into(model(), index)


def moved(folder: Path, index: Path, table: dict[str, str]) -> None:
    write(index, table | {"0.weight": "model-00002-of-00003.safetensors"})


def doubled(folder: Path, index: Path, table: dict[str, str]) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    content = safetensors.torch.load_file(shard) | {"0.weight": state()["0.weight"]}
    safetensors.torch.save_file(content, shard)


def listed_twice(folder: Path, index: Path, table: dict[str, str]) -> None:
    index.write_text('{"weight_map": {"a": "x", "b": "x", "a": "y"}}')


def of_itself(folder: Path, index: Path, table: dict[str, str]) -> None:
    write(index, table | {"0.weight": index.name})


def of_a_folder(folder: Path, index: Path, table: dict[str, str]) -> None:
    (folder / "d").mkdir()
    write(index, table | {"0.weight": "d"})


def of_more_than_tensors(folder: Path, index: Path, table: dict[str, str]) -> None:
    torch.save({"0.weight": 3}, folder / "model-00001-of-00003.safetensors")


def empty(folder: Path, index: Path, table: dict[str, str]) -> None:
    write(index, {})


def without_a_map(folder: Path, index: Path, table: dict[str, str]) -> None:
    index.write_text(json.dumps({"a": "some other settings"}))


def cut(folder: Path, index: Path, table: dict[str, str]) -> None:
    index.write_bytes(index.read_bytes()[:100])


def nested(folder: Path, index: Path, table: dict[str, str]) -> None:
    index.write_text('{"weight_map": ' + "[" * 100_000)


def unlisted(folder: Path, index: Path, table: dict[str, str]) -> None:
    del table["0.weight"]
    shard = folder / "model-00001-of-00003.safetensors"
    kept = {k: v for k, v in safetensors.torch.load_file(shard).items() if k in table}
    safetensors.torch.save_file(kept, shard)
    write(index, table)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (moved, "1 tensors that it lists in model-00002-of-00003.safetensors are not there: 0.w"),
        (doubled, "1 tensors are in more than one file: 0.weight"),
        (listed_twice, "'a' stands in it twice"),
        (of_itself, "is itself an index"),
        (of_a_folder, "this is a directory"),
        (of_more_than_tensors, "holds something other than named tensors"),
        (empty, "without a table `weight_map`"),
        (without_a_map, "a text file"),
        (cut, "it cannot be read: "),
        (nested, "nested too deeply"),
        (unlisted, "1 missing (0.weight)"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, change: Callable, expected: str) -> None:
    index, table = sharded(tmp_path)
    change(tmp_path, index, table)
    assert expected in refusal(index)
