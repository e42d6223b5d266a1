"""The finite samples of a file: the light table that every statistic starts from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.errors import ResultFileError, SpecError
from gradscope.stats.base import Floats, Mask, Source, number, wide

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """The finite samples, in the file's order.

    Attributes:
        rows: Their rows in the file (n,).
        total: How many samples the file has, finite or not.
        index: Their positions in the data set (n,).
        loss: Lᵢ (n,).
        norm: ‖gᵢ‖ (n,).
        target: (n, ...), or None where none is stored.
        id: Their own names (n,), likewise.
    """

    rows: Positions
    total: int
    index: Positions
    loss: Floats
    norm: Floats
    target: NDArray[Any] | None
    id: NDArray[Any] | None = None

    @classmethod
    def of(cls, file: Source) -> "Table":
        """Read the table of `file`."""
        rows = np.flatnonzero(finite_samples(file))
        target, own = file.samples.get("target"), file.samples.get("id")
        return cls(
            rows=rows,
            total=file.n,
            index=np.asarray(file.samples["index"])[rows],
            loss=wide(file.samples["loss"])[rows],
            norm=wide(file.samples["norm"])[rows],
            target=None if target is None else np.asarray(target)[rows],
            id=None if own is None else np.asarray(own)[rows],
        )

    @property
    def n(self) -> int:
        """The number of finite samples."""
        return int(self.rows.size)

    def name(self, place: int) -> int | str | None:
        """Return the own name of the sample at `place`, or None where none is stored."""
        if self.id is None:
            return None
        found = self.id[place]
        plain = found.item() if hasattr(found, "item") else found
        return plain.decode("utf-8", "replace") if isinstance(plain, bytes) else plain

    def place(self, index: int) -> int:
        """Return where in the table the sample `index` of the data set is.

        Raises:
            SpecError: It is not among the finite samples of the file.
        """
        found = np.flatnonzero(self.index == index)
        if not found.size:
            raise SpecError(
                f"sample {index} is not among the finite samples of the file",
                remedy="Samples are named by their position in the data set, as `stats` shows it.",
            )
        return int(found[0])


def finite_samples(file: Source) -> Mask:
    """Return which samples are finite (N,)."""
    flags: Mask = np.asarray(file.samples["finite"], dtype=bool)
    return flags & np.isfinite(wide(file.samples["norm"]))


def mean_gradient_norm(file: Source, name: str) -> float:
    """Return ‖G‖ of the parameter `name` as recorded.

    Raises:
        ResultFileError: It is not recorded.
    """
    attributes: Mapping[str, Any] = file.norm_attributes.get(name, {})
    if "mean_gradient_norm" not in attributes:
        raise ResultFileError(
            f"the norm of the mean gradient of {name!r} is not recorded",
            where=str(file.path),
            remedy="Compute the file again with this version of gradscope.",
        )
    return float(attributes["mean_gradient_norm"])


def mean_gradient_squared(file: Source) -> float | None:
    """Return ‖G‖² over all parameters, or None where it is not finite."""
    return number(sum(mean_gradient_norm(file, name) ** 2 for name in file.parameters))
