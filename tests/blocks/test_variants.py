"""The tuner's choice among kernel variants, and the variants of products against float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.blocks import OuterBlock, Tuner, outer, unmeasured
from gradscope.blocks.variants import Variant, fastest
from gradscope.process.cache import Cache


class Clock:
    """Variants that say how many milliseconds they took, and count how often they ran."""

    def __init__(self, folder: Path | None = None, **seconds: float) -> None:
        self.seconds, self.runs = seconds, dict.fromkeys(seconds, 0)
        self.folder = folder
        self.tuner = self.another()

    def another(self, **options: Any) -> Tuner:
        """A tuner as another process would have it."""
        cache = None if self.folder is None else Cache(self.folder)
        return Tuner(**{"timed": self._timed, "cache": lambda device: cache, **options})

    def _timed(self, run, device: torch.device) -> tuple[float, Tensor]:
        answer = run()
        return self.seconds[self.last] / 1000, answer

    def asked(self, tuner: Tuner | None = None, n: int = 8, **predicted: float | None) -> str:
        """What is chosen; None is predicted of what is optional."""

        def variant(k: int, name: str) -> Variant:
            def run() -> Tensor:
                self.runs[name] += 1
                self.last = name
                return torch.tensor(float(k))

            expected = predicted.get(name, 1.0)
            return Variant(1.0 if expected is None else expected, run, optional=expected is None)

        table = {name: variant(k, name) for k, name in enumerate(self.seconds)}
        with (tuner or self.tuner).active():
            return list(self.seconds)[int(fastest("r", {"n": n}, torch.zeros(1), table))]


def test_the_fastest_is_kept() -> None:
    clock = Clock(slow=3.0, fast=1.0, middling=2.0)
    assert clock.asked() == "fast"
    assert clock.runs == {"slow": 3, "fast": 4, "middling": 3}
    assert [clock.asked(n=n) for n in (5, 8)] == ["fast", "fast"]
    assert clock.runs == {"slow": 3, "fast": 6, "middling": 3}
    (choice,) = clock.tuner.chosen.values()
    assert choice.to_json() == {
        "request": "r, n≤8, float32, cpu",
        "way": "fast",
        "seconds": {"slow": 0.003, "fast": 0.001, "middling": 0.002},
        "measured": True,
    }
    assert clock.tuner.freeze() == {"r, n≤8, float32, cpu": "fast"}


def test_long_calls_are_tried_once() -> None:
    clock = Clock(a=2000.0, b=1000.0)
    assert clock.asked() == "b"
    assert clock.runs == {"a": 1, "b": 2}


def test_another_size_is_another_choice() -> None:
    clock = Clock(a=1.0, b=2.0)
    clock.asked(n=8)
    clock.seconds["a"] = 3.0
    assert clock.asked(n=9) == "b"
    assert len(clock.tuner.chosen) == 2


def test_only_what_is_a_tenth_faster_replaces_the_default() -> None:
    for took, chosen in ((0.95, "a"), (0.85, "b")):
        assert Clock(a=1.0, b=took).asked(a=0.5) == chosen


def test_an_optional_kernel_is_taken_only_where_it_was_measured() -> None:
    clock = Clock(a=2.0, b=1.0)
    assert clock.asked(clock.another(measures=False), b=None) == "a"
    with unmeasured():
        assert clock.asked(b=None) == "a"
    assert clock.asked(b=None) == "b"


@pytest.mark.parametrize(
    ("predicted", "runs"),
    [
        ({"a": 100.0}, {"a": 0, "b": 4}),  # hopeless
        ({"a": 2e-6, "b": 1e-6}, {"a": 0, "b": 1}),  # not worth measuring
    ],
)
def test_what_is_not_tried(predicted: dict[str, float], runs: dict[str, int]) -> None:
    clock = Clock(a=1.0, b=2.0)
    assert clock.asked(**predicted) == "b"
    assert clock.runs == runs


def test_without_measuring_arithmetic_chooses() -> None:
    clock = Clock(a=1.0, b=2.0)
    outermost = Tuner(measures=False)
    with outermost.active():  # the outermost decides
        assert clock.asked(b=0.5) == "b"
    (choice,) = outermost.chosen.values()
    assert (choice.variant, choice.seconds) == ("b", {"a": 1.0, "b": 0.5})
    assert not choice.measured and outermost.freeze() == {}
    assert clock.runs == {"a": 0, "b": 1}
    assert not clock.tuner.chosen
    with clock.tuner.active(), unmeasured():
        assert clock.asked(b=0.5) == "b"
    assert not clock.tuner.chosen
    assert clock.asked(b=0.5) == "a"


def test_another_process_goes_by_what_the_first_measured(tmp_path: Path) -> None:
    clock = Clock(tmp_path, a=1.0, b=2.0)
    assert clock.asked() == "a"
    clock.seconds, runs = {"a": 2.0, "b": 1.0}, dict(clock.runs)
    other = clock.another()
    assert clock.asked(other) == "a"
    assert clock.runs == runs | {"a": runs["a"] + 1}  # nothing was tried
    assert other.freeze() == {"r, n≤8, float32, cpu": "a"}
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text(encoding="utf-8"))["fact"]["way"] == "a"
    for text in ("", "[" * 10**5, '{"fact": 3}', file.read_text("utf-8").replace('"a"', '"gone"')):
        file.write_text(text, encoding="utf-8")
        assert clock.asked(clock.another()) == "b"  # measured again
        assert clock.asked(clock.another()) == "b"  # and kept
    assert clock.asked(clock.another(measures=False), b=2.0) == "a"


def test_what_a_busy_machine_shows_decides_nothing(tmp_path: Path) -> None:
    clock, moments = Clock(tmp_path, a=1.0, b=0.1), iter(range(1, 100))
    busy = clock.another(timed=lambda run, device: (next(moments) ** 2 / 1e4, run()))
    assert clock.asked(busy, a=0.5) == "a"
    assert clock.runs == {"a": 10, "b": 9}
    assert not any(tmp_path.iterdir()) and busy.freeze() == {}
    assert clock.asked(clock.another(), a=0.5) == "b"


def test_choices_that_are_given_stand() -> None:
    clock = Clock(a=1.0, b=2.0)
    clock.asked()
    clock.seconds = {"a": 2.0, "b": 1.0}
    choices = clock.tuner.freeze()
    kept = clock.another(measures=False, kept=choices)
    assert clock.asked(kept, b=0.5) == "a"
    assert clock.asked(kept, n=100, b=0.5) == "b"  # not known then: by arithmetic
    assert kept.freeze() == choices == clock.tuner.freeze()
    assert clock.asked(n=100, b=0.5) == "b"  # settled, the first one measures nothing either


def test_what_only_a_tried_variant_asked_for_is_no_choice() -> None:
    clock = Clock(a=9.0, b=2.0)

    def outer() -> Tensor:
        clock.asked()
        clock.last = "a"
        return torch.zeros(1)

    def run() -> Tensor:
        clock.last = "b"
        return torch.ones(1)

    variants = {"asks": Variant(1.0, outer), "asks nothing": Variant(1.0, run)}
    with clock.tuner.active():
        assert fastest("outer", {}, torch.zeros(1), variants).item()
    assert set(clock.tuner.chosen) == {"r, n≤8, float32, cpu", "outer, float32, cpu"}
    assert clock.tuner.freeze() == {"outer, float32, cpu": "asks nothing"}


def test_a_preferred_variant_is_taken_also_for_a_proof() -> None:
    clock = Clock(a=1.0, b=2.0)
    with Tuner(preferred=frozenset({"b"})).active():
        assert clock.asked() == "b"
        with unmeasured():
            assert clock.asked() == "b"
    assert clock.asked() == "a"


def preferring(name: str):
    return Tuner(preferred=frozenset({name})).active()


@pytest.mark.parametrize("first", ["samples", "positions"])
@pytest.mark.parametrize("variant", ["gemm", "oneDNN"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_contracted(variant: str, k: int, dtype: torch.dtype, first: str) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(5, k, 4, c).to(dtype) for c in (7, 3))
    if first == "positions":
        left, right = (f.transpose(0, 2).contiguous().transpose(0, 2) for f in (left, right))
    with preferring(variant):
        found = outer.contracted(left, right)
    exact = torch.einsum("nktr,nktc->krc", left.cdouble(), right.cdouble())
    torch.testing.assert_close(found.cdouble(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["together", "one by one"])
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_separate(
    variant: str, axes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample by sample, in whatever order the axes lie in memory; into a buffer, too."""
    monkeypatch.setattr(outer, "WORTH_A_CALL", 0)
    torch.manual_seed(0)
    given = torch.randn(6, 9, 4, dtype=dtype), torch.randn(6, 9, 5, dtype=dtype)
    left, right = (f.permute(axes).contiguous().permute(axes) for f in given)
    out = torch.full((6, 4, 5), torch.nan, dtype=dtype)
    with preferring(variant):
        found = [outer.separate(left, right), outer.separate(left, right, out), out]
    for product in found:
        torch.testing.assert_close(product, torch.einsum("mtr,mtc->mrc", *given))


