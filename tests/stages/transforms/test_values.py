"""Every transform of numbers against numpy, on every kind of block, alone and in chains."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients, Tuner, outer
from gradscope.stages.transforms import Vector, transforms
from tests.stages.transforms.rows import (
    N,
    Rows,
    compare,
    each,
    everything,
    flat,
    mean,
    one,
    real,
    run,
    scaled,
    stored,
    times,
)

__all__ = ["stored"]

CUTS = [(), (2,), (1, 2, 4)]
VECTOR = {k: np.asarray(v[1] - v[0] / 2) for k, v in everything()[1].items()}
MOMENT = {k: np.asarray((np.abs(v) ** 2).mean(0)) for k, v in everything()[1].items()}


def norms(rows: Rows, p: float) -> np.ndarray:
    return np.array([np.linalg.norm(row, p) for row in flat(rows)])


def clipped(level: float, p: float = 2) -> Callable[[Rows], Rows]:
    return lambda rows: scaled(rows, np.minimum(1, level / norms(rows, p)))


def normalized(p: float = 2) -> Callable[[Rows], Rows]:
    return lambda rows: scaled(rows, 1 / norms(rows, p))


def by_parameter(fn: Callable[[Rows], Rows]) -> Callable[[Rows], Rows]:
    return lambda rows: {k: fn({k: v})[k] for k, v in rows.items()}


def parts(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Apply `fn` to real and imaginary parts."""
    return lambda v: fn(v.real) + 1j * fn(v.imag) if np.iscomplexobj(v) else fn(v)


def sign(v: np.ndarray) -> np.ndarray:
    return v / np.where(v == 0, 1, np.abs(v))


