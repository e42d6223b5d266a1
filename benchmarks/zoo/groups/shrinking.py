"""A small configuration from a default one: the same ratios between widths, few layers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.zoo.subject import MOST

VOCABULARY = 128

_VOCABULARY = re.compile(r"vocab_size|num_embeddings$|^num_quantized|codebook_size|^entity_vocab")
_TOKEN = re.compile(r"(token|_token_id|_token_index|token_ids?|_start_id|_end_id)$|_token_")
_LAYERS = re.compile(
    r"^(num_|n_|encoder_|decoder_|[a-z_]*_)?(hidden_|num_|n_)?(layers?|blocks?)$|^depth$|_depth$"
    r"|^num_layers_|^num_hidden_|_num_layers$|_layers_count$|^num_block_records$"
)
_NO_LAYERS = re.compile(
    r"skip|drop|share|mtp|nextn|dense|moe|feature_layer|select_layer|layer_norm|window|first|out_"
    r"|fpn|level|conv|post|pre_"
)
_WIDTH = re.compile(
    r"(size|dim|dims|channels?|width|d_model|d_ff|d_kv|d_inner|d_state|n_embd|n_inner|rank"
    r"|filters|embed|d_head|planes|features|units|n_state|state|inner|hidden|bottleneck|in_planes)s?$"
    r"|^hidden_sizes|^embed_dims|^dim_|ffn|_dim_|_channels_|^attention_(head_)?size"
)
_NO_WIDTH = re.compile(
    r"kernel|patch|image|window|stride|num_channels|chunk|block_(size|len|records)|blocks?$|stack|pool|crop|grid|batch|vocab"
    r"|position|max_|min_|interval|tubelet|frame|segment|bucket|factor|^in_channels|^num_|group"
    r"|merge|memory|sample|temporal|spatial|^in_chans|shape|conv_size|input_feat|mel|conv_dim_|"
    r"type_vocab|context|horizon|num_frames|expand|feat_extract_dim|resolution"
)
_HEADS = re.compile(r"heads?$|_heads_")
_HEAD_WIDTH = re.compile(r"head_dim$|head_size$|d_kv$|attention_head_dim")
_EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts$|moe_num_experts$|^num_experts")
_CHOSEN = re.compile(r"experts_per_tok|top_?k$|moe_k$|num_selected|moe_topk")
_GROUPS = re.compile(r"^(n|topk|num_expert)_groups?$")
_POSITIONS = re.compile(
    r"max_\w*(position|length|seq)\w*$|^n_positions$|^n_ctx$|^max_\w*positions$"
)


_ABSENT = {  # values for fields that a configuration leaves None
    "vocab_size": VOCABULARY,
    "prediction_length": 8,
    "context_length": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Recipe:
    """How small.

    Attributes:
        divisor: Of widths.
        layers: At most.
        image: Pixels of a side; the configuration's own if 0.
        heads: Attention has fewer heads of the same width, instead of as many narrow ones.
        most: Parameters of the whole model.
    """

    divisor: int
    layers: int = 2
    image: int = 0
    heads: bool = False
    most: int = MOST


_FEW = 2_000_000

RECIPES = (
    Recipe(16, 2, 64, most=_FEW),
    Recipe(32, 2, 64, most=_FEW),
    Recipe(64, 2, 64, most=_FEW),
    Recipe(16, 2, 64),
    Recipe(16, 4, 64),
    Recipe(16, 2, 64, heads=True),
    Recipe(8, 2, 64),
    Recipe(32, 2, 64),
    Recipe(8, 4, 0),
    Recipe(16, 12, 0),
    Recipe(4, 4, 64),
    Recipe(2, 2, 64),
    Recipe(1, 2, 0),
    Recipe(16, 99, 64),
    Recipe(1, 99, 0),
)


def shrunk(config: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a configuration and of its parts with smaller values."""
    layers = _kinds(config, recipe.layers)
    staged = any(isinstance(config.get(key), list) for key in ("depths", "num_blocks"))
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found[key] = _shrunk_part(key, value, recipe, layers)
        elif key in _ABSENT and value is None:
            found[key] = _ABSENT[key]
        elif isinstance(value, bool) or value is None:
            found[key] = value
        elif key == "backbone" and value == "resnet50":
            found[key] = "resnet10t"
        elif isinstance(value, list):
            found[key] = _shrunk_list(key, value, config, recipe, layers)
        elif isinstance(value, int):
            found[key] = _shrunk_number(key, value, recipe, layers, staged)
        else:
            found[key] = value
    return _consistent(found)


