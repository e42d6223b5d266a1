"""What stops an evaluation: it is begun again in another way, or refused."""

from enum import IntEnum
from typing import NoReturn

from gradscope.errors import UnsupportedError

REMEDY = "Use the hooks or the loop backend for this model."


class Own(IntEnum):
    """What is each sample's own from the start, so that per-sample values can be written to it.

    The less, the more is computed once for all samples.
    """

    NOTHING = 0
    RESULTS = 1  # of operators on parameters alone
    EVERYTHING = 2  # also constants made in the forward pass, and buffers


class SharedWrite(BaseException):
    """Per-sample values were to be written into a tensor that all samples share.

    A signal, which the model's own `except Exception` must not catch.

    Args:
        needed: With what they could be.
    """

    def __init__(self, needed: Own) -> None:
        super().__init__(needed)
        self.needed = needed


class Differ(BaseException):
    """Samples take different ways through the model; a signal too.

    Args:
        keys: For each sample, which way.
    """

    def __init__(self, keys: list[str]) -> None:
        super().__init__(keys)
        self.keys = keys


def refuse(what: str, remedy: str = REMEDY) -> NoReturn:
    """Raise that this backend has no exact way."""
    raise UnsupportedError(f"the expand backend cannot run this model: {what}", remedy=remedy)


def same_as(keys: list[str]) -> None:
    """See that all samples have the same key.

    Raises:
        Differ: They do not.
    """
    if any(key != keys[0] for key in keys):
        raise Differ(keys)
