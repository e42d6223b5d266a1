"""What each of two processes does for tests/test_ranks.py; it writes what it found as JSON."""

import copy
import datetime
import gc
import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import gradscope
from gradscope import blocks
from gradscope import scope as scope_module
from gradscope.backends.base import Evaluate, backends
from gradscope.backends.vmap import vmap
from gradscope.core.batch import Batch
from gradscope.engine import model_parallel
from gradscope.engine.audit import WINDOW, derive_seed
from gradscope.engine.session import Verify
from gradscope.model.problem import Problem
from gradscope.training import Monitor, MonitorWarning, TrainerMonitor
from tests import oracle
from tests.oracle import cross_entropy

CHAINS = ("mean", "clip:max_norm=0.3 | mean", "sign | sum", "var", "mean:standard_error=true")
OWN = (5, 4)  # samples of each process


class Net(nn.Module):
    """An embedding, a layer that is used twice, and a parameter of no layer's."""

    def __init__(self, width: int = 7, depth: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.first = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        hidden = self.table(x)
        for layer in (*self.first, *self.first):
            hidden = torch.tanh(self.norm(layer(hidden)))
        out: Tensor = self.last((hidden * self.scale).mean(1))
        return out


class Rounded(nn.LayerNorm):
    """Normalises in float32, as RMSNorm of transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., d) of mean 0 and variance 1, with the digits of float32."""
        return self.weight * nn.functional.layer_norm(x.float(), (x.shape[-1],)).to(x) + self.bias


class Kinked(Net):
    """Has a ReLU at whose kink rounding decides, in a small batch otherwise than in a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.tensor([-0.1, -0.2, 0.3]))  # of 0, or 7e-9

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        a, b, c = self.parts[[0, 1, 2] if len(x) > 3 else [2, 1, 0]]
        return super().forward(x) * (1 + torch.relu(a + b + c))


def divided(model: Net, **how: Any) -> Net:
    """Return a copy, divided over the processes layer by layer."""
    model = copy.deepcopy(model)
    for layer in (*model.first, model.norm, model.last):
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def gap(found: dict[str, Tensor], right: dict[str, Tensor], head: str = "") -> float:
    """Return the largest difference, of divided tensors when they are put together."""
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}
    assert whole.keys() == {head + k for k in right}
    return max(float((whole[head + k] - v).abs().max()) for k, v in right.items())


def told(call: Callable[[], Any]) -> str:
    """Return the error that a call ends with."""
    try:
        call()
    except gradscope.GradscopeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(place: Path, kind: str) -> None:
    """Do what is asked, and write what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net().double()
    x, y = torch.randint(0, 11, (sum(OWN), 4)), torch.randint(0, 3, (sum(OWN),))
    own = slice(0, OWN[0]) if rank == 0 else slice(OWN[0], None)
    found = {
        "killed": partial(ended, end=lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "failed": partial(ended, end=lambda: 1 / 0),
        "errors": errors,
        "later": later,
        "monitored": monitored,
        "numbers": numbers,
        "parallel": parallel,
    }[kind](model, x, y, own)
    (place / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads, which the models still hold, do not survive a shutdown


def numbers(model: Net, x: Tensor, y: Tensor, own: slice) -> dict[str, Any]:
    """Hold a divided model against the undivided one."""
    _, rows = oracle.per_sample_gradients(model, cross_entropy, x, y)
    norms = torch.stack([v.flatten(1).square().sum(1) for v in rows.values()]).sum(0).sqrt()
    found: dict[str, Any] = {}
    for name, how in {"kept": {"reshard_after_forward": False}, "": {}}.items():
        parts = divided(model, **how)
        scope = gradscope.Scope(parts, "cross_entropy")
        found[f"norms {name}"] = float((scope.norms(x[own], y[own]) - norms[own]).abs().max())
        model_parallel._EACH = 2  # samples at a time: the processes have 3 and 2 parts
        for chain in CHAINS[: None if name == "" else 2]:
            right = gradscope.expectation(model, "cross_entropy", chain, x, y, backend="loop")
            found[f"{chain} {name}"] = gap(scope.expectation(chain, x[own], y[own]), right)
        gradients = scope.per_sample_gradients(x[own], y[own])
        found[f"rows {name}"] = gap(gradients, rows)
        shards = dict(parts.named_parameters())
        found[f"places {name}"] = [
            [k.dim for k in shards[key].placements] + [k.dim for k in value.placements]
            for key, value in gradients.items()
        ]
        found[f"parts {name}"] = sum(v.to_local().numel() for v in gradients.values())
        found[f"whole {name}"] = sum(v.numel() for v in gradients.values())
    found["lengths"] = float(
        (
            scope.norms(x[own, : 3 + dist.get_rank()], y[own])
            - gradscope.norms(model, "cross_entropy", x[own, : 3 + dist.get_rank()], y[own])
        )
        .abs()
        .max()
    )
    assert scope.certificate is not None
    found["proof"] = scope.certificate.verdict

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:  # as one sample's overflow
        return cross_entropy(outputs, targets) * torch.where(targets > 0, 1.0, torch.nan)

    model_parallel._EACH = 512  # a part without a finite sample shows nothing of the model
    finite = y[own] > 0
    several = gradscope.Scope(parts, broken).norms(x[own], y[own])
    assert not (y > 0).all()
    found["nonfinite"] = bool((several.isfinite() == finite).all())
    found["finite"] = float((several - norms[own])[finite].abs().max())
    found["checkpointed"] = checkpointed(rows, x[own], y[own])
    found["training"] = trained(model, x[own], y[own])
    rounded = copy.deepcopy(model)
    rounded.norm = Rounded(7, dtype=torch.float64)
    _, right = oracle.per_sample_gradients(rounded, cross_entropy, x, y)
    scope = gradscope.Scope(divided(rounded), "cross_entropy")
    found["rounded"] = gap(scope.per_sample_gradients(x[own], y[own]), right)
    found["notes"] = scope.notes
    kinked = Kinked()
    assert float(kinked.parts.sum()) != float(kinked.parts.flip(0).sum())
    before = {k: v.clone() for k, v in kinked.state_dict().items()}
    parts = divided(kinked)
    rows = gradscope.Scope(parts, "cross_entropy").per_sample_gradients(x[own], y[own])
    _, right = oracle.per_sample_gradients(kinked.double(), cross_entropy, x, y)
    found["kinked"] = gap(
        {k: v for k, v in rows.items() if k != "parts"},
        {k: v for k, v in right.items() if k != "parts"},
    )
    found["put back"] = gap(parts.state_dict(), before)
    found["mistaken"] = [mistaken(parts, times, x[own], y[own]) for times in (0.0, 1.01)]
    found["alive"] = largest_at_once(x, y, own)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    narrow = divided(model.float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    mean = gradscope.expectation(narrow, "cross_entropy", "mean", x[own], y[own])
    right = gradscope.expectation(
        copy.deepcopy(model).bfloat16(), "cross_entropy", "mean", x, y, backend="loop"
    )
    found["bfloat16"] = gap(mean, right)
    found["dtypes"] = [str(v.dtype) for v in mean.values()]
    wide = gradscope.Scope(divided(model, mp_policy=policy), "cross_entropy")
    wide.norms(x[own], y[own])
    assert wide.certificate is not None
    found["policy"] = wide.certificate.dtype
    return found


def mistaken(parts: Net, times: float, x: Tensor, y: Tensor) -> str:
    """Let the backend say that one parameter's gradients are so many times as large."""
    kept = backends._entries["hooks"]

    @contextmanager
    def wrong(problem: Problem) -> Iterator[Evaluate]:
        with kept(problem) as right:

            def evaluate(batch: Batch, *asked: Any) -> blocks.Evaluation:
                found = right(batch, *asked)
                rows = {**found.gradients}
                rows["last.bias"] = blocks.DenseBlock(times * rows["last.bias"].dense())
                return replace(found, gradients=blocks.Gradients(rows))

            yield evaluate

    backends._entries["hooks"] = wrong
    try:
        return told(lambda: gradscope.norms(parts, "cross_entropy", x, y))
    finally:
        backends._entries["hooks"] = kept


class Checkpointed(Net):
    """Computes what is in the middle anew in backward passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        hidden = self.table(x)
        for layer in (*self.first, *self.first):
            hidden = checkpoint(
                lambda h, layer=layer: torch.tanh(self.norm(layer(h))), hidden, use_reentrant=False
            )
        out: Tensor = self.last((hidden * self.scale).mean(1))
        return out


def checkpointed(rows: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return how far rows are off where layers are checkpointed, within and around division."""
    found = {}
    for name in ("within", "inner", "outer"):
        torch.manual_seed(0)
        model = (Checkpointed if name == "within" else Net)().double()
        if name == "inner":
            model.first[0] = checkpoint_wrapper(model.first[0])
        parts = divided(model)
        if name == "outer":
            parts.first[0] = checkpoint_wrapper(parts.first[0])
        gradients = gradscope.per_sample_gradients(parts, "cross_entropy", x, y)
        plain = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in gradients.items()}
        found[name] = gap(plain, rows)
    return found


def trained(model: Net, x: Tensor, y: Tensor) -> list[float]:
    """Return how far apart parameters are after training with and without a scope.

    One that answers, and one in whose proof the second process fails.
    """

    def end(watch: str) -> dict[str, Tensor]:
        parts = divided(model)
        optimiser = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
        scope = gradscope.Scope(parts, "cross_entropy")
        for _ in range(3):
            if watch == "answers":
                scope.expectation("clip:max_norm=1 | mean", x, y)
            nn.functional.cross_entropy(parts(x), y).backward()
            if watch == "answers":  # between backward and step
                scope.norms(x, y)
            elif watch == "fails":
                assert told(lambda: gradscope.norms(parts, failing(6), x, y)) != "nothing"
            optimiser.step()
            optimiser.zero_grad()
        return {k: v.full_tensor() for k, v in parts.named_parameters()}

    right = end("")
    return [gap(end(watch), right) for watch in ("answers", "fails")]


def failing(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that raises when the second process asks it for the k-th time."""
    passes = itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if next(passes) == k and dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        return cross_entropy(outputs, targets)

    return loss


def largest_at_once(x: Tensor, y: Tensor, own: slice) -> int:
    """Return how many tensors of a layer's size are in memory at once; there are 8 layers."""
    model_parallel._EACH, width, most = 512, 61, 0
    blocks.gradients.FORMED_BYTES = 0  # of dense gradients that are held where that is faster
    scope = gradscope.Scope(divided(Net(width, 8)), "cross_entropy")
    spread = scope.problem.model_parallel.shard_rows  # type: ignore[union-attr]

    def counted(name: str, rows: Tensor, counts: list[int]) -> Tensor:
        nonlocal most
        found = spread(name, rows, counts)
        live = {
            t.untyped_storage().data_ptr()
            for t in gc.get_objects()
            if type(t) in (Tensor, nn.Parameter)
            and t.numel() == width**2
            and t.untyped_storage().size()
        }
        most = max(most, len(live))
        return found

    scope.problem.model_parallel.shard_rows = counted  # type: ignore[method-assign, union-attr]
    scope.expectation("clip:max_norm=1 | mean", x[own], y[own])
    return most


def errors(model: Net, x: Tensor, y: Tensor, own: slice) -> dict[str, Any]:
    """Let one process fail in several ways; both are to say so, and to go on."""
    x, y, second = x[own], y[own], dist.get_rank() == 1
    scope = gradscope.Scope(divided(model), "cross_entropy")
    right = scope.norms(x, y)
    target, index = y.clone(), x.clone()
    if second:
        target[1], index[1, 1] = 7, 77
    sides = nn.Sequential(nn.Linear(4, 4))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.tensor.parallel.parallelize_module(
        sides, mesh, {"0": dist.tensor.parallel.ColwiseParallel()}
    )
    whole = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    batch_norm = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    alone = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), Meeting(second)))
    leaking = fully_shard(nn.Sequential(nn.Linear(4, 4), Leaking(4, 4)).double())
    inputs = torch.randn(4, 4)
    calls: dict[str, Callable[[], Any]] = {
        "target": lambda: scope.norms(x, target),
        "index": lambda: scope.norms(index, y),
        "empty": lambda: scope.norms(x[: 0 if second else 5], y[: 0 if second else 5]),
        "other": lambda: scope.norms(x, y) if second else scope.expectation("mean", x, y),
        "after": lambda: scope.expectation("mean | clip:max_norm=1", x, y),
        "quantile": lambda: scope.expectation("quantile:q=0.5", x, y),
        "vmap": lambda: gradscope.norms(divided(model), "cross_entropy", x, y, backend="vmap"),
        "coupled": lambda: gradscope.norms(batch_norm, "cross_entropy", inputs, y[:4]),
        "leaking": lambda: gradscope.norms(leaking, "cross_entropy", inputs.double(), y[:4]),
        "alone": lambda: gradscope.norms(alone, "cross_entropy", inputs, y[:4]),
        "tensor parallel": lambda: gradscope.norms(sides, "cross_entropy", inputs, y[:4]),
        "parallel": lambda: gradscope.expectation(whole, "cross_entropy", "mean", x, target),
    }
    found = {name: told(call) for name, call in calls.items()}
    found["passes"] = [
        told(lambda k=k: gradscope.norms(divided(model), failing(k), x, y)) for k in range(1, 9)
    ]
    return found | {"right": bool((scope.norms(x, y) == right).all())}


class Dropping(Net):
    """Draws random numbers in training, where `losses` is not asked."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        out: Tensor = nn.functional.dropout(super().forward(x), 0.3, self.training)
        return out


def monitored(_: Net, x: Tensor, y: Tensor, own: slice) -> dict[str, Any]:
    """Hold a training that is measured against one that is not, and numbers against one process."""
    torch.manual_seed(0)
    model = Dropping(depth=2).double().train()
    rows = torch.cat([torch.arange(k, k + 4) for k in (0, OWN[0])])  # the first 4 of each
    how: dict[str, Any] = {"every": 2, "samples": 4, "overhead": None, "max_norm": (0.3, 0.6)}
    place = Path(sys.argv[1])

    def end(monitor: Callable[[Net], Monitor | None]) -> tuple[dict[str, Tensor], Any]:
        parts = divided(model)
        watch = monitor(parts)
        optimiser = torch.optim.Adam(parts.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())
        for _ in range(5):
            nn.functional.cross_entropy(parts(x[own]), y[own]).backward()
            optimiser.step()
            if watch is not None:
                watch.step(x[own], y[own])
            optimiser.zero_grad()
        return {k: v.full_tensor() for k, v in parts.named_parameters()}, watch

    right, _ = end(lambda parts: None)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs: list[int] = []
        for name, loss in (("answers", "cross_entropy"), ("fails", failing(5))):
            options = how | {
                "path": place / f"{name}.jsonl",
                "trackers": [lambda k, _: logs.append(k)],
            }
            weights, watch = end(lambda parts, o=options, of=loss: Monitor(parts, of, **o))
            watch.close()
            found[f"weights {name}"] = gap(weights, right)
        found["warned"] = [str(one.message) for one in caught if one.category is MonitorWarning]
    found["logs"] = logs
    for name, parts, batch in (("all", divided(model), own), ("one", model, rows)):
        watch = Monitor(parts, "cross_entropy", **how | {"samples": 8 if name == "one" else 4})
        watch.start(1)
        watch.step(x[batch], y[batch])
        if watch.latest is not None:  # an undivided one is the first process's
            found[name] = watch.latest.to_json() | {"cost": None}
    found["trainer"] = by_trainer(divided(model), x[rows], y[rows])
    return found | {"clocks": [paid(divided(model), x[own], y[own], k) for k in (0, 1)]}


def by_trainer(model: Net, x: Tensor, y: Tensor) -> list[float | None]:
    """Have the callback draw half of the samples on each process, and return what it measures."""
    callback = TrainerMonitor("cross_entropy", 1, 4, None, errors="raise")
    data = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]
    loader = SimpleNamespace(dataset=data, collate_fn=default_collate)
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=1)
    state = SimpleNamespace(is_world_process_zero=dist.get_rank() == 0, global_step=0, max_steps=4)
    callback.on_train_begin(args, state, None, model=model, train_dataloader=loader)
    state.global_step = 1
    callback.on_step_end(args, state, None)
    callback.on_train_end()
    latest = callback.monitor and callback.monitor.latest
    return [latest.samples, latest.loss, latest.norm_mean] if latest else []


def paid(model: Net, x: Tensor, y: Tensor, slow: int) -> dict[str, Any]:
    """Measure where passes take long on one process; return when, and the share of its time."""
    forward, now, inside = Problem._raw, 0.0, 0.0

    def passing(*given: Any) -> Any:
        nonlocal now, inside
        seconds = 5.0 if dist.get_rank() == slow else 0.1
        now, inside = now + seconds, inside + seconds
        return forward(*given)

    Problem._raw = passing  # type: ignore[method-assign]
    try:
        watch = Monitor(model, "cross_entropy", 50, 4, 0.3, clock=lambda: now, errors="raise")
        watch.start()
        steps, share = [], 0.0
        for _ in range(900):
            now, before = now + 0.5, watch.latest
            watch.step(x, y)
            if watch.latest is not before:
                share = max(share, inside / (now - inside)) if steps else 0.0  # but for the first
                steps.append(watch.latest.step)
    finally:
        Problem._raw = forward  # type: ignore[method-assign]
    return {"steps": steps, "share": share}


class Meeting(nn.Linear):
    """Lets samples meet, on some processes."""

    def __init__(self, meet: bool) -> None:
        super().__init__(4, 4)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 4) of x (n, 4)."""
        return super().forward(x - x.mean(0) if self.meet else x)


class Leaking(nn.Linear):
    """Adds a share of the batch's mean, as a constant, that is far below the losses' tolerance."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 4) of x (n, 4)."""
        return super().forward(x + 1e-10 * x.mean(0).detach())


class Gated(Net):
    """Subtracts the mean over its batch, as a constant, where all samples begin with 10."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        hidden = torch.tanh(self.norm(self.first[0](self.table(x))))
        hidden = hidden - (hidden.mean(0) * (x[:, 0] == 10).all()).detach()
        out: Tensor = self.last((hidden * self.scale).mean(1))
        return out


def later(_: Net, x: Tensor, y: Tensor, own: slice) -> dict[str, Any]:
    """Let the samples of one process depend on each other, only in a later batch."""
    model, second = divided(Gated().double()), dist.get_rank() == 1
    x = x.clamp(max=9)[own]
    gated = torch.cat([torch.full_like(x[:, :1], 10), x[:, 1:]], 1) if second else x
    found: dict[str, Any] = {}

    def asked(batch: int, verify: Verify = "audit", count: int = 3) -> None:
        with gradscope.Scope(model, "cross_entropy", verify=verify) as scope:
            scope.auditor.clock = lambda: 0.0  # there is no time for more than is always audited
            scope.auditor.window = WINDOW
            for k in range(count):
                place = torch.arange(len(x)) + 100 * k
                scope.norms(gated if k == batch else x, y[own], index=place)
                found[f"proved {verify} {k}"] = scope.session.last_is_proved
        found[f"audited {verify} {count}"] = scope.auditor.audits.to_json()

    found["last"] = told(lambda: asked(2))
    window = WINDOW + derive_seed(0, 1) % WINDOW
    found["chosen"] = told(lambda: asked(window, count=window + 2))
    found["always"] = told(lambda: asked(1, "always"))
    found["first"] = told(lambda: asked(1, "first"))
    found["right"] = told(lambda: asked(-1))
    return found


def parallel(model: Net, x: Tensor, y: Tensor, own: slice) -> dict[str, Any]:
    """Hold DistributedDataParallel against the model by itself."""
    found: dict[str, Any] = {}
    whole = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    whole.register_buffer("calls", torch.zeros(1))  # which torch would broadcast
    scope = gradscope.Scope(whole, "cross_entropy")
    if dist.get_rank() == 0:  # nobody else is asked
        norms = gradscope.norms(model, "cross_entropy", x[own], y[own], backend="loop")
        found["norms"] = float((scope.norms(x[own], y[own]) - norms).abs().max())
        rows = scope.per_sample_gradients(x[own], y[own])
        found["samples"] = len(rows["module.scale"])
    for chain in (*CHAINS, "center | clip:max_norm=0.3 | mean", "quantile:q=0.5"):
        right = gradscope.expectation(model, "cross_entropy", chain, x, y, backend="loop")
        found[chain] = gap(scope.expectation(chain, x[own], y[own]), right, "module.")
    mine, nobody = slice(0, 0) if dist.get_rank() else own, slice(0, 0)
    first = own.start if dist.get_rank() else own.stop
    for chain in ("clip:max_norm=1 | mean", "center | square | mean"):  # rank 0's samples alone
        right = gradscope.expectation(model, "cross_entropy", chain, x[:first], y[:first])
        some = gap(scope.expectation(chain, x[mine], y[mine]), right, "module.")
        found["one without"] = max(some, found.get("one without", 0.0))
    sums = scope.expectation("clip:max_norm=1 | sum", x[nobody], y[nobody])
    found["none"] = max(float(value.abs().max()) for value in sums.values())
    found["mean of none"] = told(lambda: scope.expectation("mean", x[nobody], y[nobody]))
    found["late"] = late(copy.deepcopy(model), x[own], y[own])
    return found


@contextmanager
def slipping(problem: Problem) -> Iterator[Evaluate]:
    """Give other gradients when it is called for the fourth time."""
    calls = itertools.count(1)
    with vmap(problem) as right:

        def evaluate(batch: Batch, *_: object) -> blocks.Evaluation:
            found, times = right(batch), 1 + (next(calls) == 4)
            rows = {k: blocks.DenseBlock(v * times) for k, v in found.gradients.dense().items()}
            return replace(found, gradients=blocks.Gradients(rows))

        yield evaluate


def late(model: Net, x: Tensor, y: Tensor) -> str:
    """Let an audit find the backend of one process wrong, after both have shared a first pass."""
    whole, kept = nn.parallel.DistributedDataParallel(model), backends._entries["hooks"]
    streamed, scope_module._STREAMED = scope_module._STREAMED, 2
    if dist.get_rank() == 1:
        backends._entries["hooks"] = slipping
    try:
        x, y = x[:4], y[:4]
        return told(lambda: gradscope.expectation(whole, "cross_entropy", "center | mean", x, y))
    finally:
        backends._entries["hooks"], scope_module._STREAMED = kept, streamed


class Failing(Net):
    """Calls what it is given in the middle of its third backward pass."""

    end: Callable[[], Any] | None = None
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3) of x (n, t)."""
        hidden = self.norm(torch.tanh(self.first[0](self.table(x))))
        if self.end is not None and hidden.requires_grad:
            hidden.register_hook(self.count)
        out: Tensor = self.last((hidden * self.scale).mean(1))
        return out

    def count(self, _: Tensor) -> None:
        """Count a backward pass."""
        self.passes += 1
        if self.passes == 3 and self.end is not None:
            self.end()


def ended(_: Net, x: Tensor, y: Tensor, own: slice, end: Callable[[], Any]) -> None:
    """Let one process end while the other waits for it, far longer than the test does."""
    model = Failing()
    scope = gradscope.Scope(divided(model), "cross_entropy")
    if dist.get_rank() == 1:
        scope.problem.model.end = end  # type: ignore[assignment]
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, before this one has found out
    said = told(lambda: scope.norms(x[own], y[own]))
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    os._exit(0 if dist.get_rank() == 0 else 1)  # nobody is left to part from


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
