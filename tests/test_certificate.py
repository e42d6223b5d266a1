"""The proof catches what it must: scale, permutation, a wrong axis, a missing row, coupling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.backends.base import Evaluate, backends
from gradscope.backends.loop import loop
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.blocks.base import inner
from gradscope.core.batch import Batch
from gradscope.engine import judge
from gradscope.engine.certificate import certify
from gradscope.engine.judge import Claim, LargestError, Objective
from gradscope.engine.reference import sketch
from gradscope.errors import CertificateError, RefusedError
from gradscope.model.problem import Problem
from gradscope.scope import Scope
from gradscope.stages.losses import cross_entropy
from tests import oracle
from tests.cases import COUPLED

Mistake = Callable[[torch.Tensor], torch.Tensor]

MISTAKES: dict[str, Mistake] = {
    "mean-reduced": lambda g: g / len(g),
    "summed twice": lambda g: 2 * g,
    "permuted": lambda g: g.roll(1, 0),
    "everybody's sum": lambda g: g.sum(0, keepdim=True).expand_as(g) / len(g),
    "sign": lambda g: -g,
    "missing": torch.zeros_like,
    "one entry": lambda g: g + 1e-3 * (torch.arange(g[0].numel()).reshape(g[0].shape) == 0),
}


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def problem(request: pytest.FixtureRequest) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).to(request.param)
    return Problem.of(model, cross_entropy)


@pytest.fixture
def batch(problem: Problem) -> Batch:
    return Batch.of(torch.randn(9, 5, dtype=problem.dtype), torch.randint(0, 3, (9,)))


@contextmanager
def registered(backend: Callable) -> Iterator[None]:
    backends.register("mistaken")(backend)
    try:
        yield
    finally:
        del backends._entries["mistaken"]


def mistaken(mistake: Mistake, parameter: str) -> Callable:
    @contextmanager
    def backend(problem: Problem) -> Iterator[Evaluate]:
        with loop(problem) as right:

            def evaluate(batch: Batch, *_: object) -> Evaluation:
                found = right(batch)
                rows = found.gradients.dense()
                rows[parameter] = mistake(rows[parameter])
                blocks = {name: DenseBlock(value) for name, value in rows.items()}
                return Evaluation(found.losses, Gradients(blocks))

            yield evaluate

    return backend


def test_a_right_answer_passes(problem: Problem, batch: Batch) -> None:
    with loop(problem) as evaluate:
        _, certificate = certify(problem, "loop", evaluate, batch)
    assert certificate.completeness.error < 1e-6
    assert certificate.agreement.error < 1e-6
    assert len(set(certificate.compared)) == 3
    assert certificate.seconds > 0


@pytest.mark.parametrize("parameter", ["0.weight", "2.bias"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(problem: Problem, batch: Batch, name: str, parameter: str) -> None:
    backend = mistaken(MISTAKES[name], parameter)
    with registered(backend), backend(problem) as evaluate, pytest.raises(CertificateError) as e:
        certify(problem, "mistaken", evaluate, batch)
    assert parameter in str(e.value)


def test_a_mistake_in_a_scope_is_refused(problem: Problem, batch: Batch) -> None:
    with registered(mistaken(MISTAKES["permuted"], "0.weight")), pytest.raises(CertificateError):
        Scope(problem.model, cross_entropy, backend="mistaken").norms(batch.inputs, batch.targets)


@pytest.mark.parametrize("case", COUPLED, ids=lambda c: c.name)
def test_coupling_is_found_whatever_the_backend_says(case) -> None:
    setup = case.build()
    problem, batch = Problem.of(setup.model, setup.loss), Batch.of(setup.inputs, setup.targets)
    rows = {k: torch.zeros(len(batch), *p.shape) for k, p in problem.parameters.items()}
    claimed = Gradients({name: DenseBlock(value) for name, value in rows.items()})
    with pytest.raises(RefusedError):
        certify(problem, "loop", lambda *_: Evaluation(torch.zeros(len(batch)), claimed), batch)


def test_dropout_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    with pytest.raises(RefusedError, match=r"layer '1' \(Dropout\).*random"):
        Scope(model, "cross_entropy").norms(torch.randn(8, 5), torch.randint(0, 3, (8,)))


def test_samples_that_are_not_finite_are_counted_not_examined(problem: Problem) -> None:
    inputs = torch.randn(9, 5, dtype=problem.dtype)
    inputs[0], inputs[8] = torch.inf, torch.nan
    batch = Batch.of(inputs, torch.randint(0, 3, (9,)))
    with loop(problem) as evaluate:
        _, certificate = certify(problem, "loop", evaluate, batch)
    assert certificate.nonfinite == 2
    assert len(set(certificate.compared)) == 3 and set(certificate.compared) <= {*range(1, 8)}


class Faint(nn.Module):
    """A second layer whose share of the gradient is a millionth."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.faint = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loud(x) + 1e-6 * self.faint(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_faint_gradient_that_is_wrong_is_refused(dtype: torch.dtype) -> None:
    """By 140 %, and a millionth of the whole: far less than rounding may take of all together."""
    torch.manual_seed(0)
    problem = Problem.of(Faint().to(dtype), cross_entropy)
    batch = Batch.of(torch.randn(9, 5, dtype=dtype), torch.randint(0, 3, (9,)))
    with loop(problem) as evaluate:
        _, certificate = certify(problem, "loop", evaluate, batch)
    assert certificate.unproved == ()
    backend = mistaken(lambda g: 2.4 * g, "faint.weight")
    with (
        registered(backend),
        backend(problem) as evaluate,
        pytest.raises(CertificateError, match=r"faint\.weight"),
    ):
        certify(problem, "mistaken", evaluate, batch)


