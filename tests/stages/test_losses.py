"""Every loss against torch's own, one sample at a time, and against numpy where torch has none."""

import itertools
import json
import re
import sys
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import gradscope
from gradscope.cli.app import run as command_line
from gradscope.config import parse_loss
from gradscope.errors import CoupledSamplesError, ModelError, SpecError
from gradscope.model.problem import model_loss
from gradscope.stages.losses import bound, losses, options, resolve
from tests import oracle
from tests.oracle import per_sample_gradients

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
LAST = MAPS.transpose(1, 2)
SHARES = draw(N, C, seed=9).softmax(1)
WIDE, ANY = draw(N, T, 2), draw(N, T, 2, seed=6)
COUNTS = whole(6, N, T, 2).double()
BITS = whole(2, N, T, 2).double()
WEIGHTED = 'weight="0.5,2,1,3"'
SMOOTH = f"{WEIGHTED},per_sample=sum,label_smoothing=0.3"


CE, BCE = F.cross_entropy, F.binary_cross_entropy_with_logits
POSITIVE = torch.tensor([3.0, 0.5])
SMOOTHED = partial(CE, weight=W, label_smoothing=0.3, reduction="sum")
RATES = partial(F.poisson_nll_loss, log_input=False, full=True)
ONE, BIT = WIDE[:, 0, 0], BITS[:, 0, 0]


def less_the_log_odds(outputs, targets, ignored=-100):
    """-log p_y + log(1 - p_y) of each entry that counts, (n, c, ...) -> (entries,)."""
    rows = outputs.movedim(1, -1).reshape(-1, C).softmax(1)
    p = torch.stack([row[y] for row, y in zip(rows, targets.flatten(), strict=True)])
    return ((1 - p).log() - p.log())[targets.flatten() != ignored]


# name, outputs, targets, and torch's loss of one sample as a batch of one
TABLE = [
    ("cross_entropy", LOGITS, CLASSES, CE),
    ("cross_entropy", LOGITS, SHARES, CE),
    ("cross_entropy", MAPS, GRID, CE),
    ("cross_entropy:per_sample=sum", MAPS, GRID, partial(CE, reduction="sum")),
    ("cross_entropy:label_smoothing=0.2", LOGITS, CLASSES, partial(CE, label_smoothing=0.2)),
    (f"cross_entropy:{WEIGHTED}", MAPS, GRID, lambda o, t: CE(o, t, W, reduction="sum") / T),
    (f"cross_entropy:label_smoothing=0.3,{WEIGHTED}", LOGITS, SHARES, SMOOTHED),
    ("cross_entropy:ignore_index=2,per_sample=sum", MAPS, GRID,
     partial(CE, ignore_index=2, reduction="sum")),
    ("token_cross_entropy", LAST, GRID, lambda o, t: CE(o.transpose(1, 2), t)),
    ("token_cross_entropy", LOGITS, CLASSES, CE),
    (f"token_cross_entropy:{SMOOTH},ignore_index=2", LAST, GRID,
     lambda o, t: CE(o[0], t[0], W, ignore_index=2, label_smoothing=0.3, reduction="sum")),
    ("token_cross_entropy", draw(N, T, 2, C), whole(C, N, T, 2),
     lambda o, t: CE(o.flatten(0, 2), t.flatten())),
    ("nll", MAPS.log_softmax(1), GRID, F.nll_loss),
    (f"nll:{WEIGHTED}", LOGITS, CLASSES, partial(F.nll_loss, weight=W, reduction="sum")),
    ("margin", LOGITS, CLASSES, less_the_log_odds),
    ("margin", MAPS, GRID, lambda o, t: less_the_log_odds(o, t).mean()),
    ("margin:ignore_index=2,per_sample=sum", MAPS, GRID, partial(less_the_log_odds, ignored=2)),
    ("bce", WIDE.sigmoid(), BITS, F.binary_cross_entropy),
    ("bce:per_sample=sum", WIDE.sigmoid(), ANY.sigmoid(),
     partial(F.binary_cross_entropy, reduction="sum")),
    ("bce", WIDE.sigmoid(), BITS.long(), lambda o, t: F.binary_cross_entropy(o, t.double())),
    ("bce_with_logits", WIDE, BITS.bool(), lambda o, t: BCE(o, t.double())),
    ("kl", LOGITS.log_softmax(1), SHARES, partial(F.kl_div, reduction="batchmean")),
    ("kl:log_target=true,per_sample=mean", LOGITS.log_softmax(1), SHARES.log(),
     lambda o, t: F.kl_div(o, t, log_target=True, reduction="none").mean()),
    ("mse", WIDE, ANY, F.mse_loss),
    ("mse:per_sample=sum", WIDE, ANY, partial(F.mse_loss, reduction="sum")),
    ("l1", WIDE, ANY, F.l1_loss),
    ("huber:delta=0.3", WIDE, ANY, partial(F.huber_loss, delta=0.3)),
    ("bce_with_logits", WIDE, BITS, BCE),
    ("bce_with_logits:pos_weight=3", ONE, BIT, partial(BCE, pos_weight=torch.tensor(3.0))),
    ('bce_with_logits:pos_weight="3,0.5",per_sample=sum', WIDE, BITS,
     partial(BCE, pos_weight=POSITIVE, reduction="sum")),
    ("poisson_nll", WIDE, COUNTS, F.poisson_nll_loss),
    ("poisson_nll:log_input=false,full=true", WIDE.exp(), COUNTS, RATES),
]  # fmt: skip


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


