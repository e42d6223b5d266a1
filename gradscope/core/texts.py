"""Texts as others can read them."""


def printable(text: str) -> str:
    """Return text that UTF-8 can hold: half of a surrogate pair as JSON and Python escape it."""
    return text.encode("utf-8", "backslashreplace").decode()
