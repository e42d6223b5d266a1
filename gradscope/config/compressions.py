"""Names of compressions: `gzip`, `zstd:9`. torch is not imported."""

from dataclasses import dataclass

from gradscope.errors import SpecError

_LEVELS = {"gzip": (1, 4, 9), "zstd": (1, 3, 22), "blosc2": (1, 5, 9)}  # least, usual, most


@dataclass(frozen=True)
class Compression:
    """How rows are compressed.

    Attributes:
        name: gzip, zstd or blosc2.
        level: More is smaller and slower.
    """

    name: str
    level: int

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"


def parse_compression(text: str) -> Compression:
    """Return the compression that "NAME" or "NAME:LEVEL" stands for.

    Raises:
        SpecError: There is none of that name or level.
    """
    name, colon, level = text.partition(":")
    least, usual, most = _LEVELS.get(name, (0, 0, -1))
    number = int(level) if level.isascii() and level.isdigit() and len(level) < 4 else -1
    found = number if colon else usual
    if not least <= found <= most:
        known = ", ".join(f"{name}:{low} to {high}" for name, (low, _, high) in _LEVELS.items())
        raise SpecError(
            f"found {text!r}",
            where="compression",
            remedy=f"Accepted: {known}; without a level, a usual one.",
        )
    return Compression(name, found)
