"""The architectures: random weights, data, and the loss of one sample in plain torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.architectures import models

FILE = Path(models.__file__)
BASE = "llama"  # what the adapters are put onto

Data = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """One of them; a factory of `models`, or a class of transformers that needs none."""

    title: str
    loss: str  # as the command line takes it
    data: Callable[[], tuple[Data, Tensor]]  # inputs by name, in the model's order, and targets
    alone: Callable[[Any, Tensor], Tensor]  # outputs and targets of one sample -> its loss
    factory: str = ""  # in `models`
    kind: str = ""  # in transformers, without Config and For...
    head: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("transformers",)

    def built(self) -> nn.Module:
        """Return the model with random weights, normalisations as after training."""
        if self.factory:
            model: nn.Module = getattr(models, self.factory)()
        else:
            import transformers

            config = getattr(transformers, f"{self.kind}Config")(**self.config)
            model = getattr(transformers, f"{self.kind}{self.head}")(config)
        averages = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        if averages:  # those of new ones, 0 and 1, let activations grow from layer to layer
            for module in averages:
                module.momentum = 1.0
            with torch.no_grad():
                for module in model.modules():  # the ends of ResNet's branches, likewise
                    if hasattr(module, "shortcut") and hasattr(module, "layer"):
                        module.layer[-1].normalization.weight.fill_(0.2)  # type: ignore[union-attr, index, operator]
                model.train()(*self.data()[0].values())
        return model.eval()

    def save(self, folder: Path) -> None:
        """Write the model's weights as a user has them."""
        model = self.built()
        if self.factory:
            safetensors.torch.save_file(model.state_dict(), folder / "weights.safetensors")
        else:
            model.save_pretrained(folder, max_shard_size="40GB")  # type: ignore[operator]

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        """Return the saved model as its own library loads it."""
        if self.factory:
            model: nn.Module = getattr(models, self.factory)()
            model.load_state_dict(safetensors.torch.load_file(folder / "weights.safetensors"))
            return model.to(dtype).eval()
        import transformers

        kind = getattr(transformers, f"{self.kind}{self.head}")
        loaded: nn.Module = kind.from_pretrained(folder, dtype=dtype)
        if dtype == torch.float64 and hasattr(loaded.config, "num_experts_per_tok"):
            loaded.config._experts_implementation = "eager"  # torch has no grouped product of it
        return loaded.eval()

    @property
    def checkpoint(self) -> str:
        """What of the folder is given to the command."""
        return "weights.safetensors" if self.factory else ""

    @property
    def model(self) -> str:
        """What --model is."""
        return f"{FILE}:{self.factory}" if self.factory else "checkpoint"


class Adapters(Architecture):
    """A frozen model with LoRA's matrices beside some of its layers (Hu et al. 2021)."""

    def save(self, folder: Path) -> None:
        """Write the adapter; its base model is the folder of another architecture beside it."""
        import peft

        base = folder.parent / BASE
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = peft.PeftModel(super().load(base, torch.float32), config)
        for p in model.parameters():
            if p.requires_grad:  # zeros, with which one begins, leave half of them no gradient
                p.data.add_(torch.randn_like(p), alpha=0.02)
        config.base_model_name_or_path = str(base)
        model.save_pretrained(str(folder), save_embedding_layers=False)

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        """Return it as peft loads it."""
        import peft

        base = super().load(folder.parent / BASE, dtype)
        model: nn.Module = peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        return model.to(dtype).eval()


def tokens(n: int, length: int, vocabulary: int) -> Callable[[], tuple[Data, Tensor]]:
    """Return what makes sequences of which the next token is to be told."""

    def make() -> tuple[Data, Tensor]:
        ids = torch.randint(vocabulary, (n, length))
        return {"inputs": ids}, ids

    return make


def labelled(classes: int, *inputs: Callable[[], Tensor]) -> Callable[[], tuple[Data, Tensor]]:
    """Return what makes inputs with a class each."""

    def make() -> tuple[Data, Tensor]:
        made = {f"x{k}": each() for k, each in enumerate(inputs)}
        return made, torch.randint(classes, (len(made["x0"]),))

    return make


