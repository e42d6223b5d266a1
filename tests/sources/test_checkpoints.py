"""Checkpoints: loaded whole into a model that they fit, or refused in our own words."""

import argparse
import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from gradscope.errors import CheckpointError
from gradscope.sources.formats import checkpoint_readers
from gradscope.sources.weights import CheckpointReport, load_into

WROTE = []  # what a payload would write to


def execute() -> None:
    WROTE.append("executed")


class Payload:
    def __reduce__(self) -> tuple:
        return (execute, ())


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def trained() -> nn.Module:
    torch.manual_seed(1)
    net = model()
    net(torch.randn(8, 2)).sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(p.grad)
    return net


def state(**changes: Any) -> dict[str, Any]:
    return dict(trained().state_dict()) | changes


def legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "torch": torch.save,
    "torch-legacy": legacy,
    "safetensors": lambda content, path: safetensors.torch.save_file(content, path),
}


def saved(folder: Path, content: object, kind: str = "torch") -> Path:
    path = folder / "weights.bin"  # no suffix that says what it is
    WRITERS[kind](content, path)
    return path


def refusal(path: Path, into: nn.Module | None = None) -> str:
    """The message; the model must not have been changed, nor anything executed."""
    net = model() if into is None else into
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(net, path)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0, equal_nan=True)
    assert str(path.parent) in str(caught.value)
    assert str(caught.value).count(str(path)) <= 1
    assert caught.value.remedy
    assert caught.value.exit_code == 3
    assert "weights_only" not in str(caught.value)  # torch's advice to disable it
    assert not WROTE
    return str(caught.value)


def check(path: Path, expected: dict[str, torch.Tensor]) -> CheckpointReport:
    net = model()
    report = load_into(net, path)
    torch.testing.assert_close(dict(net.state_dict()), expected, rtol=0, atol=0)
    if len(report.files) == 1:
        assert report.sha256 == hashlib.sha256(report.path.read_bytes()).hexdigest()
    assert report.tensors == len(expected)
    return report


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_is_found_by_content(tmp_path: Path, kind: str) -> None:
    report = check(saved(tmp_path, state(), kind), state())
    assert (report.format, report.notes) == (kind, ())
    assert checkpoint_readers.summary(kind)


@pytest.mark.parametrize("key", ["model", "state_dict", "ema"])
@pytest.mark.parametrize("kind", ["torch", "torch-legacy"])
def test_a_state_dict_beside_what_training_leaves(tmp_path: Path, kind: str, key: str) -> None:
    """None of it can execute anything, though torch refuses some of it on its own."""
    content = {
        "epoch": torch.tensor(3),  # a tensor beside the state dict
        "best": np.float64(0.5),
        "losses": np.arange(3.0),
        "config": argparse.Namespace(lr=0.1, folder=tmp_path),
        "random": {"numpy": np.random.default_rng(0).bit_generator.state, "torch": torch.ones(3)},
        "generators": [np.random.RandomState(0), np.random.default_rng(0)],
        "vocabulary": {"a": 0, "b": 1},
        "generator": nn.Sequential(nn.Conv2d(1, 1, 1)).state_dict(),
        key: state(),
        "optimizer": torch.optim.Adam(trained().parameters()).state_dict(),
    }
    report = check(saved(tmp_path, content, kind), state())
    assert report.key == key
    assert repr(key) in report.notes[0]


