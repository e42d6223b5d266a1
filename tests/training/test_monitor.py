"""Monitor: numbers against float64, a training that is left alone, a budget that is kept."""

import copy
import gc
import random
import re
import subprocess
import sys
import weakref
from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gradscope.errors import CoupledSamplesError, SpecError
from gradscope.model.problem import Problem
from gradscope.training import (
    Monitor,
    MonitorWarning,
    read_history,
    to_mlflow,
    to_tensorboard,
    to_wandb,
)
from gradscope.training.history import HistoryReader
from tests.oracle import cross_entropy, per_sample_gradients


def made(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)
    return nn.Sequential(*layers).to(dtype).train()


def state_of_generators():
    return torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def trained(model, steps, between, autocast=False, after=lambda *batch: None):
    """Train with random numbers of every kind; call `between` before, `after` after each step."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        inputs = torch.randn(16, 6) * random.random() + float(np.random.rand())
        targets = torch.randint(3, (16,))
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            F.cross_entropy(model(inputs), targets).backward()
            between(inputs, targets)
            optimiser.step()
        after(inputs, targets)
    left = *model.state_dict().values(), *(p.grad for p in model.parameters())
    moments = [v for table in optimiser.state_dict()["state"].values() for v in table.values()]
    return (*left, *moments), state_of_generators()


@pytest.mark.parametrize("autocast", [False, True])
def test_the_training_is_the_same_bit_for_bit(tmp_path, autocast):
    right = trained(made(), 12, lambda *batch: None, autocast)
    model, path = made(), tmp_path / "run.jsonl"
    with Monitor(model, "cross_entropy", 3, 8, None, path=path, errors="raise") as monitor:
        found = trained(model, 12, monitor.step, autocast)
    assert [step.step for step in read_history(path).steps] == [1, 3, 6, 9, 12]
    assert all(torch.equal(a, b) for a, b in zip(right[0], found[0], strict=True))
    assert right[1] == found[1]
    assert all(module.training for module in model.modules())


def test_the_numbers_are_those_of_the_gradients():
    model, inputs = made(), torch.randn(40, 6)
    targets = inputs[:, :3].argmax(1)
    monitor = Monitor(model, "cross_entropy", 1, 32, None, max_norm=(0.5, 0.9), errors="raise")
    for _ in range(2):  # from the end of the first step
        monitor.step(inputs, targets)
    step = monitor.latest

    losses, rows = per_sample_gradients(model.eval(), cross_entropy, inputs[:32], targets[:32])
    g = torch.cat([row.flatten(1) for row in rows.values()], 1).numpy()
    norms, mean = np.linalg.norm(g, axis=1), g.mean(0)
    assert step.samples == 32
    assert step.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    found = [step.norm_percentiles[str(p)] for p in (5, 50, 95)]
    assert found == pytest.approx(list(np.percentile(norms, (5, 50, 95))), rel=1e-5)
    assert [c.clipped for c in step.clipped] == [np.mean(norms > 0.5), np.mean(norms > 0.9)]
    assert step.opposing == np.mean(g @ mean < 0)
    trace = np.trace(np.cov(g, rowvar=False))
    signal = mean @ mean - trace / 32
    assert step.noise_scale.trace_covariance == pytest.approx(trace, rel=1e-4)
    assert step.noise_scale.simple == pytest.approx(trace / signal, rel=1e-4)
    for layer in step.parameters:
        own = rows[layer.name].flatten(1).numpy()
        big = np.square(own.mean(0)).sum()
        spread = np.square(own).sum(1).mean() - big
        assert layer.signal_to_noise == pytest.approx(big / spread, rel=1e-4)


def measured_steps(path):
    return [step.step for step in read_history(path).steps]


@pytest.mark.parametrize("overhead", [1e-9, None])
@pytest.mark.parametrize("steps", [1, 2, 3, 80])
def test_the_first_and_the_last_step_are_measured(tmp_path, steps, overhead):
    right = trained(made(), steps, lambda *batch: None)
    model, path, seen = made(), tmp_path / "run.jsonl", []

    def after(inputs, targets):
        monitor.step(inputs, targets)
        seen.append((inputs, targets, copy.deepcopy(model).eval()))

    options = {"path": path, "errors": "raise"}
    with Monitor(model, "cross_entropy", 50, 8, overhead, **options) as monitor:
        found = trained(model, steps, lambda *batch: None, after=after)
    assert all(torch.equal(a, b) for a, b in zip(right[0], found[0], strict=True))
    assert right[1] == found[1] == state_of_generators()
    assert all(module.training for module in model.modules())
    history = read_history(path)
    middle = [50] if overhead is None and steps > 50 else []
    assert measured_steps(path) == [*dict.fromkeys([1, *middle, steps])]
    assert (history.end.step, history.end.reason) == (steps, None)
    for step in history.steps:
        inputs, targets, then = seen[step.step - 1]
        losses, rows = per_sample_gradients(then, cross_entropy, inputs[:8], targets[:8])
        norms = torch.cat([row.flatten(1) for row in rows.values()], 1).norm(dim=1)
        assert step.loss == pytest.approx(float(losses.mean()), rel=1e-5)
        assert step.norm_mean == pytest.approx(float(norms.mean()), rel=1e-5)


def loop(monitor, model, sizes, last=None):
    """Train plainly on batches of these sizes; return them."""
    torch.manual_seed(1)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    batches = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in sizes]
    for inputs, targets in batches:
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
        monitor.step(inputs, targets)
    return batches


def rarely(model, path=None, **options):
    """A monitor that measures the first and the last step."""
    given = {"every": 1000, "samples": 16, "errors": "raise", "path": path, **options}
    return Monitor(model, "cross_entropy", **given)


@pytest.mark.parametrize(
    ("sizes", "of"),
    [
        ([16, 16, 5, 16, 16, 5], -2),  # two epochs, whose last batches are smaller
        ([16, 12, 8, 6, 4], -1),  # ever smaller batches
        ([5, 16, 16], -1),
        ([20, 16, 17], -1),  # all are as large as what is measured
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_the_last_measurement_has_as_many_samples_as_the_first(sizes, of, is_known):
    model = made()
    monitor = rarely(model)
    if is_known:
        monitor.start(last=len(sizes))
    inputs, targets = loop(monitor, model, sizes)[of]
    assert (monitor.latest.step == len(sizes)) == is_known
    monitor.close()
    assert monitor.latest.step == len(sizes)
    most = 16 if sizes[0] > 5 else 5
    assert monitor.latest.samples == min(16, len(inputs))
    loss = F.cross_entropy(model.eval()(inputs[:16]), targets[:16]).item()
    assert monitor.latest.loss == pytest.approx(loss, rel=1e-5)
    assert len(inputs) >= most or sizes[-1] == len(inputs)


def test_of_micro_batches_the_last_is_measured(tmp_path):
    """Gradients are accumulated: several batches belong to a step."""
    model, path = made(), tmp_path / "run.jsonl"
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with rarely(model, path) as monitor:
        monitor.start()
        for k in range(1, 10):
            inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
            F.cross_entropy(model(inputs), targets).backward()
            if k % 3 == 0:
                optimiser.step()
                optimiser.zero_grad()
            monitor.step(inputs, targets, step=k // 3)
    assert measured_steps(path) == [1, 3]
    loss = F.cross_entropy(model.eval()(inputs), targets).item()
    assert monitor.latest.loss == pytest.approx(loss, rel=1e-5)


def load(model, batch):
    model.load_state_dict(made().state_dict())


def write_data(model, batch):
    for parameter in model.parameters():  # as a moving average takes the weights' place
        parameter.data.copy_(torch.zeros_like(parameter))


def put_data(model, batch):
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


def update_statistics(model, batch):
    model(batch[0])


def replace_layer(model, batch):
    model[-1] = nn.Linear(9, 3)


def delete_layer(model, batch):
    del model[-1]


def overwrite(model, batch):
    batch[0].zero_()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (load, "'0.weight' has changed after"),
        (write_data, "'4.bias' has changed after"),
        (put_data, "'4.bias' has changed after"),
        (update_statistics, "'1.num_batches_tracked' has changed after"),
        (replace_layer, "modules, .* of the model have changed since step 1$"),
        (delete_layer, "modules, .* of the model have changed since step 1$"),
        (lambda model, _: model.double(), "of the model have changed since step 1$"),
        (lambda model, _: model[0].requires_grad_(False), "the model have changed since step 1$"),
        (lambda model, _: model.to("meta"), "of the model have changed since step 1$"),
        (overwrite, "its batch was overwritten"),
    ],
)
def test_what_has_changed_since_the_last_step_is_not_measured(tmp_path, change, word):
    model, path = made(), tmp_path / "run.jsonl"
    match = f"the last step, 4, is not measured: .*{word}"
    with pytest.warns(MonitorWarning, match=match) as told, rarely(model, path) as monitor:
        batches = loop(monitor, model, [16] * 4)
        change(model, batches[-1])
    assert len(told) == 1
    assert measured_steps(path) == [1]
    end = read_history(path).end
    assert end.step == 4 and re.search(match, end.reason)


def test_a_last_step_that_is_known_is_measured_before_the_model_changes(tmp_path):
    model, path = made(), tmp_path / "run.jsonl"
    with rarely(model, path) as monitor:
        monitor.start(last=4)
        batches = loop(monitor, model, [16] * 4)
        assert monitor.latest.step == 4
        load(model, batches)
    assert measured_steps(path) == [1, 4]


def test_a_step_that_is_told_before_the_weights_change_says_so(tmp_path):
    model = made()
    match = "Call `monitor.step` after `optimizer.step`"
    with pytest.warns(MonitorWarning, match=match), rarely(model) as monitor:
        trained(model, 3, monitor.step)


def test_a_validation_is_no_change(tmp_path):
    model, path, validation = made(), tmp_path / "run.jsonl", torch.randn(9, 6)
    with torch.autocast("cpu", torch.bfloat16), rarely(model, path) as monitor:
        loop(monitor, model, [16] * 4)
        with torch.no_grad():
            model.eval()(validation)
        model.zero_grad()
    assert measured_steps(path) == [1, 4]
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_training_that_is_stopped_has_its_last_step_measured(tmp_path, kind):
    model, path = made(), tmp_path / "run.jsonl"
    with pytest.raises(kind), rarely(model, path) as monitor:
        loop(monitor, model, [16] * 4)
        raise kind
    assert measured_steps(path) == [1, 4]
    assert read_history(path).end.text == f"ended at step 4: stopped by {kind.__name__}"


def test_an_error_of_the_training_is_hidden_by_none_of_the_measurement(tmp_path, monkeypatch):
    model, path = made(), tmp_path / "run.jsonl"

    def fail(*args):
        raise RuntimeError("out of memory")

    with (
        pytest.warns(MonitorWarning, match="step, 4, is not measured: RuntimeError: out of memory"),
        pytest.raises(ValueError, match="own"),
        rarely(model, path) as monitor,
    ):
        loop(monitor, model, [16] * 4)
        monkeypatch.setattr(Problem, "_raw", fail)
        raise ValueError("own")
    assert read_history(path).end.reason.startswith("stopped by ValueError; the last step, 4, is")
    with pytest.raises(RuntimeError, match="out of memory"), rarely(made()) as monitor:
        monkeypatch.undo()
        loop(monitor, model, [16] * 4)
        monkeypatch.setattr(Problem, "_raw", fail)


UNCLOSED = """
import sys, torch
from gradscope.training import Monitor
torch.manual_seed(0)  # two biases that sum to 1 would look like probabilities
model = torch.nn.Linear(3, 2)
monitor = Monitor(model, "cross_entropy", every=1000, path=sys.argv[1])
for step in range(7):
    torch.nn.init.constant_(model.weight, 0.5 * step)
    monitor.step(torch.eye(3), torch.tensor([0, 1, 1]))
