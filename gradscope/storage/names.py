"""Parameter names as HDF5 names.

HDF5 nests at `/`, cuts at NUL and reads `.` as the group itself; control characters break
terminals. These, and `%`, are percent-encoded, so that every name has one spelling and comes back.
"""

import unicodedata
from urllib.parse import unquote


def escape(name: str) -> str:
    """Return the HDF5 name of a parameter."""
    if name in ("", "."):
        return "%2E" if name else "%"
    return "".join(_encoded(c) if _special(c) else c for c in name)


def unescape(name: str) -> str:
    """Return the parameter's name; the inverse of `escape`."""
    return "" if name == "%" else unquote(name, errors="surrogatepass")


def _special(character: str) -> bool:
    return character in "/%" or unicodedata.category(character) in ("Cc", "Cs")


def _encoded(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
