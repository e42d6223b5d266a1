"""Transforms that summarise a sample's gradient by its norm."""

from gradscope.blocks import DenseBlock, Gradients
from gradscope.transforms.base import Scope, Transform, transform


@transform("norm", Scope.VECTOR)
def norm(per: str = "sample") -> Transform:
    """T(g) = ‖g‖₂: one number a sample, or one a sample and parameter.

    Args:
        per: "sample" gives the single entry `norm` (n,); "parameter" gives (n,) for each name.

    Raises:
        ValueError: `per` is neither.
    """
    if per not in ("sample", "parameter"):
        raise ValueError(f"per must be sample or parameter, not {per!r}")

    def apply(gradients: Gradients) -> Gradients:
        if per == "sample":
            return gradients.of({"norm": DenseBlock(gradients.norms)})
        squared = gradients.squared_norms
        return gradients.of({name: DenseBlock(value.sqrt()) for name, value in squared.items()})

    return apply
