"""The error tree: one root, and one branch for each exit code of the command line.

GradscopeError                      1   a bug in gradscope, when nothing below fits
├── SpecError                       2   usage: an option, run file, chain or loss of the wrong form
├── InputError                      3   an input is absent, unreadable or does not fit
│   ├── CheckpointError
│   ├── ModelError                      the user's model factory or model file
│   ├── DatasetError
│   └── ResultFileError
├── RefusedError                    4   an exact answer is not possible
│   ├── UnsupportedError                a backend does not support this model
│   ├── CoupledSamplesError             a sample's loss depends on other samples
│   └── CertificateError                a proof or an audit failed
├── OutputError                     6   an output cannot be written
└── NonFiniteError                  7   a number is not finite, and the user asked for an error

The code that raises states the fact and the remedy. Its callers add the place with `at`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self


class GradscopeError(Exception):
    """The base class of all errors that gradscope raises on purpose.

    Args:
        what: The fact that is wrong, in one sentence.
        where: The file, key, layer or sample that has the problem.
        remedy: What the user can do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def at(self, where: str) -> Self:
        """Put `where` in front of the stored place, and return self."""
        self.where = where if self.where is None else f"{where}: {self.where}"
        return self

    @property
    def head(self) -> str:
        """The place and what is wrong, without the remedy."""
        return self.what if self.where is None else f"{self.where}: {self.what}"

    def __str__(self) -> str:
        return self.head if self.remedy is None else f"{self.head}\n{self.remedy}"


class SpecError(GradscopeError):
    """An option, run file, chain or loss has the wrong form."""

    exit_code = 2
    parts: tuple["SpecError", ...] = ()  # the separate mistakes, if the error reports several


class InputError(GradscopeError):
    """An input is absent, damaged or does not fit."""

    exit_code = 3


class CheckpointError(InputError):
    """A checkpoint cannot be read or does not fit the model."""


class ModelError(InputError):
    """The user's model file, factory or model raised or returned something unusable."""


class DatasetError(InputError):
    """The data cannot be read or do not match their description."""


class ResultFileError(InputError):
    """A result file is absent, damaged, or not a gradscope file."""


class RefusedError(GradscopeError):
    """No exact answer exists or can be computed, so gradscope gives no answer."""

    exit_code = 4


class UnsupportedError(RefusedError):
    """A backend does not support this model; `where` names the layer."""


class CoupledSamplesError(RefusedError):
    """A sample's loss depends on other samples of its batch."""


class CertificateError(RefusedError):
    """The gradients of a batch failed their proof, so they are not returned."""


class OutputError(GradscopeError):
    """An output cannot be written."""

    exit_code = 6


class NonFiniteError(GradscopeError):
    """A gradient or a chain's result is not finite, and the run was asked to fail in this case."""

    exit_code = 7


@contextmanager
def located(where: Path | str) -> Iterator[None]:
    """Add a place to gradscope errors that have none."""
    try:
        yield
    except GradscopeError as error:
        error.where = error.where or str(where)
        raise
