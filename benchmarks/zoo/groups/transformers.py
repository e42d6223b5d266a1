"""Transformers: the base model of every configuration, made small; with `heads`, all classes."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.architectures.checks import Wide
from benchmarks.zoo.groups.inputs import Make, Shape, guesses, maker, required, runnable, small
from benchmarks.zoo.groups.shrinking import RECIPES, VOCABULARY, Recipe, shrunk
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import NotBuiltError, Subject

LENGTH = 8  # tokens of a sample
_ENOUGH = 10.0  # seconds after which no other recipe is tried
Sizes = dict[str, Any]


@cache
def _classes() -> dict[str, str]:
    """Return {class of a model: class of its configuration}, base models first."""
    load("transformers")
    from transformers.models.auto import configuration_auto, modeling_auto

    configs = configuration_auto.CONFIG_MAPPING_NAMES
    tables = [modeling_auto.MODEL_MAPPING_NAMES]
    tables += [
        getattr(modeling_auto, name)
        for name in sorted(dir(modeling_auto))
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
    ]
    found: dict[str, str] = {}
    for table in tables:
        for kind, names in table.items():
            for name in (names,) if isinstance(names, str) else names:
                if kind in configs:
                    found.setdefault(name, configs[kind])
    return found


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the classes: the first of each configuration, or all of them."""
    found = _classes()
    if heads:
        return list(found)
    first: dict[str, str] = {}
    for name, config in found.items():
        first.setdefault(config, name)
    return list(first.values())


def build(name: str) -> Subject:
    """Return a small model of that class, by the first recipe that gives one that runs."""
    transformers = load("transformers")
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    config = getattr(transformers, _classes()[name])
    default = config().to_dict()
    reasons, start = [], time.process_time()
    for recipe in RECIPES:
        if time.process_time() - start > _ENOUGH:
            break
        try:
            return _built(kind, config, default, recipe)
        except Exception as error:  # libraries raise any class of error here
            reasons.append(f"{recipe}: {type(error).__name__}: {error}")
    distinct = dict.fromkeys(reason.partition("): ")[2] for reason in reasons)
    raise NotBuiltError(" / ".join(" ".join(reason.split())[:160] for reason in distinct))


def _built(kind: Any, config: Any, default: Sizes, recipe: Recipe) -> Subject:
    fields = shrunk(default, recipe)
    for key in ("transformers_version", "model_type", "architectures", "dtype"):
        fields.pop(key, None)
    if "mrope_section" in inspect.getsource(inspect.getmodule(kind)):
        _share_rotations(fields)
    made = config(**fields)
    made._attn_implementation = "eager"
    for part in vars(made).values():
        if hasattr(part, "_attn_implementation"):
            part._attn_implementation = "eager"
    model = small(lambda: kind(made), recipe.most)
    return Subject(model, runnable(model, candidates(model, made)), exactly=_exactly)


def _share_rotations(fields: Sizes) -> None:
    """Divide the rotations of a head among time, height and width, wherever they are set."""
    for part in (fields, *(v for v in fields.values() if isinstance(v, dict))):
        heads = part.get("num_attention_heads")
        if not isinstance(heads, int) or not isinstance(part.get("hidden_size"), int):
            continue
        rope = part.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
        if any(isinstance(value, dict) for value in rope.values()):  # by the kind of a layer
            continue
        width = part.get("head_dim") or part["hidden_size"] // heads
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        third = half // 3
        part["rope_parameters"] = rope | {"mrope_section": [half - 2 * third, third, third]}


