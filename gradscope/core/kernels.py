"""Kernels that hide what is needed of them, and how to do without."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unfused() -> Iterator[None]:
    """Run recurrent layers step by step: fused kernels hide the steps and have one derivative."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks on TF32 whenever these flags are read
        with (
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.cudnn.flags(enabled=False),
        ):
            yield