@pytest.mark.parametrize("t", [1, 127, 131, 260])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_ghost_norms_of_many_positions(t: int, dtype: torch.dtype) -> None:
    torch.manual_seed(t)
    left, right = torch.randn(3, t, 5, dtype=dtype), torch.randn(3, t, 4, dtype=dtype)
    dense = torch.einsum("mtr,mtc->mrc", left, right)
    torch.testing.assert_close(outer.ghost(left, right), dense.abs().square().sum((1, 2)))


@pytest.mark.parametrize("variant", ["gram", "dense"])
def test_norms_of_an_outer_product_both_ways(variant: str) -> None:
    torch.manual_seed(1)
    block = OuterBlock(torch.randn(6, 2, 9, 4).double(), torch.randn(6, 2, 9, 5).double(), (8, 5))
    with preferring(variant):
        found = block.squared_norms()
    torch.testing.assert_close(found, block.dense().square().sum((1, 2)))


def test_kernels_without_a_derivative_are_not_taken_where_one_is_asked_for() -> None:
    left = torch.randn(6, 1, 4, 8, requires_grad=True)
    right, wanted = torch.randn(6, 1, 4, 5), torch.randn(1, 8, 5)
    with preferring("oneDNN"):
        (outer.contracted(left, right) * wanted).sum().backward()
        batched = torch.func.vmap(outer.contracted)(left.detach()[None], right[None])
    assert left.grad is not None
    torch.testing.assert_close(left.grad, torch.einsum("nktc,krc->nktr", right, wanted))
    exact = torch.einsum("nktr,nktc->krc", left.detach(), right)
    torch.testing.assert_close(batched[0], exact)
