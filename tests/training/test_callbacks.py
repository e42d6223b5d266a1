"""Callbacks: transformers' Trainer as it is; Lightning's by a stand-in of its interface."""

import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gradscope.training
from gradscope.errors import SpecError
from gradscope.training import read_history
from tests.oracle import per_sample_gradients


def trainer(folder, callbacks, **arguments):
    """A Trainer of a small GPT-2 with dropout, on sequences of several lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    ids = torch.randint(20, (40, 7))
    data = [{"input_ids": row, "labels": row.where(row > 3, -100)} for row in ids]
    plain = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    own = {"max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True, **plain, **arguments}
    given = TrainingArguments(str(folder / "out"), **own)
    return Trainer(model, given, train_dataset=data, callbacks=callbacks)


def test_a_trainer_is_measured_and_left_alone(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own
        alone = trainer(tmp_path, [])
        alone.train()
        options = {"every": 2, "samples": 16, "overhead": None, "path": tmp_path / "run.jsonl"}
        monitor = gradscope.training.TrainerMonitor("causal_lm", errors="raise", **options)
        found = trainer(tmp_path, [monitor])
        found.train()
    pairs = zip(alone.model.parameters(), found.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    history = read_history(options["path"])
    assert [(step.step, step.samples) for step in history.steps] == [
        (1, 16),
        (2, 16),
        (4, 16),
        (6, 16),
    ]
    assert history.end.step == 6

    def loss(outputs, labels):  # as transformers has it, of one sequence
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())[None]

    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:16].tolist()
    batch = [found.train_dataset[row] for row in rows]
    ids, labels = (torch.stack([one[k] for one in batch]) for k in ("input_ids", "labels"))
    losses, gradients = per_sample_gradients(found.model.eval(), loss, {"input_ids": ids}, labels)
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)
    assert history.steps[-1].loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert history.steps[-1].norm_mean == pytest.approx(float(norms.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("data", "options", "word"),
    [(None, {}, "stream"), ([{"x": torch.zeros(3)}], {}, "no key 'labels'; its keys are 'x'")],
)
def test_what_cannot_be_drawn_is_refused(data, options, word):
    from torch.utils.data import default_collate

    callback = gradscope.training.TrainerMonitor("causal_lm", **options)
    loader = types.SimpleNamespace(dataset=data, collate_fn=default_collate)
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=0)
    with pytest.raises(SpecError, match=word):
        callback.on_train_begin(None, state, None, train_dataloader=loader, model=nn.Linear(3, 3))


@pytest.fixture
def lightning(monkeypatch):
    """The names that the callback needs of Lightning, without anything behind them."""
    library, inner = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    for name in ("Callback", "LightningModule", "Trainer"):
        setattr(inner, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "lightning", library)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)
    vars(gradscope.training).pop("LightningMonitor", None)
    yield
    vars(gradscope.training).pop("LightningMonitor", None)


class Logger:
    def __init__(self):
        self.found = {}

    def log_metrics(self, metrics, step=None):
        self.found[step] = metrics


def test_lightning_tells_the_batch_and_gets_the_numbers(tmp_path, lightning):
    torch.manual_seed(0)
    model, path = nn.Linear(5, 3), tmp_path / "run.jsonl"
    more = []
    callback = gradscope.training.LightningMonitor(
        "cross_entropy", 2, 8, None, path=path, errors="raise",
        trackers=[lambda step, values: more.append(step)],
    )  # fmt: skip
    run = types.SimpleNamespace(loggers=[Logger()], global_step=0)
    callback.on_train_start(run, model)
    for k in range(8):  # two batches a step
        batch = torch.randn(10, 5), torch.randint(3, (10,))
        run.global_step = (k + 1) // 2
        callback.on_train_batch_end(run, model, None, batch, k)
    callback.on_exception(run, model, KeyboardInterrupt())
    callback.on_train_end(run, model)
    history = read_history(path)
    assert [(step.step, step.samples) for step in history.steps] == [(1, 8), (2, 8), (4, 8)]
    assert history.end.reason == "stopped by KeyboardInterrupt"
    assert more == [1, 2, 4]
    found = run.loggers[0].found
    assert [found[k]["gradscope/loss"] for k in (1, 2, 4)] == [step.loss for step in history.steps]
    callback.on_train_start(run, model)  # once more, with all that was asked for
    run.global_step = 6
    callback.on_train_batch_end(run, model, None, batch, 0)
    assert more == [1, 2, 4, 6]


def split_wrongly(batch):
    raise KeyError("inputs")


@pytest.mark.parametrize("options", [{}, {"split": split_wrongly}])
def test_a_batch_that_cannot_be_split_ends_no_training(lightning, options):
    callback = gradscope.training.LightningMonitor("cross_entropy", 2, 8, None, **options)
    run, batch = types.SimpleNamespace(loggers=[], global_step=0), {"inputs": 1, "targets": 2}
    callback.on_train_start(run, nn.Linear(5, 3))
    run.global_step = 1
    with pytest.warns(
        gradscope.training.MonitorWarning, match="not a pair.*dict\n.*split=|KeyError"
    ):
        callback.on_train_batch_end(run, None, None, batch, 0)
    run.global_step = 2
    callback.on_train_batch_end(run, None, None, batch, 1)


def test_a_library_that_is_absent_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    vars(gradscope.training).pop("LightningMonitor", None)
    with pytest.raises(SpecError, match="lightning is not installed") as told:
        gradscope.training.LightningMonitor  # noqa: B018
    assert told.value.remedy == "pip install lightning"
    with pytest.raises(AttributeError):
        gradscope.training.absent  # noqa: B018
