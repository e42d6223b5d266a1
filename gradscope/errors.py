"""The error tree: one root, one branch for each exit code of the command line.

GradscopeError                      1   a bug in gradscope, when nothing below fits
├── SpecError                       2   usage: an option, run file, chain or loss of the wrong form
├── InputError                      3   something that was to be read
│   ├── CheckpointError
│   ├── ModelError                      the user's model factory or model file
│   ├── DatasetError
│   └── ResultFileError
├── RefusedError                    4   gradscope could answer only wrongly, so it does not
│   ├── UnsupportedError                a backend has no exact way for this model
│   ├── CoupledSamplesError             a sample's loss depends on other samples
│   └── CertificateError                a proof, or an audit, failed
├── OutputError                     6   something that was to be written
└── NonFiniteError                  7   something is not finite, and that was to be an error

The inner raise states the fact and the remedy; a boundary adds where it happened with `at`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self


class GradscopeError(Exception):
    """The root of everything gradscope raises on purpose.

    Args:
        what: One sentence: what is wrong.
        where: The file, key, layer or sample it is about.
        remedy: What the user can do.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def at(self, where: str) -> Self:
        """Put `where` in front of what is already known about the place, and return self."""
        self.where = where if self.where is None else f"{where}: {self.where}"
        return self

    @property
    def head(self) -> str:
        """Where it is and what is wrong, without the remedy."""
        return self.what if self.where is None else f"{self.where}: {self.what}"

    def __str__(self) -> str:
        return self.head if self.remedy is None else f"{self.head}\n{self.remedy}"


class SpecError(GradscopeError):
    """An option, run file, chain or loss is not of the form it must have."""

    exit_code = 2
    parts: tuple["SpecError", ...] = ()  # the single mistakes, where it tells of several


class InputError(GradscopeError):
    """Something that was to be read is absent, damaged or does not fit."""

    exit_code = 3


class CheckpointError(InputError):
    """A checkpoint cannot be read or does not fit the model."""


class ModelError(InputError):
    """The user's model file, factory or model raised or returned something unusable."""


class DatasetError(InputError):
    """The data cannot be read or do not fit their description."""


class ResultFileError(InputError):
    """A result file is absent, damaged or not one of ours."""


class RefusedError(GradscopeError):
    """An exact answer does not exist or cannot be had; no other answer is given."""

    exit_code = 4


class UnsupportedError(RefusedError):
    """A backend has no exact way for this model; `where` names the layer."""


class CoupledSamplesError(RefusedError):
    """A sample's loss depends on other samples of its batch."""


class CertificateError(RefusedError):
    """The numbers of a batch failed its proof, so they are not given out."""


class OutputError(GradscopeError):
    """Something that was to be written cannot be."""

    exit_code = 6


class NonFiniteError(GradscopeError):
    """A gradient, or what a chain made of it, is not finite, and the run was told to fail then."""

    exit_code = 7


@contextmanager
def located(where: Path | str) -> Iterator[None]:
    """Add a place to errors of gradscope that have none."""
    try:
        yield
    except GradscopeError as error:
        error.where = error.where or str(where)
        raise
