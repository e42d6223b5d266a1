"""Labels: drawn ones and all of them, against closed forms of the Fisher."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import gradscope
from gradscope.core.batch import Batch
from gradscope.errors import ModelError, SpecError
from gradscope.scope import NonFiniteWarning

N, C, D = 16, 3, 4
BACKENDS = ["loop", "hooks", "vmap", "expand"]


def net(outputs=C, seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def data(n=N, seed=3):
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, D, generator=g, dtype=torch.float64)
    return inputs, torch.randint(C, (n,), generator=g)


def flat(found):
    return torch.cat([v.flatten() for v in found.values()])


def jacobians(model, inputs):
    """(n, c, p) by torch.func, which no backend's machinery is part of."""
    values = {k: p.detach() for k, p in model.named_parameters()}

    def outputs(values, x):
        return torch.func.functional_call(model, values, (x[None],))[0]

    found = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(values, inputs)
    return torch.cat([j.flatten(2) for j in found.values()], 2)


def fisher_diagonal(model, inputs):
    """diag(Jᵀ (diag p − p pᵀ) J), the mean over samples."""
    jacobian, p = jacobians(model, inputs), model(inputs).detach().softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("ncp,ncd,ndp->np", jacobian, hessian, jacobian).mean(0)


@pytest.mark.parametrize(
    ("backend", "chain"),
    [(b, "square | mean") for b in BACKENDS] + [("hooks", "second_moment"), ("auto", "square")],
)
def test_exact_is_the_closed_form(backend, chain):
    model, (inputs, targets) = net(), data()
    options = {"labels": "exact", "backend": backend, "verify": "always"}
    found = gradscope.expectation(model, "cross_entropy", chain, inputs, targets, **options)
    torch.testing.assert_close(flat(found), fisher_diagonal(model, inputs), rtol=1e-10, atol=1e-15)


def by_hand(model, inputs, transform):
    """Σ_c p_c T(g_c), sample by sample: (n, p)."""
    rows = []
    for x in inputs:
        logits = model(x[None])[0]
        weights = logits.detach().softmax(0)
        total = 0
        for weight, loss in zip(weights, -logits.log_softmax(0), strict=True):
            parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            total = total + weight * transform(torch.cat([g.flatten() for g in parts]))
        rows.append(total)
    return torch.stack(rows)