TRIPLES, PAIRS, ALIKE = draw(N, 3, 4), draw(N, 2, 4), torch.tensor([1, 0, 1, 0, 0])
SPREAD = draw(N, T, 2, seed=8).exp()
SPREAD[0, 0, 0] = 1e-9  # below eps


def hadsell(a, b, y):
    """½ y d² + ½ (1 - y) max(0, 2 - d)² of one pair, d as torch's pairwise_distance has it."""
    d = (a - b + 1e-6).square().sum(-1).sqrt()
    return 0.5 * y * d**2 + 0.5 * (1 - y) * (2 - d).relu() ** 2


SEVERAL = [  # name, what the model returns, targets, and the loss of one sample
    ("gaussian_nll", (WIDE, SPREAD), ANY, lambda o, y: F.gaussian_nll_loss(o[0], y, o[1])),
    ("gaussian_nll:full=true,per_sample=sum", (WIDE, SPREAD), ANY,
     lambda o, y: F.gaussian_nll_loss(o[0], y, o[1], full=True, reduction="sum")),
    ("gaussian_nll:log_variance=true", (WIDE, SPREAD.log()), ANY,
     lambda o, y: F.gaussian_nll_loss(o[0], y, o[1].exp())),
    ("triplet:margin=2", tuple(TRIPLES.unbind(1)), ALIKE,
     lambda o, y: F.triplet_margin_loss(*o, margin=2)),
    ("triplet:swap=true,p=1", (TRIPLES,), ALIKE,
     lambda o, y: F.triplet_margin_loss(*o[0].unbind(1), p=1, swap=True)),
    ("contrastive:margin=2", tuple(PAIRS.unbind(1)), ALIKE, lambda o, y: hadsell(*o, y)),
    ("contrastive:margin=2", (PAIRS,), ALIKE, lambda o, y: hadsell(*o[0].unbind(1), y)),
]  # fmt: skip


OF_SEVERAL = {name.partition(":")[0] for name, *_ in SEVERAL}


@pytest.mark.parametrize(("name", "outputs", "targets", "alone"), SEVERAL)
def test_losses_of_several_outputs_are_torchs(name, outputs, targets, alone):
    outputs = tuple(t.detach().requires_grad_(True) for t in outputs)
    ours = resolve(name)(outputs if len(outputs) > 1 else outputs[0], targets)
    rows = range(N)
    right = torch.stack(
        [alone([t[k : k + 1] for t in outputs], targets[k : k + 1]).sum() for k in rows]
    )
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((v * weights).sum(), outputs) for v in (ours, right))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "told"),
    [
        ("bce", LOGITS[:, 0], BITS[:, 0, 0], "use the loss bce_with_logits"),
        ("bce", LOGITS.sigmoid(), CLASSES, "targets are from 1 to 3, but must be probabilities"),
        ("bce_with_logits", WIDE, ANY, "but must be probabilities from 0 to 1: outputs are"),
        ("gaussian_nll", WIDE, ANY, r"needs a tuple \(mean, variance\)"),
        ("gaussian_nll", (WIDE, -SPREAD), ANY, "a variance is negative"),
        ("gaussian_nll", (WIDE, SPREAD[:, :1]), ANY, "differ in shape"),
        ("triplet", LOGITS, CLASSES, "needs 3 embeddings a sample"),
        ("contrastive", tuple(PAIRS.unbind(1)), BITS, "must have one number a pair"),
    ],
)
def test_what_these_losses_do_not_take(name, outputs, targets, told):
    with pytest.raises(ModelError, match=told):
        resolve(name)(outputs, targets)


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


