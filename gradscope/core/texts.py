"""Texts for messages: counts, lists of names, and strings with escaped control characters."""

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any


def printable(text: str) -> str:
    """Return text that UTF-8 can encode; lone surrogates are escaped as in JSON and Python."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Return the first `limit` names, and the number of the rest."""
    every = list(names)
    more = f" and {len(every) - limit:,} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def count(n: int, noun: str) -> str:
    """Return "1 sample", "1,797 samples", "2 batches"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def noun_of(run: Mapping[str, Any]) -> str:
    """Return the kind of row of a run, from its record: sample, token or group."""
    return "group" if "groups" in run else "token" if "tokens" in run else "sample"


def article(noun: str) -> str:
    """Return a noun with "a" or "an"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def unequal(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with three digits, or with enough digits to differ."""
    for digits in range(3, 18):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, keep: str = "") -> str:
    r"""Replace unprintable characters, except those in `keep`, by escapes like \x1b."""
    return "".join(
        character if character in keep or unicodedata.category(character) not in _UNSAFE
        # # the escapes of repr, but quotes unchanged
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )  # fmt: skip
