"""The loss of the character model, one value a sequence."""

from torch import Tensor
from torch.nn import functional


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each sequence, the MEAN over its tokens (not the sum).

    Args:
        outputs: Logits (n, t, v).
        targets: The next characters (n, t), int64.

    Returns:
        (n,).
    """
    return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)