def test_a_mask_says_which_tokens_count():
    """Against labels of -100 in the place of the others, and a loop in float64."""
    logits, tokens = draw(N, T + 2, C, seed=12), whole(C, N, T + 2, seed=13)
    mask = whole(2, N, T + 2, seed=14)
    mask[1] = 0  # nothing to say
    for reduction in ("mean", "sum"):
        expected = torch.stack(
            [
                F.cross_entropy(o[:-1][m[1:] == 1], t[1:][m[1:] == 1], reduction=reduction)
                if m[1:].any()
                else torch.zeros((), dtype=o.dtype)
                for o, t, m in zip(logits, tokens, mask, strict=True)
            ]
        )
        for kind in (mask, mask.bool(), mask.to(torch.uint8)):
            found = resolve(f"causal_lm:mask=said,reduction={reduction}")(logits, (tokens, kind))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    labels = resolve("causal_lm")(logits, tokens.masked_fill(mask == 0, -100))
    assert torch.equal(resolve("causal_lm")(logits, (tokens, mask)), labels)
    for targets, said in (
        (tokens, "mask='said' is set"),
        ((tokens, mask.double()), "does not fit the tokens"),
        ((tokens, mask * 1j), "does not fit the tokens"),
        ((tokens, mask[:, 1:]), "does not fit the tokens"),
    ):
        with pytest.raises(SpecError, match=said):
            resolve("causal_lm:mask=said")(logits, targets)
    with pytest.raises(SpecError, match="the same option"):
        resolve("mse:reduction=sum,per_sample=sum")


def test_the_column_of_a_mask_comes_from_the_data(tmp_path, monkeypatch):
    """`causal_lm:mask=COLUMN` from the command line, with labels of the data and drawn ones."""
    model = nn.Sequential(nn.Embedding(C, 3), nn.Linear(3, C))
    tokens, mask = whole(C, N, T, seed=13), whole(2, N, T, seed=14)
    np.savez(tmp_path / "d.npz", inputs=tokens, targets=tokens, said=mask)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    code = f"from torch import nn\ndef build(): return nn.Sequential(nn.Embedding({C}, 3), "
    (tmp_path / "m.py").write_text(f"{code}nn.Linear(3, {C}))\n")
    monkeypatch.chdir(tmp_path)
    words = ["compute", "w.pt", "d.npz", "--model", "m.py:build", "-o", "o.h5", "--overwrite"]
    words += ["--loss", "causal_lm:mask=said,reduction=sum"]
    listed = 'path = "d.npz"\ninputs = ["inputs"]\ntargets = ["said", "targets"]\n'
    (tmp_path / "listed.toml").write_text(listed)  # first or last, it is the mask
    for labels, data in (("data", "d.npz"), ("data", "listed.toml"), ("sampled", "d.npz")):
        given = [data if word == "d.npz" else word for word in words]
        monkeypatch.setattr(sys, "argv", ["gradscope", *given, "--labels", labels])
        assert command_line() == 0
        with gradscope.open("o.h5") as file:
            assert file.run["loss"]["mask"] == "said" and file.run["loss"]["per_sample"] == "sum"
            assert file.run["spec"]["dataset"]["targets"] == ["targets", "said"]
            found = torch.from_numpy(file.chains[0]["1.weight"][:])
        if labels == "data":
            _, expected = oracle.per_sample_gradients(
                model,
                lambda o, y: F.cross_entropy(o[0, :-1], y[0][0, 1:], reduction="none")[
                    y[1][0, 1:] == 1
                ].sum()[None],
                tokens,
                (tokens, mask),
            )
            torch.testing.assert_close(found.double(), expected["1.weight"], rtol=1e-4, atol=1e-6)
        else:  # the mask stays where labels are drawn
            assert not found[mask[:, 1:].sum(1) == 0].any() and found.abs().sum() > 0
    monkeypatch.setattr(sys, "argv", ["gradscope", *words[:-1], "causal_lm:mask=sayd"])
    assert command_line() == 3
    for length, code in ((T, 0), (T - 1, 3)):  # filled up, a mask of the wrong length would fit
        rows = [{"targets": [1] * T, "said": [1] * T}, {"targets": [1] * T, "said": [1] * length}]
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        spec = 'path = "d.jsonl"\ninputs = ["targets"]\ntargets = ["targets"]\n'
        (tmp_path / "d.toml").write_text(spec + "pad = { targets = 0, said = 0 }\n")
        given = [{"d.npz": "d.toml"}.get(word, word) for word in words]
        monkeypatch.setattr(sys, "argv", ["gradscope", *given])
        assert command_line() == code