def test_averaged_weights_of_torch(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(trained(), use_buffers=True)
    report = check(saved(tmp_path, averaged.state_dict()), state())
    assert report.prefix == "module."
    assert report.notes[0] == "Entries of the checkpoint were ignored: n_averaged."


def test_of_weights_and_their_average_the_user_chooses(tmp_path: Path) -> None:
    average = {k: v * 2 for k, v in state().items()}
    content = {"model": state(), "ema": {"decay": 0.9, "module": average}}
    path = saved(tmp_path, content)
    assert "under the keys model, ema.module" in refusal(path)
    net = model()
    assert load_into(net, path, key="ema.module").key == "ema.module"
    torch.testing.assert_close(dict(net.state_dict()), average, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"Did you mean 'ema\.module'"):
        load_into(net, path, key="emma.module")


def test_of_several_models_under_one_name_each_the_user_chooses(tmp_path: Path) -> None:
    """As ema_pytorch and modules of Lightning save them: no tables within the table."""
    average = {k: v * 2 for k, v in state().items()}
    both = {f"online.{k}": v for k, v in state().items()}
    both |= {f"ema.module.{k}": v for k, v in average.items()} | {"step": torch.tensor(3)}
    for content, place in ((both, ""), ({"state_dict": both}, "state_dict.")):
        path = saved(tmp_path, content)
        assert f"are under {place}ema, {place}online: give the key with `key`" in refusal(path)
        net = model()
        report = load_into(net, path, key=f"{place}ema")
        assert (report.key, report.prefix) == (f"{place}ema", "module.")
        torch.testing.assert_close(dict(net.state_dict()), average, rtol=0, atol=0)
    path = saved(tmp_path, {"last": both, "best": both | {"ema.module.0.bias": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"under the keys last\.ema, best\.ema"):
        load_into(model(), path, key="ema")


@pytest.mark.parametrize("compiled", ["file", "model", "none"])
def test_a_compiled_part_has_the_name_of_its_own(tmp_path: Path, compiled: str) -> None:
    net, content = model(), {f"module.{k}": v for k, v in state().items()}
    if compiled == "file":
        content = {k.replace("1.", "1._orig_mod."): v for k, v in content.items()}
    elif compiled == "model":
        net = nn.Sequential(net[0], torch.compile(net[1], backend="eager"))
    report = load_into(net, saved(tmp_path, content))
    names = [k.replace("._orig_mod", "") for k in net.state_dict()]
    found = dict(zip(names, net.state_dict().values(), strict=True))
    torch.testing.assert_close(found, state(), rtol=0, atol=0)
    assert any("prefix of torch.compile" in n for n in report.notes) == (compiled != "none")


def test_a_table_that_holds_itself_is_no_loop(tmp_path: Path) -> None:
    content: dict[str, object] = {f"k{k}": {} for k in range(200)}
    for value in content.values():
        value |= dict.fromkeys(content, content)
    assert "no state dict of the model" in refusal(saved(tmp_path, content))


@pytest.mark.parametrize("prefix", ["module.", "model.", "module._orig_mod.", "net.encoder."])
def test_a_prefix_is_taken_off_and_told(tmp_path: Path, prefix: str) -> None:
    content = {"state_dict": {prefix + k: v for k, v in state().items()}, "epoch": 1}
    report = check(saved(tmp_path, content), state())
    assert (report.key, report.prefix) == ("state_dict", prefix)
    assert repr(prefix) in report.notes[1]


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trained()

    own = Outer().state_dict()
    for content in (own, {f"module.{k}": v for k, v in own.items()}):
        net = Outer()
        load_into(net, saved(tmp_path, content))
        torch.testing.assert_close(dict(net.model.state_dict()), state(), rtol=0, atol=0)


def test_floating_point_numbers_are_cast_and_told(tmp_path: Path) -> None:
    content = state() | {"0.weight": state()["0.weight"].double()}
    report = check(saved(tmp_path, content), state())
    assert report.notes == (
        "The checkpoint has more digits than the model: its weights are rounded "
        "(0.weight: float64 -> float32). The dtype float64 keeps all digits.",
    )
    content = state() | {"0.weight": state()["0.weight"].half()}
    assert load_into(model(), saved(tmp_path, content)).notes == (
        "Tensors were cast to the model's dtype: 0.weight: float16 -> float32.",
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_is_stored_once_or_agrees(tmp_path: Path) -> None:
    source, net = Tied(), Tied()
    path = tmp_path / "w"
    safetensors.torch.save_model(source, str(path))  # stores one name of the two
    report = load_into(net, path)
    assert torch.equal(net.head.weight, source.embed.weight)
    assert net.head.weight is net.embed.weight
    assert report.tensors == 1
    assert report.notes[0].startswith("Tied tensors missing in the checkpoint were filled in: ")
    content = {"embed.weight": torch.ones(4, 3), "head.weight": torch.zeros(4, 3)}
    assert "tied in the model, but differ" in refusal(saved(tmp_path, content), Tied())


def test_a_mask_of_infinities_is_no_damage(tmp_path: Path) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    source = Masked()
    load_into(Masked(), saved(tmp_path, source.state_dict()))
    source.mask.fill_(torch.nan)
    assert "mask (2 of 2)" in refusal(saved(tmp_path, source.state_dict()), Masked())


NAN, WEIGHT = torch.nan, "0.weight"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "it has no state dict of the model; its keys are: none"),
        ({"epoch": 3, "lr": 0.1}, "its keys are: 'epoch', 'lr'"),
        ({"a": {"b": {"c": {"d": state()}}}}, "a deeper key"),
        (torch.ones(3), "a single tensor"),
        (3, "it has an int, not a state dict"),
        ({3: torch.ones(2)}, "not text: 3"),
        (state(extra=torch.ones(2), epoch=3), "1 unexpected (extra)"),
        (state(**{f"x{k}": torch.ones(1) for k in range(12)}), "x9 and 2 more"),
        ({WEIGHT: state()[WEIGHT]}, "6 missing (0.bias, 1.weight"),
        (
            {("module." if k.startswith("0") else "") + k: v for k, v in state().items()},
            "Not every name begins with 'module.'",
        ),
        (
            state(**{WEIGHT: torch.ones(2, 3)}),
            "0.weight: (2, 3) in the checkpoint, (3, 2) in the model",
        ),
        (state(**{WEIGHT: [1.0]}), "0.weight: a list, not a tensor"),
        (state(**{WEIGHT: torch.ones(3, 2).to_sparse()}), "0.weight: a sparse"),
        (state(**{WEIGHT: torch.ones(3, 2, device="meta")}), "on the meta device"),
        (state(**{WEIGHT: torch.ones(3, 2).long()}), "0.weight: int64 -> float32"),
        (state(**{"1.num_batches_tracked": torch.tensor(3.0)}), "tracked: float32 -> int64"),
        (state(**{WEIGHT: torch.full((3, 2), NAN)}), "0.weight (6 of 6)"),
        (state(**{WEIGHT: torch.full((3, 2), 1e300, dtype=torch.float64)}), "0.weight (6 of 6)"),
        (state(**{"1.running_var": torch.tensor([1, torch.inf, 1])}), "1.running_var (1 of 3)"),
    ],
)
def test_a_state_dict_that_does_not_fit(tmp_path: Path, content: object, expected: str) -> None:
    assert expected in refusal(saved(tmp_path, content))


@pytest.mark.parametrize("kind", ["torch", "torch-legacy", "pickle"])
@pytest.mark.parametrize("what", ["payload", "module", "inside"])
@pytest.mark.parametrize("override", [False, True])
def test_code_is_never_executed(
    tmp_path: Path, kind: str, what: str, override: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if override:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    content = {"payload": Payload(), "module": model(), "inside": state(x=Payload())}[what]
    path = tmp_path / "w.safetensors"  # the suffix does not matter
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
        assert "could execute code and is never loaded" in refusal(path)
    else:
        WRITERS[kind](content, path)
        told = refusal(path)
        assert "it has values that are not tensors: " in told
        assert "could execute code and is not loaded" in told


@pytest.mark.parametrize("kind", WRITERS)
def test_a_truncated_file(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, state(), kind)
    whole = path.read_bytes()
    for size in (1, 4, 9, 20, *(len(whole) * k // 8 for k in range(1, 8)), len(whole) - 1):
        path.write_bytes(whole[:size])
        told = refusal(path)
        assert any(word in told for word in ("cut off", "damaged")), (size, told)


def test_any_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """In a torch archive, of which every part has a checksum; torch itself says nothing."""
    path = saved(tmp_path, state())
    whole = path.read_bytes()
    tensor = whole.find(state()["0.weight"].numpy().tobytes())
    assert tensor > 0
    for at in (tensor, *range(0, len(whole), 37)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        net = model()
        try:
            load_into(net, path)
        except CheckpointError as error:
            assert at != tensor or "checksum" in str(error)
            continue
        torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)


def test_a_part_that_is_marked_as_a_folder(tmp_path: Path) -> None:
    """torch would leave the tensor's memory as it happens to be; no checksum covers the mark."""
    path = saved(tmp_path, state())
    whole = bytearray(path.read_bytes())
    at = whole.rfind(b"archive/data/0".replace(b"archive", path.stem.encode()))
    entry = whole.rfind(b"PK\1\2", 0, at)
    whole[entry + 38] ^= 0x10  # the external attributes
    path.write_bytes(whole)
    assert "is marked as a folder" in refusal(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_one_name(tmp_path: Path) -> None:
    path = saved(tmp_path, state())
    with zipfile.ZipFile(path, "a") as archive:
        name = "/".join((path.stem, "data", "0"))
        archive.writestr(name, b"\x00" * len(archive.read(name)))
    assert "several of its parts have the same name" in refusal(path)


def zipped(**parts: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in parts.items():
                archive.writestr(name.replace("__", "/"), content)

    return write


def program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.write_bytes(b""), "the file is empty"),
        (lambda p: p.write_text("\n <html>not found</html>"), "an HTML page"),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1"), "a git-LFS pointer"),
        (lambda p: p.write_text("some text that is no checkpoint"), "a text file"),
        (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "an HDF5 file"),
        (lambda p: p.write_bytes(b"\x1f\x8b" + bytes(99)), "a gzip archive"),
        (lambda p: p.write_bytes(bytes(257) + b"ustar" + bytes(99)), "a tar archive"),
        (lambda p: p.write_bytes(bytes(range(200, 256)) * 3), "an unknown kind"),
        (lambda p: p.write_bytes((2**40).to_bytes(8, "little") + b'{"a":1}'), "declares 1,099,"),
        (lambda p: p.write_bytes((9).to_bytes(8, "little") + b'{"a":1}}}'), "damaged"),
        (zipped(readme=b"hello"), "without tensors of torch.save"),
        (zipped(**{"inputs.npy": b"x"}), "a numpy .npz file"),
        (zipped(**{"m__code__x.py": b"x", "m__data.pkl": b"x"}), "a TorchScript archive"),
        (zipped(**{"m__data.pkl": b"\x80\x02garbage"}), "damaged"),
        (zipped(**{"m__data.pkl": bytes(10**7)}), "declare 10,000,000 bytes"),
        (program, "a torch.export archive"),
    ],
)
def test_a_file_that_is_no_checkpoint(
    tmp_path: Path, write: Callable[[Path], object], expected: str
) -> None:
    path = tmp_path / "weights.pt2"
    write(path)
    assert expected in refusal(path)


def put(folder: Path, *names: str) -> None:
    for name in names:
        if name.endswith(".safetensors"):
            safetensors.torch.save_file(state(), folder / name)
        elif name.endswith((".json", ".metadata", ".txt", ".distcp", ".pkl")):
            (folder / name).write_text("{}")
        else:
            torch.save(state(), folder / name)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("model.safetensors pytorch_model.bin config.json", "model.safetensors"),
        ("pytorch_model.bin training_args.bin optimizer.pt", "pytorch_model.bin"),
        ("epoch=3.ckpt notes.txt", "epoch=3.ckpt"),
        ("weights.pt optimizer.pt scheduler.pt rng_state.pth", "weights.pt"),
    ],
)
def test_the_file_of_a_folder_that_is_meant(tmp_path: Path, names: str, chosen: str) -> None:
    put(tmp_path, *names.split())
    report = check(tmp_path, state())
    assert report.path == tmp_path / chosen
    assert report.notes == (f"The weights are read from {chosen} in the folder.",)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", "this folder has no weights; it is empty"),
        ("notes.txt config.json", "it has config.json, notes.txt"),
        ("a.pt b.pt", "this folder has several checkpoints: a.pt, b.pt"),
        (".metadata __0_0.distcp", "a distributed checkpoint"),
        ("data.pkl version.txt", "an unpacked archive of torch.save"),
    ],
)
def test_a_folder_without_weights(tmp_path: Path, names: str, expected: str) -> None:
    put(tmp_path, *names.split())
    assert expected in refusal(tmp_path)
    for part in tmp_path.glob("*.distcp"):
        assert expected in refusal(part)


