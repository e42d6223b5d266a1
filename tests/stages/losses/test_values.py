"""Every loss against torch's own, one sample at a time, and against numpy where torch has none."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gradscope.errors import SpecError
from gradscope.stages.losses import losses, options, resolve

N, C, T = 5, 4, 3


def draw(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(high, *shape, seed=4):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def gaps(targets):
    """The first sample loses one entry, the second all of them."""
    gapped = targets.clone()
    gapped[0, -1] = -100
    gapped[1] = -100
    return gapped


WEIGHT = (0.5, 2.0, 1.0, 3.0)
W = torch.tensor(WEIGHT, dtype=torch.float64)
LOGITS, CLASSES = draw(N, C), whole(C, N)
MAPS, GRID = draw(N, C, T), whole(C, N, T)
SHARES = draw(N, C, seed=9).softmax(1)
WIDE, ANY = draw(N, T, 2), draw(N, T, 2, seed=6)
COUNTS = whole(6, N, T, 2).double()
BITS = whole(2, N, T, 2).double()
WEIGHTED = 'weight="0.5,2,1,3"'

# name, outputs, targets, and torch's loss of one sample as a batch of one
TABLE = [
    ("cross_entropy", LOGITS, CLASSES, F.cross_entropy),
    ("cross_entropy", LOGITS, SHARES, F.cross_entropy),
    ("cross_entropy", MAPS, GRID, F.cross_entropy),
    (
        "cross_entropy:per_sample=sum",
        MAPS,
        GRID,
        lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    ),
    (
        "cross_entropy:label_smoothing=0.2",
        LOGITS,
        CLASSES,
        lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2),
    ),
    (
        f"cross_entropy:{WEIGHTED}",
        LOGITS,
        CLASSES,
        lambda o, t: W[t] * F.cross_entropy(o, t),
    ),
    (
        f"cross_entropy:{WEIGHTED}",
        MAPS,
        GRID,
        lambda o, t: F.cross_entropy(o, t, W, reduction="sum") / T,
    ),
    (
        f"cross_entropy:label_smoothing=0.3,{WEIGHTED}",
        LOGITS,
        SHARES,
        lambda o, t: F.cross_entropy(o, t, W, label_smoothing=0.3, reduction="sum"),
    ),
    (
        "cross_entropy:ignore_index=2,per_sample=sum",
        MAPS,
        GRID,
        lambda o, t: F.cross_entropy(o, t, ignore_index=2, reduction="sum"),
    ),
    ("nll", LOGITS.log_softmax(1), CLASSES, F.nll_loss),
    ("nll", MAPS.log_softmax(1), GRID, F.nll_loss),
    (f"nll:{WEIGHTED}", LOGITS, CLASSES, lambda o, t: F.nll_loss(o, t, W, reduction="sum")),
    ("mse", WIDE, ANY, F.mse_loss),
    ("mse:per_sample=sum", WIDE, ANY, lambda o, t: F.mse_loss(o, t, reduction="sum")),
    ("l1", WIDE, ANY, F.l1_loss),
    ("l1:per_sample=sum", WIDE, ANY, lambda o, t: F.l1_loss(o, t, reduction="sum")),
    ("huber", WIDE, ANY, F.huber_loss),
    ("huber:delta=0.3", WIDE, ANY, lambda o, t: F.huber_loss(o, t, delta=0.3)),
    ("bce_with_logits", WIDE, BITS, F.binary_cross_entropy_with_logits),
    (
        "bce_with_logits:pos_weight=3",
        WIDE[:, 0, 0],
        BITS[:, 0, 0],
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor(3.0)),
    ),
    (
        'bce_with_logits:pos_weight="3,0.5",per_sample=sum',
        WIDE,
        BITS,
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.tensor([3.0, 0.5]), reduction="sum"
        ),
    ),
    ("poisson_nll", WIDE, COUNTS, F.poisson_nll_loss),
    (
        "poisson_nll:log_input=false,full=true",
        WIDE.exp(),
        COUNTS,
        lambda o, t: F.poisson_nll_loss(o, t, log_input=False, full=True),
    ),
]


SHOWN = [f"{k}-{row[0]}" for k, row in enumerate(TABLE)]


@pytest.mark.parametrize(("name", "outputs", "targets", "alone"), TABLE, ids=SHOWN)
def test_a_batch_is_its_samples_alone(name, outputs, targets, alone):
    """Values, and gradients with respect to the outputs."""
    outputs = outputs.detach().requires_grad_(True)
    ours = resolve(name)(outputs, targets)
    assert ours.shape == (len(outputs),)
    right = torch.stack(
        [alone(o[None], t[None]).sum() for o, t in zip(outputs, targets, strict=True)]
    )
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((v * weights).sum(), outputs)[0] for v in (ours, right))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_the_mean_is_over_what_counts(name):
    outputs = MAPS.log_softmax(1).requires_grad_(True)
    values = resolve(name)(outputs, gaps(GRID))
    kept = F.nll_loss(outputs, gaps(GRID), reduction="none")
    assert values[0].item() == pytest.approx(kept[0, :-1].mean().item(), rel=1e-12)
    assert values[1].item() == 0
    torch.testing.assert_close(values[2:], kept[2:].mean(1), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(values.sum(), outputs)
    assert torch.equal(gradient[1], torch.zeros(C, T, dtype=torch.float64))
    assert gradient[0].abs().sum() > 0


def test_causal_lm_is_shifted_and_counts_tokens():
    """Against numpy, token by token."""
    logits, tokens = draw(N, T + 2, C, seed=12).requires_grad_(True), whole(C, N, T + 2, seed=13)
    tokens = gaps(tokens)
    numbers = logits.detach().numpy()
    logs = numbers - np.log(np.exp(numbers).sum(-1, keepdims=True))
    for per_sample in ("mean", "sum"):
        values = resolve(f"causal_lm:per_sample={per_sample}")(logits, tokens)
        for i, row in enumerate(tokens.numpy()):
            terms = [-logs[i, t, row[t + 1]] for t in range(T + 1) if row[t + 1] != -100]
            right = sum(terms) / (max(len(terms), 1) if per_sample == "mean" else 1)
            assert values[i].item() == pytest.approx(right, rel=1e-12)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert gradient.isfinite().all() and not gradient[1].any() and not gradient[:, -1].any()


def test_the_options_of_causal_lm_are_those_of_cross_entropy():
    logits, tokens = draw(N, T, C, seed=12), whole(C, N, T, seed=13)
    named = f"label_smoothing=0.1,{WEIGHTED},ignore_index=3,per_sample=sum"
    ours = resolve(f"causal_lm:{named}")(logits, tokens)
    right = [
        F.cross_entropy(o[:-1], t[1:], W, ignore_index=3, label_smoothing=0.1, reduction="sum")
        for o, t in zip(logits, tokens, strict=True)
    ]
    torch.testing.assert_close(ours, torch.stack(right), rtol=1e-12, atol=0)


def enumerated_ctc(probabilities, label):
    """−log of the summed probability of every path that collapses to the label."""
    t, c = probabilities.shape
    total = 0.0
    for path in itertools.product(range(c), repeat=t):
        merged = [k for k, _ in itertools.groupby(path)]
        if [k for k in merged if k != 0] == label:
            total += np.prod([probabilities[s, k] for s, k in enumerate(path)])
    return -np.log(total)


def test_ctc_is_the_sum_over_all_paths():
    outputs = draw(4, 5, 3, seed=20)
    labels = torch.tensor([[1, 2, -1], [2, 2, -1], [1, -1, -1], [2, 1, 2]])
    p = outputs.softmax(-1).numpy()
    right = [enumerated_ctc(p[i], [k for k in labels[i].tolist() if k > 0]) for i in range(4)]
    np.testing.assert_allclose(resolve("ctc")(outputs, labels).numpy(), right, rtol=1e-12)
    per_label = resolve("ctc:per_sample=mean")(outputs, labels).numpy()
    np.testing.assert_allclose(per_label, np.array(right) / [2, 2, 1, 3], rtol=1e-12)


def test_ctc_with_lengths_and_its_gradient():
    """Against numerical differentiation: torch's own gradient presumes normalised inputs."""
    outputs = draw(3, 5, 3, seed=21).requires_grad_(True)
    labels = torch.tensor([[1, 2], [2, 0], [1, 1]])
    lengths, label_lengths = torch.tensor([5, 3, 4]), torch.tensor([2, 1, 2])
    loss = resolve("ctc")
    p = outputs.detach().softmax(-1).numpy()
    right = [
        enumerated_ctc(p[i, : lengths[i]], labels[i, : label_lengths[i]].tolist()) for i in range(3)
    ]
    values = loss(outputs, (labels, lengths, label_lengths))
    np.testing.assert_allclose(values.detach().numpy(), right, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda o: loss(o, (labels, lengths, label_lengths)), outputs)