if len(sys.argv) > 2:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("more", [[], ["exit"]])
def test_a_program_that_ends_without_closing_it_has_its_last_step_measured(tmp_path, more):
    path = tmp_path / "run.jsonl"
    done = subprocess.run([sys.executable, "-c", UNCLOSED, path, *more], capture_output=True)
    assert (done.returncode, done.stderr) == (3 if more else 0, b"")
    assert measured_steps(path) == [1, 7]
    assert read_history(path).steps[-1].norm_mean > 0
    reason = "the program ended before the monitor was closed"
    assert read_history(path).end.text == f"ended at step 7: {reason}"


def test_a_batch_is_held_until_the_next_step():
    model = made()
    monitor = Monitor(model, "cross_entropy", 1, 16, None, errors="raise")
    known = []
    for _ in range(3):
        inputs = torch.randn(16, 6)
        monitor.step(inputs, torch.randint(3, (16,)))
        known.append(weakref.ref(inputs))
        del inputs
    gc.collect()
    assert [one() is None for one in known] == [True, True, False]
    monitor.close()
    gc.collect()
    assert known[-1]() is None


def test_other_precisions_are_measured_as_well():
    batch, found = (torch.randn(16, 6), torch.randint(3, (16,))), []
    for dtype in (torch.float64, torch.bfloat16):
        monitor = Monitor(made(dtype), "cross_entropy", 1, 16, None, errors="raise")
        monitor.start()
        monitor.step(batch[0].to(dtype), batch[1])
        found.append((monitor.latest.loss, monitor.latest.norm_mean))
    assert found[1] == pytest.approx(found[0], rel=0.03)


