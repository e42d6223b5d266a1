"""Compiled programs: right where they are used, and silently not used where they cannot be."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.workloads import FAMILIES, workload
from gradscope import Scope, model_loss
from gradscope.backends.base import Request, backends
from gradscope.backends.compiled import Compiled, Ranges
from gradscope.core.batch import Batch
from gradscope.engine.chains import bind
from gradscope.engine.fold import request_of
from gradscope.errors import ModelError
from gradscope.model.problem import Problem
from gradscope.stages.losses import losses
from tests.cases import CASES
from tests.oracle import cross_entropy, per_sample_gradients
from tests.zoo.base import smooth

CLIP = "clip:max_norm=0.5 | mean"


class Tagger(nn.Module):
    """An embedding, a buffer, an attribute and a weight: what may change between two batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 4)
        self.register_buffer("gain", torch.ones(4))
        self.strength = 1.0
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.head(self.tokens(tokens)).mean(1) * self.gain * self.strength)


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    torch._dynamo.reset()


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = (((6, 3), 11), ((6,), 4))
    inputs, targets = (torch.randint(0, high, size, generator=generator) for size, high in shapes)
    inputs[0, 0], inputs[1, 0], targets[0] = 10, 0, 3
    return inputs, targets


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)


def right_norms(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return norms_of(per_sample_gradients(model, cross_entropy, inputs, targets)[1])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_gradients_norms_and_sums_of_one_program_are_those_of_the_loop(name: str) -> None:
    given = workload(name, FAMILIES[name].quick)
    model = given.model.double()
    batch = Batch.of(given.inputs, given.targets).to("cpu", torch.float64)
    bound = [bind(text) for text in ("identity", CLIP, "second_moment")]
    wanted = request_of(bound)
    scope = Scope(model, "cross_entropy", backend="vmap", compile=True)
    scope.evaluate(batch, wanted)
    assert scope.session.compiles, scope.notes
    other = batch.select(torch.arange(len(batch)).flip(0))  # not the batch it was compiled on
    found = scope.evaluate(other, wanted)
    losses, rows = per_sample_gradients(
        model,
        lambda o, t: cross_entropy(o, t).reshape(len(t), -1).mean(1),
        other.inputs,
        other.targets,
    )
    close(found.losses, losses)
    close(found.gradients.norms, norms_of(rows))
    clipped, second = (found.states[key] for key in wanted.keys)
    factors = (0.5 / norms_of(rows)).clamp(max=1.0)
    for key, g in rows.items():
        close(found.gradients[key].dense(), g)
        close(clipped[f"sum:{key}"], torch.tensordot(factors, g, 1))
        close(second[f"sum:{key}"], g.square().sum(0))


@pytest.mark.full
def test_norms_and_expectations_are_compiled_without_the_gradients(tokens) -> None:
    model = Tagger()
    scope = Scope(model, "cross_entropy", backend="vmap", compile=True, verify="first")
    plain = Scope(model, "cross_entropy")
    for _ in range(2):
        close(scope.norms(*tokens), right_norms(model, *tokens))
        for name, value in scope.expectation(CLIP, *tokens).items():
            close(value, plain.expectation(CLIP, *tokens)[name])
    assert scope.session.compiles, scope.notes
    assert [note.partition(" in ")[0] for note in scope.notes] == ["vmap compiled"] * 2
    found = scope.evaluate(Batch.of(*tokens), request_of([bind(CLIP)]))
    assert found.compiled and CLIP in found.states
    # what was not computed still comes
    part = found.gradients.select(torch.tensor([True, False] * 3))
    close(part.norms, right_norms(model, *tokens)[::2])


@pytest.mark.full
def test_a_reduction_that_has_no_graph_stays_outside(tokens) -> None:
    scope = Scope(Tagger(), "cross_entropy", backend="vmap", compile=True)
    plain = Scope(Tagger(), "cross_entropy")
    texts = ["noise:std=1.0 | mean", "quantile:q=0.5", CLIP]
    scope.expectations(texts, *tokens)
    assert any(note.startswith("noise:std=1.0 | mean: not compiled") for note in scope.notes)
    assert scope.session.compiles, scope.notes
    for ours, theirs in zip(
        scope.expectations(texts, *tokens), plain.expectations(texts, *tokens), strict=True
    ):
        for name, value in theirs.items():
            close(ours[name], value)


def children() -> set[str]:
    """Return the numbers of this process's children."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid():
            found.add(stat.parent.name)
    return found


@pytest.mark.full
def test_a_change_is_never_overlooked(tokens) -> None:
    model = Tagger()
    scope = Scope(model, "cross_entropy", backend="vmap", compile=True)

    def right() -> int:
        """Ask after a change; return how many programs were made so far."""
        close(scope.norms(*tokens), right_norms(model, *tokens))
        return sum(note.startswith("vmap compiled") for note in scope.notes)

    assert right() == 1
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert right() == 1  # weights and buffers are inputs
    model.gain.mul_(3)
    assert right() == 1 and scope.session.compiles
    model.strength = 2.0
    assert right() == 1 and not scope.session.compiles
    assert (
        "no longer compiled: shapes, dtypes or Python values have changed since compilation"
        in scope.notes
    )
    model.head.register_forward_hook(lambda module, given, out: 2 * out)
    assert right() == 2  # what else a session notices, tests/test_later.py says
    assert sum("was changed between two calls" in note for note in scope.notes) == 1


@pytest.mark.full
def test_a_last_smaller_batch_is_compiled_only_when_its_size_comes_again(tokens) -> None:
    model = Tagger()
    scope = Scope(model, "cross_entropy", backend="vmap", compile=True)
    small = tuple(t[:2] for t in tokens)
    for data, programs in ((tokens, 1), (small, 1), (tokens, 1), (small, 2), (small, 2)):
        close(scope.norms(*data), right_norms(model, *data))
        assert len(scope.notes) == programs, scope.notes


@pytest.mark.full
def test_nothing_is_printed_and_no_process_is_left(tokens, capfd) -> None:
    """And numbers out of range are the model's error, not the end of the process."""
    before = children()
    inputs, targets = tokens
    scope = Scope(Tagger(), "cross_entropy", backend="vmap", compile=True)
    scope.norms(*tokens)
    assert capfd.readouterr() == ("", "")
    assert children() == before
    for data in ((inputs + 8, targets), (inputs, targets + 4)):
        with pytest.raises(ModelError, match=r"out of (range|bounds)"):
            scope.norms(*data)
    assert scope.session.compiles, scope.notes


def test_ranges_hold_what_was_accepted_column_by_column() -> None:
    ranges = Ranges()
    table = torch.tensor([[0, 40], [2, 10], [1, -100]])
    assert not ranges.hold(Batch.of(table))
    ranges.widen(Batch.of(table))
    for row, holds in (
        ([1, 12], True),
        ([3, 12], False),  # the first column has ended at 2
        ([2, 41], False),
        ([2, -100], True),
        ([2, -1], False),
        ([-100, 12], False),
    ):
        assert ranges.hold(Batch.of(torch.tensor([row]))) == holds, row
    ranges.widen(Batch.of(torch.tensor([[3, 12]])))
    assert ranges.hold(Batch.of(torch.tensor([[3, 40]])))
    long = torch.arange(100).reshape(1, 100)
    ranges.widen(Batch.of(long))
    assert ranges.hold(Batch.of(long.flip(1)))
    assert ranges.hold(Batch.of(torch.rand(3, 2))) is False  # no batch of this form has come


@pytest.mark.parametrize(
    ("name", "backend"), [("control_flow_on_the_data", "auto"), ("lstm", "vmap")]
)
def test_what_has_no_graph_is_not_compiled(name: str, backend: str) -> None:
    setup = CASES[name].build()
    _, rows = per_sample_gradients(*setup)
    scope = Scope(setup.model, setup.loss, backend=backend, compile=True)
    for _ in range(2):
        found = scope.per_sample_gradients(setup.inputs, setup.targets)
        for key, g in rows.items():
            close(found[key], g)
    assert not scope.session.compiles
    assert any(note.startswith("not compiled: ") for note in scope.notes)


def test_a_missing_compiler_is_a_note(tokens) -> None:
    import torch._inductor.config as inductor

    scope = Scope(Tagger(), "cross_entropy", backend="vmap", compile=True)
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        close(scope.norms(*tokens), right_norms(Tagger(), *tokens))
    (note,) = scope.notes
    assert note.startswith("not compiled: InvalidCxxCompiler")


@pytest.mark.parametrize("part", ["losses", "norms", "state", "rows"])
def test_a_program_that_is_off_is_not_used(part: str, tokens, monkeypatch) -> None:
    def wrong(fn, *arguments):
        def program(*arguments):
            losses, squared, states, rows = fn(*arguments)
            if part == "losses":
                losses = losses.flip(0)
            name = "head.bias"
            if part == "norms":
                squared[name] = squared[name] * 1.001
            if part == "state":
                states[CLIP][f"sum:{name}"] = states[CLIP][f"sum:{name}"] * 1.001
            if part == "rows":
                rows[name] = rows[name].flip(0)
            return losses, squared, states, rows

        return program

    monkeypatch.setattr("gradscope.backends.compiled.compiled", wrong)
    scope = Scope(Tagger(), "cross_entropy", backend="vmap", compile=True)
    batch = Batch.of(*tokens)
    wanted = request_of([bind(CLIP), bind("identity")])
    scope.evaluate(batch, wanted)
    assert not scope.session.compiles
    assert scope.notes[-1].startswith("not compiled: the program's result differs by")
    close(scope.evaluate(batch, wanted).gradients.norms, right_norms(Tagger(), *tokens))


def test_auto_weighs_compiling_against_what_is_left(tokens) -> None:
    scope = Scope(Tagger(), "cross_entropy", compile=True)
    for left in (2, 1):
        found = scope.evaluate(Batch.of(*tokens), Request(rows=False, batches_left=left))
        close(found.gradients.norms, right_norms(Tagger(), *tokens))
    (note,) = scope.notes
    assert note.startswith("not compiled: about")
    assert "s of work remain" in note


@pytest.mark.full
@pytest.mark.parametrize("faster", [True, False])
def test_auto_keeps_the_faster_way(faster: bool, tokens) -> None:
    seconds = (2.0, 1.0) if faster else (1.0, 2.0)
    ticks = iter([0.0, seconds[0], 0.0, seconds[1]] * 3)
    problem, notes = Problem.of(Tagger(), losses.get("cross_entropy")), list[str]()
    with backends.get("hooks")(problem) as plain:
        evaluate = Compiled(problem, plain, notes, faster=True, check=True, clock=ticks.__next__)
        for _ in range(2):
            found = evaluate(Batch.of(*tokens), Request(rows=False))
            close(found.gradients.norms, right_norms(Tagger(), *tokens))
    assert evaluate.in_use == found.compiled == faster, notes
    assert ("it is kept: " if faster else "it is not kept: ") in notes[-1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"backend": "hooks"}, "hooks has no compiled form"),
        ({"verify": "always"}, "every batch uncompiled"),
        ({"coupling": "own-loss"}, "joint forward pass"),
    ],
)
def test_what_cannot_go_with_it_is_a_note(options: dict[str, str], word: str, tokens) -> None:
    scope = Scope(Tagger(), "cross_entropy", compile=True, **options)
    close(scope.norms(*tokens), right_norms(Tagger(), *tokens))
    assert word in scope.notes[0]


@pytest.mark.full
def test_samples_that_are_not_finite_are_left_out() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    inputs, targets = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    scope = Scope(model, smooth, backend="vmap", compile=True)
    scope.expectation("mean", inputs, targets)
    assert scope.session.compiles, scope.notes
    spoilt = targets.clone()
    spoilt[2] = torch.nan
    with pytest.warns(UserWarning, match="1 samples have no finite gradient"):
        found = scope.expectation("mean", inputs, spoilt)
    _, rows = per_sample_gradients(model, smooth, inputs, targets)
    for name, g in rows.items():
        close(found[name], g[[0, 1, 3, 4]].mean(0))


def test_a_bare_loss_compiles_beside_one_that_is_declared() -> None:
    declared = model_loss(lambda model, inputs, targets: model(inputs).sum(1))
    assert declared.of_model
    torch.manual_seed(7)
    model, inputs, targets = nn.Linear(4, 3).double(), torch.randn(5, 4), torch.randn(5, 3)
    scope = Scope(model, smooth, backend="vmap", compile=True)
    scope.norms(inputs.double(), targets.double())
    assert scope.session.compiles, scope.notes
