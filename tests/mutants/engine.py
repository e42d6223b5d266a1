"""Defects in the other backends, in compiled programs, in reducers, transforms and labels."""

from functools import partial

import torch

from tests.mutants.base import mutant
from tests.mutants.scenarios import Asked
from tests.stages import test_labels, test_reducers, test_transforms

vmap = partial(mutant, "backends/vmap.py")
layers = partial(mutant, "backends/expand/layers.py")
loop = partial(mutant, "backends/loop.py")
reducer = partial(mutant, "stages/reducers/base.py")
moments = partial(mutant, "stages/reducers/moments.py")
order = partial(mutant, "stages/reducers/order.py")

vmap(
    "targets of the neighbour: inputs and targets are vectorised one sample apart",
    "leaves = tensors((batch.inputs, batch.targets))",
    "leaves = tensors((batch.inputs, batch.targets.roll(1, 0)))",
    Asked("mlp", backend="vmap"),
)
vmap(
    "sample axis second: the sample axis comes behind a parameter's first axis, of the same size",
    "return losses, gradients",
    "return losses, {k: g.transpose(0, 1).contiguous() for k, g in gradients.items()}",
    Asked("four", backend="vmap"),
)
vmap(
    "bias outside the reset gate: the steps of a GRU add a bias after the reset gate, not before",
    "(n + (r + hr).sigmoid() * hn)",
    "(n + (r + hr).sigmoid() * (hn - b_hh.chunk(3)[2]) + b_hh.chunk(3)[2])",
    Asked("gru", backend="vmap"),
)
mutant(
    "backends/expand/axes.py",
    "one table for all samples: tokens are added into the first sample's table",
    "return indices + offsets.reshape(-1, *[1] * (indices.dim() - 1))",
    "return indices",
    Asked("tokens", backend="expand"),
)
layers(
    "groups read backwards: the samples that a convolution took as groups are put back reversed",
    "unfold(found[1], s.n) if mask[1]",
    "unfold(found[1], s.n).flip(0) if mask[1]",
    Asked("cnn", backend="expand"),
)
layers(
    "layer norm, deviation forgotten: a backward pass takes every standard deviation to be 1",
    "to_weight = pg * (px - pm) * pr",
    "to_weight = pg * (px - pm)",
    Asked("tokens", backend="expand"),
)
mutant(
    "backends/expand/layers.py",
    "stack off by one: in a stack of products each result is that of the next matrix",
    "unfold(torch.bmm(fold(a), fold(b)), n)",
    "unfold(torch.bmm(fold(a), fold(b)), n).roll(1, 1)",
    Asked("stacked_expert_weights_with_bias", backend="expand"),
)
layers(
    "one sample's bias: a convolution's bias is that of the first sample's pixels for all",
    "to_bias = pg.sum([1, *range(3, pg.dim())])",
    "to_bias = pg.sum([1, *range(3, pg.dim())])[:1].expand(s.n, -1)",
    Asked("cnn", backend="expand"),
)
mutant(
    "backends/expand/views.py",
    "views of another sample: a view of each sample has the values of the sample before it",
    "raw.view(raw.shape[0], *size)",
    "raw.roll(1, 0).reshape(raw.shape[0], *size)",
    Asked("cnn", backend="expand"),
)
mutant(
    "backends/expand/__init__.py",
    "rows shifted: every sample has the gradient of the one before it",
    "name: mode.samples.of(gradient).contiguous()",
    "name: mode.samples.of(gradient).roll(1, 0)",
    Asked("mlp", backend="expand"),
)
loop(
    "gradients accumulate: gradients are not set to zero between two samples",
    "values[name][i] = gradient",
    "values[name][i] = gradient + (values[name][i - 1] if i else 0)",
    Asked("mlp", backend="loop"),
    "compare",
)
loop(
    "first of two losses: every sample is evaluated with the targets of the first",
    "one_sample(problem, batch.one(i))",
    "one_sample(problem, Batch(batch.one(i).inputs, batch.targets[:1], batch.index[i : i + 1]))",
    Asked("mlp", backend="loop"),
    "compare",
)
loop(
    "neighbour's own loss: of a joint forward pass each sample gets its neighbour's gradient",
    "        picks = _picks(losses)",
    "        picks = _picks(losses).roll(1, 0)",
    Asked("coupled", backend="vmap"),
)
loop(
    "centred rows: what all samples have in common is taken off their gradients",
    "{name: torch.cat([part[name] for part in parts]) for",
    "{name: (g := torch.cat([part[name] for part in parts])) - g.mean(0) for",
    Asked("coupled", backend="vmap"),
)
mutant(
    "backends/compiled.py",
    "stale constant: a program holds the targets of the batch that it was compiled on",
    "        inputs, targets = map_tensors(Tensor.contiguous, (batch.inputs, batch.targets))",
    "        inputs, targets = map_tensors(Tensor.contiguous, (batch.inputs, batch.targets))\n"
    "        targets = vars(self).setdefault('first', targets)",
    Asked("same_size", backend="vmap", compile=True),
    "audit",
)
mutant(
    "stages/reducers/accumulator.py",
    "carry lost: a sum forgets the batches before the last",
    "value.add_(more[key].to(value.device))",
    "value.copy_(more[key].to(value.device))",
    Asked("mlp", "mean", streamed=2),
)
reducer(
    "one sample too many: every batch counts one sample more than it has",
    "torch.tensor(float(gradients.n),",
    "torch.tensor(float(gradients.n + 1),",
    Asked("mlp", "mean", streamed=2),
)
moments(
    "batches' means ignored: a variance leaves out how far the batches' means are apart",
    'a["m2"] + b["m2"] + between',
    'a["m2"] + b["m2"]',
    Asked("mlp", "var", streamed=2),
)
moments(
    "weights exchanged: two batches' means are merged with each other's number of samples",
    "share = n_b / (n_a + n_b)",
    "share = n_a / (n_a + n_b)",
    Asked("mlp", "mean:standard_error=true", streamed=2),
)
order(
    "largest of the last batch: a maximum forgets the batches before the last",
    '{"value": of_two(a["value"], b["value"])}',
    "b",
    Asked("mlp", "max", streamed=2),
)
order(
    "one batch twice: of two batches a quantile holds the first one twice",
    'torch.cat([part["values"] for part in pair])',
    'torch.cat([pair[0]["values"]] * 2)',
    Asked("mlp", "quantile:q=0.5", streamed=2),
)
# wrong formulas, which no guard can tell from another wish
moments(
    "variance by n: a variance is divided by the number of samples, whatever ddof says",
    "degrees = n - ddof",
    "degrees = n",
    Asked("mlp", "var"),
    test=lambda: test_reducers.test_at_once_and_in_any_split("var", torch.float64),
)
mutant(
    "stages/transforms/norms.py",
    "clipped by the square: a gradient is clipped by its squared norm",
    "return gradients.norms\n",
    "return gradients.norms.square()\n",
    Asked("mlp", "clip:max_norm=0.5 | mean"),
    test=lambda: test_transforms.test_rows("clip:max_norm=0.5", ()),
)
mutant(
    "stages/transforms/elementwise.py",
    "mean added: centring adds the mean instead of taking it off",
    "CenteredBlock(block, mean[name].to(block.device))",
    "CenteredBlock(block, -mean[name].to(block.device))",
    Asked("mlp", "center | square | mean"),
    test=lambda: test_transforms.test_rows("center", ()),
)
mutant(
    "stages/labels.py",
    "probabilities of other classes: each class gets the probability of the one before it",
    "ExpectedBlock(block, weights)",
    "ExpectedBlock(block, weights.roll(1, 1))",
    Asked("classifier", "second_moment", labels="exact"),
    test=lambda: test_labels.test_exact_is_the_closed_form("hooks", "square | mean"),
)
