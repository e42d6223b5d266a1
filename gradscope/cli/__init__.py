"""The command line: parse, call the library, render, exit from the result."""

import os
import sys

from gradscope.process import stops, streams
from gradscope.process.libc import keep_pages

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def main() -> None:
    """Be the process `gradscope`, and exit with the code of the command.

    Within another program, `gradscope.cli.app.run` leaves the process as it was.
    """
    streams.open_standard_ones()
    stops.exit_on_signal()
    stops.register_end()
    keep_pages()
    spin_briefly()  # before torch is loaded: OpenMP reads it then
    from gradscope.cli.app import execute

    code = execute()
    stops.exit_with(code)
    sys.exit(code)


def spin_briefly() -> None:
    """Let the threads of GCC's OpenMP, which torch has on Linux, soon sleep while they wait.

    A thread that waits spins 300,000 times, for milliseconds, before it sleeps, even if the one
    that it waits for has no core because another process' thread spins there: two such processes
    may take ten times as long as they need. 1,000 turns, libgomp's own measure where it has fewer
    cores than active threads, last about as long as a thread takes to sleep and wake. Nothing is
    done where the environment says how to wait.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = "1000"


__all__ = ["main", "spin_briefly"]
