"""The checks of a GPU, on a device made of the CPU: `python -m tests.gpu --standin`.

In a process of their own: a device is made known to torch once, and for good.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full  # each starts a process of its own

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

FAULTS = """
import torch
from gradscope.core.batch import Batch
from gradscope.run.overlap import to_device
from tests.gpu import device, steps
there = device.register()
move, found = steps.moved(there), []
x, index = move((torch.ones(4, 3), torch.arange(4)))
def refused(run):
    try:
        run()
    except (RuntimeError, TypeError) as error:
        return type(error).__name__, str(error)
print(refused(lambda: x + torch.ones(4, 3)))  # two devices
print(refused(lambda: torch.rand(3, device=there, generator=torch.Generator())))
with device.without_double():
    print(refused(lambda: x.double()))
    print(refused(lambda: torch.zeros(3, device=there, dtype=torch.float64)))
print(refused(lambda: x.numpy()))
side, host = torch.standin.Stream(there), torch.zeros(4, 3)
def early(wait):
    device.seen.clear()
    with torch.standin.stream(side):
        given = torch.ones(4, 3).to(there, non_blocking=True)
        made = given + 1
        if wait:
            side.synchronize()
    if wait:
        given.record_stream(torch.standin.current_stream())
    host.zero_().copy_(made * given, non_blocking=True)
    before = host.sum().item()
    torch.standin.synchronize()
    return bool(device.seen.races), before, host.sum().item()
print([*early(False), *early(True)])
def counted(run):
    device.seen.clear()
    run()
    return device.seen.waits.total()
print([counted(run) for run in (
    lambda: x + 1, lambda: x[index], lambda: x + 2 * torch.ones(()), lambda: x.sum().item(),
    lambda: [row.cpu() for row in x], lambda: x[x > 0], lambda: x.nonzero(),
    lambda: x.sum().tolist(), lambda: bool((x > 0).all()), lambda: torch.tensor([1.0]).to(there),
)])
wide = torch.ones(2, 3).to(there)
print(refused(lambda: torch.arange(4).to(there).view(2, 2) @ torch.arange(4).to(there).view(2, 2)))
given = torch.ones(1, 3).expand(2, 3), torch.arange(12.0).view(2, 6)[:, ::2], wide, torch.ones(())
with device.pinned():
    batch = to_device(Batch(given, None, torch.arange(2)), there)
    torch.standin.synchronize()
print(all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(batch.inputs, given)))
"""


GENERATOR = """
import torch
from torch import nn
import gradscope
from tests.gpu import device, steps
there = device.register()
own = torch.Generator().manual_seed(5)  # the device's
torch.standin.get_rng_state = lambda device=None: own.get_state()
torch.standin.manual_seed_all = own.manual_seed
torch.standin.set_rng_state = lambda state, device=None: own.set_state(state)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        noise = torch.rand(len(x), 2, generator=own).to(there)
        return self.layer(x) + self.size * noise
model = device.placed(Model())
x, y = steps.moved(there)((torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
before = own.get_state()
for model.size in (0.0, 1.0):
    for verify in ("never", "first"):
        try:
            gradscope.norms(model, "cross_entropy", x, y, backend="loop", verify=verify)
            print("answered", torch.equal(before, own.get_state()))
        except gradscope.errors.GradscopeError as error:
            print(error.what.partition(":")[0], torch.equal(before, own.get_state()))
"""


def lines_of(program: str) -> list[str]:
    """Return what a program prints in a process of its own, with a device of the tests."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_generator_of_any_device_is_put_back_and_watched() -> None:
    answered = ["answered True"] * 3
    assert lines_of(GENERATOR) == [*answered, "the forward pass is random True"]


def test_device_refuses_and_counts_what_a_gpu_would() -> None:
    mixed, generator, cast, made, host, streams, counts, whole, pinned = lines_of(FAULTS)
    assert "at least two devices" in mixed
    assert "device type for generator" in generator
    assert "doesn't support float64" in cast and "doesn't support float64" in made
    assert "to numpy" in host
    assert streams == "[True, 0.0, 24.0, False, 0.0, 24.0]"
    assert json.loads(counts) == [0, 0, 0, 1, 4, 1, 1, 1, 1, 1]
    assert "mm_cuda" in whole
    assert pinned == "True"  # what cannot be pinned as it is, and what is there already, comes too


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("gpu") / "report.json"
    wanted = "float32 without float64,chains without float64,rules without float64,"
    wanted += "fixed random numbers without float64,float32,rules,waits,run to a file,"
    wanted += "an index out of range,memory runs out"
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu", "--standin", "--quick"]
    subprocess.run(
        [*command, "--steps", wanted, "--json", str(out)], cwd=ROOT, env=ENVIRONMENT, check=False
    )
    steps: dict[str, Any] = json.loads(out.read_text())["steps"]
    return steps


@pytest.mark.parametrize("step", ["float32 without float64", "float32"])
def test_cases_are_right_on_a_device(report: dict[str, Any], step: str) -> None:
    found = report[step]
    assert (found["wrong"], found["refused"], found["broken"]) == ({}, {}, {})
    assert found["right"] >= 8 and 0 < found["largest"] < 1e-3


def test_chains_are_right_on_a_device_without_float64(report: dict[str, Any]) -> None:
    found = report["chains without float64"]
    assert (found["wrong"], found["broken"]) == ({}, {})
    assert found["right"] >= 10


def test_operations_that_gpus_alone_have_are_contracted_by_rules(report: dict[str, Any]) -> None:
    for step in ("rules", "rules without float64"):
        assert (report[step]["wrong"], report[step]["broken"]) == ({}, {})


def test_fixed_random_numbers_are_those_of_the_cpu(report: dict[str, Any]) -> None:
    found = report["fixed random numbers without float64"]
    assert (found["right"], found["wrong"], found["broken"]) == (3, {}, {})


def test_an_index_out_of_range_is_told_once_and_says_whose(report: dict[str, Any]) -> None:
    found = report["an index out of range"]
    assert (found["told"], found["wrong"]) == (8, {})


def test_a_run_goes_on_with_fewer_samples_where_memory_runs_out(report: dict[str, Any]) -> None:
    found = report["memory runs out"]
    assert found["wrong"] == {} and found["right"] >= 2 and found["halved"] >= 1


def test_no_wait_and_no_operation_for_each_sample(report: dict[str, Any]) -> None:
    found = report["waits"]
    assert found["grows"] == []
    # the host asks whether losses are finite, and norms where these are given out
    for task, times in (("norms", 2), ("gradients", 1)):
        assert [waits for waits, _ in found["dense"][task].values()] == [times, times]
    for _, operations in found["dense"]["norms"].values():
        assert operations > 60  # a forward and a backward pass are seen, too


def test_no_thread_takes_what_a_stream_may_not_have_made(report: dict[str, Any]) -> None:
    found = report["run to a file"]
    assert (found["wrong"], found["races"]) == ([], {})
    assert found["copies"] > 10  # batches came and rows went while the host did something else
