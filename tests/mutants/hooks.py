"""Defects in the `hooks` backend: its rules, and what it finds out about a program."""

from functools import partial

from tests.mutants.base import mutant
from tests.mutants.scenarios import Asked

layers = partial(mutant, "backends/hooks/rules.py")
recurrent = partial(mutant, "backends/hooks/recurrent.py", scenario=Asked("lstm"))
axes = partial(mutant, "backends/hooks/graph/axes.py")
analysis = partial(mutant, "backends/hooks/graph/analysis.py")
pullback = partial(mutant, "backends/hooks/pullback.py")
backend = partial(mutant, "backends/hooks/__init__.py")

layers(
    "product with a sign: the weight's gradient of a linear layer has the wrong sign",
    "return OuterBlock(a, b, site.shape, right_is_gradient)",
    "return OuterBlock(-a, b, site.shape, right_is_gradient)",
    Asked("mlp"),
)
layers(
    "transposed weight: the factors of a square weight's gradient change places",
    "return OuterBlock(a, b, site.shape, right_is_gradient)",
    "return OuterBlock(b, a, site.shape, right_is_gradient)",
    Asked("four"),
)
layers(
    "factor alpha dropped: the factor of a product in addmm does not reach the weight's gradient",
    "return site if by == 1 else",
    "return site if True else",
    Asked("addmm_and_baddbmm"),
)
layers(
    "wrong expert: stacked weights get the gradient of their neighbour in the stack",
    "return OuterBlock(a, b, site.shape, right_is_gradient)",
    "return OuterBlock(a.roll(1, 1), b, site.shape, right_is_gradient)",
    Asked("stacked_expert_weights_with_bias"),
)
mutant(
    "backends/hooks/rules.py",
    "bias at one position: a bias is not summed over the positions of a sequence",
    "moved.sum(axes, keepdim=True)",
    "moved[:, :1].sum(axes, keepdim=True)",
    Asked("positions"),
)
layers(
    "product rule, wrong operand: a scale's gradient is multiplied by the scale itself",
    '"other" if site.slot == 0 else "self"',
    '"self" if site.slot == 0 else "other"',
    Asked("elementwise"),
)
layers(
    "quotient rule, sign: the derivative by a denominator has lost its minus",
    'ratio = -site.saved("self")',
    'ratio = site.saved("self")',
    Asked("elementwise"),
)
layers(
    "difference, factor: alpha of a subtraction is not applied",
    '1 if site.slot == 0 else site.saved("alpha")',
    "1",
    Asked("elementwise"),
)
layers(
    "group off by one: a grouped convolution's kernel meets the channels of the next group",
    'inputs = site.first(site.saved("input").conj())',
    'inputs = site.first(site.saved("input").conj()).roll(site.shape[1], 2)',
    Asked("cnn"),
)
layers(
    "bias of one pixel: a convolution's bias is not summed over the pixels",
    "return _channels(site, gradient)",
    "return _channels(site, gradient[..., :1, :1])",
    Asked("cnn"),
)
layers(
    "repeated token dropped: of a token that comes twice in a sample, only the first counts",
    "    return ScatterBlock(index, rows, size)",
    "    again = (index.unsqueeze(1) == index.unsqueeze(2)).tril(-1).any(2)\n"
    "    return ScatterBlock(index, rows.masked_fill(again.unsqueeze(-1), 0.0), size)",
    Asked("tokens"),
)
layers(
    "padding counted: the padding row of an embedding gets a gradient",
    "(index == padding)",
    "(index == -1)",
    Asked("tokens"),
)
layers(
    "layer norm, mean forgotten: the scale of a layer norm meets inputs that are not centred",
    '(site.saved("input") - site.saved("result1"))',
    'site.saved("input")',
    Asked("tokens"),
)
layers(
    "layer norm, scale and shift: the scale of a layer norm gets the gradient of the shift",
    "return site.reduced(standard.mul_(site.gradient))",
    "return site.reduced(site.gradient)",
    Asked("tokens"),
)
layers(
    "group norm, next group's mean: channels are centred by the mean of the next group",
    "(product - mean * shift)",
    "(product - mean.roll(1, 1) * shift)",
    Asked("cnn"),
)
layers(
    "batch norm without eps: the running variance is used without its eps",
    'torch.rsqrt(variance + site.saved("eps" if own else "epsilon"))',
    "torch.rsqrt(variance)",
    Asked("running"),
)
recurrent(
    "recurrent step off by one: recurrent weights meet the state after a step, not before it",
    "return found, before, found.sum(0)",
    "return found, output, found.sum(0)",
)
recurrent(
    "cell's carry lost: the gradient of an LSTM's cell does not go on to the step before",
    "cell = cell * kept[t]",
    "cell = cell * 0.0",
)
recurrent(
    "slope of the wrong function: the candidate gate of an LSTM has the slope of a sigmoid",
    "_at_tanh(i, g)",
    "_at_sigmoid(i, g)",
)
axes(
    "mask off by one: an operation without a rule keeps the gradient of the next sample",
    "        kept = torch.zeros_like(split)",
    "        kept, sample = torch.zeros_like(split), (sample + 1) % n",
    Asked("custom_function_with_a_parameter"),
)
axes(
    "time-major read as batch-major: samples and time change places in an axis that holds both",
    "return self._split(values, n).movedim",
    "return SampleAxis(k, self.after, self.before)._split(values, n).movedim",
    Asked("linear_samples_merged_last_positions_equal_samples"),
)
analysis(
    "stale layout: where samples lie in a sorted batch is taken from the first batch",
    "if any(way is not Movement.STAYS for way in self.ways.values()):",
    "if False:",
    Asked("by_length"),
    "audit",
)
mutant(
    "backends/hooks/graph/movement.py",
    "unknown mover: an operation that moves samples counts as one that leaves them in place",
    "len(known) < len(growths) or test is None:\n        return Movement.MOVES",
    "len(known) < len(growths) or test is None:\n        return Movement.STAYS",
    Asked("by_length"),
    "audit",
)
axes(
    "identity for marks: marks are read as if every entry lay at its own sample's place",
    "    owner = torch.where((most == 0) | torn, -1, owner)\n",
    "    owner = torch.arange(len(owner)) % (len(owner) // count)\n",
    Asked("flipped"),
)
axes(
    "sample 0 is nobody: entries of sample 0 count as entries without an owner",
    "torch.nonzero(self.owner >= 0)",
    "torch.nonzero(self.owner > 0)",
    Asked("flipped"),
)
mutant(
    "backends/hooks/graph/trace.py",
    "mean instead of sum: gradients are those of the mean loss, 1/n of what they should be",
    "backward(losses, given.contiguous(), edges)",
    "backward(losses, given.contiguous() / self.n, edges)",
    Asked("mlp"),
)
pullback(
    "transpose forgotten: the gradient of a square weight is not transposed back",
    "return block.transpose(0, 1)",
    "return block",
    Asked("four"),
)
pullback(
    "one use of two: of a weight that is used twice only one use counts",
    "parts[names[id(leaf)]].append(block)",
    "parts[names[id(leaf)]] = [block]",
    Asked("tied_embedding_and_output"),
)
analysis(
    "frontier with a gap: one of the edges from parameters to samples is left out",
    "frontier=frontier,",
    "frontier=frontier[1:],",
    Asked("mlp"),
)
mutant(
    "backends/hooks/graph/ownership.py",
    "a gap between owners: an operation of one sample's in a loop is left out of the frontier",
    "for node in sorted(wanted - shared)",
    "for node in sorted(wanted - shared)[:-1]",
    Asked("control_flow_on_the_data"),
)
backend(
    "two rows swapped: the first two samples have each other's gradient",
    "return Gradients(rows)\n",
    "return Gradients(rows).select(torch.tensor([1, 0, *range(2, len(losses))]))\n",
    Asked("mlp"),
)
pullback(
    "samples reversed in a product: a batched product through a softmax comes back backwards",
    "name: DenseBlock(value) for",
    "name: DenseBlock(value.flip(0)) for",
    Asked("softmax_over_a_parameter"),
)
backend(
    "single sample counted twice: a batch of one, evaluated twice over, gives twice the gradient",
    "both.select(slice(0, 1))",
    "both.select(slice(0, 1)).scale(torch.full((1,), 2.0))",
    Asked("single_samples"),
    "audit",
)
backend(
    "stale answer: a batch gets the answer of an earlier one of its size",
    "return isolating(problem, batch, together, alone)",
    "return vars(program).setdefault(f'{len(batch)}', program.evaluate(batch))",
    Asked("same_size"),
    "audit",
)
backend(
    "stale factors: losses are the batch's own, but gradients meet what an earlier one saved",
    "parts = self._parts(recorded, analysis)\n            except",
    "parts = vars(self).setdefault(f'{len(batch)}', self._parts(recorded, analysis))\n"
    "            except",
    Asked("same_size"),
    "audit",
)
