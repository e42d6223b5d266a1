"""The self-contained page of `gradscope view`: data as JSON, scripts, charts; no network.

The script inserts all data as text, never as markup. The page's policy allows only its own
scripts. `serve` runs a server on localhost, from which the page loads details of samples.
"""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from gradscope import markup, storage
from gradscope.errors import OutputError
from gradscope.markup.glossary import TERMS, explained
from gradscope.stats import html
from gradscope.stats.sections import Overview
from gradscope.view.document import View

_MAKER = "gradscope view"
_DATA = "\0data\0"  # stands for the data, because no HTML contains it


def page(document: dict[str, Any], found: Overview) -> str:
    """Return the page for a document of `View.document` and its statistics `found`."""
    return "".join(_parts(document, found))


def _parts(document: dict[str, Any], found: Overview) -> tuple[str, str, str]:
    """Return the page in three parts: the data, which may be long, are the second."""
    about = "About this file"
    filled = {
        "HEADER": html.header(found) + markup.details(about, html.about(found, about)),
        "NOUN": found.noun,
        "OPPOSED": explained("opposed"),
        "STATISTICS": "\n".join(
            markup.section(section.title, html.section(section, found.noun))
            for section in found.sections
        ),
        "DATA": _DATA,
    }
    pieces = _part("view.html").split("%%")  # text, a name, text, ...
    before, _, after = markup.page(
        f"{html.title(found)}: {found.noun}s and their gradients",
        "".join(filled[one] if k % 2 else one for k, one in enumerate(pieces)),
        _MAKER,
        style=_part("view.css"),
        scripts=[*markup.chart_scripts(), _part("view.js")],
        connect="'self'" if document["served"] else "'none'",
    ).partition(_DATA)
    return before, markup.embedded(document | {"terms": TERMS}, "data"), after


def write_page(document: dict[str, Any], found: Overview, path: str | Path) -> int:
    """Write the page, and return the number of bytes.

    Raises:
        OutputError: The file cannot be written, or exists and is not such a page.
    """
    return storage.write_page(Path(path), _MAKER, *_parts(document, found))


def _part(name: str) -> str:
    return markup.resource("gradscope.view", "static", name)


_HOST = "127.0.0.1"
_TOGETHER = 256  # samples of one answer


def serve(view: View, port: int = 0, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serve the page on localhost until interrupted; `ready` is called with its address.

    Raises:
        OutputError: The port cannot be used.
    """
    text, lock, n = page(view.document(None), view.overview()).encode(), Lock(), view.data.samples.n

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in names:  # DNS rebinding
                return self._answer(403, b"", "text/plain")
            asked = urlsplit(self.path)
            if asked.path == "/":
                return self._answer(200, text, "text/html; charset=utf-8")
            words = parse_qs(asked.query).get("places", [""])[0].split(",")
            sound = asked.path == "/details" and len(words) <= _TOGETHER
            if not sound or not all(w.isdecimal() and int(w) < n for w in words):
                return self._answer(404, b"", "text/plain")
            with lock:  # one HDF5 read at a time
                found = view.details(np.array([int(word) for word in words], np.int64))
            return self._answer(200, json.dumps(found).encode(), "application/json")

        def _answer(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: the browser lists the requests."""

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise OutputError(
            f"port {port} cannot be used: {error.strerror or error}",
            remedy="Give another --port, or leave it out.",
        ) from error
    names = {f"{name}:{server.server_port}" for name in (_HOST, "localhost")}
    server.daemon_threads = True
    with server:
        ready(f"http://{_HOST}:{server.server_port}/")
        server.serve_forever()
