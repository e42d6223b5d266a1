"""The command line: parse, call the library, render, exit from the result."""

import os
import sys

from gradscope.process import stops, streams
from gradscope.process.collection import collect_as_usual, collect_rarely
from gradscope.process.libc import keep_pages

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> None:
    """Run the command line as the process `gradscope`, and exit with its code.

    Use `gradscope.cli.app.run` within another program: it restores signal handlers.
    """
    streams.open_standard_ones()
    stops.exit_on_signal()
    stops.register_end()
    keep_pages()
    collect_rarely()
    spin_briefly()  # OpenMP reads the setting when torch is loaded
    from gradscope.cli.app import execute

    code = execute()
    stops.exit_with(code)
    collect_as_usual()
    sys.exit(code)


def spin_briefly() -> None:
    """Make waiting threads of GCC's OpenMP, which torch uses on Linux, sleep sooner.

    By default a waiting thread spins 300,000 times, for milliseconds, before it sleeps. If two
    processes share cores, spinning threads of one process block working threads of the other, which
    can make both ten times slower. 1,000 turns take about as long as to sleep and wake up. libgomp
    itself uses this number if there are fewer cores than threads. Nothing changes if the
    environment has a setting for waiting.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = "1000"


__all__ = ["main", "spin_briefly"]
