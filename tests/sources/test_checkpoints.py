"""Checkpoints: loaded whole into a model that they fit, or refused in our own words."""

import argparse
import hashlib
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from gradscope.errors import CheckpointError
from gradscope.sources import CheckpointReport, checkpoint_readers, load_into

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


def state() -> dict[str, torch.Tensor]:
    return dict(trained().state_dict())


def legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[object, Path], None]] = {
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
    assert str(path) in str(caught.value)
    assert str(caught.value).count(str(path)) == 1
    assert caught.value.remedy
    assert caught.value.exit_code == 3
    assert "weights_only" not in str(caught.value)  # torch's advice to disable it
    assert not WROTE
    return str(caught.value)


def check(path: Path, expected: dict[str, torch.Tensor]) -> CheckpointReport:
    net = model()
    report = load_into(net, path)
    torch.testing.assert_close(dict(net.state_dict()), expected, rtol=0, atol=0)
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report.tensors == len(expected)
    return report


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_is_found_by_content(tmp_path: Path, kind: str) -> None:
    report = check(saved(tmp_path, state(), kind), state())
    assert report.format == kind
    assert report.notes == ()
    assert set(WRITERS) <= set(checkpoint_readers.names())
    assert checkpoint_readers.summary(kind)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "model_state", "ema"])
def test_a_state_dict_under_a_key(tmp_path: Path, key: str) -> None:
    optimizer = torch.optim.Adam(trained().parameters()).state_dict()
    report = check(saved(tmp_path, {"epoch": 3, key: state(), "optimizer": optimizer}), state())
    assert report.key == key
    assert repr(key) in report.notes[0]


def test_a_checkpoint_may_hold_what_training_leaves_beside_the_weights(tmp_path: Path) -> None:
    """None of it can execute anything, though torch refuses some of it on its own."""
    content = {
        "epoch": torch.tensor(3),  # a tensor beside the state dict
        "best": np.float64(0.5),
        "losses": np.arange(3.0),
        "config": argparse.Namespace(lr=0.1, folder=tmp_path),
        "random": {"numpy": np.random.default_rng(0).bit_generator.state, "torch": torch.ones(3)},
        "vocabulary": {"a": 0, "b": 1},
        "model_state_dict": state(),
        "optimizer": torch.optim.Adam(trained().parameters()).state_dict(),
    }
    for kind in ("torch", "torch-legacy"):
        assert check(saved(tmp_path, content, kind), state()).key == "model_state_dict"


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    content = {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{k}": v for k, v in state().items()},
        "optimizer_states": [],
        "hyper_parameters": {"width": 3},
        "loops": {"fit_loop": {"state_dict": {}}},
    }
    report = check(saved(tmp_path, content), state())
    assert (report.key, report.prefix) == ("state_dict", "model.")