CHAINS = {  # each sample's transform, and what becomes of the mean
    "clip:max_norm=0.5 | mean": (lambda g: g * min(1.0, 0.5 / float(g.norm())), lambda m: m),
    "normalize | square | mean": (lambda g: (g / g.norm()) ** 2, lambda m: m),
    "square | mean | square": (lambda g: g**2, lambda m: m**2),
    "norm | mean": (lambda g: g.norm()[None], lambda m: m),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_exact_expectations_of_transforms(chain):
    model, (inputs, targets) = net(), data(7)
    found = gradscope.expectation(model, "cross_entropy", chain, inputs, targets, labels="exact")
    transform, then = CHAINS[chain]
    right = then(by_hand(model, inputs, transform).mean(0))
    torch.testing.assert_close(flat(found), right, rtol=1e-10, atol=1e-14)


def test_exact_after_an_earlier_pass():
    """The mean that `center` waits for is over labels too."""
    model, (inputs, targets) = net(), data(9)
    found = gradscope.expectation(
        model, "cross_entropy", "abs | center | square | mean", inputs, targets, labels="exact"
    )
    middle = by_hand(model, inputs, torch.abs).mean(0)
    right = by_hand(model, inputs, lambda g: (g.abs() - middle) ** 2).mean(0)
    torch.testing.assert_close(flat(found), right, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("labels", ["sampled", "exact"])
def test_binary_labels(labels):
    """p(1 − p) j² exactly, and drawn within five standard errors of it."""
    model, inputs = net(1), data(4_000 if labels == "sampled" else N)[0]
    jacobian, p = jacobians(model, inputs)[:, 0], model(inputs).detach().sigmoid()[:, 0]
    right = (p * (1 - p))[:, None] * jacobian**2
    zeros = torch.zeros_like(p)[:, None]
    found = gradscope.expectation(
        model, "bce_with_logits", "square | mean", inputs, zeros, labels=labels
    )
    if labels == "exact":
        torch.testing.assert_close(flat(found), right.mean(0), rtol=1e-10, atol=1e-15)
    else:
        fourth = (p * (1 - p) * ((1 - p) ** 3 + p**3))[:, None] * jacobian**4
        error = (fourth - right**2).sum(0).sqrt() / len(inputs)
        assert ((flat(found) - right.mean(0)).abs() < 5 * error).all()


def test_drawn_labels_converge_to_the_exact_fisher():
    model, (few, _) = net(), data(50)
    inputs = few.repeat(100, 1)  # one sample's index differs from its copy's, so does its draw
    p, jacobian = model(few).detach().softmax(1), jacobians(model, few)
    gradients = p[:, None, :] - torch.eye(C, dtype=torch.float64)  # (n, label, c) at the outputs
    squares = torch.einsum("nlc,ncp->nlp", gradients, jacobian) ** 2
    exact = (p[:, :, None] * squares).sum(1)
    variance = (p[:, :, None] * squares**2).sum(1) - exact**2
    error = (variance.mean(0) / len(inputs)).sqrt()
    wrong = torch.zeros(len(inputs), dtype=torch.int64)
    found = gradscope.expectation(
        model, "cross_entropy", "square | mean", inputs, wrong, labels="sampled"
    )
    distance = (flat(found) - exact.mean(0)).abs() / error
    assert distance.max() < 5
    assert distance.mean() > 0.2  # drawn, and not the expectation itself
    torch.testing.assert_close(exact.mean(0), fisher_diagonal(model, few), rtol=1e-10, atol=1e-15)


def drawn(model, inputs, targets, loss="cross_entropy", **options):
    with gradscope.Scope(model, loss, labels="sampled", **options) as scope:
        return scope.session.labels.of(Batch.of(inputs, targets)).targets


def test_draws_depend_on_seed_and_index_only():
    model, (inputs, targets) = net(), data()
    scope = gradscope.Scope(model, "cross_entropy", labels="sampled", seed=5)
    whole = Batch.of(inputs, targets)
    together = scope.session.labels.of(whole).targets
    alone = torch.cat([scope.session.labels.of(whole.one(i)).targets for i in range(N)])
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    assert torch.equal(together, alone)
    assert torch.equal(together[order], scope.session.labels.of(whole.select(order)).targets)
    assert not torch.equal(together, drawn(model, inputs, targets, seed=6))
    assert torch.equal(together, drawn(model, inputs, None, seed=5))  # no labels are needed
    assert set(together.tolist()) == set(range(C))


def test_drawn_tokens_keep_the_first_and_the_ignored():
    torch.manual_seed(0)
    tokens = torch.randint(6, (300, 8))
    targets = tokens.clone()
    targets[:, 5] = -100
    model = nn.Embedding(6, 6)
    labels = drawn(model, tokens, targets, "causal_lm")
    assert torch.equal(labels[:, 0], targets[:, 0])
    assert (labels[:, 5] == -100).all()
    others = labels[:, [1, 2, 3, 4, 6, 7]]
    assert (others >= 0).all() and (others < 6).all()
    # position t's token is drawn from what the model says at t − 1
    p = model(tokens[:, 0]).detach().softmax(1)
    one_hot = nn.functional.one_hot(labels[:, 1], 6)
    error = (p * (1 - p)).sum(0).sqrt() / 300
    assert ((one_hot - p).mean(0).abs() < 5 * error).all()


def test_a_sample_that_is_not_finite_is_left_out_with_all_its_labels():
    model, (inputs, targets) = net(), data(9)
    inputs[4] = torch.inf
    kept = torch.arange(9) != 4
    with pytest.warns(NonFiniteWarning, match="1 samples"):
        found = gradscope.expectation(
            model, "cross_entropy", "square | mean", inputs, targets, labels="exact"
        )
    torch.testing.assert_close(
        flat(found), fisher_diagonal(model, inputs[kept]), rtol=1e-10, atol=1e-15
    )


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        ("l1", {"labels": "sampled"}, "bce_with_logits, causal_lm, cross_entropy, mse, nll"),
        (lambda o, t: o.sum(1), {"labels": "exact"}, "no distribution"),
        ("margin", {"labels": "sampled"}, "the loss 'margin' defines no distribution of labels"),
        ("cross_entropy", {"labels": "drawn"}, "exact"),
        ("cross_entropy", {"labels": "exact", "coupling": "own-loss"}, "sampled"),
    ],
)
def test_what_does_not_go_together(loss, options, words):
    with pytest.raises(SpecError, match=words):
        gradscope.Scope(net(), loss, **options)


class Answers(nn.Linear):
    def __init__(self, answer):
        super().__init__(3, 4)
        self.answer = answer

    def forward(self, x):
        return self.answer(super().forward(x))


@pytest.mark.parametrize("labels", ["sampled", "exact"])
@pytest.mark.parametrize(
    ("loss", "answer", "told"),
    [
        ("cross_entropy", lambda o: (o, o), "tuple"),
        ("cross_entropy", lambda o: o[:, 0], ",)"),
        ("cross_entropy", lambda o: o.T, "(4, "),
        ("causal_lm", lambda o: {"logits": o}, "4)"),
        ("cross_entropy", lambda o: o.long(), "4)"),
    ],
)
def test_answers_that_no_labels_can_be_drawn_from(loss, answer, told, labels):
    inputs, targets = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)
    how = {"labels": labels, "backend": "loop"}
    with pytest.raises(ModelError, match="labels cannot be sampled from") as raised:
        gradscope.expectation(Answers(answer), loss, "square | mean", inputs, targets, **how)
    assert told in raised.value.what


