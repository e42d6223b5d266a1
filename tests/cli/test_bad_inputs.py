"""Bad checkpoints, data, models and options: one clear error, nothing written or executed.

What is wrong with a file in itself is told in `tests/sources`, and with a run file in
`tests/config`; here are exit codes, the hostile files, and what only a run can find.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import gradscope
from tests.cli.conftest import LINEAR, N, words
from tests.cli.forked import Forked, Outcome

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, N)

CODE = f"""{LINEAR}
import torch
def averaged(outputs, targets): return nn.functional.cross_entropy(outputs, targets)
def hits(outputs, targets): return outputs.argmax(1) == targets
class Uneven(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, k): return torch.ones(k + 1), 0
class Said(Uneven):
    def __getitem__(self, k): return "hello", 0
"""
FORWARD = """from torch import nn
class Made(nn.Linear):
    def forward(self, x):
        {}
def build(): return Made(4, 3)
"""


class Payload:
    """Writes a file as it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.system, ("touch executed",))


def state(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return dict(nn.Linear(4, 3).state_dict()) | changes


def data(**changes: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: np.savez(folder / "data.npz", **({"inputs": X, "targets": Y} | changes))


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "model.py").write_text(CODE)
    data()(folder)
    return folder


def compute(forked: Forked, folder: Path, *more: object, data: str = "data.npz") -> Outcome:
    run = words(*more)
    run[2] = data
    return forked.run(*run, cwd=folder)


def assert_clear(done: Outcome, code: int, words: str, folder: Path) -> None:
    assert done.code == code, done.err
    assert words in done.err.replace("\n", ". ")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") >= 2  # what it is, and what to do
    assert not done.out
    for hidden in ("Traceback", "\x1b", "weights_only", "gradscope/"):  # none of our own frames
        assert hidden not in done.err
    assert not {"out.h5", "executed"} & {p.name for p in folder.iterdir()}


def saved(content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / "w.pt")


def claiming(name: str) -> Callable[[Path], object]:
    header = b'{"weight":{"dtype":"F32","shape":[99999,99999],"data_offsets":[0,39999200004]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    return lambda folder: (folder / name).write_bytes(content)


def hdf5(folder: Path, *shape: Any, **options: Any) -> int:
    """Write inputs and targets; return where the second chunk of the inputs lies."""
    with h5py.File(folder / "data.h5", "w") as file:
        inputs = file.create_dataset("inputs", *shape, **options)
        file["targets"] = Y
        return int(inputs.id.get_chunk_info(1).byte_offset) if shape == () else 0


def empty_chunk(folder: Path) -> None:
    """A chunk of no bytes at the beginning of the file, by which HDF5 crashes."""
    offset = hdf5(folder, data=X, chunks=(4, 4), compression="gzip", fletcher32=True)
    whole = bytearray((folder / "data.h5").read_bytes())
    at = whole.find(offset.to_bytes(8, "little"))
    assert at > 0
    whole[at : at + 8] = bytes(8)
    (folder / "data.h5").write_bytes(bytes(whole))


def elsewhere(folder: Path) -> None:
    (folder / "secret.bin").write_bytes(X.tobytes())
    hdf5(folder, X.shape, "f4", external=[(str(folder / "secret.bin"), 0, X.nbytes)])


def petabytes(folder: Path) -> None:
    hdf5(folder, (2**51, 4), "f8", chunks=(2**20, 4), compression="gzip")


def spec(folder: Path) -> None:
    (folder / "dataset.toml").write_text('path = "data.npz"\ntarget = []')


def model(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.py").write_text(text)


def waited_for(folder: Path) -> None:
    (folder / "model.py").unlink()
    os.mkfifo(folder / "model.py")


FILES: dict[str, tuple[Callable[[Path], object], str, int, str]] = {
    "a payload": (saved(Payload()), "data.npz", 3, "w.pt: it has values that are not tensors"),
    "a huge header": (claiming("w.pt"), "data.npz", 3, "w.pt: the file is damaged or cut off"),
    "odd names": (
        saved({"[red]\x1b[31m": torch.ones(1)}), "data.npz", 3, "[red]\\x1b[31m",
    ),
    "unknown key": (spec, "dataset.toml", 2, "Did you mean 'targets'?"),
    "uneven samples": (data(), "model.py:Uneven", 3, "have different shapes"),
    "texts of one's own": (data(), "model.py:Said", 3, "a sample has text: 'hello'"),
    "label out of range": (data(targets=Y + 5), "data.npz", 3, "sample 0: "),
    "integers": (data(inputs=X.astype(int)), "data.npz", 3, 'dtype = { NAME = "float32" }'),
    "truth values": (data(inputs=X > 0), "data.npz", 3, "inputs are booleans"),
    "floats for labels": (data(targets=X[:, 0]), "data.npz", 3, 'dtype = { NAME = "int64" }'),
    "a name too long": (data(), "x" * 300, 3, "File name too long"),
    "wrong width": (data(inputs=X[:, :3]), "data.npz", 3, "shapes"),
    "not in this file": (elsewhere, "data.h5", 3, "in further files"),
    "a chunk that is none": (empty_chunk, "data.h5", 3, "its index of chunks is wrong"),
    "petabytes": (petabytes, "data.h5", 3, "but 0 are stored"),
    "a hostile header": (
        claiming("data.safetensors"), "data.safetensors", 3, "data.safetensors",
    ),
    "odd arrays": (
        lambda p: np.savez(p / "data.npz", **{"[red]x\x1b[31m": X}), "data.npz", 3,
        "[red]x\\x1b[31m",
    ),
    "a model that leaves": (
        model("import os; os._exit(0)"), "data.npz", 3, "your code called sys.exit(0)",
    ),
    "a model that is cut off": (
        model(FORWARD.format("return nn.Linear.forward(self, x).detach()")), "data.npz", 3,
        "are detached from",
    ),
    "a model that would be waited for": (waited_for, "data.npz", 3, "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file(forked: Forked, folder: Path, name: str) -> None:
    prepare, data, code, told = FILES[name]
    prepare(folder)
    assert_clear(compute(forked, folder, data=data), code, told, folder)


def test_what_the_forward_pass_raises(forked: Forked, folder: Path) -> None:
    model(FORWARD.format("raise OSError('no table')"))(folder)
    done = compute(forked, folder)
    assert_clear(done, 3, "raised OSError: no table", folder)
    lines = done.err.splitlines()
    assert f'  File "{folder}/model.py", line 4, in forward' in lines
    assert not any("torch/nn/modules" in line for line in lines)


def test_a_model_for_which_memory_runs_out_as_it_is_made(forked: Forked, folder: Path) -> None:
    model("def build():\n    raise MemoryError('400 GB')")(folder)
    done = compute(forked, folder)
    assert_clear(done, 3, "MemoryError: 400 GB", folder)
    assert not any("typer" in line for line in done.err.splitlines())  # who called is no part of it


def test_a_model_that_does_not_run_on_one_sample_alone(forked: Forked, folder: Path) -> None:
    code = "return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"
    (folder / "model.py").write_text(f"from torch import nn\ndef build(): {code}\n")
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    torch.save(made.state_dict(), folder / "w.pt")
    for options in ("", "--batch-size 4", "--memory 1GB"):
        done = compute(forked, folder, "--mode", "train", *options.split())
        assert_clear(done, 4, "runs on a batch but not on a single sample", folder)


def test_the_result_goes_where_it_was_asked_for(forked: Forked, folder: Path) -> None:
    """Even if the user's code goes elsewhere; what it prints is kept from stdout."""
    (folder / "elsewhere").mkdir()
    model(f"import os; os.chdir('elsewhere'); print('hi')\n{CODE}")(folder)
    done = compute(forked, folder, "--quiet", data=str(folder / "data.npz"))
    assert (done.code, done.out) == (0, ""), done.err
    assert "hi" in done.err
    assert (folder / "out.h5").exists()


def test_forms_and_names_are_told_at_once(forked: Forked, folder: Path) -> None:
    (folder / "loss.py").write_text("open('executed', 'w')")
    (folder / "run.toml").write_text(
        '[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "w.pt"\n'
        '[dataset]\npath = "data.npz"\n[loss]\nname = "loss.py:f"\n'
        "[compute]\nbackend = 'hoks'\ntransform = ['meen', 'mean']\nbatch_size = -1\nsede = 1\n"
        "[compare]\nbackends = ['vamp']\n"
    )
    done = forked.run("compute", "--config", "run.toml", "-o", "out.h5", cwd=folder)
    assert_clear(done, 2, "5 settings are wrong", folder)
    for told in ("batch_size: found -1", "sede: unknown", "'hoks'", "[0]: unknown", "'vamp'"):
        assert told in done.err
    assert done.err.count("run.toml: ") == 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--labels exact --loss l1", "labels"),
        ("--coupling own-loss --backend hooks", "own-loss"),
        ("-t clip:max_nrm=1|mean", "Did you mean 'max_norm'?"),
        ("--device cuda:99", "there is no device 'cuda:99'"),
        ("--mode test", "Accepted: eval or train"),
        ("--loss cross_entropy:label_smoothing=2", "from 0 to 1"),
        ("--loss model.py:averaged", "reduction='none'"),
        ("--loss model.py:hits", "must return floating-point numbers, not torch.bool"),
    ],
)
def test_options_that_do_not_fit(forked: Forked, folder: Path, options: str, told: str) -> None:
    assert_clear(compute(forked, folder, *options.split()), 2, told, folder)


def test_a_gpu_on_which_nothing_runs_is_refused(forked: Forked, folder: Path) -> None:
    """One that torch counts: of another generation, say, or with a driver that is too old."""
    (folder / "model.py").write_text(f"{CODE}\ntorch.cuda.device_count = lambda: 99\n")
    found = compute(forked, folder, "--device", "cuda:98")
    assert_clear(found, 2, "computation on cuda:98 failed", folder)


def test_the_same_file_is_loaded_when_it_is_trusted(forked: Forked, folder: Path) -> None:
    done = compute(forked, folder, "--model", "checkpoint")
    assert_clear(done, 3, "has weights, but no model", folder)
    saved(nn.Linear(4, 3))(folder)
    done = compute(forked, folder, "--unsafe-pickle", "--model", "checkpoint")
    assert done.code == 0, done.err
    assert "was allowed to execute code" in done.out
    saved(state(x=Payload()))(folder)
    compute(forked, folder, "--unsafe-pickle", "--overwrite")
    assert (folder / "executed").exists()  # the payload is a real one


def test_a_key_is_chosen(forked: Forked, folder: Path) -> None:
    saved({"model": state(), "ema": state()})(folder)
    assert_clear(compute(forked, folder, "--key", "emma"), 3, "Did you mean 'ema'?", folder)
    assert compute(forked, folder, "--key", "ema").code == 0


def test_names_that_the_model_does_not_have(forked: Forked, folder: Path) -> None:
    more = {"scale": torch.ones(1), "head.w": torch.ones(2)}
    saved({f"module.{k}": v for k, v in (state() | more).items()})(folder)
    refused = compute(forked, folder)
    assert_clear(refused, 3, "2 unexpected (scale, head.w)", folder)
    assert "with --ignore GLOB" in refused.err
    done = compute(forked, folder, "--ignore", "scale", "--ignore", "head.*")
    assert done.code == 0, done.err
    assert "Entries of the checkpoint were ignored" in done.out
    saved({"weight": state()["weight"]} | more)(folder)
    short = compute(forked, folder, "--ignore", "*", "--overwrite")
    assert (short.code, "1 missing (bias)" in short.err) == (3, True)  # not what the model has


def test_no_part_of_the_checkpoint_is_written_over(forked: Forked, folder: Path) -> None:
    safetensors.torch.save_file(state(), folder / "part.bin")
    table = dict.fromkeys(state(), "part.bin")
    (folder / "w.pt").write_text(json.dumps({"weight_map": table}))
    before = (folder / "part.bin").read_bytes()
    done = compute(forked, folder, "-o", "part.bin", "--overwrite")
    assert_clear(done, 6, "the output would replace the checkpoint", folder)
    assert (folder / "part.bin").read_bytes() == before


def test_a_stored_vector_is_not_written_over(forked: Forked, folder: Path) -> None:
    saved(state())(folder)
    assert compute(forked, folder, "-t", "mean", "-o", "mean.h5").code == 0
    before = (folder / "mean.h5").read_bytes()
    done = compute(forked, folder, "-t", "dot:with=mean.h5:0", "-o", "mean.h5", "--overwrite")
    assert (done.code, (folder / "mean.h5").read_bytes() == before) == (6, True), done.err
    assert "the output would replace an input" in done.err


@pytest.mark.parametrize("rows", [[0, 6, 11], list(range(N))], ids=str)
def test_rows_that_are_not_finite_are_flagged_alone(
    forked: Forked, folder: Path, rows: list[int]
) -> None:
    inputs = X.copy()
    inputs[rows, 2] = np.nan
    data(inputs=inputs)(folder)
    done = compute(forked, folder)
    assert done.code == 7, done.err
    with h5py.File(folder / "out.h5") as file:
        assert np.flatnonzero(~file["samples/finite"][:].astype(bool)).tolist() == rows


def test_data_that_changed_before_resume(forked: Forked, folder: Path) -> None:
    assert compute(forked, folder).code == 0
    before = (folder / "out.h5").read_bytes()
    data(inputs=X + 1)(folder)
    done = compute(forked, folder, "--resume")
    assert done.code == 6
    assert "a run with different options or inputs" in done.err
    assert "dataset has changed (SHA-256 " in done.err
    assert (folder / "out.h5").read_bytes() == before


@pytest.mark.parametrize(("form", "key"), [("csv", "name"), ("U", "key"), ("S", "name")])
def test_ids_and_texts_are_stored(forked: Forked, folder: Path, form: str, key: str) -> None:
    names = [f"sample {k} {'é' * (k % 3)}" for k in range(N)]
    labels = np.array(["a", "b", "c"])[Y]
    text = f'path = "data.{"csv" if form == "csv" else "npz"}"\nid = "{key}"\n'
    text += 'targets = ["label"]\nclasses = { label = ["a", "b", "c"] }\n'
    if form == "csv":
        rows = zip(X.tolist(), labels, names, range(N), strict=True)
        lines = [f"{','.join(map(str, x))},{y},{name},{10 * k}" for x, y, name, k in rows]
        (folder / "data.csv").write_text("\n".join(["a,b,c,d,label,name,key", *lines]))
        text += 'columns = { inputs = ["[0:4]"] }\n'
    else:
        kept = np.char.encode(names, "utf-8") if form == "S" else np.array(names)
        np.savez(folder / "data.npz", inputs=X, label=labels, name=kept, key=np.arange(N) * 10)
    (folder / "dataset.toml").write_text(text)
    done = compute(forked, folder, "--batch-size", 5, "--samples", "1:12", data="dataset.toml")
    assert done.code == 0, done.err
    with h5py.File(folder / "out.h5") as file:
        assert file["samples/target"][:].tolist() == Y[1:].tolist()
        ids = file["samples/id"]
        found = ids.asstr()[:].tolist() if key == "name" else ids[:].tolist()
    assert found == (names if key == "name" else list(range(0, 10 * N, 10)))[1:]
    with gradscope.open(folder / "out.h5") as result:
        assert str(result.samples["id"][0]) == (names[1] if key == "name" else "10")


def channels_last(path: Path) -> None:
    convolution(path, (8, 8, 3), 3)


def without_channels(path: Path) -> None:
    convolution(path, (8, 8), 1)


def convolution(path: Path, shape: tuple[int, ...], channels: int) -> None:
    layers = f"nn.Conv2d({channels}, 2, 3), nn.Flatten(), nn.Linear(72, 3)"
    model(f"from torch import nn\ndef build(): return nn.Sequential({layers})\n")(path)
    built = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    torch.save(built.state_dict(), path / "w.pt")
    inputs = np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)
    np.savez(path / "data.npz", inputs=inputs, targets=np.arange(N) % 3)


def written(name: str, content: bytes | str) -> Callable[[Path], object]:
    held = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(held)


def run_file(old: str, new: str) -> Callable[[Path], object]:
    text = (
        '[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "w.pt"\n'
        '[dataset]\npath = "data.npz"\n[loss]\nname = "cross_entropy"\n'
    )
    assert old in text
    return written("run.toml", text.replace(old, new))


def outputs(n: int, targets: np.ndarray) -> Callable[[Path], None]:
    """A model of n outputs, and targets for it."""

    def prepare(folder: Path) -> None:
        model(f"from torch import nn\ndef build(): return nn.Linear(4, {n})\n")(folder)
        saved(nn.Linear(4, n).state_dict())(folder)
        data(targets=targets)(folder)

    return prepare


def vector_outputs(folder: Path) -> None:
    outputs(1, X[:, :1])(folder)
    model(FORWARD.format("return nn.Linear.forward(self, x)[:, 0]").replace("4, 3", "4, 1"))(folder)


def own(code: str) -> Callable[[Path], object]:
    return model(f"{LINEAR}import torch\n{code}\n")


def layers(text: str, inputs: np.ndarray) -> Callable[[Path], None]:
    """A model of these layers, and inputs that do not fit them."""

    def prepare(folder: Path) -> None:
        model(f"from torch import nn\ndef build(): return nn.Sequential({text})\n")(folder)
        saved(eval(f"nn.Sequential({text})").state_dict())(folder)
        data(inputs=inputs)(folder)

    return prepare


NOTHING: Callable[[Path], object] = lambda folder: None  # noqa: E731
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
PAGE = "<!DOCTYPE html><html>404 not found</html>"
EMBED = "nn.Embedding(9, 2), nn.Flatten(), nn.Linear(4, 3)"
IMAGE = "nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3)"
OWN, MSE = ("--loss", "model.py:f"), ("--loss", "mse")
CHECK = ("check", "--config", "run.toml")
DATA = ("check", "w.pt", "d.toml", "--model", "model.py:build", "--loss", "cross_entropy")
FITS = "reshape = { NAME = "

# wrong input: what was done to the folder, options of compute (or a command of its own, with its
# name in front), exit code, what is wrong and where, what to do
MESSAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int, str, str]] = {
    "a stage with a bare value": (NOTHING, ("-t", "clip:1.0"), 2, "'1.0'", "clip:max_norm=1.0"),
    "a comma between stages": (
        NOTHING, ("-t", "clip:max_norm=1.0, mean"), 2, "mean", "clip:max_norm=1.0 | mean",
    ),
    "another word for the mean": (NOTHING, ("-t", "avg"), 2, "'avg'", "Did you mean 'mean'?"),
    "a stage as a call": (NOTHING, ("-t", "clip(1.0)"), 2, "'clip(1.0)'", "NAME:argument=value"),
    "a stage with a space": (NOTHING, ("-t", "clip p=2"), 2, "'clip p=2'", "NAME:argument=value"),
    "text for a number": (NOTHING, ("-t", "clip:max_norm=big"), 2, "'big'", "clip:max_norm=VALUE"),
    "a stage without its argument": (NOTHING, ("-t", "clip"), 2, "needs max_norm", "Write clip:"),
    "an empty stage": (NOTHING, ("-t", "mean |"), 2, "a stage is empty", "Write stages as in"),
    "two reducers": (NOTHING, ("-t", "mean | sum"), 2, "one reducer only", "Remove one"),
    "a stage of a file that is not there": (
        NOTHING, ("-t", "my.py:T"), 3, "my.py: cannot be read", "Check the path",
    ),
    "a result named as another format": (
        NOTHING, ("-t", "mean", "-o", "x.npz"), 2, "--output: found 'x.npz'", "gradscope export",
    ),
    "a result in no folder": (NOTHING, ("-o", "no/o.h5"), 6, "does not exist", "Create the folder"),
    "samples reversed": (NOTHING, ("--samples", "8:3"), 2, "--samples: found '8:3'", '"A:B"'),
    "samples with a dash": (NOTHING, ("--samples", "0-5"), 2, "--samples: found '0-5'", '"A:B"'),
    "samples beyond": (NOTHING, ("--samples", "0:99"), 3, "the data set has 12", "at most 12"),
    "a batch of none": (NOTHING, ("--batch-size", "0"), 2, "--batch-size: found 0", "at least 1"),
    "another word for a dtype": (NOTHING, ("--dtype", "double"), 2, "--dtype: found", "float64"),
    "another word for a device": (NOTHING, ("--device", "gpu"), 2, "--device: found", "cuda"),
    "memory and a batch size": (
        NOTHING, ("--memory", "1GB", "--batch-size", "4"), 2, "--memory", "Remove one of the two",
    ),
    "no such parameter": (NOTHING, ("--parameters", "fc*"), 2, "'fc*'", "weight, bias"),
    "a backend misspelt": (NOTHING, ("--backend", "hook"), 2, "'hook'", "Did you mean 'hooks'?"),
    "a loss misspelt": (NOTHING, ("--loss", "crossentropy"), 2, "'crossentropy'", "cross_entropy"),
    "a model file alone": (
        NOTHING, ("--model", "model.py"), 3, "model.py: this file trains nothing", "model.py:NAME",
    ),
    "channels last": (channels_last, (), 3, "to have 3 channels", "x.transpose(0, 3, 1, 2)"),
    "no channels": (without_channels, (), 3, "to have 1 channels", f"{FITS}[1, 8, 8] }}"),
    "flat images": (
        layers(IMAGE, np.ones((N, 192), "f4")), (), 3, "inputs (12, 192)", f"{FITS}[channels",
    ),
    "too many columns": (
        data(inputs=np.ones((N, 5), "f4")), (), 3, "takes 4 numbers on the last axis, and a sample "
        "has 5", 'columns = { NAME = ["ARRAY[0:4]"] }',
    ),
    "images for a recurrent layer": (
        layers("nn.LSTM(3, 2, batch_first=True)", np.ones((N, 1, 5, 3), "f4")), (), 3,
        "takes 3 axes", f"{FITS}[5, 3] }}",
    ),
    "rows for a recurrent layer": (
        layers("nn.GRU(3, 2, batch_first=True)", np.ones((N, 15), "f4")), (), 3,
        "takes 3 numbers at each step", f"{FITS}[5, 3] }}",
    ),
    "images for a convolution of sequences": (
        layers("nn.Conv1d(5, 2, 1)", np.ones((N, 1, 5, 3), "f4")), (), 3,
        "takes 3 axes", f"{FITS}[5, 3] }}",
    ),
    "images for a linear layer": (
        data(inputs=np.ones((N, 2, 2), "f4")), (), 3, "inputs (12, 2, 2)", f"{FITS}[4] }}",
    ),
    "token ids in floating point": (
        layers(EMBED, np.ones((N, 2), "f4")), (), 3, "inputs (12, 2) float32", 'NAME = "int64"',
    ),
    "one-hot classes": (
        data(targets=np.eye(3, dtype=int)[np.arange(N) % 3]), (), 3, "(12, 3)", "y.argmax(1)",
    ),
    "classes in floating point": (
        data(targets=(np.arange(N) % 3).astype("f4")), (), 3, "float32", 'NAME = "int64"',
    ),
    "classes in a column": (data(targets=Y[:, None]), (), 3, "targets (12, 1)", f"{FITS}[] }}"),
    "classes from 1": (data(targets=np.arange(N) % 3 + 1), (), 3, "Target 3", "must be 0 to"),
    "negative classes": (data(targets=np.arange(N) % 3 - 1), (), 3, "Target -1", "must be 0 to"),
    "classes as texts": (data(targets=np.array(["a", "b"] * 6)), (), 3, "'a'", "[dataset] classes"),
    "targets of a vector for a column": (
        outputs(1, X[:, 0]), MSE, 2, "outputs (12, 1) and targets (12,)", f"{FITS}[1] }}",
    ),
    "targets of a column for a vector": (
        vector_outputs, MSE, 2, "outputs (12,) and targets (12, 1)", f"{FITS}[] }}",
    ),
    "logits for probabilities": (
        outputs(1, np.ones((N, 1), "f4")), ("--loss", "bce"), 3, "outputs are", "bce_with_logits",
    ),
    "arrays of two lengths": (data(targets=Y[:-1]), (), 3, "inputs 12, targets 11", "first axis"),
    "arrays of other names": (
        lambda p: np.savez(p / "data.npz", x=X, y=Y), (), 3, "no array 'inputs'", "It has: x, y",
    ),
    "no samples": (data(inputs=X[:0], targets=Y[:0]), (), 3, "no samples", "at least one sample"),
    "a picture as data": (written("data.npz", PNG), (), 3, "this is a PNG image", "Supported: "),
    "a page as data": (written("data.npz", PAGE), (), 3, "an HTML page", "Download the file"),
    "an empty file as data": (written("data.npz", b""), (), 3, "the file is empty", "download"),
    "a page as weights": (written("w.pt", PAGE), (), 3, "w.pt: this is an HTML page", "Download"),
    "data as weights": (
        lambda p: (p / "data.npz").replace(p / "w.pt"), (), 3, "data, not weights", "CHECKPOINT",
    ),
    "an optimiser's state": (
        saved(torch.optim.Adam([torch.ones(1)]).state_dict()), (), 3, "state of an optimiser",
        "Save model.state_dict()",
    ),
    "weights of numpy": (
        saved({k: v.numpy() for k, v in state().items()}), (), 3, "numpy arrays", "from_numpy",
    ),
    "a whole model": (saved(nn.Linear(4, 3)), (), 3, "Linear", "--unsafe-pickle loads it"),
    "weights of another width": (
        saved(nn.Linear(5, 3).state_dict()), (), 3, "(3, 5) in the checkpoint, (3, 4)", "factory",
    ),
    "a factory that returns a class": (
        own("def build(): return nn.Linear"), (), 3, "the class Linear", "Return Linear(...)",
    ),
    "a factory that returns nothing": (
        own("def build(): nn.Linear(4, 3)"), (), 3, "returned None", "has no `return`",
    ),
    "a factory that returns weights": (
        own("def build(): return nn.Linear(4, 3).state_dict()"), (), 3, "OrderedDict",
        "not its state dict",
    ),
    "a package that is missing": (
        model("import timmm"), (), 3, "No module named 'timmm'", "Install timmm for",
    ),
    "a loss that returns nothing": (
        own("def f(o, t): pass"), OWN, 2, "it returned None", "Return the tensor of losses",
    ),
    "a loss that returns a number of Python": (
        own("def f(o, t): return o.sum().item()"), OWN, 2, "it returned a float", ".item()",
    ),
    "a loss that returns several numbers": (
        own("def f(o, t): return o"), OWN, 2, "it returned shape (12, 3)", "Reduce over all axes",
    ),
    "the class of a loss": (
        own("f = nn.CrossEntropyLoss"), OWN, 2, "the class CrossEntropyLoss", "reduction='none'",
    ),
    "a key misspelt": (run_file("factory", "facotry"), CHECK, 2, "facotry", "mean 'factory'?"),
    "a table misspelt": (run_file("[loss]", "[los]"), CHECK, 2, "los: unknown", "mean 'loss'?"),
    "a text without quotes": (
        run_file('"model.py:build"', "model.py:build"), CHECK, 2, "at line 2",
        "The line is: factory = model.py:build",
    ),
    "no run file": (NOTHING, CHECK, 2, "there is no such file", "gradscope init writes"),
    "weights as a run file": (
        NOTHING, ("check", "--config", "w.pt"), 2, "a file of torch.save", "gradscope init writes",
    ),
    "a run file as weights": (
        run_file("[loss]", "[loss]"), ("init", "run.toml", "data.npz"), 2, "this is a run file",
        "gradscope check --config run.toml",
    ),
    "data for a checkpoint": (
        written("d.toml", b'path = "data.npz"'), ("check", "d.toml", "w.pt"), 2,
        "d.toml: this is a dataset spec, not a checkpoint",
        "Give the checkpoint first, then the data: gradscope COMMAND CHECKPOINT DATASET.",
    ),
    "a scale of an array that is missing": (
        written("d.toml", b'path = "data.npz"\nscale = { input = 0.5 }'), DATA, 3,
        "data.npz: scale: there is no array 'input' in the file",
        "Did you mean 'inputs'? It has: inputs, targets.",
    ),
    "weights of a training that diverged": (
        saved(state(bias=torch.full((3,), math.nan))), (), 3,
        "w.pt: values are not finite in 1 tensor: bias (3 of 3)",
        "Use a checkpoint from before the training diverged.",
    ),
    "tokens of a loss of samples": (
        NOTHING, ("--rows", "token"), 2,
        "--rows token: the loss 'cross_entropy' must return floating-point values of shape (1, t), "
        "one per position; it returned (1,) of float32",
        "If a sample has one loss, use --rows sample. For tokens, use a loss of tokens, such as "
        "token_cross_entropy. Your own loss must use reduction='none', and flatten all axes but "
        "the first into one. If some positions do not count, it must return (losses, counted), "
        "both (n, t).",
    ),
    **{
        f"{kind} for {command[0]}": (
            written("k", content), command, 3, f"k: this is {kind}", "gradscope compute -o wrote",
        )
        for kind, content in (("a PNG image", PNG), ("an HTML page", PAGE), ("an empty file", ""))
        for command in (
            ("stats", "k"), ("view", "k"), ("export", "k", "-o", "x.npy"), ("attribute", "k", "k"),
            ("merge", "k", "-o", "m.h5"), ("validate", "k", "--train", "model.py:f"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_says_what_is_wrong_where_and_what_to_do(
    forked: Forked, folder: Path, name: str
) -> None:
    prepare, options, code, wrong, remedy = MESSAGES[name]
    prepare(folder)
    before = {path.name for path in folder.iterdir()} | {"__pycache__"}
    if options and not options[0].startswith("-"):
        done = forked.run(*options, cwd=folder)
    else:
        done = compute(forked, folder, *options)
    assert_clear(done, code, wrong, folder)
    assert remedy in " ".join(done.err.split()), done.err
    assert {path.name for path in folder.iterdir()} <= before


@pytest.mark.parametrize("form", ["csv", "unnamed", "parquet"])
def test_the_index_of_pandas_is_no_input(forked: Forked, folder: Path, form: str) -> None:
    """As `DataFrame.to_csv` and `to_parquet` write it."""
    name = {"csv": "", "unnamed": "Unnamed: 0", "parquet": "__index_level_0__"}[form]
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"a": X[:, 0], "b": X[:, 1], "label": Y, name: np.arange(N)})
        pytest.importorskip("pyarrow.parquet").write_table(table, folder / "data.parquet")
    else:
        rows = [f"{k},{X[k, 0]},{X[k, 1]},{Y[k]}" for k in range(N)]
        (folder / "data.csv").write_text("\n".join([f"{name},a,b,label", *rows]))
    data = "data.parquet" if form == "parquet" else "data.csv"
    done = forked.run("init", "w.pt", data, "--json", cwd=folder)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["unused"] == {name or "0": "the name of a sample index"}
    assert found["guessed"]["dataset.columns"].startswith('{ "table" = ["a", "b"] }')
