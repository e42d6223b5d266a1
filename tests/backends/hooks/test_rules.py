"""Every node rule fires, and equals the masked fallback where it does."""

from functools import partial

import pytest
import torch

from gradscope.backends.hooks import block_of, hooks, recurrent
from gradscope.backends.hooks.rules import Site, masked, node_rules
from gradscope.blocks import Block
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
    "group_norm": "Convolution NativeGroupNorm",
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


def test_every_rule_is_above() -> None:
    """But those of fused LSTM layers, of experts, of GPUs: test_recurrent, test_experts, gpu."""
    above = {f"{kind}Backward0" for kinds in FIRE.values() for kind in kinds.split()}
    elsewhere = {recurrent.KIND, "GroupedMmBackward0", *steps.RULES, *steps.UNTRIED}
    assert above == {*node_rules.names()} - elsewhere
