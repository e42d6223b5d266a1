"""Odd architectures against a loop over batches of one; and the command that sweeps all of them."""

import json
from operator import itemgetter

import pytest
import torch
from torch import nn

from benchmarks.zoo import tables
from benchmarks.zoo.__main__ import main
from benchmarks.zoo.loss import Uneven
from benchmarks.zoo.subject import SAMPLES, Subject
from benchmarks.zoo.sweep import written
from benchmarks.zoo.truth import truth
from gradscope import Scope
from gradscope.core.batch import map_tensors
from tests import oracle
from tests.zoo.architectures import ARCHITECTURES

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def largest_error(found, right):
    assert found.keys() == right.keys()
    whole = sum(g.square().flatten(1).sum(1) for g in right.values()).sqrt()
    return max(
        float(
            (
                (found[k] - g).flatten(1).norm(dim=1) / (g.flatten(1).norm(dim=1) + 0.01 * whole)
            ).max()
        )
        for k, g in right.items()
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_odd_architecture_is_exact_in_a_first_and_a_later_batch(name, dtype):
    setup = ARCHITECTURES[name](dtype)
    model, loss, inputs, targets = setup
    tolerance = 1e-5 if name == "low_precision_inside" else TOLERANCE[dtype]
    with Scope(model, loss) as scope:
        for order in (slice(None), [3, 1, 4, 0]):  # the later batch has other samples
            batch = map_tensors(itemgetter(order), (inputs, targets))
            _, right = oracle.per_sample_gradients(model, loss, *batch)
            found = scope.per_sample_gradients(*batch)
            assert largest_error(found, right) <= max(tolerance, TOLERANCE[dtype])
            squares = sum(g.square().flatten(1).sum(1) for g in right.values())
            torch.testing.assert_close(
                scope.norms(*batch).double(), squares.sqrt(), rtol=2e-4, atol=1e-6
            )


def test_the_truth_of_a_parameter_without_an_axis():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Scaled().double()
    subject = Subject(model, lambda seed, n: torch.randn(n, 4).double(), torch.float64)
    inputs = subject.inputs(0, SAMPLES)
    exact = truth(subject, Uneven([()], [1.0]), inputs)
    with Scope(model, Uneven([()], [1.0])) as scope:
        torch.testing.assert_close(scope.norms(inputs), exact.norms)
    assert exact.rows["scale"].shape == (SAMPLES,)


def test_the_truth_of_coupled_and_random_samples():
    def judged(model):
        subject = Subject(model.double(), lambda seed, n: torch.randn(n, 4).double(), torch.float64)
        return truth(subject, Uneven([()], [1.0]), subject.inputs(0, SAMPLES))

    class Centred(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return h - 1e-6 * h.mean(0)

    alone = judged(nn.Linear(4, 3))
    assert alone.nature == "independent" and alone.company < 1e-12
    assert alone.norms.shape == (SAMPLES,)
    assert judged(Centred(4, 3)).nature == "coupled"
    assert judged(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train()).nature == "random"


@pytest.mark.full
def test_the_command_sweeps_resumes_and_writes_its_page(tmp_path, capsys):
    path, page = tmp_path / "found.jsonl", tmp_path / "zoo.md"
    words = ["modules", "--only", "Linear/0", "--json", str(path), "--markdown", str(page)]
    assert main([*words, "--tools", "gradscope,vmap(grad)"]) == 0
    records = written(path)
    cases = [r for r in records if "case" in r]
    assert [r["case"] for r in cases] == ["modules/Linear/0"]
    answers = cases[0]["tools"]
    assert answers["gradscope"]["outcome"] == answers["vmap(grad)"]["outcome"] == "right"
    assert answers["gradscope"]["backend"] == "hooks"
    assert answers["gradscope"]["cost_rows"] > 0
    assert "| modules | gradscope | 1 | 1 | 0 | 0 | 0 | hooks 1 |" in page.read_text()
    assert "gradscope" in capsys.readouterr().out
    assert main([*words]) == 0  # nothing is run again
    assert len(written(path)) == len(records)


def test_a_wrong_answer_is_told_by_the_exit_code(tmp_path, capsys):
    path = tmp_path / "found.jsonl"
    facts = {"nature": "independent"}
    wrong = {"outcome": "wrong", "reason": "rows of a are off by 1", "backend": "hooks"}
    record = {
        "case": "modules/A/0",
        "status": "judged",
        "facts": facts,
        "tools": {"gradscope": wrong},
    }
    path.write_text(json.dumps(record) + "\n" + '{"case": "cut off')
    assert main(["modules", "--report", "--json", str(path)]) == 1
    assert "gradscope is wrong on modules/A/0" in capsys.readouterr().err
    assert "- `modules/A/0`: rows of a are off by 1" in tables.page([record], [])


def test_an_absent_library_is_told_and_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.zoo.__main__.missing", lambda group: ["timm"])
    assert main(["timm", "--json", str(tmp_path / "found.jsonl")]) == 0
    assert "timm left out: timm not installed: make zoo" in capsys.readouterr().err
