"""The command line: parse, call the library, render, exit from the result."""

import sys

from gradscope.core import stops, streams
from gradscope.core.libc import keep_pages


def main() -> None:
    """Be the process `gradscope`, and exit with the code of the command.

    Within another program, `gradscope.cli.app.run` leaves the process as it was.
    """
    streams.open_standard_ones()
    stops.at_once()
    stops.ignored_at_the_end()
    keep_pages()
    from gradscope.cli.app import execute

    code = execute()
    stops.finished(code)
    sys.exit(code)


__all__ = ["main"]
