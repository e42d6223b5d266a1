"""The expand backend's interpreter: its rules, what a program means, writes and signals."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from gradscope.backends.expand import mode, views
from gradscope.backends.expand.facts import facts_of, rules
from gradscope.backends.expand.mode import Interpreter
from gradscope.backends.expand.tensor import (
    Expansion,
    PerSample,
    SamplesDiverge,
    SharedWrite,
    WriteScope,
    leaves,
    tensors_of,
)
from gradscope.errors import UnsupportedError
from tests.backends.expand_examples import EXAMPLES, VIEWS, Maker, N

# Their results hold whatever was in memory, or torch has no like of them for one sample.
OTHERWISE = {
    *(f"new_{name}.default" for name in ("empty", "zeros", "ones", "full", "empty_strided")),
    "_sparse_coo_tensor_with_dims_and_tensors.default",
}
LEVELS = list(WriteScope)
APPLIED: set[str] = set()  # rules that have given an answer


def operator(key):
    name, _, overload = key.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload)


class Noting:
    """The rules, noting those that apply."""

    def find(self, key):
        rule = rules.find(key)

        def noted(*args, **kwargs):
            found = rule(*args, **kwargs)
            if found is not NotImplemented:
                APPLIED.add(key)
            return found

        return None if rule is None else noted


def answers(func, arguments, of, around):
    """What a function gives, with the gradients by its arguments: tensors, none of them None."""
    last = arguments[-1] if isinstance(arguments[-1], dict) else {}
    kwargs = {k: of(t, tracked=False) if isinstance(t, Tensor) else t for k, t in last.items()}
    given = leaves(of, arguments[: len(arguments) - bool(kwargs)])
    floats = [t for t in tensors_of(given, {}) if t.requires_grad]
    with around:
        copies = leaves(lambda t: t * 1 if t.requires_grad else t, given)
        found = func(*copies, **kwargs)
    found = [t for t in (found if isinstance(found, tuple | list) else [found]) if t is not None]
    tracked = [t for t in found if t.requires_grad]
    if "native" in str(func):  # of statistics that are differentiated there is another formula
        tracked = tracked[:1]
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(N, *t.shape, dtype=t.dtype, generator=generator) for t in tracked)
    weights = [of(PerSample(t), tracked=False) for t in drawn]
    with around:
        slopes = (
            torch.autograd.grad(tracked, floats, weights, allow_unused=True, materialize_grads=True)
            if tracked and floats
            else ()
        )
        return [*(t.detach() for t in found), *slopes]


def judged(key, example, own):
    """Hold an operator on all samples against torch's on one after the other."""

    def leaf(t, tracked=True, sample=None):
        tracked = tracked and (t.is_floating_point() or t.is_complex())
        if not isinstance(t, PerSample):
            return t
        if sample is None:
            return PerSample(t.raw, requires_grad=tracked)
        return t.raw[sample].clone().requires_grad_(tracked)

    def made():
        torch.manual_seed(0)
        return example(Maker(own))

    func, samples = operator(key), Expansion(N)
    for level in WriteScope:  # as the backend tries them
        try:
            ours = answers(func, made(), leaf, Interpreter(N, level))
            break
        except SharedWrite:
            pass
    rows = [answers(func, made(), partial(leaf, sample=i), nullcontext()) for i in range(N)]
    for a, column in zip(ours, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(samples.of(a), torch.stack(column), rtol=1e-9, atol=1e-11)


def test_a_rule_does_what_torch_does_for_each_sample(monkeypatch):
    """Every rule applies somewhere: those of backward passes in the gradients of an example."""
    monkeypatch.setattr(mode, "rules", Noting())
    with torch.random.fork_rng():
        for name, examples in EXAMPLES.items():
            key = name if "." in name else f"{name}.default"
            for example in examples:
                for own in (False, True):
                    APPLIED.discard(key)
                    judged(key, example, own)
                    assert key in APPLIED or rules.find(key) is None, key
    assert {*rules.names()} - OTHERWISE <= APPLIED


def test_a_frequent_view_is_the_view_of_each_sample():
    """Also of memory with gaps and of transposed memory; with the strides of one sample's view."""
    assert VIEWS.keys() == views._frequent.keys()
    for key, examples in VIEWS.items():
        func = operator(key)
        for example, own in product(examples, (False, True)):
            judged(key, example, own)
            base, *rest = example(Maker(own))
            for raw in (base.raw, spaced(base.raw), turned(base.raw)):
                if "view" in key and not raw.is_contiguous():
                    continue
                with Interpreter(N, WriteScope.NOTHING):
                    ours = func(PerSample(raw), *rest)
                right = func(raw[1], *rest)
                for a, b in zip(
                    *([t] if isinstance(t, Tensor) else t for t in (ours, right)), strict=True
                ):
                    assert a.raw.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
                    assert torch.equal(a.raw[1], b)
                    assert a.raw[1].data_ptr() == b.data_ptr() and a.shape == b.shape
                    used = [k for k, size in enumerate(b.shape) if size > 1 and b.numel()]
                    assert all(a.stride(k) == b.stride(k) for k in used)
                    assert a.shared == (raw.stride(0) == 0)


def spaced(raw):
    """The same values in memory with gaps."""
    return torch.stack([raw, raw], -1)[..., 0]


def turned(raw):
    """The same values with the samples last in memory."""
    return raw.movedim(0, -1).contiguous().movedim(-1, 0)


OUT_OF_RANGE = {
    "transpose.int": (0, -3),
    "permute.default": ([0, -3],),
    "unsqueeze.default": (-4,),
    "squeeze.dim": (-3,),
    "select.int": (-3, 0),
    "slice.Tensor": (-3,),
    "unbind.int": (-3,),
    "split.Tensor": (2, -3),
    "unsafe_split.Tensor": (2, -3),
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_frequent_view_has_no_axis_of_samples(key):
    x = PerSample(torch.randn(N, 1, 1))
    with Interpreter(N, WriteScope.NOTHING), pytest.raises(IndexError, match="out of range"):
        operator(key)(x, *OUT_OF_RANGE[key])


@pytest.mark.parametrize("key", ["flip.default", "roll.default"])
def test_no_axes_at_all_is_not_all_axes(key):
    x = PerSample(torch.randn(N, 4, 6))
    args = (x, []) if key == "flip.default" else (x, [1], [])
    assert rules.get(key)(Expansion(N), *args) is NotImplemented


def test_rules_leave_axes_out_of_range_to_torch():
    x = PerSample(torch.randn(N, 4))
    with Interpreter(N, WriteScope.NOTHING), pytest.raises(IndexError):
        x.sum(-2)


def interpreted(program, *tensors, own=WriteScope.NOTHING):
    """The result (n, ...) of a program on tensors (n, ...)."""
    wrapped = [PerSample(t.clone()) for t in tensors]
    with Interpreter(N, own):
        return program(*wrapped).physical


def by_sample(program, *tensors):
    return torch.stack([program(*(t[i].clone() for t in tensors)) for i in range(N)])


PROGRAMS = {
    "type promotion of a number": lambda x: x.float().sum() * x.double() + x.sum() * 2.5,
    "a number of wider dtype": lambda x: x.float() * x.sum(),
    "write to a transposed view": lambda x: (x.T.mul_(x[:, 0].clone()), x)[1],
    "write to a slice of a view": lambda x: (x.view(-1)[1::2].fill_(0.5), x)[1],
    "write a number": lambda x: (x[0].fill_(x.sum()), x)[1],
    "assign by mask": lambda x: (x.__setitem__(x > 0, x.mean()), x)[1],
    "assign by positions": lambda x: (x.__setitem__((x.argmax(0), [0, 1]), 0.0), x)[1],
    "reshape in place": lambda x: x.clone().unsqueeze_(0).transpose_(1, 2).squeeze_(0) * 2,
    "new memory": lambda x: x.new_zeros(2) + x.new_ones(2) + x.new_full((2,), 3.0),
    "one sample's own sort": lambda x: x.flatten().sort().values.unfold(0, 2, 3),
    "conjugates": lambda x: torch.complex(x, x + 1).conj().imag * 2,
    "a conjugate of what changes": lambda x: conjugate_then_write(torch.complex(x, x + 1)),
    "indices with a gap": lambda x: x.expand(4, 3, 2)[
        torch.tensor([0, 3]), :, torch.tensor([1, 0])
    ],
    "a mask with as many entries": lambda x: x[torch.tensor([True, False, True])].cumsum(0),
    "out=": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1).add_(1) + x[1:],
    "no entries": lambda x: x[:0].sum(0) + x[:0].amax(1).sum(),
}


def conjugate_then_write(z):
    """A lazy conjugate sees later writes, a resolved one does not."""
    lazy, resolved = z.conj(), z.conj().resolve_conj()
    z.mul_(2)
    return torch.view_as_real(lazy * resolved + resolved.conj())


@pytest.mark.parametrize("own", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_means_the_same_for_all_samples_at_once(name, own):
    x = torch.randn(N, 3, 2, dtype=torch.float64)
    ours = interpreted(PROGRAMS[name], x, own=own)
    torch.testing.assert_close(ours, by_sample(PROGRAMS[name], x))


def test_writes_to_shared_tensors_are_signalled():
    shared = PerSample(torch.ones(4).expand(N, 4))
    own = PerSample(torch.randn(N, 4))
    with Interpreter(N, WriteScope.NOTHING):
        with pytest.raises(SharedWrite) as result:
            (shared * 2).add_(own)
        with pytest.raises(SharedWrite) as constant:
            torch.zeros(4).add_(own)
    assert result.value.needed == WriteScope.RESULTS
    assert constant.value.needed == WriteScope.EVERYTHING
    with Interpreter(N, WriteScope.EVERYTHING):
        assert torch.equal((shared * 2).add_(own).physical, 2 + own.physical)
        assert torch.equal(torch.zeros(4).add_(own).physical, own.physical)
        with pytest.raises(UnsupportedError, match="writes per-sample values"):
            shared.add_(own)


def test_values_read_in_python_must_agree():
    same, different = PerSample(torch.full((N, 1), 2.0)), PerSample(torch.arange(N).unsqueeze(1))
    with Interpreter(N, WriteScope.NOTHING):
        assert same.item() == 2.0 and bool(same > 1) and same.tolist() == [2.0]
        assert same.numpy() == 2.0
        for read in (Tensor.item, bool, PerSample.tolist, PerSample.numpy, Tensor.nonzero):
            with pytest.raises(SamplesDiverge) as caught:
                read(different)
            assert len(caught.value.keys) == N


def test_shared_work_is_done_once():
    weight = PerSample(torch.randn(6, 4).expand(N, 6, 4))
    with Interpreter(N, WriteScope.NOTHING):
        assert (weight / weight.norm()).T.shared


def test_schemas_are_read_right():
    aten = torch.ops.aten
    assert facts_of(aten.add_.Tensor).may_write == ("self",)
    assert facts_of(aten.add_.Tensor).returns_written == ("self",)
    assert facts_of(aten.add_.Tensor).pointwise and facts_of(aten.copy_.default).pointwise
    assert facts_of(aten.select.int).view and not facts_of(aten.select_backward.default).view
    assert not facts_of(aten.equal.default).pointwise
    assert facts_of(aten.bernoulli.default).random
    assert facts_of(aten.squeeze_.dim).reshapes_in_place
