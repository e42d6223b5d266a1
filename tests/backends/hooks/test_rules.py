"""Every node rule fires, and equals the masked fallback where it does."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gradscope.backends.hooks import block_of, hooks, recurrent
from gradscope.backends.hooks.rules import Site, masked, node_rules
from gradscope.blocks import Block
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem
from tests.backends.outcomes import run
from tests.cases import CASES
from tests.gpu import steps

FIRE = {
    "addmm_and_baddbmm": "Addmm Expand",
    "complex_parameters": "Mul",
    "conv2d_groups": "Convolution",
    "conv_transpose2d": "Convolution",
    "distances_to_centres": "Mul Sub Mm",
    "encoder_layer_in_eval_mode": "Addmm NativeLayerNorm",
    "expert_weights_by_einsum": "Bmm Addmm Mm",
    "expert_weights_indexed": "Index",
    "group_norm": "Convolution NativeGroupNorm",
    "indexed_table_with_repeats": "Index IndexSelect",
    "language_model": "Addmm Embedding NativeLayerNorm",
    "linear_features_before_positions": "Add Mm",
    "linear_four_extra_axes": "Addmm",
    "matmul_parameter_on_the_left": "Mm Mv",
    "matrix_times_transposed_batch": "Mm",
    "parameter_as_denominator_and_exponent": "Div",
    "residual_network": "Addmm Convolution NativeBatchNorm",
    "softmax_over_a_parameter": "Bmm",
    "stacked_expert_weights_with_bias": "Baddbmm",
}


@pytest.mark.parametrize("name", FIRE)
def test_a_rule_fires_and_equals_the_fallback(name: str) -> None:
    fired: set[str] = set()

    def compared(kind: str, site: Site) -> Block:
        block = block_of(kind, site)
        rule = node_rules.find(kind)
        if rule is not None and rule(site) is not None:
            torch.testing.assert_close(block.dense(), masked(site).dense(), rtol=1e-9, atol=1e-11)
            assert block.shape == site.shape
            fired.add(kind)
        return block

    run(partial(hooks, contract=compared), CASES[name].build())
    assert {f"{kind}Backward0" for kind in FIRE[name].split()} <= fired


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "power": lambda x, w: x.abs() ** w,
    "clamped": lambda x, w: torch.clamp(x, w - 1, w),
    "chosen": lambda x, w: torch.where(x > 0, w, x * x),
    "chosen for a sample": lambda x, w: torch.where(x[:, :1] > 0, w, w[0] * x),
    "maximum": lambda x, w: torch.maximum(x, w) + torch.minimum(w[0], x),
    "lerp": lambda x, w: torch.lerp(x, w, 0.3) + torch.lerp(x, 2 * x, w),
    "angle": lambda x, w: torch.atan2(w, x) + torch.hypot(x, w),
    "addcmul": lambda x, w: torch.addcmul(x, w, x, value=2) + torch.addcdiv(w, x, w + 3),
    "prelu": lambda x, w: nn.functional.prelu(x, w),
    "logaddexp": lambda x, w: torch.logaddexp(x, w) + torch.xlogy(w, x.abs()),
    "loss": lambda x, w: nn.functional.smooth_l1_loss(w.expand_as(x), x, reduction="none"),
    "indexed by two": lambda x, w: (w[:, None] * w)[(x > 0).long(), (x > 1).long() - 1] * x,
    "indexed along an axis": lambda x, w: (w[:, None] * w)[:, (x[:, 0] > 0).long()].T + x,
    "indexed by a mask": lambda x, w: w[x[0] < 9] * x,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_those_of_single_samples(name: str) -> None:
    torch.manual_seed(4)
    weight = nn.Parameter(torch.rand(3, dtype=torch.float64) + 0.5)
    model = nn.Module()
    model.weight, model.forward = weight, lambda x: ELEMENTWISE[name](x, weight)
    x, targets = torch.randn(2, 5, 3, dtype=torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sin() * targets).sum(1)

    with hooks(Problem.of(model, loss)) as evaluate:
        rows = evaluate(Batch.of(x, targets)).gradients.dense()["weight"]
    for k in range(5):
        one = loss(model(x[k : k + 1]), targets[k : k + 1]).sum()
        (right,) = torch.autograd.grad(one, [weight])
        torch.testing.assert_close(rows[k], right, rtol=1e-12, atol=1e-12)


def test_every_rule_is_above() -> None:
    """But those of fused LSTM layers, of experts, of GPUs: test_recurrent, test_experts, gpu."""
    above = {f"{kind}Backward0" for kinds in FIRE.values() for kind in kinds.split()}
    elsewhere = {recurrent.KIND, "GroupedMmBackward0", *steps.RULES, *steps.UNTRIED}
    assert above == {*node_rules.names()} - elsewhere