def _shrunk_part(key: str, value: Mapping[Any, Any], recipe: Recipe, layers: int) -> dict[Any, Any]:
    if key in ("rope_parameters", "rope_scaling", "quantization_config"):
        return dict(value)
    if not all(isinstance(k, str) for k in value):
        return dict(value)
    if key.startswith("per_layer"):  # by the number of a layer
        return {k: v for k, v in value.items() if str(k).isdigit() and int(k) < layers}
    return shrunk(value, recipe)


def _kinds(config: Mapping[str, Any], most: int) -> int:
    """Return the number of layers that contains each kind of layer."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or not kinds:
        return most
    first = max(map(kinds.index, kinds))
    return max(most, first + 1) if first < 8 else most


def _shrunk_number(key: str, value: int, recipe: Recipe, layers: int, staged: bool) -> int:
    if _VOCABULARY.search(key) and value > VOCABULARY:
        return VOCABULARY
    if _CHOSEN.search(key):
        return min(value, 2)
    if _TOKEN.search(key):
        return value if value < VOCABULARY - 20 else VOCABULARY - 2 - sum(map(ord, key)) % 17
    if _GROUPS.search(key):
        return 1
    if _EXPERTS.search(key):
        return min(value, 4)
    if _LAYERS.search(key) and not _NO_LAYERS.search(key):
        return value if staged else min(value, layers)
    if key in ("first_k_dense_replace", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
        return min(value, 1)
    if key in ("image_size", "img_size", "input_size", "sample_size") and recipe.image:
        return min(value, recipe.image)
    if _POSITIONS.search(key):
        return min(value, 512)
    if key.endswith("chunk_size"):
        return min(value, 16)
    if recipe.heads and _HEADS.search(key):
        return max(1, value // recipe.divisor)
    if recipe.heads and _HEAD_WIDTH.search(key):
        return value
    if _WIDTH.search(key) and not _NO_WIDTH.search(key) and value >= 2 * recipe.divisor:
        narrow = value // recipe.divisor
        return narrow - narrow % 4 if narrow > 8 else max(2, narrow)  # products by groups need it
    return value


def _shrunk_list(
    key: str, value: list[Any], config: Mapping[str, Any], recipe: Recipe, layers: int
) -> list[Any]:
    counts = {v for k, v in config.items() if isinstance(v, int) and _LAYERS.search(k)}
    if len(value) in counts and len(value) > 5:
        return _shrunk_list(key, value[:layers], {}, recipe, layers)
    if key in ("depths", "num_blocks", "layers"):
        return [min(v, 2) if isinstance(v, int) else v for v in value]
    if key in ("image_size", "img_size", "input_size", "sample_size") and recipe.image:
        return [min(v, recipe.image) for v in value]
    if _LAYERS.search(key) or not all(isinstance(v, int) for v in value):
        return list(value)
    return [_shrunk_number(key, v, recipe, layers, False) for v in value]


def _consistent(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with those that must follow from others put right."""
    image, patch = found.get("image_size"), found.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and patch and image % patch:
        found["image_size"] = max(patch * 4, image // patch * patch)
    rope = found.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and "mrope_section" in rope
        and isinstance(rope["mrope_section"], list)
    ):
        half = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        share = half * rope.get("partial_rotary_factor", 1) / 2 / sum(rope["mrope_section"])
        rope["mrope_section"] = [max(1, int(v * share)) for v in rope["mrope_section"]]
    stages = found.get("out_features")
    count = found.get("num_hidden_layers")
    if isinstance(stages, list) and isinstance(count, int) and "depths" not in found:
        found["out_features"] = [f"stage{count}"]
        found.pop("out_indices", None)
        found.pop("stage_names", None)
    for key in ("use_cache", "output_attentions"):
        if key in found:
            found[key] = False
    return found
