"""Every transform against numpy, on every kind of block, alone and in chains; and refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gradscope.blocks import DenseBlock, Gradients, Tuner, outer
from gradscope.errors import SpecError
from gradscope.stages.transforms.base import TransformScope, transforms
from tests.stages import examples
from tests.stages.examples import (
    N,
    Rows,
    bind_with,
    compare,
    each,
    everything,
    example,
    flat,
    mean,
    scaled,
)

VECTOR = {k: np.asarray(v[1] - v[0] / 2) for k, v in everything()[1].items()}
MOMENT = {k: np.asarray((np.abs(v) ** 2).mean(0)) for k, v in everything()[1].items()}


def run(
    text: str, gradients: Gradients, cuts: tuple[int, ...] = (), vector: Rows | None = None
) -> dict[str, torch.Tensor]:
    """Run a chain; unless another is given, `with=` stands for `MOMENT` or `VECTOR`."""
    usual = MOMENT if "precondition" in text else VECTOR
    return examples.run(text, gradients, cuts, usual if vector is None else vector)


def one(aggregate: Rows) -> Rows:
    return {name: values[None] for name, values in aggregate.items()}


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
    "power:p=2": each(lambda v: v * v),
    "power:p=3": each(lambda v: v * v * v),
    "power:p=2.5": each(signed_power(2.5)),
    "clamp:min=-0.3,max=0.5": each(parts(lambda v: np.minimum(np.maximum(v, -0.3), 0.5))),
    "clamp:min=0.1": each(parts(lambda v: np.where(v < 0.1, 0.1, v))),
    "clamp:max=0": each(parts(lambda v: np.where(v > 0, 0, v))),
    "threshold:value=0.4": each(lambda v: v * (np.abs(v) > 0.4)),
    "scale:by=-2.5": each(lambda v: -2.5 * v),
    "clip:max_norm=0.5": clipped(0.5),
    "clip:max_norm=4,p=1": clipped(4, 1),
    "clip:max_norm=0.7,p=inf": clipped(0.7, np.inf),
    "clip:max_norm=0.5,per=parameter": by_parameter(clipped(0.5)),
    "normalize": normalized(),
    "normalize:p=inf,per=parameter": by_parameter(normalized(np.inf)),
    "norm": lambda rows: {"norm": norms(rows, 2)},
    "norm:p=inf": lambda rows: {"norm": norms(rows, np.inf)},
    "norm:p=3": lambda rows: {"norm": norms(rows, 3)},
    "norm:per=parameter": lambda rows: {k: norms({k: v}, 2) for k, v in rows.items()},
    "norm:p=1,per=parameter": lambda rows: {k: norms({k: v}, 1) for k, v in rows.items()},
    "topk:k=1": top(1),
    "topk:k=30": top(30),
    "topk:k=100000": lambda rows: rows,
    "topk:fraction=0.2": top(round(0.2 * ENTRIES)),
    "dot:with=stored": lambda rows: {"dot": flat(rows) @ flat(one(VECTOR))[0].conj()},
    "cosine:with=stored": lambda rows: cosines(rows, VECTOR),
    "precondition:with=stored,damping=0.1": lambda rows: {
        k: v / (np.sqrt(MOMENT[k]) + 0.1) for k, v in rows.items()
    },
    "precondition:with=stored,damping=0.1,power=1": lambda rows: {
        k: v / (MOMENT[k] + 0.1) for k, v in rows.items()
    },
}
# they take the mean of the samples first, so they have no place after a reducer
STATISTICS: dict[str, Callable[[Rows], Rows]] = {
    "center": lambda rows: {k: v - v.mean(0) for k, v in rows.items()},
    "cosine:to=mean": lambda rows: cosines(rows, mean(rows)),
}
ALL = TABLE | STATISTICS
ELSEWHERE = {  # these have a file of their own
    "adam": "test_adam",
    "hvp": "test_hessian",
    "noise": "test_stochastic",
    "project": "test_project",
    "quantize": "test_stochastic",
}


def test_every_transform_has_a_case() -> None:
    own = {
        n for n in transforms.names() if transforms.get(n).make.__module__.startswith("gradscope.")
    }
    assert own == {text.partition(":")[0] for text in ALL} | ELSEWHERE.keys()


@pytest.mark.parametrize("cuts", [(), (1, 2, 4)])
@pytest.mark.parametrize("text", ALL)
def test_rows(text: str, cuts: tuple[int, ...]) -> None:
    gradients, rows = everything()
    compare(run(text, gradients, cuts), ALL[text](rows))


@pytest.mark.parametrize("text", ALL)
def test_before_and_after_a_reducer(text: str) -> None:
    gradients, rows = everything()
    right = ALL[text](rows)
    found = run(f"{text} | mean", gradients, (1, 3))
    if text == "center":
        assert all(value.abs().max() <= 1e-15 * np.abs(rows[k]).max() for k, value in found.items())
    else:
        compare(found, mean(right), 1e-10)
    spread = {k: v.var(0, ddof=1) for k, v in right.items()}
    compare(run(f"{text} | var", gradients, (1, 3)), spread, 1e-9)
    if text in TABLE:
        after = {k: v[0] for k, v in TABLE[text](one(mean(rows))).items()}
        compare(run(f"mean | {text}", gradients, (2,)), after, 1e-10)


SECOND = [
    ("clip:max_norm=4,p=1", "abs"),
    ("abs", "clip:max_norm=0.5"),
    ("clip:max_norm=0.5", "center"),
    ("center", "norm:per=parameter"),
    ("center", "square"),
    ("topk:k=30", "center"),
    ("topk:k=30", "clip:max_norm=0.5"),
    ("precondition:with=stored,damping=0.1", "clip:max_norm=0.7,p=inf"),
    ("normalize", "cosine:to=mean"),
    ("norm:per=parameter", "power:p=2.5"),
]


@pytest.mark.parametrize("text", [" | ".join(pair) for pair in SECOND])
def test_one_after_another(text: str) -> None:
    gradients, rows = everything()
    first, second = text.split(" | ")
    right = ALL[second](ALL[first](rows))
    compare(run(text, gradients, (2,)), right, 1e-9)
    spread = {k: v.var(0) for k, v in right.items()}
    compare(run(f"{text} | var:ddof=0", gradients, (2,)), spread, 1e-9)


@pytest.mark.parametrize("text", ALL)
def test_other_precisions(text: str) -> None:
    """Half-precision numbers are exact in float32, so nothing but float32's rounding is lost."""
    gradients, rows = everything(torch.float32)
    found = run(text, gradients)
    for name, right in ALL[text](rows).items():
        gap = np.linalg.norm(found[name].numpy() - right) / (np.linalg.norm(right) or 1)
        assert gap < 1e-6, (name, gap)
    for half in (torch.float16, torch.bfloat16):
        small = torch.randn(N, 4, 3, generator=torch.Generator().manual_seed(2)).to(half)
        if "stored" not in text and "fraction" not in text:
            found = run(text, Gradients({"outer": DenseBlock(small)}, torch.arange(N)))
            right = ALL[text]({"outer": small.double().numpy()})
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