def test_a_loss_that_divides_by_the_tokens_of_the_batch_is_told():
    """The same for samples of one length, so that only other company shows it."""
    tokens = gaps(whole(C, N, T, seed=13))
    model = nn.Sequential(nn.Embedding(C, 3), nn.Linear(3, C))

    def over_all(outputs, targets):
        values = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return values.sum(1) / (targets != -100).sum()

    with pytest.raises(CoupledSamplesError) as coupled:
        gradscope.norms(model, over_all, tokens.clamp(min=0), tokens)
    assert "divide by a constant" in str(coupled.value.remedy)

    def scalar(outputs, targets):
        return F.cross_entropy(outputs.transpose(1, 2), targets)

    with pytest.raises(SpecError) as refused:
        gradscope.norms(model, scalar, tokens.clamp(min=0), tokens)
    assert "divided by a constant" in str(refused.value.remedy)


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
    # with lengths; the gradient numerically, since torch's own presumes normalised inputs
    lengths, counts = torch.tensor([5, 3, 4, 5]), torch.tensor([2, 2, 1, 3])
    given = (labels.clamp(min=0), lengths, counts)
    right = [enumerated_ctc(p[i, : lengths[i]], labels[i, : counts[i]].tolist()) for i in range(4)]
    np.testing.assert_allclose(resolve("ctc")(outputs, given).numpy(), right, rtol=1e-12)
    outputs.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda o: resolve("ctc")(o, given), outputs)


def test_labels_that_do_not_fit():
    outputs, labels = draw(2, 2, 3).requires_grad_(True), torch.tensor([[1, 2, 1], [1, -1, -1]])
    assert resolve("ctc")(outputs, labels)[0] == torch.inf
    values = resolve("ctc:zero_infinity=true")(outputs, labels)
    assert values[0] == 0 and values[1] > 0
    (gradient,) = torch.autograd.grad(values.sum(), outputs)
    assert not gradient[0].any() and gradient[1].any()


def test_every_loss_has_a_case():
    tried = {name.partition(":")[0] for name, *_ in (*TABLE, *SEVERAL)} | {"causal_lm", "ctc"}
    assert tried == set(losses.names())


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
        ("huber:delta=0", "positive"),
        ("cross_entropy:label_smoothing=1.5", "from 0 to 1"),
        ('cross_entropy:weight="1,x"', "numbers"),
        ('cross_entropy:weight="1,-2"', "negative"),
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
        ('bce_with_logits:pos_weight="1,2"', LOGITS[:, 0], BITS[:, 0, 0], "for 1 classes"),
        ("mse", LOGITS, LOGITS[:, :1], "broadcasting"),
        ("causal_lm", MAPS, GRID, "(n, t, v)"),
    ],
)
def test_shapes_that_do_not_fit(name, outputs, targets, words):
    with pytest.raises(SpecError) as caught:
        resolve(name)(outputs, targets)
    assert words in str(caught.value)


class Same(nn.Module):
    """Returns its inputs, by way of a parameter."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
@pytest.mark.parametrize(
    ("outputs", "targets", "must"),
    [
        (LOGITS, CLASSES.double(), "Convert the classes to int64"),
        (LOGITS, CLASSES[:, None], "reshape = { NAME = [] }"),
        (LOGITS, CLASSES.int(), "Convert the classes to int64"),
        (LOGITS, CLASSES[1:], "Give outputs"),
        (LOGITS, SHARES.long(), "Convert one-hot targets to classes"),
        (LOGITS, SHARES[:, 1:], "Give outputs"),
        (LOGITS[:, 0], CLASSES, "Give outputs"),
        (MAPS.transpose(1, 2), GRID, "Give outputs"),
    ],
)
def test_targets_that_are_no_classes(name, outputs, targets, must):
    """Both shapes are said, and what they must be."""
    with pytest.raises(ModelError) as caught:
        resolve(name)(outputs, targets)
    for words in (str(tuple(outputs.shape)), str(tuple(targets.shape)), must):
        assert words in str(caught.value)
    last = outputs.dim() > 2 and targets.shape == outputs.shape[:-1]
    assert ("token_cross_entropy" in str(caught.value)) == last


@pytest.mark.parametrize("answer", [lambda o: o, lambda o: SimpleNamespace(logits=o)])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_the_loss_that_is_named_for_classes_on_the_last_axis_takes_them(answer, name):
    """Of a model that returns its logits, or transformers' answer with them."""
    logits, tokens = draw(3, 6, C, seed=8), whole(C, 3, 6)
    tokens[0, :2] = -100
    with pytest.raises(ModelError) as caught:
        resolve(name)(answer(logits), tokens)
    said = re.search(r"Use the loss (\w+) for", str(caught.value))
    values = resolve(said[1])(answer(logits), tokens)
    right = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").sum(1)
    torch.testing.assert_close(values, right / (tokens != -100).sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [(MAPS, GRID), (LAST, GRID.int()), (LAST, GRID[:, 1:]), (LAST, GRID.double()), (ONE, CLASSES)],
)
def test_what_is_no_class_of_each_position(outputs, targets):
    with pytest.raises(ModelError, match=r"on the last axis.*classes \(n, t\)") as caught:
        resolve("token_cross_entropy")(outputs, targets)
    assert f"outputs are {tuple(outputs.shape)}" in str(caught.value)


