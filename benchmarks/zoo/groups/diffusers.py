"""Diffusers: U-Nets, transformers and autoencoders, made narrow and shallow."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.zoo.groups.guessing import arguments
from benchmarks.zoo.groups.inputs import Make, Shape, guesses, maker, required, runnable, small
from benchmarks.zoo.groups.shrinking import Recipe
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import NotBuiltError, Subject

_RECIPES = (Recipe(8, 1, 16), Recipe(16, 1, 16), Recipe(4, 1, 16), Recipe(16, 1, heads=True),
            Recipe(8, 2, heads=True), Recipe(2, 2, 16), Recipe(1, 1, 16))  # fmt: skip
_FRAMES = 5


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the classes of models."""
    diffusers = load("diffusers")
    found = []
    for name in sorted(dir(diffusers)):
        if name.endswith("Model") or name.startswith(("Autoencoder", "VQ", "UNet")):
            kind = getattr(diffusers, name, None)
            if isinstance(kind, type) and issubclass(kind, nn.Module) and "Multi" not in name:
                found.append(name)
    return found


def build(name: str) -> Subject:
    """Return a model by the first recipe that gives one that runs."""
    diffusers = load("diffusers")
    diffusers.utils.logging.set_verbosity_error()
    kind = getattr(diffusers, name)
    reasons = []
    for recipe in _RECIPES:
        try:
            given = arguments(kind, {}, recipe)
            if "norm_num_groups" in inspect.signature(kind.__init__).parameters:
                given["norm_num_groups"] = 2
            model = small(lambda given=given: kind(**given))
            return Subject(model, runnable(model, _makes(model)))
        except Exception as error:  # libraries raise any class of error here
            reasons.append(f"{recipe}: {type(error).__name__}: {error}")
    raise NotBuiltError("; ".join(" ".join(reason.split())[:160] for reason in reasons))


def _makes(model: nn.Module) -> Iterator[Make]:
    """Yield inputs: a noised sample, steps, and what it is conditioned on."""
    config: Any = model.config
    channels = config.get("in_channels") or config.get("num_channels") or 3
    width = next(
        (config[k] for k in ("cross_attention_dim", "joint_attention_dim", "caption_channels",
                             "text_dim", "encoder_hid_dim", "text_embed_dim", "caption_dim")
         if isinstance(config.get(k), int)), 8,
    )  # fmt: skip
    pooled = config.get("pooled_projection_dim") or width
    side = config.get("sample_size")
    sides = [side] if isinstance(side, int) else []
    real = [
        size
        for s in (*sides, 16, 32)
        for size in ((channels, s, s), (channels, _FRAMES, s, s), (_FRAMES, channels, s, s),
                     (channels, 64), (s, channels))
    ]  # fmt: skip
    samples = [Shape("real", size) for size in real]
    shapes = {
        "timestep": [Shape("steps", (), 900)],
        "encoder_hidden_states": [Shape("real", (6, width))],
        "pooled_projections": [Shape("real", (pooled,))],
        "guidance": [Shape("real", ())],
        "class_labels": [Shape("ids", (), 5)],
        "encoder_attention_mask": [Shape("ones", (6,))],
        "encoder_hidden_states_mask": [Shape("ones", (6,))],
    }
    options = {
        key: samples
        if key in ("sample", "hidden_states", "x", "latents")
        else shapes.get(key, samples)
        for key in required(model.forward)
    }
    for extra in (
        (),
        ("encoder_hidden_states", "timestep"),
        ("timestep",),
        ("class_labels", "timestep"),
    ):
        more = {key: shapes[key] for key in extra}
        for guess in guesses(options | more):
            yield maker(guess)
