"""What is checked on a device; each step returns plain data for the report."""

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gradscope
from gradscope.backends.hooks import block_of, hooks
from gradscope.backends.hooks.rules import Site, masked, node_rules
from gradscope.blocks import Block
from gradscope.config import resolve
from gradscope.core.batch import Batch, map_tensors
from gradscope.errors import GradscopeError
from gradscope.model.problem import Problem
from gradscope.process.memory import peak_memory
from gradscope.run import compute, prepare
from tests import oracle
from tests.cases import CASES, COUPLED, INDEPENDENT, Setup
from tests.gpu import device as standin

ROOT = Path(__file__).parents[2]
RUN = ["compute", "--config", "sample_models/digits_cnn/run.toml", "--overwrite", "--quiet"]
CHAINS = [
    "clip:max_norm=1.0 | mean",
    "normalize | var",
    "second_moment",
    "project:dim=8 | gram",
    "kfac",
    "ekfac",
    "quantize:bits=4 | mean",
    "histogram:bins=8",
    "quantile:q=0.3",
    "hvp | mean",
    "topk:k=5 | std",
]
# what torch itself cannot run on a device made of Python: vmap of jvp of vmap of grad
NOT_MADE = {"laplacian_by_functional_transforms"}
# relative to the largest entry's size: a precision's own rounding, over some tens of operations
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "tf32": 3e-2, "bfloat16": 0.3, "autocast": 0.3}

Place = Callable[[Any], Any]  # moves a model, or tensors in tuples and dicts


def moved(device: torch.device) -> Place:
    """Return how models and tensors get to a device."""

    def move(what: Any) -> Any:
        if isinstance(what, nn.Module):
            there = device.type == standin.NAME
            return standin.placed(what) if there else what.to(device)
        return map_tensors(lambda t: t.to(device), what)

    return move


class Autocast(nn.Module):
    """A model whose forward pass runs under autocast."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self._type = model, device.type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._type, torch.bfloat16):
            return self.model(*args, **kwargs)


def table(
    device: torch.device, precision: str, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Hold the table of cases on a device against a loop in float64 on the CPU.

    Args:
        device: Where gradscope computes.
        precision: A dtype, `tf32` or `autocast`.
        names: The cases; all by default.

    Returns:
        How many are `right` (and the `largest` error of these), `wrong` ones with their error,
        those `refused` on the CPU as well with the reason, and `broken` ones with what was raised,
        which is never to happen; coupled cases that are answered are wrong.
    """
    found: dict[str, Any] = {"right": 0, "largest": 0.0, "wrong": {}, "refused": {}, "broken": {}}
    known = {case.name for case in INDEPENDENT}
    for name in names or [case.name for case in (*INDEPENDENT, *COUPLED)]:
        if device.type == standin.NAME and name in NOT_MADE:
            continue
        try:
            error = _error(device, precision, name)
        except GradscopeError as refusal:
            if name not in known:
                found["right"] += 1
            elif _refused_on_cpu(precision, name):
                found["refused"][name] = refusal.what
            else:
                found["broken"][name] = f"refused here, not on the CPU: {refusal}"[:600]
        except Exception as other:
            found["broken"][name] = f"{type(other).__name__}: {other}"[:300]
        else:
            if name not in known or not error <= TOLERANCES[precision]:
                found["wrong"][name] = error
            else:
                found["right"] += 1
                found["largest"] = max(found["largest"], error)
    return found


def _refused_on_cpu(precision: str, name: str) -> bool:
    try:
        _error(torch.device("cpu"), precision, name)
    except GradscopeError:
        return True
    return False