def test_exact_labels_have_no_rows_of_their_own():
    model, (inputs, targets) = net(), data(4)
    scope = gradscope.Scope(model, "cross_entropy", labels="exact")
    for call in (scope.per_sample_gradients, scope.norms):
        with pytest.raises(SpecError, match="one gradient for each class"):
            call(inputs, targets)
    with pytest.raises(SpecError, match="mean, sum, second_moment"):
        scope.expectation("var", inputs, targets)
    maps = nn.Sequential(nn.Linear(D, C * 2), nn.Unflatten(1, (C, 2))).double()
    with pytest.raises(SpecError, match=r"3\^2"):
        gradscope.expectation(
            maps, "cross_entropy", "abs", inputs, targets[:, None].expand(-1, 2), labels="exact"
        )


def npz_run(folder):
    """A run of the small model, as files."""
    model, (inputs, targets) = net(), data()
    (folder / "model.py").write_text(
        "import torch\nfrom torch import nn\ndef build():\n"
        f"    return nn.Sequential(nn.Linear({D}, 5), nn.Tanh(), nn.Linear(5, {C})).double()\n"
    )
    torch.save(model.state_dict(), folder / "w.pt")
    np.savez(folder / "d.npz", inputs=inputs.numpy(), targets=targets.numpy())
    (folder / "run.toml").write_text(
        '[model]\nfactory = "model.py:build"\n[checkpoint]\npath = "w.pt"\n[dataset]\n'
        'path = "d.npz"\n[loss]\nname = "cross_entropy"\nkwargs = {label_smoothing = 0.0}\n'
        '[compute]\nlabels = "exact"\ntransform = ["square | mean", "norm", "square"]\n'
    )
    return model, inputs, targets


def test_a_run_records_its_labels(tmp_path):
    from gradscope.config import load, resolve
    from gradscope.run import compute, estimate, prepare

    model, inputs, targets = npz_run(tmp_path)
    p = model(inputs).detach().softmax(1)
    job = prepare(load(tmp_path / "run.toml"))
    compute(job, tmp_path / "out.h5")
    assert estimate(job, tmp_path / "out.h5").samples == N
    with gradscope.open(tmp_path / "out.h5") as file:
        assert np.array_equal(file.samples["target"], targets.numpy())
        entropy = -(p * p.log()).sum(1)
        np.testing.assert_allclose(file.samples["loss"], entropy.numpy(), rtol=1e-10)
        norms = by_hand(model, inputs, lambda g: g.norm()[None])[:, 0]
        np.testing.assert_allclose(file.samples["norm"], norms.numpy(), rtol=1e-10)
        np.testing.assert_allclose(file.chains[1]["norm"][:], norms.numpy(), rtol=1e-10)
        found = np.concatenate([a[:].ravel() for a in file.chains[0].values()])
        right = fisher_diagonal(model, inputs).numpy()
        np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-15)
        rows = np.concatenate([a[:].reshape(N, -1) for a in file.chains[2].values()], 1)
        np.testing.assert_allclose(rows.mean(0), right, rtol=1e-10, atol=1e-15)
        run = file.run if isinstance(file.run, dict) else json.loads(file.run)
    assert run["spec"]["compute"]["labels"] == "exact"
    assert run["loss"]["name"] == "cross_entropy" and run["loss"]["per_sample"] == "mean"
    prints = [
        prepare(resolve(tmp_path / "run.toml", overrides)).fingerprint()
        for overrides in (
            {},
            {"compute": {"labels": "data"}},
            {"loss": {"name": "cross_entropy", "kwargs": {"label_smoothing": 0.1}}},
        )
    ]
    assert prints[0] == job.fingerprint()
    assert prints[0] != prints[1] and prints[0] != prints[2] and prints[1] != prints[2]


def test_a_run_draws_the_same_in_batches(tmp_path):
    from gradscope.config import resolve
    from gradscope.run import compute, prepare

    model, inputs, targets = npz_run(tmp_path)
    options = {"labels": "sampled", "seed": 4, "transform": ["identity"], "batch_size": 7}
    compute(prepare(resolve(tmp_path / "run.toml", {"compute": options})), tmp_path / "out.h5")
    labels = drawn(model, inputs, targets, seed=4)
    right = gradscope.per_sample_gradients(model, "cross_entropy", inputs, labels)
    with gradscope.open(tmp_path / "out.h5") as file:
        assert np.array_equal(file.samples["target"], targets.numpy())
        for name, value in right.items():
            np.testing.assert_allclose(
                file.chains[0][name][:], value.numpy(), rtol=1e-9, atol=1e-14
            )