class Clock:
    """Time that passes when somebody says so, and with each forward pass of a measurement."""

    def __init__(self, seconds, monkeypatch):
        self.now = self.inside = 0.0
        forward = Problem._raw

        def slow(*given):  # it is no part of the loss, or it would be put back
            self.now += seconds
            self.inside += seconds
            return forward(*given)

        monkeypatch.setattr(Problem, "_raw", slow)

    def __call__(self):
        return self.now


@pytest.mark.parametrize("budget", [0.015, 0.03, 1.0])
def test_the_budget_is_kept(tmp_path, monkeypatch, budget):
    clock, model, path = Clock(0.15, monkeypatch), made(), tmp_path / "run.jsonl"
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    monitor = Monitor(model, "cross_entropy", 5, 16, budget, path=path, clock=clock, errors="raise")
    monitor.start()
    shares = []
    for _ in range(602):
        clock.now += 0.5
        before = monitor.latest
        monitor.step(inputs, targets)
        if monitor.latest is not before:
            shares.append(clock.inside / (clock.now - clock.inside))
    monitor.close()
    shares.append(clock.inside / (clock.now - clock.inside))
    found = read_history(path)
    assert [step.cost.overhead for step in found.steps] == pytest.approx(shares)
    assert max(shares[1:-1]) <= budget * (1 + 1e-12)  # all but the first and the last
    assert found.end.overhead <= budget + found.steps[-1].cost.seconds / 300
    assert found.end.step == 602
    assert found.steps[-1].cost.proof_seconds > found.steps[-1].cost.seconds > 0
    first, *steps, last = [step.step for step in found.steps]
    assert (first, last) == (1, 602)
    assert all(step % 5 == 0 for step in steps)
    if budget < 1:  # what there is is used, and what is foretold comes true
        assert shares[-2] > 0.75 * budget - 0.15 / 300
        for step, later in zip(found.steps[1:], steps[1:], strict=False):
            assert later == step.step + step.cost.interval
    else:
        assert len(steps) > 110  # every five steps, but for a start


