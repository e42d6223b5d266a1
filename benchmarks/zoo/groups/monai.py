"""MONAI: its networks, made small."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.zoo.groups.guessing import arguments
from benchmarks.zoo.groups.inputs import Make, Shape, guesses, maker, required, runnable, small
from benchmarks.zoo.groups.shrinking import Recipe
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import NotBuiltError, Subject

_VALUES: dict[str, Any] = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16), "strides": (2, 2),
    "num_classes": 3, "classes": 3, "in_shape": (1, 32, 32), "out_shape": (3,),
    "image_size": (32, 32), "img_size": (32, 32), "patch_size": (8, 8), "num_channel_initial": 4,
    "depth": 2, "hidden_size": 16, "mlp_dim": 32, "num_layers": 2, "num_heads": 2, "num_tokens": 20,
    "max_seq_len": 16,
    "attn_layers_dim": 16, "attn_layers_depth": 2, "attn_layers_heads": 2, "latent_size": 4,
    "latent_shape": (8,), "start_shape": (8, 4, 4), "hidden_channels": (16, 8),
    "encode_channels": (16, 8), "decode_channels": (8, 16), "kernel_size": (3, 3),
    "num_layers_d": 2, "num_d": 2, "label_nc": 2, "input_shape": (32, 32),
    "model_name": "efficientnet-b0",
    "backbone": "efficientnet-b0", "extract_levels": (0, 1), "block": "basic",
    "layers": (1, 1, 1, 1), "block_inplanes": (8, 8, 16, 16), "in_planes": 4, "planes": 4, "dim": 8,
    "unet_out_channels": 4, "final_conv_channels": (4,), "input_image_size": (32, 32),
    "init_filters": 8, "features": (8, 8, 16, 16, 32, 8), "pretrained": False,
    "num_res_channels": (8, 8), "upsample_kernel_size": (2,),
}  # fmt: skip
_EXTRA = (
    "spatial_dims", "features", "pretrained", "init_filters", "hidden_size", "mlp_dim",
    "num_layers", "num_heads", "channels",
)  # fmt: skip


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the networks."""
    nets = load("monai").networks.nets
    return sorted(
        name
        for name in dir(nets)
        if isinstance(kind := getattr(nets, name), type)
        and issubclass(kind, nn.Module)
        and kind.__name__ == name
    )


def build(name: str) -> Subject:
    """Return a network in two dimensions, else in three."""
    kind = getattr(load("monai").networks.nets, name)
    reasons = []
    for recipe, extra in (
        (None, _EXTRA),
        (Recipe(4, 1, 32), ("spatial_dims", "pretrained")),
        (None, ("pretrained",)),
    ):
        try:
            given = arguments(kind, _VALUES, recipe)
            known = inspect.signature(kind.__init__).parameters
            given |= {key: _VALUES[key] for key in extra if key in known}
            if name.startswith("SE"):
                given |= {"spatial_dims": 2, "in_channels": 1, "num_classes": 3}
            model = small(lambda given=given: kind(**given))
            return Subject(model, runnable(model, _makes(model)))
        except Exception as error:  # libraries raise any class of error here
            reasons.append(f"{type(error).__name__}: {error}")
    raise NotBuiltError("; ".join(" ".join(reason.split())[:200] for reason in reasons))


def _makes(model: nn.Module) -> Iterator[Make]:
    images = [
        Shape("real", size)
        for size in ((1, 32, 32), (3, 32, 32), (1, 64, 64), (3, 64, 64), (1, 32, 32, 32),
                     (1, 64, 64, 64), (3, 32, 32, 32), (8,), (1,), (2, 32, 32), (4, 8, 8),
                     (8, 8, 8))
    ]  # fmt: skip
    shapes = {
        "timesteps": [Shape("steps", (), 900)],
        "seg": [Shape("real", (2, 32, 32))],
        "controlnet_cond": [Shape("real", (1, 32, 32))],
        "context": [Shape("real", (4, 8))],
    }
    ids = [Shape("ids", (8,), 20)]
    needed = required(model.forward)
    yield from (maker(g) for g in guesses({key: shapes.get(key, images) for key in needed}))
    yield from (maker(g) for g in guesses({key: shapes.get(key, ids) for key in needed}))
