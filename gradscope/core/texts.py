"""Texts as others can read them."""

from collections.abc import Iterable


def printable(text: str) -> str:
    """Return text that UTF-8 can hold: half of a surrogate pair as JSON and Python escape it."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit:,} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def article(noun: str) -> str:
    """Return a noun behind "a" or "an"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