@contextmanager
def _exactly(model: nn.Module) -> Iterator[None]:
    """Ignore casts to float32. Experts run one by one: grouped products have no float64."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    with Wide():
        yield


def candidates(model: nn.Module, config: Any) -> Iterator[Make]:
    """Yield makers of inputs, from what the signature asks for."""
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    wanted = dict.fromkeys(required(model.forward))
    if main in signature and main not in wanted:
        wanted[main] = None
    both = {"input_ids": None, "pixel_values": None}
    choices = [list(wanted)]
    if "pixel_values" in signature and "input_ids" in signature:
        choices.insert(0, list(wanted | both))
    decoder = [k for k in ("decoder_input_ids",) if k in signature]
    if decoder:
        choices = [chosen + decoder for chosen in choices] + choices
    for extra in (["input_ids"], ["pixel_values"], ["input_values"], ["input_features"]):
        if extra[0] in signature:
            choices.append(extra + decoder)
    if "encoder_hidden_states" in signature:
        choices.append([*wanted, "encoder_hidden_states"])
    if "bbox" in signature:
        choices = [[*chosen, "bbox"] for chosen in choices] + choices
    fixed = {k: False for k in ("use_cache",) if k in signature}
    for chosen in [list(c) for c in dict.fromkeys(tuple(dict.fromkeys(c)) for c in choices)]:
        options = {key: list(_options(key, config, model, chosen)) for key in chosen}
        for guess in guesses(options):
            yield maker(guess, fixed)


def _options(key: str, config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    for pattern, make in _KNOWN.items():
        if pattern == key:
            yield from make(config, model, chosen)
            return
    if key.endswith(("mask", "ids")):
        yield Shape("ones", (LENGTH,), 0)
        return
    width = _of(config, "hidden_size", "d_model", "input_size", default=32)
    yield Shape("real", (LENGTH, width), 0)
    yield Shape("real", (width,), 0)


def _ids(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    token = _of(config, "image_token_id", "image_token_index", default=None)
    if token is not None and any(key.startswith("pixel_values") for key in chosen):
        for count in _image_tokens(config, model):
            yield Shape(f"image:{token}", (count + LENGTH,), count)
    bound = min(_of(config, "vocab_size", default=VOCABULARY), 90)
    yield Shape("ids", (LENGTH,), bound)
    yield Shape("ids", (LENGTH * 4,), bound)
    yield Shape("ids", (2, LENGTH), bound)


def _image_tokens(config: Any, model: nn.Module) -> Iterator[int]:
    if hasattr(model, "get_image_features"):
        for _, shape, _ in _pixels(config, model, []):
            try:
                with torch.no_grad():
                    found = model.get_image_features(pixel_values=torch.randn(1, *shape))
                tensor = getattr(found, "pooler_output", found)
                tensor = tensor[0] if isinstance(tensor, tuple | list) else tensor
                yield int(tensor.shape[:-1].numel())
            except Exception:  # models raise any class of error here
                continue
    yield from (1, 4, 16, 64)


def _pixels(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    vision = getattr(config, "vision_config", None) or config
    side = _of(vision, "image_size", "img_size", "input_size", default=64)
    sides = tuple(side)[:2] if isinstance(side, list | tuple) else (side, side)
    if isinstance(side, dict):
        sides = (side["height"], side["width"])
    channels = _of(vision, "num_channels", "in_channels", "in_chans", default=3)
    frames = _of(vision, "num_frames", "frames_per_clip", default=4)
    for shape in (
        (channels, *sides),
        (1, channels, *sides),
        (frames, channels, *sides),
        (channels, frames, *sides),
        (channels, 64, 64),
        (channels, 128, 128),
        (channels, 224, 224),
        (2, channels, *sides),
    ):
        yield Shape("real", shape, 0)


def _features(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
    audio = audio or config
    bins = _of(
        audio,
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "input_dim",
        "mel_dim",
        "n_mels",
        "feat_in",
        "num_mels",
        default=80,
    )
    length = _of(audio, "max_source_positions", default=32)
    for shape in (
        (bins, 2 * length),
        (bins, length),
        (64, bins),
        (bins, 64),
        (128, bins),
        (1, 1024, bins),
        (1, bins, 64),
        (256, bins),
        (64, 160),
    ):
        yield Shape("real", shape, 0)


def _values(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    bins = _of(config, "num_mel_bins", "model_in_dim", default=80)
    length = _of(config, "max_length", "context_length", default=64)
    for shape in (
        (1600,),
        (1, 1600),
        (length, bins),
        (64, bins),
        (8000,),
        (1, 8000),
        (bins, 64),
        (16000,),
        (64, 64),
    ):
        yield Shape("real", shape, 0)


def _series(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    length = _of(config, "context_length", "seq_length", default=64)
    length += max(_of(config, "lags_sequence", default=[0]) or [0])
    channels = _of(config, "num_input_channels", "input_size", default=1)
    for shape in ((length, channels), (length,), (channels, length), (64,), (512,)):
        yield Shape("real", shape, 0)


def _mask_of_series(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    for _, shape, _ in _series(config, model, chosen):
        yield Shape("ones", shape, 0)


def _time(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    count = max(1, _of(config, "num_time_features", default=1))
    for _, shape, _ in _series(config, model, chosen):
        yield Shape("real", (shape[0], count), 0)


def _encoded(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    yield Shape("real", (6, _of(config, "encoder_hidden_size", "hidden_size", default=32)))


def _boxes(config: Any, model: nn.Module, chosen: list[str]) -> Iterator[Shape]:
    yield Shape("boxes", (LENGTH,), 100)


_KNOWN: dict[str, Callable[[Any, nn.Module, list[str]], Iterator[Shape]]] = {
    "input_ids": _ids,
    "decoder_input_ids": lambda c, m, k: iter([Shape("ids", (LENGTH,), 90)]),
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _features,
    "input_values": _values,
    "past_values": _series,
    "past_observed_mask": _mask_of_series,
    "past_time_features": _time,
    "bbox": _boxes,
    "encoder_hidden_states": _encoded,
}


def _of(config: Any, *keys: str, default: Any) -> Any:
    """Return the first of these fields that a configuration or its text part has."""
    for place in (config, getattr(config, "text_config", None)):
        for key in keys:
            found = getattr(place, key, None)
            if found is not None:
                return found
    return default