LINES, TEXTS = draw(2, 5, C, seed=3), torch.tensor([[1, 2], [3, 9]])  # 9 is no label of the four


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "words"),
    [
        ("cross_entropy", LOGITS, CLASSES + C, r"sample \d(?s:.*)classes 0 to 3"),
        ("nll", MAPS, GRID - C, r"sample \d(?s:.*)Target -\d is out of bounds.*classes 0 to 3"),
        ("margin", LOGITS, CLASSES + C, r"sample \d(?s:.*)classes 0 to 3"),
        ("margin", LOGITS[:, :1], CLASSES * 0, "a margin needs at least two classes: outputs are"),
        ("bce_with_logits", LOGITS, LOGITS.long() * 0 + 2, "use the loss cross_entropy"),
        ("ctc", LINES, TEXTS, "sample 1: .*Target 9 is out of bounds.* 0 to 3"),
        ("ctc", LINES, TEXTS.double(), "do not fit the outputs as labels"),
        ("ctc", LINES[:, 0], TEXTS, "do not fit the outputs as labels"),
    ],
)
def test_targets_that_a_loss_does_not_take(name, outputs, targets, words):
    with pytest.raises(ModelError, match=words):
        gradscope.Scope(Same(), name, backend="loop").norms(outputs, targets)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_label_that_is_none_is_no_number_within_vmap():
    """torch reads memory beyond the logits for it, and may crash."""
    values = torch.func.vmap(lambda o, y: resolve("ctc")(o[None], y[None])[0])(LINES, TEXTS)
    right = resolve("ctc")(LINES[:1], TEXTS[:1])[0]
    assert values[0].item() == pytest.approx(right.item(), rel=1e-12) and values[1].isnan()


@pytest.mark.parametrize("name", sorted({*losses.names()} - OF_SEVERAL))
def test_what_is_no_tensor(name):
    for outputs, targets, words in (({}, ANY, "not a tensor"), (WIDE, None, "targets are not")):
        with pytest.raises(ModelError, match=words):
            resolve(name)(outputs, targets)


WEIGHT = 'weight="1,2,0.5,1,3,1"'


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def tokens():
    found = torch.randint(6, (N, 4), generator=torch.Generator().manual_seed(1))
    wanted = found.clone()
    wanted[1, 2:] = -100
    wanted[2] = -100
    return found, wanted


SEQUENCES = [
    ("causal_lm", tokens()[1], "vmap"),
    (f"causal_lm:per_sample=sum,label_smoothing=0.1,{WEIGHT}", tokens()[1], "expand"),
    ("token_cross_entropy", tokens()[1], "vmap"),
    ("ctc", torch.tensor([[1, 2], [3, -1], [4, 5], [1, 1], [2, -1]]), "auto"),
]


@pytest.mark.parametrize(
    ("name", "targets", "other"), SEQUENCES, ids=["mean", "sum", "tokens", "ctc"]
)
def test_losses_of_sequences_through_the_backends(name, targets, other):
    model, (inputs, _) = net(), tokens()
    _, right = per_sample_gradients(model, resolve(name), inputs, targets)
    for backend in ("loop", "hooks", other):
        scope = gradscope.Scope(model, name, backend=backend, verify="always")
        found = scope.per_sample_gradients(inputs, targets)
        for key, value in right.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-13)
            assert name == "ctc" or not found[key][2].any()  # every token is ignored


