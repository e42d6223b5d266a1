"""Amounts of memory, as people write them."""

import re

from gradscope.errors import SpecError

_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT])(i?)B", re.IGNORECASE)


def parse_memory(text: str) -> int:
    """Return the bytes that "2GB", "1.5 GiB" or "500MB" stands for; GB are powers of 1000.

    Raises:
        SpecError: It has another form, or is nothing.
    """
    match = _MEMORY.fullmatch(text)
    bytes_ = 0
    if match:
        number, unit, binary = match.groups()
        bytes_ = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    if not bytes_:
        raise SpecError(
            f"found {text!r}",
            where="memory",
            remedy="Accepted: a number and KB, MB, GB, TB, or KiB, MiB, GiB, TiB: 2GB, 1.5GiB.",
        )
    return bytes_


def memory_text(size: float) -> str:
    """Return "2.5 GB" or "500 MB"."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