def test_a_zero_second_moment_gives_zero() -> None:
    gradients = Gradients({"w": DenseBlock(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))})
    found = run("precondition:with=stored", gradients, (), {"w": np.array([0.0, 4.0])})["w"]
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
    gradients, rows = example(torch.float64, N)
    names = ["outer", "positions", "scatter", "total"]
    gradients = gradients.of({k: gradients[k] for k in names})
    rows = {k: rows[k] for k in names}

    def refuse(self: object, out: object = None) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} was made dense")

    for block in gradients.values():
        monkeypatch.setattr(type(block), "dense", refuse)
    right = mean(scaled(rows, np.minimum(1, 0.5 / norms(rows, 2))))
    preferred = frozenset({"gram", "gemm"})  # of small matrices a few dense rows would cost less
    with Tuner(preferred=preferred).active():
        compare(run("clip:max_norm=0.5 | mean", gradients), right)
        centred_mean = run("center | scale:by=3 | mean", gradients)
        assert all(value.abs().max() < 1e-13 for value in centred_mean.values())
        centred = {k: v - v.mean(0) for k, v in rows.items()}
        compare(run("center | norm", gradients), {"norm": norms(centred, 2)})
        moments = {k: (v**2).mean(0) for k, v in rows.items()}
        left = {k: v / (np.sqrt(moments[k]) + 1) for k, v in rows.items()}
        text = "precondition:with=stored,damping=1 | mean"
        compare(run(text, gradients, (), moments), mean(left))