def tempered(outputs, targets, *, tau: float = 1.0):
    """A user's own loss with an option."""
    return nn.functional.cross_entropy(outputs / tau, targets, reduction="none")


def test_options_of_a_users_loss():
    loss = bound(tempered, parse_loss("mine.py:tempered", {"tau": 2}))
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 3])
    assert torch.equal(loss(outputs, targets), tempered(outputs, targets, tau=2.0))
    assert options(loss) == {"tau": 2.0} and loss.__name__ == "tempered"
    with pytest.raises(SpecError, match="tau"):
        bound(tempered, parse_loss("mine.py:tempered:temperature=2"))


@pytest.mark.parametrize("squared", [True, False])
def test_an_option_without_a_type(squared):
    """What a run file says is false is not the text "false", which Python takes for true."""

    def powered(outputs, targets, squared=False, weights=None):
        error = (outputs - targets).abs() ** (2 if squared else 1)
        return (error * torch.tensor(weights)).sum(1)

    loss = bound(powered, parse_loss("mine.py:powered", {"squared": squared, "weights": [1, 3]}))
    outputs, targets = torch.randn(5, 2), torch.randn(5, 2)
    error = (outputs - targets).abs() ** (1 + squared)
    torch.testing.assert_close(loss(outputs, targets), error[:, 0] + 3 * error[:, 1])


def test_options_that_look_like_others():
    """A list of one is a list, `reduction` an option of its own, and `**options` takes any."""

    def loss(outputs, targets, weights=None, reduction="none", **options):
        return weights, reduction, options

    given = {"weights": [2.5], "reduction": "sum", "margin": 0.5}
    found = bound(loss, parse_loss("mine.py:loss", given))(None, None)
    assert found == ((2.5,), "sum", {"margin": 0.5})
    outputs, targets = torch.randn(3, 1), torch.rand(3, 1)
    one = bound(losses.get("bce_with_logits"), parse_loss("bce_with_logits", {"pos_weight": [2]}))
    right = BCE(outputs, targets, pos_weight=torch.tensor(2.0), reduction="none")[:, 0]
    torch.testing.assert_close(one(outputs, targets), right)


@pytest.mark.parametrize("by_its_result", [True, False])
def test_a_model_loss_keeps_its_mark(by_its_result):
    def decayed(model, inputs, targets, *, decay: float):
        penalty = sum(p.square().sum() for p in model.parameters())
        return (model(inputs) - targets).square().sum(1) + decay * penalty

    marked = model_loss(decayed)
    decayed = marked if by_its_result else decayed

    model = nn.Linear(3, 2).double()
    inputs, targets = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    loss = bound(decayed, parse_loss("mine.py:decayed:decay=0.5"))
    found = gradscope.per_sample_gradients(model, loss, inputs, targets)
    plain = gradscope.per_sample_gradients(model, "mse:per_sample=sum", inputs, targets)
    torch.testing.assert_close(found["weight"], plain["weight"] + model.weight.detach())


@dataclass
class Answer:
    """As transformers answers."""

    hidden: torch.Tensor
    logits: torch.Tensor


class Named(NamedTuple):
    """As torchvision's GoogLeNet answers."""

    logits: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap", "expand"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda h, o: Answer(h, o),
        lambda h, o: Named(o, h),
        lambda h, o: {"logits": o, "hidden": h},
        lambda h, o: UserDict(logits=o, hidden=h),
        lambda h, o: OrderedDict(sample=o),
        lambda h, o: (o, None),
    ],
    ids=["an object", "a named tuple", "a dict", "a mapping", "the only tensor", "a tuple"],
)
def test_what_a_loss_by_name_takes_of_an_answer(answer, backend):
    class Model(nn.Module):
        plain = False

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, C)

        def forward(self, x):
            hidden = self.first(x).tanh()
            out = self.last(hidden)
            return out if self.plain else answer(hidden, out)

    model = Model().double()
    inputs, targets = draw(N, 3), whole(C, N)
    found = gradscope.per_sample_gradients(
        model, "cross_entropy:label_smoothing=0.1", inputs, targets, backend=backend
    )
    model.plain = True
    loss = partial(F.cross_entropy, reduction="none", label_smoothing=0.1)
    for name, right in per_sample_gradients(model, loss, inputs, targets)[1].items():
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-12)


def test_an_answer_of_several_tensors_is_refused():
    model = nn.LSTM(3, 4)
    with pytest.raises(ModelError, match="is not a tensor but tuple"):
        gradscope.norms(model, "mse", draw(N, T, 3).float(), draw(N, T, 4).float())