def _molecules() -> tuple[Data, Tensor]:
    n = 8
    atoms = torch.randint(models.KINDS, (n, models.ATOMS))
    bonds = torch.randint(models.ATOMS, (n, 2, models.EDGES))
    return {"atoms": atoms, "bonds": bonds}, torch.randint(2, (n, 12)).float()


def _noised() -> tuple[Data, Tensor]:
    inputs = {"noised": torch.randn(4, 3, 32, 32), "steps": torch.randint(1000, (4,))}
    return inputs, torch.randn(4, 3, 32, 32)


def _speech() -> tuple[Data, Tensor]:
    return {"sound": torch.randn(4, 16_000)}, torch.randint(1, 32, (4, 12))


def _next(outputs: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits[0, :-1], target[0, 1:])


def _class(outputs: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(outputs, "logits", outputs), target)


def _labels(outputs: Any, target: Tensor) -> Tensor:
    scores = outputs.logits.log_softmax(-1)[0]
    return F.ctc_loss(scores, target, (len(scores),), (target.shape[1],), reduction="sum")


_PICTURES = labelled(1000, lambda: torch.randn(4, 3, 224, 224))
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
_EXPERTS = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
_MAMBA = {  # as its authors draw weights; by transformers' defaults, activations reach 200
    "initializer_range": 0.02,
    "rescale_prenorm_residual": True,
}
_LM = {"loss": "causal_lm", "alone": _next, "head": "ForCausalLM"}
_CLASSES = {"loss": "cross_entropy", "alone": _class}

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        "GPT-2 small, T = 128",
        data=tokens(4, 128, 50_257),
        kind="GPT2",
        **{**_LM, "head": "LMHeadModel"},
    ),
    "llama": Architecture(
        "TinyLlama 1.1B, T = 64",
        data=tokens(2, 64, 32_000),
        kind="Llama",
        config=_LLAMA,
        **_LM,
    ),
    "lora": Adapters(
        "TinyLlama 1.1B with LoRA of rank 8 (PEFT)",
        data=tokens(4, 64, 32_000),
        kind="Llama",
        config=_LLAMA,
        needs=("transformers", "peft"),
        **_LM,
    ),
    "bert": Architecture(
        "BERT-base, T = 128",
        data=labelled(4, lambda: torch.randint(30_522, (4, 128))),
        kind="Bert",
        head="ForSequenceClassification",
        config={"num_labels": 4},
        **_CLASSES,
    ),
    "vit": Architecture(
        "ViT-B/16, 224×224",
        data=_PICTURES,
        kind="ViT",
        head="ForImageClassification",
        config={"num_labels": 1000},
        **_CLASSES,
    ),
    "resnet50": Architecture(
        "ResNet-50, 224×224",
        data=_PICTURES,
        kind="ResNet",
        head="ForImageClassification",
        config={"num_labels": 1000},
        **_CLASSES,
    ),
    "mobilenet_v3": Architecture(
        "MobileNetV3-Large, 224×224",
        data=_PICTURES,
        factory="mobilenet_v3",
        needs=("torchvision",),
        **_CLASSES,
    ),
    "wav2vec2": Architecture(
        "wav2vec 2.0 base, 1 s of sound",
        loss="ctc",
        data=_speech,
        alone=_labels,
        kind="Wav2Vec2",
        head="ForCTC",
    ),
    "unet": Architecture(
        "U-Net of DDPM, 32×32 (diffusers)",
        loss="mse",
        data=_noised,
        alone=lambda outputs, noise: F.mse_loss(outputs.sample, noise),
        factory="unet",
        needs=("diffusers",),
    ),
    "graph": Architecture(
        "GIN of ogbg-mol*, 24 atoms (PyG)",
        loss="bce_with_logits",
        data=_molecules,
        alone=F.binary_cross_entropy_with_logits,
        factory="graph",
        needs=("torch_geometric",),
    ),
    "experts": Architecture(
        "OLMoE's 64 experts of which 8, two of its 16 layers, T = 64",
        data=tokens(2, 64, 50_304),
        kind="Olmoe",
        config=_EXPERTS,
        **_LM,
    ),
    "mamba": Architecture(
        "Mamba 130M, T = 64",
        data=tokens(3, 64, 50_280),
        kind="Mamba",
        config=_MAMBA,
        **_LM,
    ),
}
