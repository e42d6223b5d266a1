"""Inputs that every sample has whole: the nodes of a graph against a float64 loop over nodes."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradscope
from gradscope import Whole
from gradscope.errors import CoupledSamplesError, GradscopeError, SpecError, UnsupportedError
from tests.oracle import cross_entropy

N, F, C = 60, 5, 3
BACKENDS = ("hooks", "vmap", "expand", "loop")


def graph(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, F), a normalised adjacency (N, N) and classes (N,)."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(N, F, generator=draw), torch.randint(C, (N,), generator=draw)
    a = (torch.rand(N, N, generator=draw) < 0.06).float()
    a = ((a + a.T + torch.eye(N)) > 0).float()
    d = a.sum(1).rsqrt()
    return x, d[:, None] * a * d, y


X, A, Y = graph()
EDGES = A.nonzero().T  # (2, E)


class Dense(nn.Module):
    """Two layers of Kipf & Welling (2017): A relu(A X W + b) W + b."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(F, 8), nn.Linear(8, C)

    def forward(self, x, adjacency):
        return adjacency @ self.b(torch.relu(adjacency @ self.a(x)))


class Edges(Dense):
    """Messages along a list of edges (2, E), as PyTorch Geometric has them."""

    def spread(self, h, edges):
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

    def forward(self, x, edges):
        return self.spread(self.b(torch.tanh(self.spread(self.a(x), edges))), edges)


class Attention(nn.Module):
    """A graph attention layer (Velickovic et al. 2018) that also returns its weights."""

    def __init__(self):
        super().__init__()
        self.w, self.left, self.right = nn.Linear(F, C), nn.Linear(C, 1), nn.Linear(C, 1)

    def forward(self, x, adjacency):
        h = self.w(x)
        scores = functional.leaky_relu(self.left(h) + self.right(h).T)
        weights = scores.masked_fill(adjacency == 0, -1e9).softmax(1)
        return {"logits": weights @ h, "weights": weights}


class Normalised(Dense):
    """Normalises over the nodes of the graph, which are no samples to each other's loss."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, adjacency):
        return adjacency @ self.b(torch.relu(self.norm(adjacency @ self.a(x))))


class Held(Dense):
    """Holds the adjacency itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", A)

    def forward(self, x):
        return super().forward(x, self.adjacency)


class Writing(Dense):
    """Writes into its arguments, which are copies."""

    def forward(self, x, adjacency):
        return super().forward(x.mul_(2), adjacency.mul_(0.5))


