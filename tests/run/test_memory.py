"""Memory: how much there is, how much a run takes, and the batch size that follows."""

import gc
import json
import os
import re
import runpy
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gradscope import Scope
from gradscope.config import memory_text, parse_memory, resolve
from gradscope.engine.certificate import certify
from gradscope.errors import CoupledSamplesError, SpecError
from gradscope.process.memory import available, peak_memory, release_freed_memory, used_memory
from gradscope.run import compute, estimate, plan, prepare
from gradscope.run.budget import PeakCurve, Rehearsals, Sizes, graph_bytes
from gradscope.storage import open_file
from tests.run.project import SAMPLES, spec, write
from tests.run.test_pipeline import SAMPLES as MODELS

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent.parent
MIB = 2**20


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("500 MB", 5 * 10**8), ("1.5gib", 3 * 2**29), ("64KiB", 65536)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_memory(text) == size
    assert resolve(MODELS / "digits_mlp" / "run.toml", {"compute": {"memory": text}})


@pytest.mark.parametrize("text", ["2", "GB", "-1GB", "0MB", "2 PB", "1e3MB", "", "2GB of it"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SpecError, match="memory"):
        resolve(MODELS / "digits_mlp" / "run.toml", {"compute": {"memory": text}})


def test_a_size_as_it_is_shown() -> None:
    assert [memory_text(n) for n in (2.5e9, 512e6, 1234)] == ["2.5 GB", "512 MB", "0.00123 MB"]


@pytest.mark.parametrize(("wide", "size"), [(0, 2**15), (200, 2**11), (4000, 256)])
def test_batches_of_small_models_grow_while_their_graph_is_small(
    tmp_path: Path, wide: int, size: int
) -> None:
    many = {"transform": ["norm | mean"], "verify": "never"}
    write(tmp_path, 40_000)
    job = prepare(spec(tmp_path, {"wide": wide}, **many))
    assert plan(job, free=2**36).batch_size == size
    shards = [prepare(spec(tmp_path, {"wide": wide}, shard=f"{k}/8", **many)) for k in range(8)]
    assert [len(shard.rows) for shard in shards] == [5000] * 8


def system(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FREE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"}
TWO = {"proc/self/cgroup": "0::/a/b\n"}
ONE = {"proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/a\n"}
SYSTEMS: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing known": ({}, None),
    "no group": (FREE, 8_192_000),
    "no limit": (FREE | TWO | {"sys/fs/cgroup/a/b/memory.max": "max\n"}, 8_192_000),
    "a limit": (
        FREE | TWO
        | {"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.current": "400\n"},
        600,
    ),
    "a limit above": (
        FREE | TWO
        | {"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.current": "400\n"}
        | {"sys/fs/cgroup/a/memory.max": "900\n", "sys/fs/cgroup/a/memory.current": "800\n"},
        100,
    ),
    "cached files are given up": (
        FREE | TWO
        | {"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.current": "900\n"}
        | {"sys/fs/cgroup/a/b/memory.stat": "anon 200\ninactive_file 500\n"},
        600,
    ),
    "version one": (
        FREE | ONE
        | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "5000\n"}
        | {"sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000\n"},
        4000,
    ),
    "more than allowed": (
        FREE | TWO
        | {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "1100\n"},
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_the_system_says(name: str, tmp_path: Path) -> None:
    files, expected = SYSTEMS[name]
    assert available(CPU, system(tmp_path, files)) == expected


def test_what_this_process_holds() -> None:
    release_freed_memory()  # or it would be used again
    before = used_memory(CPU)
    held = torch.ones(2**25)  # 128 MiB
    after = used_memory(CPU)
    assert before is not None and after is not None
    assert after - before == pytest.approx(held.nbytes, rel=0.2)


def test_the_peak_counts_what_was_freed_again() -> None:
    with peak_memory(CPU) as peak:
        a = torch.ones(10 * MIB)  # 40 MiB, written to
        b = a + 1  # and 40 more at the same time
        del a, b
    assert 75 * MIB < peak[0] < 100 * MIB


def test_a_kernel_that_keeps_its_high_water_mark(tmp_path: Path) -> None:
    """The resident memory is read again and again instead."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "status").symlink_to("/proc/self/status")  # but /proc/self/clear_refs is not written
    torch.ones(20 * MIB)  # the mark stays above what is held now
    with peak_memory(CPU, tmp_path) as peak:
        a = torch.ones(10 * MIB)
        time.sleep(0.05)
        del a
    assert 35 * MIB < peak[0] < 60 * MIB


def test_no_peak_where_the_system_does_not_tell(tmp_path: Path) -> None:
    with peak_memory(CPU, tmp_path) as peak:
        torch.ones(MIB)
    assert peak == []


def test_a_curve_of_peaks_and_a_budget() -> None:
    found = PeakCurve(((1, 100), (2, 110), (4, 150)), complete=True)
    assert PeakCurve(((1, 100),), complete=True).peak(9) == 100
    assert [found.peak(n) for n in (1, 2, 3, 4, 6, 10)] == [100, 110, 130, 150, 190, 270]
    fits = {99: 0, 100: 1, 149: 2, 150: 4, 229: 4, 230: 8}
    assert {budget: found.most(budget, 50) for budget in fits} == fits
    assert [found.most(budget, 7) for budget in (209, 210, 10**9)] == [4, 7, 7]
    partial = PeakCurve(found.points, complete=False)
    assert partial.most(10**9, 50) == 4  # of what is larger nothing is known


@pytest.mark.parametrize(
    ("most", "budget", "sizes"),
    [
        (1000, 10**10, [1, 1, 2, 4, 8, 16, 32, 64, 128]),  # 64 MiB more: it is clear
        (100, 10**10, [1, 1, 2, 4, 8, 16, 32, 64, 100]),
        (1000, 10**8, [1, 1, 2, 4, 8, 16, 32]),  # 64 might be too much
        (1, 10**10, [1, 1]),
    ],
)
def test_peaks_are_measured_on_small_batches(
    most: int, budget: int, sizes: list[int], tmp_path: Path
) -> None:
    tried = []

    class Linear(Rehearsals):
        def peak(self, n: int) -> int:
            tried.append(n)
            return 40 * 10**6 + n * 2**20

    found = Linear(prepare(spec(write(tmp_path)))).curve(most, budget)
    assert found is not None
    assert tried == sizes
    assert found.complete == (budget > 10**9)
    assert found.peak(most) == pytest.approx(40e6 + most * 2**20)
    assert found.most(budget, most) == (32 if budget < 10**9 else most)


def test_every_rehearsal_is_proved_as_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof takes the most memory of many models: without it, a peak is too small."""
    proved: list[int] = []

    def counted(problem: Any, backend: str, evaluate: Any, batch: Any, **options: Any) -> Any:
        proved.append(len(batch))
        return certify(problem, backend, evaluate, batch, **options)

    monkeypatch.setattr("gradscope.engine.session.certify", counted)
    assert plan(prepare(spec(write(tmp_path), memory="1GB"))).batch_size == SAMPLES
    assert list(dict.fromkeys(proved)) == [1, 2, 4, 8, 16, 32, SAMPLES]


PROGRAM = """
import json, sys, torch
from pathlib import Path
from gradscope.process.memory import peak_memory
from gradscope.run import compute, estimate, prepare
from tests.run.project import spec

how, folder, out, options = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
job = prepare(spec(folder, {"wide": 20_000}, **json.loads(options)))
if how == "plan":
    plan = estimate(job, out)
    print(json.dumps({"peak": plan.memory, "samples": plan.batch_size, "notes": plan.notes}))
else:
    with peak_memory(torch.device("cpu")) as peak:
        report = compute(job, out)
    print(json.dumps({"peak": peak[0], "notes": report.notes}))
"""


def fresh(how: str, folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Plan or compute in a process of its own, as the command does."""
    steady = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # else malloc keeps now more, now less
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(folder), str(out), json.dumps(options)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | steady,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return write(tmp_path / "project", 128)


@pytest.mark.full
def test_a_plan_says_what_a_run_takes(folder: Path, tmp_path: Path) -> None:
    options = {"batch_size": 64, "backend": "hooks"}
    plan = fresh("plan", folder, tmp_path / "out.h5", **options)
    run = fresh("run", folder, tmp_path / "out.h5", **options)
    assert plan["samples"] == 64
    assert run["peak"] > 64 * 4 * 20_000 * 8  # one of the arrays of its widest layer
    assert plan["peak"] == pytest.approx(run["peak"], rel=0.2)


@pytest.mark.full
def test_a_run_stays_within_its_budget(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    run = fresh("run", folder, out, memory="150MB", backend="hooks")
    assert run["peak"] <= 150 * 10**6
    with open_file(out) as file:
        size = file.run["batch_size"]
        assert file.certificate["samples"] == size
    assert 1 < size < 128  # not all of them
    assert any("of the allowed" in note for note in run["notes"])


def test_a_budget_for_nothing(tmp_path: Path) -> None:
    job = prepare(spec(write(tmp_path), memory="1MB"))
    for use in (estimate, compute):
        with pytest.raises(SpecError, match="batch of one sample") as refusal:
            use(job, tmp_path / "out.h5")
        assert refusal.value.exit_code == 2
        takes, enough = re.findall(r"(?:about|than) ([\d.]+ .?B)", str(refusal.value))
        assert parse_memory(enough) == pytest.approx(parse_memory(takes) / 0.8, rel=0.02)
    assert not list(tmp_path.glob("out*"))


def test_memory_does_not_choose_who_shares_a_batch(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="share a batch"):
        prepare(spec(write(tmp_path), memory="1GB", coupling="own-loss"))
    assert prepare(spec(tmp_path, coupling="own-loss", batch_size=5)).batch_size == 5


@pytest.mark.parametrize(("free", "whole"), [(10**12, True), (150 * 10**6, False)])
def test_without_a_budget_there_is_what_the_machine_has(
    free: int, whole: bool, tmp_path: Path
) -> None:
    job = prepare(spec(write(tmp_path), {"wide": 20_000}, backend="hooks"))
    found = plan(job, free=free)
    assert (found.batch_size == SAMPLES) == whole
    assert bool(found.notes) == (not whole)
    assert job.session.certificate is None
    assert job.session.notes == []


@pytest.mark.parametrize("wide", [0, 1000])
def test_a_batch_is_not_made_smaller_where_it_is_the_smaller_part(
    wide: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the memory does not suffice, all of it does; what a smaller batch saves differs."""
    model = {"wide": wide} if wide else None
    job = prepare(spec(write(tmp_path), model, samples="0:2", transform=["var"]))
    sizes = Sizes.of(job)
    assert sizes is not None
    assert (2 * sizes.each > sizes.fixed) == bool(wide)
    monkeypatch.setattr(Rehearsals, "peak", lambda self, n: pytest.fail("counted, not measured"))
    for share in (1, 2):
        found = plan(job, free=sizes.most(2) // share)
        assert found.batch_size == (1 if wide else 2)
        assert bool(found.notes) == (share == 2) or wide


def test_a_batch_that_would_not_fit_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak follows from those of smaller batches: 40 MB, and 1 MB for each sample."""
    tried: list[int] = []

    def linear(self: Rehearsals, n: int) -> int:
        tried.append(n)
        return 40 * 10**6 + n * 10**6

    monkeypatch.setattr(Rehearsals, "peak", linear)
    job = prepare(spec(write(tmp_path), {"wide": 1000}, batch_size=60))
    found = plan(job, measured=True, free=60 * 10**6)
    assert found.batch_size == 60 and found.peak == 100 * 10**6
    assert max(tried) == 16
    assert found.notes[-1].endswith("enough for 16")


def test_a_rehearsal_leaves_no_trace(tmp_path: Path) -> None:
    """The first batch of the run is proved as a whole, whatever was tried before."""
    job = prepare(spec(write(tmp_path), memory="1GB", transform=["center | var"], backend="auto"))
    report = compute(job, tmp_path / "out.h5")
    assert report.certificate["samples"] == SAMPLES
    assert sum("earlier pass" in note for note in report.notes) == 1


def test_what_one_sample_tells_is_counted(tmp_path: Path) -> None:
    """In float64: input 5, hidden layer 4, and in the loss the output, its cosine's and y."""
    wide, chains = 1000, ["norm", "identity", "var", "clip:max_norm=1 | mean"]
    job = prepare(spec(write(tmp_path), {"wide": wide}, transform=chains))
    parameters = 5 * 4 + 4 + 4 + 1
    sizes = Sizes.of(job)
    assert sizes is not None
    assert sizes.gradient == 8 * parameters
    assert sizes.rows == 8 * (1 + parameters)
    counts = 3 * 8  # of var, of the mean and of the mean gradient
    assert sizes.states == 8 * (3 + 1 + 1) * parameters + counts
    one, four = (graph_bytes(job.session.problem, job.load(0, n)) for n in (1, 4))
    assert sizes.graph == one and four == 4 * one
    assert one - recorded_without(tmp_path) == 8 * (4 * wide + 4 + 1)  # repeated, mean, product
    busy = sizes.busy(CPU)
    assert busy & (busy - 1) == 0
    assert busy * one <= 2**28 * max(2, torch.get_num_threads()) < 2 * busy * one
    assert job.session.certificate is None and not job.session.notes


def test_what_was_counted_is_let_go_of(tmp_path: Path) -> None:
    job = prepare(spec(write(tmp_path)))
    held: list[weakref.ref[Any]] = []

    def tanh(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        found = output.tanh()  # whose node saves it

        def hook(g: torch.Tensor) -> None: ...

        found.register_hook(hook)  # lives as long as the node
        held.append(weakref.ref(hook))
        return found

    first = next(m for m in job.session.problem.model.modules() if isinstance(m, torch.nn.Linear))
    with first.register_forward_hook(tanh):
        assert graph_bytes(job.session.problem, job.load(0, 2)) > 0
    gc.collect()
    assert held and all(hook() is None for hook in held)


def recorded_without(folder: Path) -> int:
    job = prepare(spec(folder))
    return graph_bytes(job.session.problem, job.load(0, 1))


def test_coupled_samples_are_refused_where_batches_of_one_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradscope.run.budget._BUSY", 1)
    folder = write(tmp_path)
    coupled = (
        (folder / "model.py")
        .read_text()
        .replace(".tanh()", ".tanh()\n        hidden = hidden - hidden.mean(0)")
    )
    job = prepare(spec(folder))
    assert plan(job).batch_size == 1
    (folder / "model.py").write_text(coupled)
    with pytest.raises(CoupledSamplesError, match="depends on other samples"):
        plan(prepare(spec(folder)))


class Live(TorchDispatchMode):
    """The bytes of the tensors that exist at a time, beside those of a model, in its sizes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        own = list(model.parameters())
        self._own, self._size = {p.untyped_storage().data_ptr() for p in own}, nbytes(own)
        self._held = WeakIdKeyDictionary(ref_type=weakref.ref)
        self.peak = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self._own:
                self._held[t.untyped_storage()] = t.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._held.values()) / self._size)
        return found


def nbytes(tensors: list[Any]) -> int:
    return sum(t.nbytes for t in tensors)


DEEP = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what grows with a model: of what is large, no copies are kept for a proof or a stop."""
    monkeypatch.setattr("gradscope.model.state._COPIED", 0)
    monkeypatch.setattr("gradscope.engine.certificate._COPIED", 0)
    monkeypatch.setattr("gradscope.scope._STREAMED", 4)
    monkeypatch.setattr("gradscope.storage.write.writer.KEEP_BYTES", 0)


# A proof holds a sum of gradients and one more. Sums over batches are in float64.
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("chain", "samples", "most"),
    [
        (None, 4, 2.5),
        ("mean", 4, 2.5),
        ("clip:max_norm=1 | mean", 4, 2.5),
        ("clip:max_norm=1 | mean", 12, 2 + 2.5),
    ],
)
def test_no_more_of_a_model_than_a_call_needs(chain: str | None, samples: int, most: float) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    x, y = torch.randn(samples, 64), torch.randint(64, (samples,))
    with Live(model) as live, Scope(model, "cross_entropy", backend="hooks") as scope:
        found = scope.norms(x, y) if chain is None else scope.expectation(chain, x, y)
    assert len(found) == (samples if chain is None else 24)
    assert 1 < live.peak < most


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("chain", "samples", "most"),
    [
        ("norm", 12, 2 + 2.5),
        ("mean", 12, 2 + 2.5),
        ("clip:max_norm=1 | mean", 12, 4 + 2.5),
    ],
)
def test_no_more_of_a_model_than_a_run_needs(
    chain: str, samples: int, most: float, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(DEEP)
    draw = np.random.default_rng(0)
    inputs, targets = draw.normal(size=(samples, 64)), draw.integers(0, 64, samples)
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=targets)
    model = runpy.run_path(str(tmp_path / "model.py"))["build"]()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    job = prepare(spec(tmp_path, transform=[chain], batch_size=4, backend="hooks", dtype="float32"))
    with Live(job.session.problem.model) as live:
        compute(job, tmp_path / "out.h5")
    assert 1 < live.peak < most
