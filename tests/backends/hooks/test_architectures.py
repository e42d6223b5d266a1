"""Architectures of transformers, tiny and random, that show their samples in unusual ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.backends.hooks import hooks
from gradscope.core.batch import Batch
from gradscope.model.problem import Problem
from tests.oracle import per_sample_gradients
from tests.zoo.base import seeded

N, T = 4, 6
Built = tuple[nn.Module, dict[str, Tensor]]


def attention(layers: int = 2) -> dict[str, Any]:
    return {"hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}


def timesformer() -> Built:
    """The class token of each sample is a row of the first samples' frames."""
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    config = TimesformerConfig(
        image_size=16, patch_size=8, num_frames=3, intermediate_size=32, **attention()
    )
    return TimesformerForVideoClassification(config), {"pixel_values": torch.randn(N, 3, 3, 16, 16)}


def timesfm() -> Built:
    """A loop over the samples writes their series."""
    from transformers import TimesFmConfig, TimesFmModelForPrediction

    config = TimesFmConfig(
        patch_length=4,
        context_length=16,
        horizon_length=4,
        intermediate_size=16,
        head_dim=8,
        **attention(),
    )
    given = {"past_values": torch.randn(N, 16), "freq": torch.zeros(N, dtype=torch.long)}
    return TimesFmModelForPrediction(config), given


def qwen3_5() -> Built:
    """Gradients of the decay are differences that cancel."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=40,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        pad_token_id=0,
        **attention(4),
    )
    return Qwen3_5ForCausalLM(config), {"input_ids": torch.randint(3, 40, (N, T))}


def jetmoe() -> Built:
    """Some experts get no token."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=1,
    )
    return JetMoeForCausalLM(config), {"input_ids": torch.randint(3, 40, (N, T))}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """A smooth loss (n,) of the first floating-point output."""
    named = ("logits", "mean_predictions")
    values = next(outputs[name] for name in named if name in outputs)
    return (values - targets.reshape(-1, *[1] * (values.dim() - 1))).sin().flatten(1).mean(1)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # transformers' own
@pytest.mark.parametrize("build", [timesformer, timesfm, qwen3_5, jetmoe])
def test_hooks_answers_the_architecture(build: Callable[[], Built]) -> None:
    with seeded(build.__name__):
        model, inputs = build()
        model.eval()
        targets = torch.randn(N)
    _, right = per_sample_gradients(model, loss, inputs, targets)
    size = max(float(rows.norm()) for rows in right.values())
    with hooks(Problem.of(model, loss)) as evaluate:
        for _ in range(2):
            found = evaluate(Batch.of(inputs, targets)).gradients.dense()
            for name, rows in right.items():
                assert float((found[name] - rows).norm()) <= 1e-6 * size, name