GRAPHS = {
    "dense": (Dense, (X, A)),
    "edges": (Edges, (X, EDGES)),
    "attention": (Attention, {"x": X, "adjacency": A}),
    "normalised": (Normalised, (X, A)),
    "held": (Held, X),
    "writing": (Writing, (X, A)),
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def logits(answer):
    return answer["logits"] if isinstance(answer, dict) else answer


def double(tree):
    if isinstance(tree, tuple):
        return tuple(map(double, tree))
    if isinstance(tree, dict):
        return {k: double(v) for k, v in tree.items()}
    return tree.double() if tree.is_floating_point() else tree.clone()


def reference(model, inputs, targets=Y, loss=cross_entropy):
    """Return {name: (n, *shape)}, the gradient of each node's loss by autograd in float64."""
    model = copy.deepcopy(model).double()
    inputs = double(inputs)
    if isinstance(inputs, dict):
        answer = model(**inputs)
    else:
        answer = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    named = dict(model.named_parameters())
    losses = loss(logits(answer), targets)
    found = [torch.autograd.grad(v, named.values(), retain_graph=True) for v in losses]
    return {k: torch.stack([g[i] for g in found]) for i, k in enumerate(named)}


def shared(inputs):
    if isinstance(inputs, dict):
        return {k: Whole(v) for k, v in inputs.items()}
    return tuple(map(Whole, inputs)) if isinstance(inputs, tuple) else Whole(inputs)


def require_equal(found, right, tolerance=1e-5):
    assert found.keys() == right.keys()
    for name, rows in right.items():
        scale = float(rows.abs().max())
        torch.testing.assert_close(found[name].double(), rows, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_the_nodes_of_a_graph(kind, backend):
    build, inputs = GRAPHS[kind]
    model = made(build)
    before = copy.deepcopy(inputs)
    found = gradscope.per_sample_gradients(
        model, "cross_entropy", shared(inputs), Y, backend=backend
    )
    require_equal(found, reference(model, inputs))
    assert str(before) == str(inputs)


@pytest.mark.parametrize("backend", ["auto", "hooks", "loop"])
def test_a_sparse_adjacency(backend):
    model = made(Dense)
    given = Whole(X), Whole(A.to_sparse())
    found = gradscope.per_sample_gradients(model, "cross_entropy", given, Y, backend=backend)
    require_equal(found, reference(model, (X, A)))


def test_one_whole_object_holds_all_arguments():
    model = made(Dense)
    for given in (Whole((X, A)), Whole({"x": X, "adjacency": A})):
        found = gradscope.per_sample_gradients(model, "cross_entropy", given, Y)
        require_equal(found, reference(model, (X, A)))


def test_the_training_nodes_alone():
    model, nodes = made(Dense), torch.tensor([41, 3, 17, 59])
    right = {k: g[nodes] for k, g in reference(model, (X, A)).items()}
    with gradscope.Scope(model, "cross_entropy") as scope:
        given = Whole(X), Whole(A)
        found = scope.per_sample_gradients(given, Y[nodes], index=nodes)
        mean = scope.expectation("clip:max_norm=0.5 | mean", given, Y[nodes], index=nodes)
    require_equal(found, right)
    norms = sum(g.flatten(1).square().sum(1) for g in right.values()).sqrt()
    factors = (0.5 / norms).clamp(max=1)
    clipped = {k: (g.flatten(1) * factors[:, None]).mean(0) for k, g in right.items()}
    require_equal({k: g.flatten() for k, g in mean.items()}, clipped)


def test_another_graph_in_the_next_call():
    model = made(Dense)
    x, a, y = graph(1)
    with gradscope.Scope(model, "cross_entropy") as scope:
        scope.norms((Whole(X), Whole(A)), Y)
        found = scope.per_sample_gradients((Whole(x), Whole(a)), y)
    require_equal(found, reference(model, (x, a), y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_beside_what_is_whole(backend):
    class Pairs(Edges):  # link prediction: a sample is a pair of nodes
        def forward(self, pairs, x, edges):
            h = super().forward(x, edges)
            return (h[pairs[:, 0]] * h[pairs[:, 1]]).sum(1)

    model, pairs = made(Pairs), torch.randint(N, (9, 2))
    targets = torch.rand(9)
    given = pairs, Whole(X), Whole(EDGES)

    def bce(outputs, targets):
        return functional.binary_cross_entropy_with_logits(
            outputs, targets.double(), reduction="none"
        )

    found = gradscope.per_sample_gradients(
        model, "bce_with_logits", given, targets, backend=backend
    )
    require_equal(found, reference(model, (pairs, X, EDGES), targets, bce))

    @gradscope.model_loss
    def loss(model, inputs, targets):
        own = functional.binary_cross_entropy_with_logits(model(*inputs), targets, reduction="none")
        return own + 0.1 * model.a.weight.square().sum()

    rows = gradscope.per_sample_gradients(model, loss, given, targets, backend=backend)
    plain = reference(model, (pairs, X, EDGES), targets, bce)
    plain["a.weight"] += 0.2 * model.a.weight.detach().double()
    require_equal(rows, plain)


def test_batch_statistics_and_dropout_of_one_graph():
    class Dropped(Normalised):
        def forward(self, x, adjacency):
            return super().forward(functional.dropout(x, 0.3, self.training), adjacency)

    model = made(Dropped).train()
    given = Whole(X), Whole(A)
    with pytest.raises(UnsupportedError, match="random"):
        gradscope.norms(model, "cross_entropy", given, Y)
    rows = [
        gradscope.per_sample_gradients(
            model, "cross_entropy", given, Y, backend=backend, randomness="fixed", seed=2
        )
        for backend in ("hooks", "loop")
    ]
    require_equal(rows[0], {k: g.double() for k, g in rows[1].items()})


def test_labels_and_positions_of_nodes():
    model, given = made(Dense), (Whole(X), Whole(A))
    p = copy.deepcopy(model).double()(X.double(), A.double()).softmax(1).detach()
    every = [reference(model, (X, A), torch.full((N,), c)) for c in range(C)]
    right = {
        k: sum(p[:, c] @ e[k].flatten(1).square() for c, e in enumerate(every)) for k in every[0]
    }
    found = gradscope.expectation(model, "cross_entropy", "square | sum", given, Y, labels="exact")
    require_equal({k: g.flatten() for k, g in found.items()}, right)

    class Steps(nn.Module):  # an answer (N, t, C): each node has t positions
        def __init__(self):
            super().__init__()
            self.inner = Dense()

        def forward(self, x, adjacency):
            h = self.inner(x, adjacency)
            return torch.stack([h, h.tanh()], 1)

    steps, targets = made(Steps), torch.stack([Y, (Y + 1) % C], 1)
    rows = gradscope.per_sample_gradients(
        steps, "token_cross_entropy", given, targets, rows="token"
    )

    def loss(outputs, targets):
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    require_equal(rows, reference(steps, (X, A), targets, loss))


def test_compare_against_code_of_the_users_own():
    def own(model, loss, inputs, targets):
        losses = loss(model(*inputs), targets)
        found = [torch.autograd.grad(v, model.parameters(), retain_graph=True) for v in losses]
        names = [name for name, _ in model.named_parameters()]
        return dict(zip(names, map(torch.stack, zip(*found, strict=True)), strict=True))

    found = gradscope.compare(
        made(Dense), "cross_entropy", (Whole(X), Whole(A)), Y, against={"own": own}
    )
    assert found.agrees
    assert {row.backend: row.status for row in found.rows}["own"] == "agrees"


def test_a_compiled_program_is_not_made():
    with gradscope.Scope(made(Dense), "cross_entropy", compile=True) as scope:
        scope.norms((Whole(X), Whole(A)), Y)
    assert "not compiled: inputs are whole" in scope.notes


class Padded(Dense):
    def forward(self, x, adjacency):
        return super().forward(x, adjacency)[None]


@gradscope.model_loss
def of_model(model, inputs, targets):
    return cross_entropy(model(*inputs), targets)


ALL = Whole(X), Whole(A)


@pytest.mark.parametrize(
    ("model", "loss", "inputs", "targets", "what", "remedy"),
    [
        # an (n, n) matrix among the inputs, or a buffer (n, n)
        (Dense, "cross_entropy", (X, A), Y, "not on a single sample", "nodes of one graph"),
        (Held, "cross_entropy", X, Y, "not on a single sample", "nodes of one graph"),
        (
            Dense,
            "cross_entropy",
            (X, Whole(A)),
            Y,
            "not on a single",
            "Give features and graph whole",
        ),
        (Attention, "cross_entropy", (X, A), Y, "not on a single sample", "nodes of one graph"),
        # a list of edges has another length than the nodes
        (Edges, "cross_entropy", (X, EDGES), Y, "different numbers", r"gradscope\.Whole\(x\)"),
        # answers without a row for each sample
        (Dense, "cross_entropy", ALL, Y[:7], r"returned \(60, 3\); .* 7 rows", "index=positions"),
        (Padded, "cross_entropy", ALL, Y, r"returned \(1, 60, 3\)", "leading axis of 1"),
        (Dense, "cross_entropy", ALL, None, "number of samples is unknown", "index=torch.arange"),
        (Dense, of_model, ALL, Y, "does not know which rows", r"torch\.arange\(n\)"),
    ],
)
def test_what_is_said(model, loss, inputs, targets, what, remedy):
    with pytest.raises(GradscopeError, match=what) as caught:
        gradscope.norms(made(model), loss, inputs, targets)
    assert caught.value.remedy is not None
    assert remedy.replace("\\", "") in caught.value.remedy


def test_positions_beyond_the_answer():
    nodes = torch.tensor([2, N])
    scope = gradscope.Scope(made(Dense), "cross_entropy")
    with pytest.raises(GradscopeError, match=r"returned \(60, 3\)"):
        scope.norms(ALL, Y[:2], index=nodes)


def test_what_holds_no_tensor_cannot_be_whole():
    class Data:
        x = X

    with pytest.raises(SpecError, match="Data holds none"):
        Whole(Data())


def test_a_square_matrix_of_samples_is_no_graph():
    # rows of a kernel matrix are samples, and so are as many samples as columns
    kernel = torch.exp(-torch.cdist(X, X).square())
    model = nn.Linear(N, C)
    found = gradscope.per_sample_gradients(model, "cross_entropy", kernel, Y)
    p = model(kernel).softmax(1) - functional.one_hot(Y, C)
    torch.testing.assert_close(found["weight"], (p[:, :, None] * kernel[:, None]).detach())


def test_coupled_samples_without_a_graph_hear_nothing_of_one():
    model = nn.Sequential(nn.Linear(F, 8), nn.BatchNorm1d(8), nn.Linear(8, C)).train()
    with pytest.raises(CoupledSamplesError) as caught:
        gradscope.norms(model, "cross_entropy", X, Y)
    assert "graph" not in str(caught.value.remedy)
