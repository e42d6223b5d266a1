"""What cannot be done: a table of commands, options, exit codes and what the message names.

Nothing is written, nothing goes to stdout, and there is no traceback.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from gradscope.cli.app import app
from tests.cli.forked import Forked
from tests.run import project

RUN = project.RUN.format(loss="model.py:loss")
WRONG = RUN.replace("model.py:loss", "mes") + (
    '[compute]\nbackend = "hoks"\ntransform = ["mean", "clip | maen"]\n'
    '[compare]\nbackends = ["lop"]\n'
)


@pytest.fixture(scope="module")
def folder(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, data, run files, two results and things that are none of these."""
    path = project.write(tmp_path_factory.mktemp("usage"))
    (path / "run.toml").write_text(RUN)
    (path / "wrong.toml").write_text(WRONG)
    (path / "mine").write_text("mine")
    (path / "empty").mkdir()
    (path / "run.jsonl").write_text("")
    (path / "pickle.pt").write_bytes(b"\x80\x04" + bytes(30))
    (path / "zeros.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"0" * 64)
    torch.save({"weight": torch.ones(3)}, path / "other.pt")
    np.savez(path / "none.npz", inputs=np.ones((0, 5), "float32"), targets=np.ones(0, "float32"))
    for name, chain in (("out.h5", "identity"), ("mean.h5", "mean")):
        done = forked.run(
            "compute", "--config", "run.toml", "-t", chain, "-q", "-o", name, cwd=path
        )
        assert done.code == 0, done.err
    return path


TABLE: dict[str, list[tuple[str, int, str]]] = {
    "": [("plot", 2, "plot"), ("list nothing", 2, "nothing")],
    "compute --config run.toml": [
        ("-o empty", 6, "empty: this is a folder"),
        ("-o empty --overwrite", 6, "empty: this is a folder"),
        ("-o empty --resume", 6, "empty: this is a folder"),
    ],
    "compute --config run.toml -o new.h5": [
        ("--nonsense", 2, "--nonsense"),
        ("--checkpoint weights.pt", 2, "--checkpoint is not an option but an argument"),
        ("weights.pt --data=data.npz", 2, "Write gradscope compute [OPTIONS] [CHECKPOINT]"),
        ("missing.pt", 3, "missing.pt"),
        ("pickle.pt", 3, "could execute code"),
        ("other.pt", 3, "other.pt"),
        ("weights.pt none.npz", 3, "none.npz"),
        ("--config missing.toml", 2, "missing.toml"),
        ("--backend hook", 2, "'hooks'"),
        ("-t klip|mean", 2, "'clip'"),
        ("-t clip:norm=1|mean", 2, "max_norm"),
        ("-t mean|var", 2, "one reducer only"),
        ("--loss crossentropy", 2, "'cross_entropy'"),
        ("--model model.py:biuld", 3, "'build'"),
        ("--model nowhere.py:build", 3, "nowhere.py"),
        ("--model model.py", 3, "model.py: this file trains nothing when it is run"),
        ("--dtype float8", 2, "--dtype: found"),
        ("--batch-size 0", 2, "--batch-size: found 0"),
        ("--layout sparse", 2, "--layout: found"),
        ("--samples 0:99999", 3, "60"),
        ("--samples nine", 2, '"A:B"'),
        ("--parameters conv*", 2, "conv*"),
        ("--resume --overwrite", 2, "--resume"),
        ("-o nowhere/out.h5", 6, "nowhere"),
        ("-o out.h5", 6, "--overwrite"),
        ("-o weights.pt --overwrite", 2, "weights.pt"),
        ("-o data.npz --overwrite", 2, "data.npz"),
        ("-o model.py --overwrite", 6, "model.py"),
        ("--memory much", 2, "1.5GiB"),
        ("--memory 1KB", 2, "a batch of one sample"),
        ("--memory 1GB --coupling own-loss", 2, "--batch-size"),
        ("--memory 1GB --batch-size 60", 2, "Remove one of the two"),
        ("--compression lz4", 2, "zstd"),
        ("--compression gzip:11", 2, "zstd"),
        ("--compression zstd:", 2, "zstd"),
        ("--shard 2/2", 2, "0 ≤ I < N"),
        ("--shard 1/10 --batch-size 7", 2, "make 9 batches"),
        ("--shard 0/2 -t center|var", 4, "a shard has only some samples"),
        ("--shard 0/2 -t cosine:to=mean", 4, "compute 'mean' in shards"),
        ("--shard 0/2 -t ekfac", 4, "compute 'kfac:bias=column,full=512' in shards"),
    ],
    "compute": [
        ("--config run.toml", 2, "-o OUT.h5"),
        ("", 2, "To start, run `gradscope init CHECKPOINT DATASET`"),
        ("weights.pt data.npz --dry-run", 2, "check --config run.toml"),
        ("-o new.h5", 2, "--loss: missing"),
        (
            "run.toml -o new.h5",
            2,
            "run.toml: this is a run file\nRun `gradscope check --config run.toml`",
        ),
        (
            "w.pt run.toml -o new.h5",
            2,
            "run.toml: this is a run file\nRun `gradscope check --config run.toml`",
        ),
    ],
    "check": [
        ("", 2, "To start, run `gradscope init CHECKPOINT DATASET`"),
        ("--config wrong.toml --backend vmpa", 2, "4 settings are wrong"),
        ("--config wrong.toml", 2, "wrong.toml: compute.transform[1]: "),
        ("--config wrong.toml", 2, "wrong.toml: compute.backend: unknown backend 'hoks'"),
        ("--config wrong.toml --backend vmpa", 2, "unknown backend 'vmpa'. Did you mean 'vmap'?"),
        ("--config wrong.toml", 2, "wrong.toml: compare.backends: unknown backend 'lop'"),
        ("--config wrong.toml", 2, "wrong.toml: loss.name: unknown loss 'mes'. Did you mean 'mse'"),
    ],
    "compare --config run.toml": [
        ("--backends loop,lop", 2, "'loop'"),
        ("--against nowhere.py:f", 3, "nowhere.py"),
        ("--against model.py:nothing", 3, "nothing"),
        ("--against mean.h5", 2, "-t identity"),
        ("--against missing.h5", 3, "missing.h5"),
        ("--against opacu", 3, "Give backpack, opacus, FILE.py"),
        (f"--against {'x' * 300}", 3, "Give backpack, opacus, FILE.py"),
    ],
    "merge -o new.h5": [
        ("no.h5", 3, "there is no such file"),
        ("empty", 3, "the folder holds no shards"),
        ("q*.h5", 3, "no file matches"),
        ("data.npz", 3, "not an HDF5 file"),
        ("out.h5 mean.h5", 3, "chains"),
        ("out.h5 --config missing.toml", 2, "missing.toml"),
    ],
    "merge": [("out.h5", 2, "output")],
    "stats": [
        ("missing.h5", 3, "missing.h5"),
        ("run.jsonl", 3, "run.jsonl"),
        ("mine", 3, "mine"),
        ("zeros.h5", 3, "zeros.h5"),
        ("out.h5 mean.h5 out.h5", 2, "3 files"),
        ("out.h5 mean.h5 --nearest 0", 2, "--nearest"),
        ("out.h5 --nearest 100", 2, "index 100"),
        ("out.h5 --lr -1", 2, "learning rate"),
        ("out.h5 mean.h5 --lr 1", 2, "--lr"),
        ("run.jsonl out.h5", 2, "out.h5"),
        ("run.jsonl --clip 1", 2, "--clip"),
        ("out.h5 --top 0", 2, "--top"),
        ("out.h5 --html out.h5", 6, "expected: page of gradscope stats"),
        ("out.h5 --html nowhere/x.html", 6, "cannot be written"),
        (".", 3, "this is a directory"),
    ],
    "attribute out.h5 out.h5": [("--weights 1,2", 2, "one weight for TRAIN")],
    "export out.h5": [
        ("-o x.npy --chain 7", 2, "0 (identity)"),
        ("-o x.npy --samples nine", 2, "A:B"),
        ("-o nowhere/x.csv", 6, "nowhere"),
        ("-o out.h5", 6, "would replace an input"),
        ("", 2, "output"),
    ],
    "export": [("missing.h5 -o x.csv", 3, "missing.h5")],
    "init": [
        ("none.pt data.npz -o x.toml", 3, "none.pt: there is no such file"),
        ("weights.pt data.npz --loss crossentropy -o x.toml", 2, "'cross_entropy'"),
        ("weights.pt data.npz --loss mse:per_sample=max -o x.toml", 2, "must be mean or sum"),
        ("weights.pt no.npz -o x.toml", 3, "no.npz: there is no such file"),
        (f"{'x' * 300} data.npz -o x.toml", 3, "File name too long"),
        ("weights.pt data.npz --model model.py -o x.toml", 3, "model.py: this file trains nothing"),
        ("weights.pt data.npz -o none/run.toml", 6, "does not exist"),
        ("weights.pt data.npz -o mine", 6, "--overwrite"),
        ("pickle.pt data.npz -o x.toml", 3, "could execute code"),
    ],
}
CASES = [(c, *row) for c, rows in TABLE.items() for row in rows]


@pytest.mark.sampled
@pytest.mark.parametrize(("command", "options", "code", "words"), CASES)
def test_what_cannot_be_done(
    forked: Forked, folder: Path, command: str, options: str, code: int, words: str
) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.name != "__pycache__"}
    done = forked.run(*shlex.split(f"{command} {options}"), cwd=folder, COLUMNS="200")
    assert (done.code, done.out) == (code, ""), done.err
    assert words in done.err
    assert "Traceback" not in done.err
    after = {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.name != "__pycache__"}
    assert after == before


@pytest.mark.parametrize("width", [80, 200])
def test_help_is_whole_at_every_width(forked: Forked, tmp_path: Path, width: int) -> None:
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    texts = {
        name: forked.run(*filter(None, [name]), "--help", cwd=tmp_path, COLUMNS=str(width)).out
        for name in ("", *commands)
    }
    for name, text in texts.items():
        assert all(len(line) <= width for line in text.splitlines()), text
        assert "[]" not in text, name
    front = " ".join(texts[""].split())
    for name, command in commands.items():
        summary = " ".join(command.help.partition("\n\n")[0].split())
        assert f" {name} {summary}" in front
