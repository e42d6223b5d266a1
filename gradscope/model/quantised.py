"""Layers of bitsandbytes with kernels that other quantised layers do not have.

Other quantised layers need no special case: their weights are constants of the forward pass.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from gradscope.core.batch import Batch
from gradscope.errors import CoupledSamplesError, RefusedError, UnsupportedError


def _layers(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) for each layer of a class of bitsandbytes."""
    for name, layer in model.named_modules():
        for own in type(layer).__mro__:
            if own.__name__ == kind and own.__module__.partition(".")[0] == "bitsandbytes":
                yield f"layer {name!r} ({type(layer).__name__})", layer
                break


def require_fixed_weights(model: nn.Module) -> None:
    """Raise if a 4-bit layer replaces its weights when it is called.

    In mode eval, the first input without gradient replaces them by a packed copy. The kernel for
    packed weights has no gradient, and reads wrong memory under vmap (bitsandbytes 0.50).
    """
    for where, layer in _layers(model, "Linear4bit"):
        packs = getattr(layer, "support_avx512bf16_for_cpu", False) and not layer.training
        if packs and layer.weight.device.type == "cpu":
            raise UnsupportedError(
                "in mode eval on this CPU, the layer replaces its weights when it is called, and "
                "its new kernel has no gradient",
                where=where,
                remedy="Set layer.support_avx512bf16_for_cpu = False for each Linear4bit when the "
                "model is made, or call train() on these layers.",
            )


def require_fixed_columns(model: nn.Module, batch: Batch) -> None:
    """Raise if an 8-bit layer chooses the columns that it does not quantise by several samples."""
    several = len(batch.sample_batch) > 1
    for where, layer in _layers(model, "Linear8bitLt") if several else ():
        if layer.state.threshold > 0:
            raise CoupledSamplesError(
                f"an input above the threshold {layer.state.threshold:g} in one sample changes how "
                "the layer rounds all samples of the batch",
                where=where,
                remedy="Use batches of one sample. Or load the model with the threshold 0 "
                "(llm_int8_threshold=0.0, layer.state.threshold), which quantises each row alone. "
                'Or use coupling="own-loss": the gradients of the losses in this batch.',
            )


def require_float64(model: nn.Module) -> None:
    """Raise if a 4-bit layer has no kernel for float64 (bitsandbytes 0.50 returns any numbers)."""
    for where, _ in _layers(model, "Linear4bit"):
        raise RefusedError("the layer has no float64 kernel", where=where)