def _setup(name: str, dtype: torch.dtype) -> Setup:
    """Return a case in another precision."""

    def cast(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(dtype.to_complex())
        return t.to(dtype) if t.is_floating_point() else t

    model, loss, inputs, targets = CASES[name].build()
    inputs, targets = map_tensors(cast, (inputs, targets))
    return Setup(model._apply(cast), loss, inputs, targets)  # type: ignore[no-untyped-call]


def _error(device: torch.device, precision: str, name: str) -> float:
    """Return the largest error of a case, relative to each parameter's gradient or to the whole."""
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(precision, torch.float32)
    move, own = moved(device), _setup(name, dtype)
    model = move(own.model)
    if precision == "autocast":
        model = Autocast(model, device)
    scope = gradscope.Scope(model, own.loss)
    rows = scope.per_sample_gradients(*move((own.inputs, own.targets)))
    wide = _setup(name, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        right = oracle.per_sample_gradients(*wide)[1]
    finally:
        torch.set_default_dtype(before)
    whole = max((float(g.norm()) for g in right.values()), default=0.0)
    worst = 0.0
    for key, g in right.items():
        row = rows[f"model.{key}" if precision == "autocast" else key].cpu()
        assert row.real.dtype == dtype, f"{key} is {row.dtype}"
        row = row.to(g.dtype)
        size = max(float(g.norm()), 1e-2 * whole)
        gap = float((row - g).norm())
        worst = max(worst, gap / size if size else gap)
    return worst


RULES = {  # of operations that torch records on GPUs only, each with a case that has it there
    "CudnnBatchNormBackward0": "residual_network",
    "FusedRmsNormBackward0": "rms_norm",
    "ThnnFusedGruCellBackward0": "gru",
    "ThnnFusedLstmCellBackward0": "lstm",
    "LinearBackward0": "linear_four_extra_axes",  # on Apple's
}
UNTRIED = {"MiopenBatchNormBackward0"}  # as cuDNN's


def rules(device: torch.device, kinds: Iterable[str]) -> dict[str, Any]:
    """Hold what the rules of such operations make of a case against the masked fallback."""
    found: dict[str, Any] = {"right": 0, "wrong": {}, "broken": {}}
    move, fired = moved(device), set()

    def compared(kind: str, site: Site) -> Block:
        block = block_of(kind, site)
        if kind in kinds:
            right, own = masked(site).dense(), block.dense()
            if not torch.allclose(own, right, rtol=1e-4, atol=1e-6 * float(right.abs().max())):
                found["wrong"][kind] = float((own - right).abs().max())
            if (rule := node_rules.find(kind)) is not None and rule(site) is not None:
                fired.add(kind)
        return block

    for kind in kinds:
        own = _setup(RULES[kind], torch.float32)
        batch = Batch.of(*move((own.inputs, own.targets)))
        with hooks(Problem.of(move(own.model), own.loss), contract=compared) as evaluate:
            evaluate(batch)
    found["right"] = len(fired)
    found["broken"] = dict.fromkeys(set(kinds) - fired, "the rule was not used")
    return found


def small(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Setup]:
    """Return small models of several kinds with n samples each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classes = torch.arange(n) % 3
        dense = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
        images = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        words = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(30, 3))
        inputs = torch.randn(n, 6), torch.randn(n, 2, 6, 6), torch.arange(n * 5).view(n, 5) % 9
    return {
        "dense": Setup(dense.to(dtype), F_CROSS, inputs[0].to(dtype), classes),
        "convolution": Setup(images.to(dtype), F_CROSS, inputs[1].to(dtype), classes),
        "embedding": Setup(words.to(dtype), F_CROSS, inputs[2], classes),
    }


F_CROSS: Any = "cross_entropy"


def chains(device: torch.device) -> dict[str, Any]:
    """Hold every chain's result on a device, in float32, against the CPU's in float64."""
    found: dict[str, Any] = {"right": 0, "largest": 0.0, "wrong": {}, "broken": {}}
    move = moved(device)
    for chain in CHAINS:
        try:
            model, loss, x, y = small(12)["dense"]
            here = gradscope.Scope(move(model), loss).expectation(chain, *move((x, y)))
            model, loss, x, y = small(12, torch.float64)["dense"]
            right = gradscope.Scope(model, loss).expectation(chain, x, y)
            error = _gap(here, right, "vectors" in " ".join(right))
        except Exception as other:
            found["broken"][chain] = f"{type(other).__name__}: {other}"[:300]
            continue
        if error <= TOLERANCES["float32"]:
            found["right"] += 1
            found["largest"] = max(found["largest"], error)
        else:
            found["wrong"][chain] = error
    return found


def _gap(here: dict[str, Tensor], right: dict[str, Tensor], rotated: bool) -> float:
    """Return the largest relative difference; eigenvectors have no sign, so they are left out."""
    worst = 0.0
    for key, value in right.items():
        if rotated and key.endswith("vectors"):
            continue
        gap = float((here[key].cpu().double() - value.double()).norm())
        worst = max(worst, gap / max(float(value.norm()), 1e-12))
    return worst


TASKS: dict[str, Callable[[gradscope.Scope, Any, Any], Any]] = {
    "norms": lambda scope, x, y: scope.norms(x, y),
    "gradients": lambda scope, x, y: scope.per_sample_gradients(x, y),
    "clipped mean": lambda scope, x, y: scope.expectation("clip:max_norm=1.0 | mean", x, y),
    "gram": lambda scope, x, y: scope.expectation("gram", x, y),
}


def waits(device: torch.device, kinds: Iterable[str] | None = None) -> dict[str, Any]:
    """Count what makes the host wait for the device, and the operations, of a second batch.

    Returns:
        {model: {task: {n: [waits, operations]}}}, and in `grows` where waits are more for more
        samples, or operations by one for each of them: sums of many numbers are taken in parts.
        On a real GPU waits are torch's own synchronisation warnings, and operations None.
    """
    found: dict[str, Any] = {"grows": []}
    for kind in kinds or small(4):
        for task, run in TASKS.items():
            counts = {n: _waits(device, kind, run, n) for n in (8, 32)}
            found.setdefault(kind, {})[task] = counts
            (few, begun), (more, ended) = counts.values()
            if more != few or (ended or 0) - (begun or 0) >= 32 - 8:
                found["grows"].append(f"{kind}: {task}: {counts}")
    return found


def _waits(device: torch.device, kind: str, run: Callable[..., Any], n: int) -> list[Any]:
    model, loss, x, y = small(n)[kind]
    move = moved(device)
    scope = gradscope.Scope(move(model), loss, backend="hooks", verify="first")
    x, y = move((x, y))
    for _ in range(3):
        run(scope, x, y)  # proved, and its kernels chosen
    if device.type == standin.NAME:
        standin.seen.clear()
        run(scope, x, y)
        return [standin.seen.waits.total(), standin.seen.operations.total()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(scope, x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [sum("synchroniz" in str(w.message) for w in caught), None]


class Drawing(nn.Module):
    """Draws by dropout, and by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = F.dropout(self.first(x), 0.5, self.training)
        return self.second((hidden + torch.randn_like(hidden)).tanh())


def fixed(device: torch.device) -> dict[str, Any]:
    """Hold gradients under fixed random numbers against those on the CPU: they are the same."""
    found: dict[str, Any] = {"right": 0, "largest": 0.0, "wrong": {}, "broken": {}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x, y = Drawing(), torch.randn(6, 6), torch.arange(6) % 3
    wide, move = copy.deepcopy(model).double(), moved(device)
    own = standin.modes_kept if device.type == standin.NAME else nullcontext
    right = gradscope.per_sample_gradients(wide, F_CROSS, x.double(), y, randomness="fixed")
    for backend in ("hooks", "loop", "vmap"):
        there = move(copy.deepcopy(model))
        try:
            with (
                own(),
                gradscope.Scope(there, F_CROSS, randomness="fixed", backend=backend) as scope,
            ):
                error = _gap(scope.per_sample_gradients(*move((x, y))), right, rotated=False)
        except Exception as other:
            found["broken"][backend] = f"{type(other).__name__}: {other}"[:300]
            continue
        right_now = error <= TOLERANCES["float32"]
        found["right"] += right_now
        found["largest"] = max(found["largest"], error)
        found["wrong"] |= {} if right_now else {backend: error}
    return found


def lost() -> dict[str, Any]:
    """Give labels and tokens that are out of range: one error says so, and which samples."""
    found: dict[str, Any] = {"told": 0, "wrong": {}}
    move = moved(torch.device(standin.NAME, 0))
    for kind in ("dense", "embedding"):
        for task, run in TASKS.items():
            model, loss, x, y = small(8)[kind]
            if kind == "dense":
                y = y.index_fill(0, torch.tensor([5]), 7)
            else:
                x = x.index_fill(0, torch.tensor([5]), 70)
            with standin.found_again():
                try:
                    run(gradscope.Scope(move(model), loss), *move((x, y)))
                    found["wrong"][f"{kind}: {task}"] = "answered"
                except gradscope.errors.ModelError as error:
                    clear = "samples 0 to 7: the device has failed" in str(error)
                    found["told"] += clear
                    found["wrong"] |= {} if clear else {f"{kind}: {task}": str(error)}
                except Exception as other:
                    found["wrong"][f"{kind}: {task}"] = f"{type(other).__name__}: {other}"[:300]
    return found


def full(tries: int) -> dict[str, Any]:
    """Let memory run out at some operations of a run to a file: it is right, or told in a word."""
    found: dict[str, Any] = {"right": 0, "halved": 0, "told": 0, "wrong": {}}
    with TemporaryDirectory() as folder:
        right, out = Path(folder) / "right.h5", Path(folder) / "out.h5"
        standin.seen.clear()
        _computed(right, standin.NAME, "dense", "float32", "0:80")
        every = standin.seen.operations.total()
        for k in range(1, every, max(1, every // tries)):
            try:
                with standin.full_after(k):
                    notes = _computed(out, standin.NAME, "dense", "float32", "0:80")
                error = _file_gap(out, right)
                found["right"] += error <= TOLERANCES["float32"]
                found["halved"] += any("memory ran out" in note for note in notes)
                found["wrong"] |= {} if error <= TOLERANCES["float32"] else {str(k): error}
            except (GradscopeError, torch.OutOfMemoryError) as error:  # the command line tells both
                known = isinstance(error, torch.OutOfMemoryError) or "memory ran out" in str(error)
                found["told"] += known
                found["wrong"] |= {} if known else {str(k): str(error)[:300]}
            except Exception as other:
                found["wrong"][str(k)] = f"{type(other).__name__}: {other}"[:300]
    return found


def memory(device: torch.device) -> dict[str, Any]:
    """Measure the peak bytes that each task takes beyond the model and its batch."""
    found: dict[str, Any] = {}
    for kind, setup in small(512).items():
        model, (x, y) = setup.model.to(device), moved(device)((setup.inputs, setup.targets))
        scope = gradscope.Scope(model, setup.loss)
        for task, run in TASKS.items():
            run(scope, x, y)
            with peak_memory(device) as peak:
                run(scope, x, y)
            found[f"{kind}: {task}"] = peak[0] if peak else None
    return found


def run_to_file(device: torch.device) -> dict[str, Any]:
    """Compute a file on the device, by several small batches, and hold it against the CPU's.

    Rows go by pinned memory and a stream of their own; dense and factored.
    """
    found: dict[str, Any] = {}
    standin.seen.clear()
    with TemporaryDirectory() as folder:
        for layout in ("dense", "factored"):
            here, right = (Path(folder) / f"{layout}-{k}.h5" for k in ("here", "right"))
            _computed(here, device.type, layout, "float32")
            _computed(right, "cpu", layout, "float64")
            found[layout] = _file_gap(here, right)
    found["wrong"] = [k for k, error in found.items() if not error <= TOLERANCES["float32"]]
    if device.type == standin.NAME:
        found |= {"copies": standin.seen.copies, "races": dict(standin.seen.races)}
        found["wrong"] += [f"{name} takes what may not be there" for name in standin.seen.races]
    return found


def _options(out: Path, device: str, layout: str, dtype: str) -> list[str]:
    own = ["--device", device, "--layout", layout, "--dtype", dtype, "-o", str(out)]
    few = ["--samples", "0:300", "--batch-size", "64", *(f"-t{chain}" for chain in _STORED)]
    return [sys.executable, "-m", "gradscope", *RUN, *few, *own]


_STORED = ("identity", "clip:max_norm=1", "clip:max_norm=1 | mean")


def _computed(
    out: Path, device: str, layout: str, dtype: str, samples: str = "0:300"
) -> tuple[str, ...]:
    """Compute a file, and return the notes where it is done in this process."""
    if device == standin.NAME:  # which the command line does not know
        asked = {"samples": samples, "batch_size": 64, "transform": [*_STORED], "layout": layout}
        spec = resolve(ROOT / RUN[2], {"compute": asked | {"dtype": dtype}})
        with standin.pinned(), patch("gradscope.run.job._placed", lambda m, *_: standin.placed(m)):
            return compute(prepare(spec), out, overwrite=True).notes
    done = subprocess.run(
        _options(out, device, layout, dtype), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2000:]}")
    return ()


def _file_gap(one: Path, other: Path) -> float:
    """Return the largest relative difference of two files' rows."""
    worst = 0.0
    with gradscope.open(one) as a, gradscope.open(other) as b:
        for chain in range(2):
            for name in b.chains[chain]:
                x, y = (torch.as_tensor(f.chains[chain][name][:]).double() for f in (a, b))
                worst = max(worst, float((x - y).norm() / y.norm().clamp_min(1e-12)))
    return worst


def shared(device: torch.device) -> dict[str, Any]:
    """Let two processes compute on one device at the same time: both files are right."""
    with TemporaryDirectory() as folder:
        right = Path(folder) / "right.h5"
        _computed(right, "cpu", "dense", "float64")
        files = [Path(folder) / f"{k}.h5" for k in range(2)]
        running = [
            subprocess.Popen(
                _options(file, device.type, "dense", "float32"),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for file in files
        ]
        told = [process.communicate()[1] for process in running]
        codes = [process.returncode for process in running]
        if any(codes):
            raise RuntimeError(f"exits {codes}: {[text[-1000:] for text in told]}")
        errors = [_file_gap(file, right) for file in files]
    wrong = [error for error in errors if not error <= TOLERANCES["float32"]]
    return {"errors": errors, "wrong": wrong}


def benchmarks(device: torch.device) -> dict[str, Any]:
    """Run the quick benchmarks on the device and return their document."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks", "--quick", "--device", device.type]
        done = subprocess.run(
            [*command, "--methods", "gradscope", "--json", str(out), "--scratch", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2000:]}")
        return {"exit": done.returncode, "results": json.loads(out.read_text())}


def tf32(*, on: bool) -> Any:
    """Return a context in which products of float32 matrices may, or may not, be TF32."""
    return _Tf32(on) if torch.cuda.is_available() else nullcontext()


class _Tf32:
    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self._on else "highest")
        torch.backends.cudnn.allow_tf32 = self._on

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self._before[0])
        torch.backends.cudnn.allow_tf32 = self._before[1]
