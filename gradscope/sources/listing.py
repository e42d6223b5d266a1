"""Names in a message."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def article(noun: str) -> str:
    """Return a noun behind "a" or "an"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
