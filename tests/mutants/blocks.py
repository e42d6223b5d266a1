"""Defects in blocks: what they say of gradients without forming them, and how they form them."""

from functools import partial

from tests.mutants.base import mutant
from tests.mutants.scenarios import Asked

outer = partial(mutant, "blocks/outer.py")
products = partial(mutant, "blocks/outer.py")
scatter = partial(mutant, "blocks/scatter.py")
convolution = partial(mutant, "blocks/convolution.py")

outer(
    "both factors scaled: a factor for each sample is applied to both factors of a product",
    "replace(self, left=times(left, factors))",
    "replace(self, left=times(left, factors), right=times(right, factors))",
    Asked("mlp", "clip:max_norm=0.5 | mean"),
)
mutant(
    "blocks/base.py",
    "factors of a table ignored: an embedding's rows stay as they are where they are scaled",
    "{last: times(getattr(self, last), factors)}",
    "{last: getattr(self, last)}",
    Asked("tokens", "clip:max_norm=0.5 | mean"),
)
products(
    "sum cut short: a sum over more than four samples leaves out the last of them",
    "(f.permute(order).flatten(1, 2) for",
    "(f[: max(4, len(f) - 1)].permute(order).flatten(1, 2) for",
    Asked("mlp", "mean"),
)
products(
    "last position left out: rows are formed without the last position of a sequence",
    "    m, t, r = left.shape",
    "    left, right = left[:, :-1], right[:, :-1]\n    m, t, r = left.shape",
    Asked("positions"),
)
products(
    "half a cross term: Gram matrices count the products of the two halves once, not twice",
    "+ 2 * _met(a, b, c, d)",
    "+ _met(a, b, c, d)",
    Asked("long", "norms", variant="gram"),
)
scatter(
    "repeated token squared apart: an embedding's norms square what meets in a row, then add it",
    "return norms.index_add_(0, samples, squares(merged).sum(1))",
    "return squares(precise(self.rows)).sum((1, 2))",
    Asked("tokens", "norms"),
)
scatter(
    "cross term of tied weights: norms count what two uses of a weight have in common once",
    ".mH)).sum((1, 2)).real",
    ".mH)).sum((1, 2)).real / 2",
    Asked("tied_embedding_and_output", "norms"),
)
outer(
    "square before the sum over positions: second moments square each position's part",
    "if not self.sums_squares:",
    "if False:",
    Asked("positions", "second_moment"),
)
mutant(
    "blocks/base.py",
    "last tile empty: sums of squares take the samples of the last tile to be zeros",
    "self._parts(TILE_BYTES):\n            yield part, self.select(part).dense()",
    "self._parts(600):\n            yield part, self.select(part).dense() * (part.stop < self.n)",
    Asked("positions", "second_moment"),
)
convolution(
    "patches one pixel off: the patches of a padded image begin one position late",
    ".flatten(1, 1 + d)",
    ".flatten(1, 1 + d).roll(int(any(self.padding)), -1)",
    Asked("cnn"),
)
convolution(
    "samples as groups, reversed: the kernel of samples as groups gives them back backwards",
    "stacked).view(n, *self.shape)",
    "stacked).view(n, *self.shape).flip(0)",
    Asked("cnn", variant="grouped kernel"),
)
convolution(
    "kernel axes swapped: a kernel's height and width change places in sums over samples",
    "return found[1]",
    "return found[1].mT.contiguous()",
    Asked("cnn", "mean"),
)
outer(
    "inner product of one position: the inner product with a vector takes the first one only",
    "* precise(self.right)).sum((1, 2, 3))",
    "* precise(self.right))[:, :, :1].sum((1, 2, 3))",
    Asked("positions", "cosine:to=mean | mean"),
)
mutant(
    "blocks/gradients.py",
    "rows one place late: rows are right one by one, and handed out one place late",
    "name: block.dense(None if out is None else out[name]) for",
    "name: block.dense(None if out is None else out[name]).roll(int(self.n > 3), 0) for",
    Asked("mlp"),
)
