"""The page on localhost: its samples' details are read when they are asked for."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

import numpy as np

from gradscope.errors import OutputError
from gradscope.view.document import View
from gradscope.view.page import page

_HOST = "127.0.0.1"
_TOGETHER = 256  # samples of one answer


def serve(view: View, port: int = 0, ready: Callable[[str], None] = lambda _: None) -> None:
    """Answer on localhost until it is interrupted; `ready` is called with the page's address.

    Raises:
        OutputError: The port is taken.
    """
    text, lock, n = page(view.document(None)).encode(), Lock(), view.data.samples.n

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in names:  # another name that leads here
                return self._answer(403, b"", "text/plain")
            asked = urlsplit(self.path)
            if asked.path == "/":
                return self._answer(200, text, "text/html; charset=utf-8")
            words = parse_qs(asked.query).get("places", [""])[0].split(",")
            sound = asked.path == "/details" and len(words) <= _TOGETHER
            if not sound or not all(w.isdecimal() and int(w) < n for w in words):
                return self._answer(404, b"", "text/plain")
            with lock:  # HDF5 answers one at a time
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
            """Say nothing: what is asked for is in the browser."""

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
