"""Bad checkpoints, data, models and run files: one clear error, nothing written or executed.

What is wrong with a file in itself is told in `tests/sources`; here it goes through the command
line, with exit codes and the hostile files.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import gradscope
from tests.cli.forked import Forked, Outcome

N = 12
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, N)

MODEL = """
import torch
from torch import nn
def build(): return nn.Linear(4, 3)
def averaged(outputs, targets): return nn.functional.cross_entropy(outputs, targets)
def hits(outputs, targets): return outputs.argmax(1) == targets
class Uneven(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, k): return torch.ones(k + 1), 0
class Said(Uneven):
    def __getitem__(self, k): return "hello", 0
"""
FORWARD = """
from torch import nn
class Made(nn.Linear):
    def forward(self, x):
        {}
def build(): return Made(4, 3)
"""
RUN = """
[model]
factory = "model.py:build"
[checkpoint]
path = "w.pt"
[dataset]
path = "data.npz"
[loss]
name = "cross_entropy"
"""


class Payload:
    """Writes a file as it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.system, ("touch executed",))


def state(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return dict(nn.Linear(4, 3).state_dict()) | changes


def good(folder: Path, **changes: np.ndarray) -> None:
    np.savez(folder / "data.npz", **({"inputs": X, "targets": Y} | changes))


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    torch.save(state(), tmp_path / "w.pt")
    good(tmp_path)
    return tmp_path


def compute(forked: Forked, folder: Path, *more: object, data: str = "data.npz") -> Outcome:
    words = ["compute", "w.pt", data, "--model", "model.py:build", "--loss", "cross_entropy"]
    return forked.run(*words, "-o", "out.h5", *more, cwd=folder)


def assert_clear(done: Outcome, code: int, words: str, folder: Path) -> None:
    assert done.code == code, done.err
    assert words in done.err.replace("\n", ". ")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") >= 2  # what it is, and what to do
    assert not done.out
    for hidden in ("Traceback", "\x1b", "weights_only", "gradscope/"):  # none of our own frames
        assert hidden not in done.err
    assert not {"out.h5", "executed"} & {p.name for p in folder.iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def outside(path: Path) -> None:
    safetensors.torch.save_file(state(), path.parent.parent / "elsewhere.safetensors")
    table = dict.fromkeys(state(), "../elsewhere.safetensors")
    path.write_text(json.dumps({"weight_map": table}))


def claiming(path: Path) -> None:
    header = b'{"weight":{"dtype":"F32","shape":[99999,99999],"data_offsets":[0,39999200004]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p.unlink(), "there is no such file"),
    "cut": (cut, "damaged or cut off"),
    "payload": (lambda p: torch.save(Payload(), p), "it holds more than tensors"),
    "inside": (lambda p: torch.save(state(x=Payload()), p), "it holds more than tensors"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps(Payload())), "which could execute code"),
    "misfit": (lambda p: torch.save(state(x=torch.ones(1)), p), "1 unexpected (x)"),
    "index outside": (outside, "which is no file of its own folder"),
    "huge header": (claiming, "damaged or cut off"),
    "odd names": (lambda p: torch.save({"[red]\x1b[31m": torch.ones(1)}, p), "[red]\\x1b[31m"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint(forked: Forked, folder: Path, name: str) -> None:
    write, words = CHECKPOINTS[name]
    write(folder / "w.pt")
    done = compute(forked, folder)
    assert_clear(done, 3, words, folder)
    assert f"{folder}/w.pt" in done.err


def bomb(folder: Path) -> None:
    """A member that claims 8 exabytes, and compresses to nothing."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**30, 2**30)}
    )
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", header.getvalue() + bytes(10**7))
        archive.writestr("targets.npy", header.getvalue())


def member_sizes(folder: Path) -> None:
    """The directory of the archive claims more bytes than a member has."""
    whole = bytearray((folder / "data.npz").read_bytes())
    at = whole.rfind(b"PK\x01\x02")
    whole[at + 20 : at + 28] = (2**31).to_bytes(4, "little") * 2
    (folder / "data.npz").write_bytes(bytes(whole))


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


def spec(folder: Path, text: str) -> None:
    (folder / "dataset.toml").write_text(f'path = "data.npz"\n{text}')


def nothing(folder: Path) -> None: ...


DATA: dict[str, tuple[Callable[[Path], object], str, int, str]] = {
    "unknown key": (lambda p: spec(p, "target = []"), "dataset.toml", 2, "Did you mean 'targets'?"),
    "absent": (lambda p: np.savez(p / "data.npz", x=X), "data.npz", 3, "no array 'inputs'"),
    "ids": (lambda p: (good(p, k=Y), spec(p, 'id = "k"')), "dataset.toml", 3, "the same id"),
    "uneven samples": (nothing, "model.py:Uneven", 3, "not all of one shape"),
    "texts of one's own": (nothing, "model.py:Said", 3, "a sample holds text: 'hello'"),
    "label out of range": (lambda p: good(p, targets=Y + 5), "data.npz", 3, "sample 0: "),
    "integers": (
        lambda p: good(p, inputs=X.astype(int)), "data.npz", 3, 'dtype = { NAME = "float32" }',
    ),
    "truth values": (lambda p: good(p, inputs=X > 0), "data.npz", 3, "inputs hold truth values"),
    "floats for labels": (
        lambda p: good(p, targets=X[:, 0]), "data.npz", 3, 'dtype = { NAME = "int64" }',
    ),
    "a name too long": (nothing, "x" * 300, 3, "File name too long"),
    "wrong width": (lambda p: good(p, inputs=X[:, :3]), "data.npz", 3, "shapes"),
    "zip bomb": (bomb, "data.npz", 3, "bytes of numbers"),
    "zip member sizes": (member_sizes, "data.npz", 3, "data.npz"),
    "not in this file": (elsewhere, "data.h5", 3, "other files"),
    "a chunk that is none": (empty_chunk, "data.h5", 3, "its index of chunks is wrong"),
    "petabytes": (petabytes, "data.h5", 3, "of which 0 are stored"),
    "hostile header": (
        lambda p: claiming(p / "data.safetensors"), "data.safetensors", 3, "data.safetensors",
    ),
    "odd names": (
        lambda p: np.savez(p / "data.npz", **{"[red]x\x1b[31m": X}), "data.npz", 3,
        "[red]x\\x1b[31m",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_bad_data(forked: Forked, folder: Path, name: str) -> None:
    prepare, data, code, words = DATA[name]
    prepare(folder)
    assert_clear(compute(forked, folder, data=data), code, words, folder)


MODELS: dict[str, tuple[str | None, str]] = {
    "no file": (None, "model.py: cannot be read"),
    "raises on import": ("1 / 0", "ZeroDivisionError: division by zero"),
    "leaves": ("import os; os._exit(0)", "your code called sys.exit(0)"),
    "odd": ("class Odd(BaseException): pass\nraise Odd('x')", "your code raised Odd: x"),
    "needs arguments": ("def build(width): pass", "missing a required argument: 'width'"),
    "raises in forward": (FORWARD.format("raise OSError('no table')"), "raised OSError: no table"),
    "exits in forward": (FORWARD.format("raise SystemExit(0)"), "called sys.exit(0)"),
    "is cut off": (
        FORWARD.format("return nn.Linear.forward(self, x).detach()"),
        "are cut off from",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_file(forked: Forked, folder: Path, name: str) -> None:
    content, words = MODELS[name]
    path = folder / "model.py"
    path.unlink() if content is None else path.write_text(content)
    done = compute(forked, folder)
    assert_clear(done, 3, words, folder)
    if name == "raises in forward":
        lines = done.err.splitlines()
        assert f'  File "{folder}/model.py", line 5, in forward' in lines
        assert not any("torch/nn/modules" in line for line in lines)


def test_a_model_file_that_would_be_waited_for(forked: Forked, folder: Path) -> None:
    (folder / "model.py").unlink()
    os.mkfifo(folder / "model.py")
    assert_clear(compute(forked, folder), 3, "no regular file", folder)


def test_the_result_goes_where_it_was_asked_for(forked: Forked, folder: Path) -> None:
    """Even if the user's code goes elsewhere; what it prints is kept from stdout."""
    (folder / "elsewhere").mkdir()
    (folder / "model.py").write_text(f"import os; os.chdir('elsewhere'); print('hi'){MODEL}")
    done = compute(forked, folder, "--quiet", data=str(folder / "data.npz"))
    assert (done.code, done.out) == (0, ""), done.err
    assert "hi" in done.err
    assert (folder / "out.h5").exists()


def test_names_with_odd_characters_are_shown_not_obeyed(forked: Forked, folder: Path) -> None:
    name = "[bold] a\x1b[31m/b|c"
    (folder / "model.py").write_text(
        "from torch import nn\n"
        f"def build(): return nn.ModuleDict({{{name!r}: nn.Linear(4, 3)}})\n"
        "nn.ModuleDict.forward = lambda self, x: next(iter(self.children()))(x)\n"
    )
    torch.save({f"{name}.{k}": v for k, v in state().items()}, folder / "w.pt")
    done = compute(forked, folder)
    assert done.code in (0, 6), done.err  # stored, or refused for its name
    assert "\x1b" not in done.out + done.err
    assert "[bold] a\\x1b[31m/b|c" in done.out + done.err


RUNS: dict[str, tuple[bytes, str]] = {
    "not TOML": (b"{'a': 1}", "run.toml: not valid TOML"),
    "not text": (bytes(range(256)), "run.toml: not"),
    "100 MB": (b"# nothing here\n" * 7_000_000, "larger than 1,000,000 bytes"),
    "unknown key": (f"{RUN}[compute]\nbatchsize = 3".encode(), "Did you mean 'batch_size'?"),
    "unknown backend": (f"{RUN}[compute]\nbackend = 'hook'".encode(), "Did you mean 'hooks'"),
    "unknown stage": (f"{RUN}[compute]\ntransform = ['meen']".encode(), "Did you mean 'mean'"),
    "trust as text": (
        RUN.replace('"w.pt"', '"w.pt"\nunsafe_pickle = "yes"').encode(),
        "checkpoint.unsafe_pickle: found 'yes'. Accepted: true or false",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_bad_run_file(forked: Forked, folder: Path, name: str) -> None:
    content, words = RUNS[name]
    (folder / "run.toml").write_bytes(content)
    done = forked.run("compute", "--config", "run.toml", "-o", "out.h5", cwd=folder)
    assert_clear(done, 2, words, folder)
    assert "run.toml" in done.err


def test_forms_and_names_are_told_at_once(forked: Forked, folder: Path) -> None:
    (folder / "loss.py").write_text("open('executed', 'w')")
    (folder / "run.toml").write_text(
        RUN.replace('"cross_entropy"', '"loss.py:f"')
        + "[compute]\nbackend = 'hoks'\ntransform = ['meen', 'mean']\nbatch_size = -1\nsede = 1\n"
        + "[compare]\nbackends = ['vamp']\n"
    )
    done = forked.run("compute", "--config", "run.toml", "-o", "out.h5", cwd=folder)
    assert_clear(done, 2, "5 settings are wrong", folder)
    for words in ("batch_size: found -1", "sede: unknown", "'hoks'", "[0]: unknown", "'vamp'"):
        assert words in done.err
    assert done.err.count("run.toml: ") == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--resume --overwrite", "contradict each other"),
        ("--labels exact --loss mse", "labels"),
        ("--coupling own-loss --backend hooks", "own-loss"),
        ("--backend hook", "Did you mean 'hooks'?"),
        ("-t clip:max_nrm=1|mean", "Did you mean 'max_norm'?"),
        ("-t mean|mean", "mean"),
        ("--parameters none.*", "no trainable parameter matches 'none.*'"),
        ("--device cuda:99", "there is no device 'cuda:99'"),
        ("--batch-size 0", "compute.batch_size: found 0"),
        ("--mode test", "Accepted: eval or train"),
        ("--samples 5-9", "A:B"),
        ("--loss cross_entropy:label_smoothing=2", "from 0 to 1"),
        ("--loss model.py:averaged", "reduction='none'"),
        ("--loss model.py:hits", "must return floating-point numbers, not torch.bool"),
    ],
)
def test_options_that_contradict_or_do_not_exist(
    forked: Forked, folder: Path, options: str, words: str
) -> None:
    assert_clear(compute(forked, folder, *options.split()), 2, words, folder)


def test_the_same_file_is_loaded_when_it_is_trusted(forked: Forked, folder: Path) -> None:
    done = compute(forked, folder, "--model", "checkpoint")
    assert_clear(done, 3, "holds weights, not the model they belong to", folder)
    torch.save(nn.Linear(4, 3), folder / "w.pt")
    done = compute(forked, folder, "--unsafe-pickle")
    assert done.code == 0, done.err
    assert "was trusted to execute code" in done.out
    done = compute(forked, folder, "--unsafe-pickle", "--model", "checkpoint", "--overwrite")
    assert done.code == 0, done.err
    torch.save(state(x=Payload()), folder / "w.pt")
    compute(forked, folder, "--unsafe-pickle", "--overwrite")
    assert (folder / "executed").exists()  # the payload is a real one


def test_a_key_is_chosen(forked: Forked, folder: Path) -> None:
    torch.save({"model": state(), "ema": state()}, folder / "w.pt")
    assert_clear(compute(forked, folder, "--key", "emma"), 3, "Did you mean 'ema'?", folder)
    assert compute(forked, folder, "--key", "ema").code == 0
    torch.save({"a": {"b": {"c": {"d": state()}}}}, folder / "w.pt")
    assert compute(forked, folder, "--key", "a.b.c.d", "--overwrite").code == 0


def test_names_that_the_model_does_not_have(forked: Forked, folder: Path) -> None:
    more = {"scale": torch.ones(1), "head.w": torch.ones(2)}
    torch.save({f"module.{k}": v for k, v in (state() | more).items()}, folder / "w.pt")
    refused = compute(forked, folder)
    assert_clear(refused, 3, "2 unexpected (scale, head.w)", folder)
    assert "--ignore GLOB leaves out" in refused.err
    done = compute(forked, folder, "--ignore", "scale", "--ignore", "head.*")
    assert done.code == 0, done.err
    assert "Left out of the checkpoint" in done.out
    wanted = compute(forked, folder, "--ignore", "*", "--overwrite")
    assert wanted.code == 0, wanted.err  # what the model has is never left out
    torch.save({"weight": state()["weight"]} | more, folder / "w.pt")
    short = compute(forked, folder, "--ignore", "*", "--overwrite")
    assert (short.code, "1 missing (bias)" in short.err) == (3, True)


def test_no_part_of_the_checkpoint_is_written_over(forked: Forked, folder: Path) -> None:
    safetensors.torch.save_file(state(), folder / "part.safetensors")
    table = dict.fromkeys(state(), "part.safetensors")
    (folder / "w.pt").write_text(json.dumps({"weight_map": table}))
    before = (folder / "part.safetensors").read_bytes()
    done = compute(forked, folder, "-o", "part.safetensors", "--overwrite")
    assert_clear(done, 6, "would replace the checkpoint", folder)
    assert (folder / "part.safetensors").read_bytes() == before


@pytest.mark.parametrize("rows", [[7], [0, 6, 11], list(range(N))], ids=str)
def test_rows_that_are_not_finite_are_flagged_alone(
    forked: Forked, folder: Path, rows: list[int]
) -> None:
    inputs = X.copy()
    inputs[rows, 2] = np.nan
    good(folder, inputs=inputs)
    done = compute(forked, folder)
    assert done.code == 7, done.err
    with h5py.File(folder / "out.h5") as file:
        assert np.flatnonzero(~file["samples/finite"][:].astype(bool)).tolist() == rows


def test_data_that_changed_before_resume(forked: Forked, folder: Path) -> None:
    assert compute(forked, folder).code == 0
    before = (folder / "out.h5").read_bytes()
    good(folder, inputs=X + 1)
    done = compute(forked, folder, "--resume")
    assert done.code == 6
    assert "this is another run" in done.err
    assert "dataset has changed (SHA-256 " in done.err
    assert (folder / "out.h5").read_bytes() == before


@pytest.mark.parametrize("key", ["name", "key"])
@pytest.mark.parametrize("form", ["csv", "U", "S"])
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