class _Widened(nn.Module):
    """Layers in float32 whose output, or last layer, is float64."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(50, 64), nn.Linear(64, 7)
        if head:
            self.last.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden.to(self.last.weight.dtype)).double()


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("backend", ["hooks", "loop"])
def test_losses_are_no_more_precise_than_what_they_are_computed_from(
    backend: str, head: bool
) -> None:
    torch.manual_seed(0)
    model = _Widened(head=head)
    with Scope(model, "cross_entropy", backend=backend) as scope:
        for _ in range(3):
            batch = torch.randn(33, 50), torch.randint(7, (33,))
            found = scope.per_sample_gradients(*batch)
            right = oracle.per_sample_gradients(model, cross_entropy, *batch)[1]
            for name, g in found.items():
                torch.testing.assert_close(g.double(), right[name], rtol=1e-4, atol=1e-6)


class _Rounded(nn.Module):
    """RMSNorm as in Llama: it computes in float32, whatever the model's precision."""

    def __init__(self, *, coupled: bool = False) -> None:
        super().__init__()
        self.weight, self.axis = nn.Parameter(torch.ones(16)), 0 if coupled else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(self.axis, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def _llama_like(*, coupled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norms = (_Rounded(), _Rounded(coupled=coupled))
    layers = (nn.Linear(5, 16), norms[0], nn.Linear(16, 16), nn.SiLU(), norms[1], nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("backend", ["hooks", "vmap", "expand", "loop"])
def test_a_layer_that_rounds_to_float32_is_no_coupling_in_float64(backend: str) -> None:
    model, x, y = _llama_like(), torch.randn(33, 5).double(), torch.randint(3, (33,))
    with Scope(model, "cross_entropy", backend=backend) as scope:
        found = scope.per_sample_gradients(x, y)
        assert scope.certificate is not None
        assert "passed: sum of 33 samples" in scope.certificate.verdict
    right = oracle.per_sample_gradients(model, cross_entropy, x, y)[1]
    for name, g in found.items():
        torch.testing.assert_close(g, right[name], rtol=1e-5, atol=1e-6)


def test_coupling_in_a_layer_that_rounds_to_float32_is_refused() -> None:
    x, y = torch.randn(33, 5).double(), torch.randint(3, (33,))
    with pytest.raises(RefusedError, match="depends on other samples"):
        Scope(_llama_like(coupled=True), "cross_entropy").norms(x, y)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_layer_that_rounds_to_float32_is_found(name: str) -> None:
    problem = Problem.of(_llama_like(), cross_entropy)
    batch = Batch.of(torch.randn(9, 5).double(), torch.randint(0, 3, (9,)))
    backend = mistaken(MISTAKES[name], "1.weight")
    with registered(backend), backend(problem) as evaluate, pytest.raises(CertificateError):
        certify(problem, "mistaken", evaluate, batch)


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the factors of float32 products to ten binary digits, as a GPU does with TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            args = [
                ((t.contiguous().view(torch.int32) + 0xFFF) & ~0x1FFF).view(torch.float32)
                if isinstance(t, Tensor) and t.dtype == torch.float32 and t.dim() > 1
                else t
                for t in args
            ]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("allowed", ["highest", "high"])
def test_products_in_tf32_are_proved_to_its_digits_where_it_is_allowed(allowed: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(12, 6), torch.arange(12) % 3
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(allowed)
    try:
        with (
            RoundedProducts(),
            Scope(model, "cross_entropy", backend="vmap") as scope,
            nullcontext() if allowed == "high" else pytest.raises(CertificateError),
        ):
            scope.norms(inputs, targets)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_a_sketch_keeps_norms_of_differences(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 300, 401, generator=draw, dtype=dtype)
    assert len(sketch(a)) < a.numel() / 20
    torch.testing.assert_close(sketch(a) - sketch(b), sketch(a - b), atol=1e-4, rtol=1e-4)
    few = torch.zeros_like(a)
    few[3, 5], few[7, 11] = 2.0, -1.5
    for t in (a - b, few):
        right = float(torch.linalg.vector_norm(t))
        assert float(torch.linalg.vector_norm(sketch(t))) == pytest.approx(right, rel=0.08)


DIRECTION = torch.tensor([0.0, 1.0])
SIZES = {"right": 1.0, "kinked": 1.0, "wrong": 1.0, "tiny": 1e-7, "lost": 1.0, "unused": 0.0}
GAPS = {
    "right": 1e-6,
    "kinked": 0.02,
    "wrong": 0.03,
    "tiny": 1e-7,
    "lost": float("nan"),
    "unreached": 1.0,
}


def test_rounding_answers_for_as_much_as_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(nn.Linear(1, 1), cross_entropy)
    objective = Objective.in_one_batch(Batch.of(torch.zeros(1, 1)), torch.ones(1))

    def refuse(*_: object) -> Any:
        raise RefusedError("the model cannot be copied")

    monkeypatch.setattr(judge, "_in_float64", refuse)
    monkeypatch.setattr(judge, "computed_in", lambda *_: torch.float32)
    monkeypatch.setattr(judge, "nearby", lambda *_: [problem])

    def judged(*names: str, **spread: float) -> LargestError:
        right = {name: torch.tensor([SIZES.get(name, 0.0), 0.0]) for name in names}
        rows = {k: DenseBlock((v + GAPS.get(k, 0.0) * DIRECTION)[None]) for k, v in right.items()}
        moved = {name: value + spread.get(name, 0.0) * DIRECTION for name, value in right.items()}
        again = {name: value + 1e-7 * DIRECTION for name, value in right.items()}
        monkeypatch.setattr(judge, "gradients", lambda *_: (torch.zeros(1), dict(moved)))
        claim = Claim.of_one(Gradients(rows), torch.ones(1))
        return judge.compare_claim(problem, claim, objective, right, lambda: again)

    few = ("right", "kinked", "tiny", "unused")
    assert (judged(*few).parameter, judged(*few).passed) == ("kinked", False)
    assert judged(*few, kinked=0.01).passed
    assert judged(*few, kinked=0.01).small == ("tiny",)  # of that nothing is known
    assert not judged(*few, kinked=0.005).passed
    assert judged(*few, kinked=0.5).small == ("tiny", "kinked")
    every = judged(*SIZES, kinked=0.01, wrong=0.01, lost=1.0)
    assert (every.parameter, every.passed) == ("lost", False)
    missing = judged("unreached")  # autograd has no gradient of what has one
    assert (missing.error, missing.passed) == (1.0, False)


def test_inner_products_of_many_entries_keep_their_digits() -> None:
    rows = torch.randn(2, 3_000_001, generator=torch.Generator().manual_seed(0))
    right = rows.double() @ rows[0].double()
    torch.testing.assert_close(inner(rows, rows[0])[0].double(), right[0], atol=0, rtol=1e-6)
    few = torch.randn(3, 5, dtype=torch.complex64)
    torch.testing.assert_close(inner(few, few[0]), few @ few[0])


class ScaleInvariant(nn.Module):
    """Its losses do not depend on the scale. The gradient is zero, but for rounding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x * self.scale, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["hooks", "vmap", "expand", "loop"])
def test_a_gradient_that_is_rounding_alone_is_no_coupling(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ScaleInvariant(dtype)
    for seed in range(3):
        x, y = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        with Scope(model, "mse", backend=backend) as scope:
            found = scope.per_sample_gradients(x, y)["scale"]
        assert found.abs().max() < 100 * torch.finfo(dtype).eps