FIRST, SECOND, THIRD = (f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))


def sharded(folder: Path, kind: str = "safetensors") -> tuple[Path, dict[str, Any]]:
    """Write a checkpoint in three files, and return its index and its weight map."""
    folder.mkdir(exist_ok=True)
    names = list(state())
    table = {}
    for k, file in enumerate((FIRST, SECOND, THIRD)):
        part = {name: state()[name] for name in names[k::3]}
        WRITERS[kind](part, folder / file)
        table |= dict.fromkeys(part, file)
    return indexed(folder / "model.safetensors.index.json", table), table


def indexed(path: Path, table: Any) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}, indent=2))
    return path


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("by", ["index", "folder"])
def test_all_shards_are_loaded(tmp_path: Path, kind: str, by: str) -> None:
    folder = tmp_path / "snapshot"
    index, _ = sharded(folder, kind)
    (folder / FIRST).rename(tmp_path / "blob")
    (folder / FIRST).symlink_to(tmp_path / "blob")  # as in a download cache
    report = check(index if by == "index" else folder, state())
    assert (report.format, report.path) == ("index", index)
    files = [index, *sorted(folder.glob("model-*"))]
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    assert report.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize(
    "file", ["../x", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "\\x", "", 3, None, "a\nb"]
)
def test_an_index_that_points_outside_its_folder(tmp_path: Path, file: Any) -> None:
    index, table = sharded(tmp_path / "inner")
    (tmp_path / "x").write_bytes((tmp_path / "inner" / FIRST).read_bytes())
    told = refusal(indexed(index, table | {"0.weight": file}))
    assert "which is not a file in the index's folder" in told