def test_a_model_that_is_changed_is_proved_within_the_budget(monkeypatch):
    """As one whose layers are frozen one after the other: the time of a proof is known by then."""
    clock, model, proofs = Clock(1.0, monkeypatch), made(), []
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    monitor = Monitor(model, "cross_entropy", 1, 16, 0.1, clock=clock, errors="raise")
    monitor.start()
    for step in range(1, 3000):
        if step == 1000:
            model[0].requires_grad_(False)
        clock.now += 0.5
        before = monitor.latest
        monitor.step(*batch)
        if monitor.latest is not before:
            proofs.append(monitor.latest.cost.proof_seconds)
            assert step == 1 or clock.inside <= 0.1 * (clock.now - clock.inside)
    assert len(dict.fromkeys(proofs)) == 2


def test_a_training_without_a_step_says_so(tmp_path):
    path = tmp_path / "run.jsonl"
    with (
        pytest.warns(
            MonitorWarning, match="no measurement: no step was recorded. Call `monitor.step`"
        ),
        Monitor(made(), "cross_entropy", path=path),
    ):
        pass
    reader = HistoryReader(path)
    with pytest.raises(Exception, match="no measurement"):
        reader.read()
    match = "no measurement: all batches were empty"
    with pytest.warns(MonitorWarning, match=match), rarely(made()) as monitor:
        monitor.step(torch.randn(0, 6), torch.randint(3, (0,)))


def test_what_is_refused_ends_the_measuring_and_not_the_training(tmp_path):
    model, path = made(), tmp_path / "run.jsonl"
    model[3].p = 0.0  # BatchNorm on the batch's statistics is left
    options = {"mode": "train", "path": path}
    monitor = Monitor(model, "cross_entropy", 2, 16, None, **options)
    with pytest.warns(MonitorWarning, match="continues, but is no longer measured") as told:
        trained(model, 8, monitor.step)
    assert len(told) == 1
    end = path.read_text()
    assert "no longer measured" in end
    assert "BatchNorm" in end
    with pytest.raises(CoupledSamplesError):
        trained(
            model, 8, Monitor(model, "cross_entropy", 2, 16, None, errors="raise", **options).step
        )
    assert all(module.training for module in model.modules())