def signed_power(p: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda v: sign(v) * np.abs(v) ** p


def top(count: int) -> Callable[[Rows], Rows]:
    """Keep the largest, one by one."""

    def apply(rows: Rows) -> Rows:
        whole = flat(rows)
        kept = np.zeros_like(whole)
        for row, target in zip(whole, kept, strict=True):
            for place in sorted(range(len(row)), key=lambda j: (-abs(row[j]), j))[:count]:
                target[place] = row[place]
        cuts = np.cumsum([v[0].size for v in rows.values()])[:-1]
        cut = zip(rows.items(), np.split(kept, cuts, axis=1), strict=True)
        return {
            k: (part if np.iscomplexobj(v) else part.real).reshape(v.shape) for (k, v), part in cut
        }

    return apply


def cosines(rows: Rows, vector: Rows) -> Rows:
    whole, other = flat(rows), flat(one(vector))[0]
    sizes = np.linalg.norm(whole, axis=1) * np.linalg.norm(other)
    return {"cosine": (whole @ other.conj()).real / sizes}


ENTRIES = flat(everything()[1]).shape[1]

# the stage, and the same on {name: (n, *shape)}
TABLE: dict[str, Callable[[Rows], Rows]] = {
    "identity": lambda rows: rows,
    "abs": each(np.abs),
    "square": each(lambda v: np.abs(v) ** 2),
    "sign": each(sign),
    "power:p=1": lambda rows: rows,
    "power:p=2": each(lambda v: v * v),
    "power:p=3": each(lambda v: v * v * v),
    "power:p=0.5": each(signed_power(0.5)),
    "power:p=2.5": each(signed_power(2.5)),
    "clamp:min=-0.3,max=0.5": each(parts(lambda v: np.minimum(np.maximum(v, -0.3), 0.5))),
    "clamp:min=0.1": each(parts(lambda v: np.where(v < 0.1, 0.1, v))),
    "clamp:max=0": each(parts(lambda v: np.where(v > 0, 0, v))),
    "threshold:value=0.4": each(lambda v: v * (np.abs(v) > 0.4)),
    "scale:by=-2.5": each(lambda v: -2.5 * v),
    "clip:max_norm=0.5": clipped(0.5),
    "clip:max_norm=4,p=1": clipped(4, 1),
    "clip:max_norm=0.7,p=inf": clipped(0.7, np.inf),
    "clip:max_norm=2,p=3": clipped(2, 3),
    "clip:max_norm=0.5,per=parameter": by_parameter(clipped(0.5)),
    "clip:max_norm=0.5,p=inf,per=parameter": by_parameter(clipped(0.5, np.inf)),
    "normalize": normalized(),
    "normalize:p=1": normalized(1),
    "normalize:p=inf,per=parameter": by_parameter(normalized(np.inf)),
    "normalize:per=parameter": by_parameter(normalized()),
    "norm": lambda rows: {"norm": norms(rows, 2)},
    "norm:p=1": lambda rows: {"norm": norms(rows, 1)},
    "norm:p=inf": lambda rows: {"norm": norms(rows, np.inf)},
    "norm:p=3": lambda rows: {"norm": norms(rows, 3)},
    "norm:per=parameter": lambda rows: {k: norms({k: v}, 2) for k, v in rows.items()},
    "norm:p=1,per=parameter": lambda rows: {k: norms({k: v}, 1) for k, v in rows.items()},
    "topk:k=1": top(1),
    "topk:k=30": top(30),
    "topk:k=100000": lambda rows: rows,
    "topk:fraction=0.2": top(round(0.2 * ENTRIES)),
    "topk:fraction=1": lambda rows: rows,
    "dot:with=stored": lambda rows: {"dot": flat(rows) @ flat(one(VECTOR))[0].conj()},
    "cosine:with=stored": lambda rows: cosines(rows, VECTOR),
    "precondition:with=stored": lambda rows: {k: v / np.sqrt(MOMENT[k]) for k, v in rows.items()},
    "precondition:with=stored,damping=0.1": lambda rows: {
        k: v / (np.sqrt(MOMENT[k]) + 0.1) for k, v in rows.items()
    },
}
# they take the mean of the samples first, so they have no place after a reducer
STATISTICS: dict[str, Callable[[Rows], Rows]] = {
    "center": lambda rows: {k: v - v.mean(0) for k, v in rows.items()},
    "cosine:to=mean": lambda rows: cosines(rows, mean(rows)),
}
ALL = TABLE | STATISTICS
ELSEWHERE = {  # these have a file of their own
    "hvp": "test_hessian",
    "noise": "test_stochastic",
    "project": "test_projections",
    "quantize": "test_stochastic",
}


def test_every_transform_has_a_case() -> None:
    own = {n for n in transforms.names() if transforms.get(n).__module__.startswith("gradscope.")}
    assert own == {text.partition(":")[0] for text in ALL} | ELSEWHERE.keys()


@pytest.fixture(autouse=True)
def vectors(request: pytest.FixtureRequest, stored: Callable[[Rows], None]) -> None:
    text = request.node.callspec.params.get("text", "") if hasattr(request.node, "callspec") else ""
    stored(MOMENT if "precondition" in text else VECTOR)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("text", ALL)
def test_rows(text: str, cuts: tuple[int, ...]) -> None:
    gradients, rows = everything()
    compare(run(text, gradients, cuts), ALL[text](rows))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("text", ALL)
def test_mean(text: str, cuts: tuple[int, ...]) -> None:
    gradients, rows = everything()
    found = run(f"{text} | mean", gradients, cuts)
    if text == "center":
        assert all(value.abs().max() <= 1e-15 * np.abs(rows[k]).max() for k, value in found.items())
    else:
        compare(found, mean(ALL[text](rows)), 1e-10)


@pytest.mark.parametrize("text", ALL)
def test_variance(text: str) -> None:
    gradients, rows = everything()
    right = {k: v.var(0, ddof=1) for k, v in ALL[text](rows).items()}
    compare(run(f"{text} | var", gradients, (1, 3)), right, 1e-9)


@pytest.mark.parametrize("text", TABLE)
def test_after_a_reducer(text: str) -> None:
    gradients, rows = everything()
    right = {k: v[0] for k, v in TABLE[text](one(mean(rows))).items()}
    compare(run(f"mean | {text}", gradients, (2,)), right, 1e-10)


SECOND = [
    ("clip:max_norm=4,p=1", "abs"),
    ("abs", "clip:max_norm=0.5"),
    ("square", "normalize:p=1"),
    ("clip:max_norm=0.5", "center"),
    ("center", "clip:max_norm=0.5"),
    ("center", "norm:per=parameter"),
    ("center", "square"),
    ("topk:k=30", "center"),
    ("topk:k=30", "clip:max_norm=0.5"),
    ("topk:k=30", "norm:p=1"),
    ("precondition:with=stored", "norm"),
    ("precondition:with=stored", "clip:max_norm=0.7,p=inf"),
    ("normalize", "cosine:to=mean"),
    ("abs", "dot:with=stored"),
    ("norm:per=parameter", "power:p=0.5"),
]


@pytest.mark.parametrize("tail", ["", " | mean", " | var:ddof=0"])
@pytest.mark.parametrize("text", [" | ".join(pair) for pair in SECOND])
def test_one_after_another(text: str, tail: str) -> None:
    gradients, rows = everything()
    if text.endswith("center") and tail == " | mean":
        tail = " | var:ddof=0"  # the mean is rounding
    first, second = text.split(" | ")
    right = ALL[second](ALL[first](rows))
    fn = {"": lambda v: v, " | mean": lambda v: v.mean(0), " | var:ddof=0": lambda v: v.var(0)}
    compare(run(text + tail, gradients, (2,)), {k: fn[tail](v) for k, v in right.items()}, 1e-9)


@pytest.mark.parametrize("text", ALL)
def test_float32(text: str) -> None:
    gradients, _ = everything(torch.float32)
    exact = {k: v.astype(complex if np.iscomplexobj(v) else float) for k, v in dense32().items()}
    tails = [("", lambda v: v), (" | mean", lambda v: v.mean(0))]
    for tail, fn in tails[: 1 if text == "center" else 2]:
        found = run(text + tail, gradients)
        for name, value in ALL[text](exact).items():
            right, ours = fn(value), found[name].numpy()
            gap = np.linalg.norm(ours - right) / (np.linalg.norm(right) or 1)
            assert gap < 1e-6, (name, gap)


def dense32() -> Rows:
    """The float32 factors multiplied out in float64."""
    gradients, _ = everything(torch.float32)
    wide = {
        k: b.to(torch.complex128 if b.dtype.is_complex else torch.float64).dense()
        for k, b in gradients.items()
    }
    return {k: v.numpy() for k, v in wide.items()}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", ALL)
def test_half_precision_is_computed_in_float32(text: str, half: torch.dtype) -> None:
    """Half-precision numbers are exact in float32, so nothing but float32's rounding is lost."""
    torch.manual_seed(2)
    small = torch.randn(N, *VECTOR["outer"].shape).to(half)
    gradients = Gradients({"outer": DenseBlock(small)}, torch.arange(N))
    rows = {"outer": small.double().numpy()}
    if text == "topk:fraction=0.2":
        right = top(round(0.2 * 12))(rows)
    elif ":with=stored" in text and "precondition" not in text:
        part = VECTOR["outer"].ravel()
        dots = flat(rows) @ part
        sizes = np.linalg.norm(flat(rows), axis=1) * np.linalg.norm(part)
        right = {"dot": dots} if text.startswith("dot") else {"cosine": dots / sizes}
    else:
        right = ALL[text](rows)
    found = run(text, gradients)
    compare({k: v.double() for k, v in found.items()}, right, 1e-6)


@pytest.mark.parametrize("text", ALL)
def test_a_zero_gradient(text: str) -> None:
    """Zero, or what the definition says of zero; never NaN."""
    shapes = {k: v.shape[1:] for k, v in everything()[1].items() if not k.startswith("complex")}
    zero = {k: DenseBlock(torch.zeros(2, *s, dtype=torch.float64)) for k, s in shapes.items()}
    found = run(text, Gradients(zero, torch.arange(2)))
    value = 0.1 if text == "clamp:min=0.1" else 0.0
    for name, values in found.items():
        assert torch.equal(values, torch.full_like(values, value)), name


def test_a_zero_second_moment_gives_zero(stored: Callable[[Rows], None]) -> None:
    stored({"w": np.array([0.0, 4.0])})
    gradients = Gradients({"w": DenseBlock(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))})
    found = run("precondition:with=stored", gradients)["w"]
    assert torch.equal(found, torch.tensor([[0.0, 0.5], [0.0, 1.5]]))