def shard_of(folder: Path, file: str, change: Callable[[dict], dict]) -> None:
    safetensors.torch.save_file(change(safetensors.torch.load_file(folder / file)), folder / file)


Change = Callable[[Path, Path, dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f, i, t: (f / SECOND).unlink(), f"1 of its 3 files are missing: {SECOND}"),
        (
            lambda f, i, t: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-4]),
            f"{SECOND}: the file is damaged or cut off",
        ),
        (
            lambda f, i, t: indexed(i, t | {"0.weight": SECOND}),
            f"1 tensors that it lists in {SECOND} are missing: 0.w",
        ),
        (
            lambda f, i, t: shard_of(f, SECOND, lambda c: c | {"0.weight": torch.ones(3, 2)}),
            "1 tensors are in more than one file: 0.weight",
        ),
        (
            lambda f, i, t: i.write_text('{"weight_map": {"a": "x", "a": "y"}}'),
            "it has the key 'a' twice",
        ),
        (lambda f, i, t: indexed(i, t | {"0.weight": i.name}), "is itself an index"),
        (
            lambda f, i, t: ((f / "d").mkdir(), indexed(i, t | {"0.weight": "d"})),
            "this is a directory",
        ),
        (
            lambda f, i, t: torch.save({"0.weight": 3}, f / FIRST),
            "has values that are not named tensors",
        ),
        (lambda f, i, t: indexed(i, {}), "without a table `weight_map`"),
        (lambda f, i, t: indexed(i, {"a": "x" * 5000}), "File name too long"),
        (lambda f, i, t: i.write_text('{"a": "some other settings"}'), "a text file"),
        (lambda f, i, t: i.write_bytes(i.read_bytes()[:100]), "it cannot be read: "),
        (lambda f, i, t: i.write_text('{"weight_map": ' + "[" * 100_000), "nested too deeply"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, change: Change, expected: str) -> None:
    index, table = sharded(tmp_path)
    change(tmp_path, index, table)
    assert expected in refusal(index)


def test_shards_without_their_index(tmp_path: Path) -> None:
    sharded(tmp_path)[0].unlink()
    assert "index.json of the checkpoint's parts is missing" in refusal(tmp_path)