def test_its_file_is_ended_where_it_was_begun(tmp_path, monkeypatch):
    """Also where nobody closes the monitor; what cannot be written ends no training."""
    monkeypatch.chdir(tmp_path)
    model, batch = made(), (torch.randn(16, 6), torch.randint(3, (16,)))
    monitor = Monitor(model, "cross_entropy", 5, 8, None, path="run.jsonl", errors="raise")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    monitor.start()
    for step in (3, 6, 9, 12):  # of each five, one
        monitor.step(*batch, step=step)
    del monitor
    gc.collect()
    history = read_history(tmp_path / "run.jsonl")
    assert [step.step for step in history.steps] == [3, 6, 12]
    assert history.end.text == "ended at step 12: the monitor was deleted before it was closed"
    monitor = Monitor(model, "cross_entropy", 1, 8, None, path="run.jsonl")
    monitor.path = tmp_path
    with pytest.warns(MonitorWarning, match="must end in .jsonl"):
        monitor.close("the end")


class Kept:
    """The calls that trackers of the named libraries have in their documented interfaces."""

    def __init__(self):
        self.found, self.metrics = [], []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.found.append((global_step, tag, scalar_value))

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, data, step=None):
        self.found += [(data["gradscope/step"], k, v) for k, v in data.items()]

    def log_metrics(self, metrics, step=None):
        assert all(re.fullmatch(r"[/\w.\- :]*", name) for name in metrics)  # as MLflow has it
        self.found += [(step, k, v) for k, v in metrics.items()]


class Own:
    def __init__(self):
        self.found = []

    def log(self, step, values):
        self.found += [(step, k, v) for k, v in values.items()]


def test_trackers_get_the_numbers():
    boards = Kept(), Kept(), Kept()
    own, plain = Own(), []
    trackers = [to_tensorboard(boards[0]), to_wandb(boards[1]), to_mlflow(boards[2]), own]
    trackers.append(lambda step, values: plain.extend((step, k, v) for k, v in values.items()))
    trackers.insert(2, lambda step, values: 1 / 0)
    model = made()
    model.add_module("a(b)", nn.Linear(3, 3))
    monitor = Monitor(model, "cross_entropy", 1, 8, None, trackers=trackers, max_norm=0.5)
    monitor.start(7)
    with pytest.warns(MonitorWarning, match="is no longer called: ZeroDivisionError"):
        monitor.step(torch.randn(16, 6), torch.randint(3, (16,)))
    step = monitor.latest
    assert step.step == 8
    assert (8, "gradscope/median_norm", step.norm_median) in plain
    assert (8, "gradscope/clipped_by_0.5", step.clipped[0].clipped) in plain
    assert (8, "gradscope/signal_to_noise/0.weight", step.parameters[0].signal_to_noise) in plain
    assert own.found == boards[0].found == plain
    assert [one for one in boards[1].found if not one[1].endswith("/step")] == plain
    assert boards[1].metrics == [("gradscope/*", "gradscope/step")]
    assert [one[2] for one in boards[2].found] == [one[2] for one in plain]
    monitor.step(torch.randn(16, 6), torch.randint(3, (16,)))  # without the one that failed
    for wrong in (to_tensorboard, to_wandb, to_mlflow):
        with pytest.raises(SpecError, match="int has no"):
            wrong(3)


@pytest.mark.full
def test_nothing_is_imported_that_is_not_used():
    program = (
        "import sys, gradscope.training as t\n"
        "t.to_wandb(), t.to_mlflow()\n"
        "heavy = {'transformers', 'lightning', 'pytorch_lightning', 'wandb', 'mlflow'}\n"
        "assert not heavy & sys.modules.keys()\n"
        "assert 'torch.utils.tensorboard' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"samples": 1},
        {"overhead": 0.0},
        {"overhead": "3%"},
        {"max_norm": [1.0, -1.0]},
        {"probe": torch.zeros(3, 6)},
        {"trackers": print},
        {"model": None},
        {"mode": "both"},
        {"errors": "hide"},
        {"trackers": [3]},
        {"parameters": "absent*"},
        {"loss": "cross_entropi"},
    ],
)
def test_what_is_wrong_is_said_before_the_training(wrong):
    with pytest.raises(SpecError):
        Monitor(**{"model": made(), "loss": "cross_entropy", **wrong})


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, 2**53, torch.zeros(2)])
def test_a_step_has_a_whole_number(tmp_path, step):
    path = tmp_path / "run.jsonl"
    monitor = Monitor(made(), "cross_entropy", 1, 8, None, path=path)
    with pytest.raises(SpecError, match="step: a step must be a whole number"):
        monitor.start(step)
    monitor.start(np.int64(2))
    with pytest.raises(SpecError, match="whole number"):
        monitor.advance(step, lambda: (None, None))
    monitor.step(torch.randn(8, 6), torch.randint(3, (8,)), step=torch.tensor(4))
    monitor.close()
    history = read_history(path)
    assert [one.step for one in history.steps] == [4] and history.end.step == 4


