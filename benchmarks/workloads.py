"""Workloads: a model, a batch and a loss, the same for every method of a run."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import networks, real
from gradscope.stages.losses import resolve

LOSS = "cross_entropy"
SEED = 0
TOLERANCE = 1e-4

_SPARE = 6  # samples drawn for each that is kept, of models with ReLU
_FILE_BYTES, _LEAST, _MOST = 2**29, 4, 20  # of a run to a file, and the limits of its batches
_CLEAR = 5e-6  # more than float32 is off anywhere in these models

_SMALL = ("gradients", "norms", "moments", "clipped", "projection", "kronecker", "sjlt", "file")
_REAL = ("norms", "clipped", "kronecker", "sjlt")

Made = tuple[nn.Module, Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """What is differentiated.

    Attributes:
        name: One of `FAMILIES`.
        sizes: What its family was called with.
        model: In train mode, as Opacus asks; no layer behaves differently in eval mode.
        inputs: (n, ...).
        targets: (n, ...).
        precision: One of `PRECISIONS`.
    """

    name: str
    sizes: Mapping[str, Any]
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    precision: str = "float32"

    @property
    def tolerance(self) -> float:
        """The relative error from which on an answer is wrong."""
        return max(self.family.tolerance, PRECISIONS[self.precision][1])

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.inputs.shape[0])

    @property
    def family(self) -> "Family":
        """What kind of model it is."""
        return FAMILIES[self.name]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are differentiated by, in the model's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def parameters(self) -> int:
        """P, the number of trainable numbers."""
        return sum(p.numel() for p in self.trainable.values())

    @property
    def file_batches(self) -> int:
        """The batches of a run to a file: half a GiB, since a run opens and verifies it once."""
        return min(_MOST, max(_LEAST, ceil(_FILE_BYTES / (4 * self.n * self.parameters))))

    @property
    def device(self) -> torch.device:
        """Where model and data are."""
        return self.inputs.device

    def losses(self, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the losses (n,) of the model, or of one that stands for it."""
        return resolve(LOSS)((model or self.model)(self.inputs), self.targets)

    def copy(self) -> "Workload":
        """Return the same with a model of its own, which a method may change."""
        return replace(self, model=copy.deepcopy(self.model))


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        title: For tables.
        detail: Its full sizes, in words.
        make: Takes the sizes and returns model, inputs and targets; of models with ReLU more
            samples than n.
        full: The sizes of the benchmark.
        quick: Sizes that take no time.
        tasks: What is measured with it.
        dimensions: Of its projections.
        real: It has a size that people train: few calls, few methods, not in the default run.
        tolerance: The relative error from which on an answer is wrong.
    """

    title: str
    detail: str
    make: Callable[..., Made]
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    tasks: tuple[str, ...] = _SMALL
    dimensions: int = 512
    real: bool = False
    tolerance: float = TOLERANCE

    def label(self, sizes: Mapping[str, Any]) -> str:
        """Return a heading for a workload of these sizes."""
        detail = f"{self.detail}, " if {**sizes, "n": 0} == {**self.full, "n": 0} else ""
        return f"{self.title}, {detail}n={sizes['n']}"


def mlp(n: int, widths: list[int]) -> Made:
    """A perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    drawn = _SPARE * n
    return nn.Sequential(*layers[:-1]), torch.randn(drawn, widths[0]), _classes(widths[-1], drawn)


