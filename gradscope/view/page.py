"""One self-contained page: the data as JSON, the script, the charts; nothing from a network.

What is in the data is text to the page: the script sets it as text only, and the policy lets
nothing run but the two scripts whose digests it names.
"""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradscope.core.markup import safe
from gradscope.errors import OutputError

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
    "script-src {scripts}; base-uri 'none'; form-action 'none'"
)


_MADE, _HEAD = b'<meta name="generator" content="gradscope view">', 1000  # bytes of a page


def page(document: dict[str, Any]) -> str:
    """Return the page that shows a document of `View.document`."""
    scripts = [_part("charts.js"), _part("view.js")]
    digests = (b64encode(sha256(text.encode()).digest()).decode() for text in scripts)
    policy = _POLICY.format(
        connect="'self'" if document["served"] else "'none'",
        scripts=" ".join(f"'sha256-{digest}'" for digest in digests),
    )
    data = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    filled = {
        "POLICY": policy,
        "TITLE": safe(document["name"]),
        "STYLE": _part("view.css"),
        "DATA": data.replace("<", "\\u003c"),
        "CHARTS": scripts[0],
        "SCRIPT": scripts[1],
    }
    pieces = _part("view.html").split("%%")  # text, a name, text, ...
    return "".join(filled[one] if k % 2 else one for k, one in enumerate(pieces))


def write_page(document: dict[str, Any], path: str | Path) -> int:
    """Write the page, and return its bytes.

    Raises:
        OutputError: The file cannot be written, or is another one.
    """
    text = page(document).encode()
    try:
        if Path(path).is_file() and _MADE not in Path(path).read_bytes()[:_HEAD]:
            raise OutputError(
                "this file is there, and is no page of gradscope view",
                where=str(path),
                remedy="Move it away, or give another --output.",
            )
        Path(path).write_bytes(text)
    except OSError as error:
        raise OutputError(
            f"the page cannot be written: {error.strerror or error}", where=str(path)
        ) from error
    return len(text)


@cache
def _part(name: str) -> str:
    return (files("gradscope.view") / "static" / name).read_text(encoding="utf-8").strip()