def test_a_module_within_its_wrapper_is_measured():
    model = made()
    monitor = Monitor(nn.DataParallel(model), "cross_entropy", 1, 8, None)
    assert next(iter(monitor.scope.problem.parameters)) == "0.weight"


def test_a_fixed_probe_is_measured_every_time():
    model, probe = made(), (torch.randn(12, 6), torch.randint(3, (12,)))
    monitor = Monitor(model, "cross_entropy", 1, 64, None, probe=probe, errors="raise")
    monitor.start()
    monitor.step()
    first = monitor.latest
    monitor.step(step=5)
    assert monitor.latest.step == 5
    assert monitor.latest.norm_percentiles == first.norm_percentiles
    assert sqrt(monitor.latest.noise_scale.trace_covariance) > 0
    nothing = Monitor(model, "cross_entropy", 1, 64, None, errors="raise")
    nothing.start()
    with pytest.raises(SpecError, match="no batch to measure"):
        nothing.step()


def test_a_model_that_holds_its_monitor_is_copied_and_saved_and_both_train_on(tmp_path):
    right = trained(made(), 6, lambda *batch: None)
    model = made()
    model.monitor = monitor = Monitor(model, "cross_entropy", 1, 8, None, errors="raise")
    trained(model, 2, monitor.step)  # it has measured, and is proved
    model.load_state_dict(made().state_dict())
    model.zero_grad()
    torch.save(model, tmp_path / "model.pt")
    saved, copied = torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)
    assert saved.monitor is None and copied.monitor is monitor
    for one in (saved, copied, model):
        assert not any(m._forward_hooks or m._backward_hooks for m in one.modules())
        found = trained(one, 6, lambda *batch: None)
        assert all(torch.equal(a, b) for a, b in zip(right[0], found[0], strict=True))
    nn.init.zeros_(model[-1].bias)  # now the two differ, and the original is measured
    inputs, targets = torch.randn(8, 6), torch.randint(3, (8,))
    monitor.step(inputs, targets)

    norms = []
    for one in (model, copied):
        rows = per_sample_gradients(one.eval(), cross_entropy, inputs, targets)[1]
        g = torch.cat([row.flatten(1) for row in rows.values()], 1)
        norms.append(float(g.norm(dim=1).mean()))
    assert monitor.latest.norm_mean == pytest.approx(norms[0], rel=1e-5)
    assert monitor.latest.norm_mean != pytest.approx(norms[1], rel=1e-3)


def test_a_batch_of_nothing_but_nan_is_measured_too():
    monitor = Monitor(made(), "cross_entropy", 1, 8, None, errors="raise")
    monitor.start()
    targets = torch.randint(3, (8,))
    monitor.step(torch.full((8, 6), torch.nan), targets)
    assert monitor.latest.nonfinite == 8
    monitor.step(torch.randn(8, 6), targets)
    assert monitor.latest.nonfinite == 0 and monitor.latest.norm_mean > 0


def test_what_measures_is_no_state_of_the_model_that_leads_to_it():
    """As a LightningModule leads to its trainer, and that to its callbacks."""
    model, batch = made(), (torch.randn(8, 6), torch.randint(3, (8,)))
    options = {"mode": "train", "coupling": "frozen", "randomness": "fixed", "errors": "raise"}
    monitor = Monitor(model, "cross_entropy", 1, 8, None, **options)
    model.trainer = {"callbacks": [monitor]}
    monitor.start()
    for step in (1, 2):
        monitor.step(*batch)
        assert monitor.latest.step == step
    assert copy.deepcopy(model).trainer == model.trainer
    assert copy.deepcopy([monitor.scope, copy.copy(monitor)]) == [monitor.scope, monitor]
    buffers = {name: t.clone() for name, t in made().named_buffers()}
    torch.testing.assert_close(dict(model.named_buffers()), buffers)