def test_averaged_weights_of_torch(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(trained(), use_buffers=True)
    report = check(saved(tmp_path, averaged.state_dict()), state())
    assert report.prefix == "module."
    assert report.notes[0] == "Left out of the checkpoint, as not the model's: n_averaged."


def test_of_weights_and_their_average_the_user_chooses(tmp_path: Path) -> None:
    average = {k: v * 2 for k, v in state().items()}
    content = {"model": state(), "ema": {"decay": 0.9, "module": average}}
    path = saved(tmp_path, content)
    assert "under each of model, ema.module" in refusal(path)
    net = model()
    assert load_into(net, path, key="ema.module").key == "ema.module"
    torch.testing.assert_close(dict(net.state_dict()), average, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"Did you mean 'ema\.module'"):
        load_into(net, path, key="emma.module")


def test_the_state_dict_of_this_model_is_found_among_others(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Conv2d(1, 1, 1)).state_dict()
    content = {"generator": other, "discriminator": state(), "steps": 3}
    assert check(saved(tmp_path, content), state()).key == "discriminator"


def test_a_table_that_holds_itself_is_no_loop(tmp_path: Path) -> None:
    content: dict[str, object] = {f"k{k}": {} for k in range(200)}
    for value in content.values():
        value |= dict.fromkeys(content, content)
    assert "no state dict of the model" in refusal(saved(tmp_path, content))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_a_prefix_is_taken_off_and_told(tmp_path: Path, prefix: str) -> None:
    report = check(saved(tmp_path, {prefix + k: v for k, v in state().items()}), state())
    assert report.prefix == prefix
    assert repr(prefix) in report.notes[0]


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trained()

    for content in (
        Outer().state_dict(),
        {f"module.{k}": v for k, v in Outer().state_dict().items()},
    ):
        net = Outer()
        load_into(net, saved(tmp_path, content))
        torch.testing.assert_close(dict(net.model.state_dict()), state(), rtol=0, atol=0)


def test_a_prefix_that_only_some_names_have_stays(tmp_path: Path) -> None:
    content = {("module." if k.startswith("0") else "") + k: v for k, v in state().items()}
    told = refusal(saved(tmp_path, content))
    assert "2 missing (0.weight, 0.bias)" in told
    assert "2 unexpected (module.0.weight, module.0.bias)" in told
    assert "Not every name begins with 'module.'" in told


def test_floating_point_numbers_are_cast_and_told(tmp_path: Path) -> None:
    content = state() | {"0.weight": state()["0.weight"].double()}
    report = check(saved(tmp_path, content), state())
    assert report.notes == ("Cast to the model's dtype: 0.weight: float64 -> float32.",)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_may_be_stored_once(tmp_path: Path) -> None:
    source, net = Tied(), Tied()
    path = tmp_path / "w"
    safetensors.torch.save_model(source, str(path))  # stores one name of the two
    report = load_into(net, path)
    assert torch.equal(net.head.weight, source.embed.weight)
    assert net.head.weight is net.embed.weight
    assert report.tensors == 1
    assert report.notes[0] in (
        f"Not in the checkpoint, tied to others that are: {name}.weight."
        for name in ("embed", "head")
    )


def test_a_tied_weight_stored_twice_must_agree(tmp_path: Path) -> None:
    content = {"embed.weight": torch.ones(4, 3), "head.weight": torch.zeros(4, 3)}
    assert "one tensor in the model, but differ" in refusal(saved(tmp_path, content), Tied())


def test_a_mask_of_infinities_is_no_damage(tmp_path: Path) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    source = Masked()
    load_into(Masked(), saved(tmp_path, source.state_dict()))
    source.mask.fill_(torch.nan)
    assert "mask (2 of 2)" in refusal(saved(tmp_path, source.state_dict()), Masked())


def edited(**changes: object) -> Callable[[], dict]:
    names = {
        "weight": "0.weight",
        "running_var": "1.running_var",
        "batches": "1.num_batches_tracked",
    }
    return lambda: state() | {names.get(k, k): v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lambda: {}, "no state dict of the model in it; its keys are: none"),
        (lambda: {"epoch": 3, "lr": 0.1}, "its keys are: 'epoch', 'lr'"),
        (lambda: torch.ones(3), "a single tensor"),
        (lambda: [torch.ones(3)], "holds a list"),
        (lambda: {"model": state(), "state_dict": state()}, "each of model, state_dict"),
        (lambda: {3: torch.ones(2)}, "not text: 3"),
        (edited(extra=torch.ones(2)), "1 unexpected (extra)"),
        (edited(epoch=3), "1 unexpected (epoch)"),
        (lambda: {"0.weight": state()["0.weight"]}, "6 missing (0.bias, 1.weight"),
        (edited(weight=torch.ones(2, 3)), "0.weight: (2, 3) here, (3, 2) in the model"),
        (edited(weight=[1.0]), "0.weight: a list, not a tensor"),
        (edited(weight=torch.ones(3, 2).to_sparse()), "0.weight: a sparse"),
        (edited(weight=torch.ones(3, 2, dtype=torch.int64)), "0.weight: int64 -> float32"),
        (edited(batches=torch.tensor(3.0)), "1.num_batches_tracked: float32 -> int64"),
        (edited(weight=torch.full((3, 2), torch.nan)), "0.weight (6 of 6)"),
        (edited(weight=torch.full((3, 2), 1e300, dtype=torch.float64)), "0.weight (6 of 6)"),
        (edited(running_var=torch.tensor([1, torch.inf, 1])), "1.running_var (1 of 3)"),
    ],
)
def test_a_state_dict_that_does_not_fit(
    tmp_path: Path, content: Callable[[], object], expected: str
) -> None:
    assert expected in refusal(saved(tmp_path, content()))