def test_labels_that_do_not_fit():
    outputs, labels = draw(2, 2, 3).requires_grad_(True), torch.tensor([[1, 2, 1], [1, -1, -1]])
    assert resolve("ctc")(outputs, labels)[0] == torch.inf
    values = resolve("ctc:zero_infinity=true")(outputs, labels)
    assert values[0] == 0 and values[1] > 0
    (gradient,) = torch.autograd.grad(values.sum(), outputs)
    assert not gradient[0].any() and gradient[1].any()


def test_every_loss_has_a_case():
    tried = {name.partition(":")[0] for name, *_ in TABLE} | {"causal_lm", "ctc"}
    assert tried == set(losses.names())


def test_a_loss_without_options_is_the_function_itself():
    assert resolve("mse") is losses.get("mse")
    assert resolve(F.mse_loss) is F.mse_loss
    assert losses.get("mse")(WIDE, ANY).shape == (N,)


def test_options_in_force():
    assert options(resolve("mse")) == {"per_sample": "mean"}
    assert options(resolve('cross_entropy:weight="1,2",label_smoothing=0.1')) == {
        "label_smoothing": 0.1,
        "weight": [1.0, 2.0],
        "ignore_index": -100,
        "per_sample": "mean",
    }
    assert options(lambda outputs, targets, tau=2: outputs) == {"tau": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cross_entropi", "'cross_entropy'"),
        ("mse:per_sample=batch", "mean or sum"),
        ("mse:reduction=none", "per_sample"),
        ("huber:delta=0", "positive"),
        ("huber:delta=nan", "positive"),
        ("cross_entropy:label_smoothing=1.5", "from 0 to 1"),
        ("cross_entropy:weight=1,2", "double quotes"),
        ('cross_entropy:weight="1,x"', "numbers"),
        ('cross_entropy:weight="1,-2"', "negative"),
        ("cross_entropy:ignore_index=1.5", "int"),
        ("poisson_nll:full=maybe", "bool"),
        ("cross_entropy:", "key=value"),
    ],
)
def test_names_that_do_not_resolve(name, words):
    with pytest.raises(SpecError) as caught:
        resolve(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "words"),
    [
        ('cross_entropy:weight="1,2"', LOGITS, CLASSES, "2 weights are given for 4 classes"),
        ('bce_with_logits:pos_weight="1,2"', LOGITS[:, 0], LOGITS[:, 0], "for 1 classes"),
        ("mse", LOGITS, LOGITS[:, :1], "broadcasting"),
        ("causal_lm", LOGITS, CLASSES, "(n, t, v)"),
        ("causal_lm", MAPS, GRID, "(n, t, v)"),
    ],
)
def test_shapes_that_do_not_fit(name, outputs, targets, words):
    with pytest.raises(SpecError) as caught:
        resolve(name)(outputs, targets)
    assert words in str(caught.value)