def test_equal_magnitudes_are_kept_in_order() -> None:
    values = torch.tensor([[1.0, -2.0, 2.0, 0.5], [3.0, 3.0, -3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    gradients = Gradients({"a": DenseBlock(values), "b": DenseBlock(-values)})
    found = run("topk:k=3", gradients)
    a = torch.tensor([[0.0, -2.0, 2.0, 0.0], [3.0, 3.0, -3.0, 0.0], [0.0] * 4])
    b = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4])
    assert torch.equal(found["a"], a) and torch.equal(found["b"], b)


@pytest.mark.parametrize("text", ["topk:k=1", "threshold:value=0.5", "clamp:max=1", "normalize"])
def test_a_nan_is_never_lost(text: str) -> None:
    values = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, 3.0]])
    found = run(text, Gradients({"w": DenseBlock(values)}))["w"]
    assert bool(found[0].isnan().any()) and bool(found[1].isfinite().all())


def test_norms_do_not_overflow() -> None:
    values = torch.tensor([[1e30, 1e30]])
    found = run("norm:p=3", Gradients({"w": DenseBlock(values)}))["norm"]
    torch.testing.assert_close(found, torch.tensor([2 ** (1 / 3) * 1e30]))


def test_clip_and_mean_of_real_gradients_never_form_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scope promises: neither norms of large outer blocks nor their sums are dense."""
    monkeypatch.setattr(outer, "KEPT", 0)
    gradients, rows = real()
    names = ["outer", "positions", "table", "tied"]
    gradients = gradients.of({k: gradients[k] for k in names})
    rows = {k: rows[k] for k in names}

    def refuse(self: object, out: object = None) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} was made dense")

    for block in gradients.values():
        monkeypatch.setattr(type(block), "dense", refuse)
    right = mean(scaled(rows, np.minimum(1, 0.5 / norms(rows, 2))))
    preferred = frozenset({"gram", "gemm"})  # of small matrices a few dense rows would cost less
    with Tuner(preferred=preferred).active():
        _never_formed(gradients, rows, right, monkeypatch)


def _never_formed(
    gradients: Gradients, rows: Rows, right: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(run("clip:max_norm=0.5 | mean", gradients), right)
    centred_mean = run("center | scale:by=3 | mean", gradients)
    assert all(value.abs().max() < 1e-13 for value in centred_mean.values())
    centred = {k: v - v.mean(0) for k, v in rows.items()}
    compare(run("center | norm", gradients), {"norm": norms(centred, 2)})
    moments = {k: (v**2).mean(0) for k, v in rows.items()}
    tensors = {k: torch.from_numpy(v) for k, v in moments.items()}
    left = {k: times(np.ones(N), v) / (np.sqrt(moments[k]) + 1) for k, v in rows.items()}
    monkeypatch.setattr("gradscope.stages.chains.binding.stored_vector", lambda _: Vector(tensors))
    compare(run("precondition:with=stored,damping=1 | mean", gradients), mean(left))
