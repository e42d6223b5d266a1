"""Commands in processes of their own, quickly: one process imports everything, then forks.

Each command runs in a fork that nothing else has run in, with an exit code, a stdout and a stderr
of its own, as the installed script would.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

SECONDS = 60  # longer is a hang


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


class Forked:
    """A process that runs one command after the other, each in a fork."""

    def __enter__(self) -> Self:
        import torch

        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
            | {"OMP_NUM_THREADS": str(torch.get_num_threads())},  # a file names their number
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process:  # which closes its streams
            self._process.kill()  # its interpreter has nothing to shut down

    def run(self, *arguments: object, cwd: Path, first: str = "", **environment: str) -> Outcome:
        """Run `gradscope ARGUMENTS` in a folder, with some variables set, after some code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = [*map(str, arguments)], str(cwd), environment, first
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        return Outcome(code, out, err)


def load() -> None:
    """Import what commands need, for all forks at once."""
    for name in ("gradscope.comparison", "gradscope.run", "gradscope.report", "torch._dynamo"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # to be looked through, all of it would be copied into each fork


def command(
    arguments: Sequence[str],
    cwd: str | Path,
    environment: Mapping[str, str],
    before: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run `gradscope ARGUMENTS` in a fork of this process, which calls `before` first."""
    from gradscope.cli import main

    def body() -> None:
        os.chdir(cwd)
        os.environ.update(environment)
        sys.argv = ["gradscope", *arguments]
        before()
        main()

    return apart(body)


def apart(body: Callable[[], object], seconds: int = SECONDS) -> Outcome:
    """Call a function in a fork of this process; its exit code is that of a program."""
    return begin(body, seconds)()


def begin(body: Callable[[], object], seconds: int = SECONDS) -> Callable[[], Outcome]:
    """Begin to call a function in a fork of this process; return what waits for its end."""
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.alarm(seconds)
        _exit(body)

    def end() -> Outcome:
        _, status = os.waitpid(child, 0)
        texts = [os.pread(f, 2**24, 0).decode(errors="surrogateescape") for f in (out, err)]
        os.close(out)
        os.close(err)
        return Outcome(os.waitstatus_to_exitcode(status), *texts)

    return end


def _serve() -> None:
    load()
    for line in sys.stdin:
        arguments, cwd, environment, first = json.loads(line)
        found = command(arguments, cwd, environment, partial(exec, first))
        print(json.dumps(found), flush=True)


def _exit(body: Callable[[], object]) -> None:
    """Call a function and leave with its exit code, past whatever the parent would do."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # closed by the user's code
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