def cnn(n: int, channels: int) -> Made:
    """The network of Opacus' MNIST example; 26,010 parameters with 16 channels."""
    model = nn.Sequential(
        nn.Conv2d(1, channels, 8, 2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(channels, 2 * channels, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * channels, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    return model, torch.randn(n, 1, 28, 28), _classes(10, n)


def resnet(n: int, width: int, blocks: int, side: int) -> Made:
    """A residual network with GroupNorm on images (3, side, side)."""
    drawn = _SPARE * n
    return networks.ResNet(width, blocks), torch.randn(drawn, 3, side, side), _classes(10, drawn)


def gpt(n: int, depth: int, width: int, length: int, vocabulary: int) -> Made:
    """A transformer that predicts a class at every position."""
    model = networks.GPT(depth, width, length, vocabulary, heads=4)
    return model, _classes(vocabulary, n, length), _classes(vocabulary, n, length)


def lstm(n: int, inputs: int, hidden: int, length: int) -> Made:
    """PyTorch's own LSTM layer; Opacus puts its DPLSTM in the place."""
    return networks.Recurrent(inputs, hidden), torch.randn(n, length, inputs), _classes(10, n)


def tied(n: int, vocabulary: int, width: int, length: int) -> Made:
    """Raw, reused and tied parameters."""
    model = networks.RawAndTied(vocabulary, width, length)
    return model, _classes(vocabulary, n, length), _classes(vocabulary, n, length)


FAMILIES: dict[str, Family] = {
    "mlp": Family(
        "MLP",
        "784-512-512-10",
        mlp,
        {"n": 256, "widths": [784, 512, 512, 10]},
        {"n": 6, "widths": [8, 7, 6, 4]},
    ),
    "cnn": Family(
        "CNN", "26k parameters", cnn, {"n": 512, "channels": 16}, {"n": 4, "channels": 2}
    ),
    "resnet": Family(
        "ResNet-18",
        "width 32, GroupNorm, 32x32",
        resnet,
        {"n": 32, "width": 32, "blocks": 2, "side": 32},
        {"n": 3, "width": 8, "blocks": 1, "side": 16},
    ),
    "gpt": Family(
        "GPT",
        "4 layers, d=256, T=128",
        gpt,
        {"n": 8, "depth": 4, "width": 256, "length": 128, "vocabulary": 512},
        {"n": 3, "depth": 1, "width": 8, "length": 6, "vocabulary": 9},
    ),
    "lstm": Family(
        "LSTM",
        "64-128, T=32",
        lstm,
        {"n": 64, "inputs": 64, "hidden": 128, "length": 32},
        {"n": 4, "inputs": 3, "hidden": 5, "length": 4},
    ),
    "tied": Family(
        "raw and tied",
        "d=128, T=64",
        tied,
        {"n": 32, "vocabulary": 512, "width": 128, "length": 64},
        {"n": 4, "vocabulary": 9, "width": 6, "length": 5},
    ),
}

# Batches of about 2,000 positions, and of 16 large images: a plain pass then takes 1 to 4 GB, which
# is what `auto` plans a batch with (a power of two, in half of the memory) where 8 GB are free.
_WORDS = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_TINY = {
    **_WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _real(
    title: str,
    detail: str,
    make: Callable[..., Made],
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
    tasks: tuple[str, ...] = _REAL,
    tolerance: float = TOLERANCE,
) -> Family:
    return Family(title, detail, make, full, quick, tasks, 4096, real=True, tolerance=tolerance)


REAL = {
    "gpt2": _real(
        "GPT-2 small",
        "124M, T=256",
        real.language("GPT2"),
        {"n": 8, "length": 256},
        {"n": 3, "length": 6, "n_embd": 16, "n_layer": 1, "n_head": 2, **_WORDS},
        (*_REAL, "command"),
    ),
    "mixtral": _real(
        "Mixtral",
        "61M, 4 layers, 8 experts, T=128",
        real.language("Mixtral"),
        {
            "n": 16,
            "length": 128,
            "vocab_size": 8000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
        },
        {
            "n": 3,
            "length": 6,
            **_TINY,
            "num_local_experts": 4,
        },
    ),
    "llama": _real(
        "Llama",
        "100M, T=256",
        real.language("Llama"),
        {"n": 8, "length": 256, **_LLAMA},
        {"n": 3, "length": 6, **_TINY, "tie_word_embeddings": True},
    ),
    "bert": _real(
        "BERT-base",
        "T=128",
        real.text,
        {"n": 16, "length": 128},
        {"n": 3, "length": 6, **_VIT, "intermediate_size": 24, "vocab_size": 32},
    ),
    "vit": _real(
        "ViT-B/16",
        "224x224",
        real.images("ViT"),
        {"n": 8, "side": 224},
        {"n": 3, "side": 32, **_VIT, "intermediate_size": 24, "image_size": 32},
    ),
    "resnet50": _real(
        "ResNet-50",
        "224x224, BatchNorm as in evaluation",
        real.images("ResNet"),
        {"n": 16, "side": 224},
        {"n": 3, "side": 32, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        tolerance=1e-2,  # of 10^7 inputs of a ReLU some are so close to 0 that rounding decides
    ),
    "lora": _real(
        "Llama, adapters only",
        "100M frozen, r=8, T=256",
        real.adapters,
        {"n": 8, "length": 256, "rank": 8, **_LLAMA},
        {"n": 3, "length": 6, "rank": 2, **_TINY},
        ("gradients", *_REAL),
    ),
}
FAMILIES |= REAL


def _pythia(size: str, n: int, layers: int, width: int, heads: int) -> Family:
    """Return a model of the size of a Pythia (Biderman et al. 2023, table 1), random weights."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50304,
    }
    tiny = {**_WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    quick = {"n": 3, "length": 6, **tiny, "intermediate_size": 24}
    full = {"n": n, "length": 512, **sizes}
    return _real(f"Pythia {size}", "T=512", real.language("GPTNeoX"), full, quick)


LARGE = {  # for GPUs: `make gpu-bench`
    "pythia-70m": _pythia("70M", 16, 6, 512, 8),
    "pythia-160m": _pythia("160M", 16, 12, 768, 12),
    "pythia-410m": _pythia("410M", 8, 24, 1024, 16),
    "pythia-1b": _pythia("1B", 4, 16, 2048, 8),
}
FAMILIES |= LARGE

# the dtype of the model in each number format, and the relative error from which on it is wrong
PRECISIONS: dict[str, tuple[torch.dtype, float]] = {
    "float32": (torch.float32, 0.0),
    "tf32": (torch.float32, 2e-2),
    "bf16": (torch.bfloat16, 1e-1),
}


def workload(
    name: str, sizes: Mapping[str, Any], device: str = "cpu", precision: str = "float32"
) -> Workload:
    """Make a workload; the same numbers every time."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = PRECISIONS[precision][0]
    model, inputs, targets = _made(name, sizes)
    if len(inputs) > sizes["n"]:
        kept = clear_of_kinks(model, inputs).nonzero().flatten()[: sizes["n"]]
        assert len(kept) == sizes["n"], "too few samples were drawn"
        inputs, targets = inputs[kept], targets[kept]
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    made = model.to(device, dtype), inputs.to(device), targets.to(device)
    return Workload(name, sizes, *made, precision)


def build(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Return the model alone: the factory that gradscope's command loads it by."""
    return _made(name, sizes)[0]


def clear_of_kinks(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return (n,), True where no input of a ReLU is near its kink.

    On which side of it a sample is decides its gradient. Where that hangs on the rounding of
    float32, two correct methods may differ by a percent, and nothing could be said of either.
    """
    margins = torch.full((len(inputs),), inf, dtype=torch.float64)
    exact = copy.deepcopy(model).double()

    def look(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        torch.minimum(margins, arguments[0].abs().flatten(1).amin(1), out=margins)

    for module in exact.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        exact(inputs.double())
    return margins > _CLEAR


def _made(name: str, sizes: Mapping[str, Any]) -> Made:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return FAMILIES[name].make(**sizes)


def _classes(classes: int, *shape: int) -> Tensor:
    return torch.randint(0, classes, shape)