REFUSED = [  # one for each check of an argument
    ("power:p=0", "positive"),
    ("power:p=inf", "finite"),
    ("clamp", "give min, max or both"),
    ("clamp:min=2,max=1", "above max"),
    ("clamp:min=nan", "min"),
    ("threshold:value=-1", "negative"),
    ("scale:by=inf", "finite"),
    ("clip:max_norm=-1", "positive"),
    ("clip:max_norm=1,p=nan", "positive"),
    ("norm:p=0", "positive"),
    ("norm:per=layer", "sample or parameter"),
    ("topk", "give either"),
    ("topk:k=1,fraction=0.5", "give either"),
    ("topk:k=0", "at least 1"),
    ("topk:fraction=1.5", "at most 1"),
    ("quantize:bits=1", "2 to 24"),
    ("noise:std=-1", "negative"),
    ("project:dim=0", "from 1 to 16,777,216"),
    ("project:dim=99999999999999999999", "64 bits"),
    ("project:dim=4,kind=gausian", "gaussian"),
    ("cosine", "give either"),
    ("cosine:to=mean,with=stored", "give either"),
    ("precondition:with=stored,damping=-1", "negative"),
    ("precondition:with=stored,power=0", "positive"),
    ("mean | center", "cannot follow a reducer"),
    ("mean | hvp", "cannot follow a reducer"),
    ("projekt:dim=4", "Did you mean 'project'"),
    ("moment:k=0", "at least 1"),
    ("std:ddof=-1", "negative"),
    ("quantile:q=nan", "between 0 and 1"),
    ("quantile:q=0.5,error=0", "error"),
    ("histogram:bins=1", "from 2 to 16,777,216"),
    ("histogram:low=1", "both low and high"),
    ("histogram:low=2,high=1", "below"),
    ("histogram:low=0,high=1,scale=log", "positive"),
    ("histogram:linear=0,scale=symlog", "positive"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        run(text, everything()[0])
    assert words in str(caught.value) and "^" in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, np.nan, 1j])
def test_what_is_no_second_moment(bad: complex) -> None:
    with pytest.raises(SpecError, match="not a second moment") as caught:
        run("mean | precondition:with=stored", everything()[0], (), {"w": np.array([1.0, bad])})
    assert " " * 9 + "^" in str(caught.value)


@pytest.mark.parametrize("text", ["dot", "cosine", "precondition"])
def test_a_vector_that_does_not_fit(text: str) -> None:
    gradients, rows = everything()
    vector = {k: np.abs(v[0]) for k, v in rows.items()}
    other = vector | {"outer": np.ones((3, 4))}
    with pytest.raises(SpecError, match=r"shape \(3, 4\) for 'outer'"):
        run(f"{text}:with=stored", gradients, (), other)
    del vector["scatter"]
    with pytest.raises(SpecError, match="has no 'scatter'"):
        run(f"{text}:with=stored", gradients, (), vector)


def test_every_transform_declares_its_scope_and_says_what_it_is() -> None:
    for name in transforms.names():
        factory = transforms.get(name)
        assert isinstance(factory.scope, TransformScope), name
        assert transforms.summary(name).endswith((".", ";", ",")), name


def test_first_passes_of_different_vectors_are_told_apart() -> None:
    """A quoted argument may hold the sign that parts stages."""
    texts = [f'precondition:with="v.h5:square | mean{tail}" | center' for tail in ("", " | abs")]
    bound = [bind_with(text, {}) for text in texts]
    assert [chain.first_pass.text for chain in bound] == [
        text.replace("center", "mean") for text in texts
    ]
