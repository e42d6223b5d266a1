"""Models of the size that people train: transformers' own, with random weights."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

NEEDS = ("transformers", "huggingface_hub", "tokenizers", "regex", "yaml", "safetensors", "tqdm")

_CLASSES = 10  # where the loss is one of a whole sample
_STILL = {  # dropout and ends of sentences, by which no two methods could be compared
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}

Made = tuple[nn.Module, Tensor, Tensor]


def missing() -> list[str]:
    """Return the packages that these models need and that are not installed."""
    return [name for name in NEEDS if find_spec(name) is None]


class Logits(nn.Module):
    """A model of transformers as a function of one tensor; the second axis of logits is classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (n, t) to logits (n, classes, t), or samples (n, ...) to (n, classes)."""
        config: Any = self.model.config
        if hasattr(config, "num_local_experts"):  # torch has no grouped product of float64
            exact = next(self.parameters()).dtype == torch.float64
            config._experts_implementation = "eager" if exact else "grouped_mm"
        logits: Tensor = self.model(inputs).logits
        return logits.transpose(1, 2) if logits.dim() > 2 else logits


class Adapted(nn.Module):
    """A frozen linear layer and a product of two thin matrices beside it (Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        # as after some steps: from zeros, with which one begins, `down` has no gradient
        self.up = nn.Parameter(0.02 * torch.randn(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., i) to (..., o)."""
        out: Tensor = self.frozen(x) + F.linear(F.linear(x, self.down), self.up)
        return out


def language(kind: str) -> Callable[..., Made]:
    """Return what makes a model that predicts the next of `length` tokens."""

    def make(n: int, length: int, **config: Any) -> Made:
        model = _built(
            kind, "ForCausalLM" if kind != "GPT2" else "LMHeadModel", use_cache=False, **config
        )
        tokens = torch.randint(0, model.model.config.vocab_size, (n, length + 1))  # type: ignore[union-attr]
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def adapters(n: int, length: int, rank: int, **config: Any) -> Made:
    """A frozen Llama with trainable adapters beside its queries and values."""
    model, inputs, targets = language("Llama")(n, length, **config)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if hasattr(module, name):
                setattr(module, name, Adapted(getattr(module, name), rank))
    return model, inputs, targets


def text(n: int, length: int, **config: Any) -> Made:
    """BERT, which tells the class of a text."""
    model = _built("Bert", "ForSequenceClassification", num_labels=_CLASSES, **config)
    tokens = torch.randint(0, model.model.config.vocab_size, (n, length))  # type: ignore[union-attr]
    return model, tokens, torch.randint(0, _CLASSES, (n,))


def images(kind: str) -> Callable[..., Made]:
    """Return what makes a model that tells the class of an image; BatchNorm as in evaluation."""

    def make(n: int, side: int, **config: Any) -> Made:
        model = _built(kind, "ForImageClassification", num_labels=_CLASSES, **config)
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "shortcut"):
                # as in trained ones; with 1, rounding in float32 grows to 2 % of a gradient
                nn.init.constant_(module.layer[-1].normalization.weight, 0.2)  # type: ignore[union-attr, index, operator]
        inputs = torch.randn(n, 3, side, side)
        averages = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for module in averages:
            module.momentum = 1.0  # the statistics of one batch, or activations would grow
        if averages:
            with torch.no_grad():
                model(torch.randn_like(inputs))
        for module in averages:
            module.eval()
        return model, inputs, torch.randint(0, _CLASSES, (n,))

    return make


def _built(kind: str, head: str, **config: Any) -> Logits:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(**_STILL.get(kind, {}), **config)
    return Logits(getattr(transformers, f"{kind}{head}")(settings).train())
