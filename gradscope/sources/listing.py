"""Names in a message: the first ones, and how many more there are."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
