"""Which labels the losses are held against: the data's, drawn ones, or all of them.

- `data`: the targets as they are; `square | mean` is the diagonal of the empirical Fisher.
- `sampled`: one draw from the model's own predictive distribution: the Fisher by Monte Carlo. The
  random numbers depend on the seed and the sample's index only.
- `exact`: the expectation over all classes, E_{y ~ p(y|x)} T(∇L(x, y)), in every sample's place:
  `square | mean` is the diagonal of the exact Fisher. A sample costs as many gradients as there
  are classes. An expectation over labels goes through T(g) only in a linear reducer: mean, sum, or
  none (Kunstner et al. 2019, arXiv:1905.12558; Martens 2020, arXiv:1412.1193).

The weights p are no function of the parameters here: no gradient goes through them.
"""

from gradscope.stages.labels.bound import Labels, Mode, require
from gradscope.stages.labels.expectation import chosen, mean, over_labels, samples

__all__ = ["Labels", "Mode", "chosen", "mean", "over_labels", "require", "samples"]