def test_ten_names_and_a_count_are_told(tmp_path: Path) -> None:
    content = state() | {f"extra{k}": torch.ones(1) for k in range(25)}
    told = refusal(saved(tmp_path, content))
    assert "25 unexpected" in told
    assert "extra9 and 15 more" in told
    assert "extra10" not in told


@pytest.mark.parametrize("kind", ["torch", "torch-legacy", "pickle"])
@pytest.mark.parametrize("what", ["payload", "module", "inside"])
@pytest.mark.parametrize("override", [False, True])
def test_code_is_never_executed(
    tmp_path: Path, kind: str, what: str, override: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if override:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    content = {"payload": Payload(), "module": model(), "inside": state() | {"x": Payload()}}[what]
    path = tmp_path / "w.safetensors"  # the suffix does not matter
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
        assert "could execute code and is never loaded" in refusal(path)
    else:
        WRITERS[kind](content, path)
        told = refusal(path)
        assert "can execute code and is not loaded" in told
        assert "it holds more than tensors: " in told


def test_the_payload_is_a_real_one() -> None:
    pickle.loads(pickle.dumps(Payload()))
    assert WROTE == ["executed"]
    WROTE.clear()


def cut_points(size: int) -> list[int]:
    return [1, 4, 9, 20, *(size * k // 8 for k in range(1, 8)), size - 1]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_truncated_file(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, state(), kind)
    whole = path.read_bytes()
    for size in cut_points(len(whole)):
        path.write_bytes(whole[:size])
        told = refusal(path)
        assert any(word in told for word in ("cut off", "damaged")), (size, told)


def test_a_flipped_bit_in_a_torch_archive(tmp_path: Path) -> None:
    path = saved(tmp_path, state())
    whole = bytearray(path.read_bytes())
    at = whole.find(state()["0.weight"].numpy().tobytes())
    assert at > 0
    whole[at] ^= 1
    path.write_bytes(whole)
    torch.load(path, weights_only=True)  # torch itself says nothing
    assert "checksum" in refusal(path)


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
    assert "several of its parts have one name" in refusal(path)


def test_any_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """In a torch archive, of which every part has a checksum."""
    path = saved(tmp_path, state())
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        net = model()
        try:
            load_into(net, path)
        except CheckpointError:
            continue
        torch.testing.assert_close(dict(net.state_dict()), state(), rtol=0, atol=0)


def zipped(**parts: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in parts.items():
                archive.writestr(name.replace("__", "/"), content)

    return write


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "no weights are in this folder; it is empty"),
        (lambda p: p.write_bytes(b""), "the file is empty"),
        (lambda p: p.write_text("<!DOCTYPE html><html><body>404</body></html>"), "an HTML page"),
        (lambda p: p.write_text("\n <html>not found</html>"), "an HTML page"),
        (
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
            "a git-LFS pointer",
        ),
        (lambda p: p.write_text("some text that is no checkpoint"), "a text file"),
        (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "an HDF5 file"),
        (lambda p: p.write_bytes(bytes(range(200, 256)) * 3), "an unknown kind"),
        (lambda p: p.write_bytes((2**40).to_bytes(8, "little") + b'{"a":1}'), "claims 1,099,"),
        (lambda p: p.write_bytes((9).to_bytes(8, "little") + b'{"a":1}}}'), "damaged"),
        (zipped(readme=b"hello"), "without tensors of torch.save"),
        (zipped(**{"inputs.npy": b"x"}), "a numpy .npz file"),
        (zipped(**{"m__code__x.py": b"x", "m__data.pkl": b"x"}), "a TorchScript archive"),
        (zipped(**{"m__data.pkl": b"\x80\x02garbage"}), "damaged"),
        (zipped(**{"m__data.pkl": bytes(10**7)}), "claim 10,000,000 bytes"),
    ],
)
def test_a_file_that_is_no_checkpoint(
    tmp_path: Path, write: Callable[[Path], object], expected: str
) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    assert expected in refusal(path)


def test_torchs_own_archives_of_programs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path)
    assert "a torch.export archive" in refusal(path)
