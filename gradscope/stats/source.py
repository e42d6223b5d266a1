"""The parts of a result file that statistics read: finite samples and stored chains."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradscope.core import texts
from gradscope.core.grammar import Stage, parse
from gradscope.errors import ResultFileError, SpecError
from gradscope.stats.records import Floats, Mask, Positions, number, plain, wide

Arrays = Mapping[str, Any]


class Source(Protocol):
    """The parts of a result file that statistics use; see `gradscope.storage.GradientFile`.

    `samples` holds index, loss, norm and finite, each (N,), and target and id where stored;
    `norms` maps a parameter's name to ‖gᵢ‖ of that parameter, (N,); `norm_attributes` maps it
    to {"mean_gradient_norm": ‖mean gᵢ‖ over the finite samples}. A chain has `text`, `reduced` and
    its arrays by name.
    """

    path: Any
    n: int
    attributes: Any
    run: Any
    certificate: Any
    parameters: Any
    samples: Any
    norms: Any
    chains: Any

    @property
    def norm_attributes(self) -> Any:
        """{parameter: {attribute: number}}."""


@dataclass(frozen=True)
class Samples:
    """The n finite samples of a file, in its order."""

    rows: Positions  # their rows in the file (n,)
    total: int  # how many samples the file has, finite or not
    index: Positions  # their positions in the data set (n,)
    loss: Floats  # lᵢ (n,)
    norm: Floats  # ‖gᵢ‖ (n,)
    target: NDArray[Any] | None  # (n, ...), if stored
    id: NDArray[Any] | None = None  # the samples' names (n,), if stored
    prediction: NDArray[Any] | None = None  # the model's predictions (n,), if stored
    margin: Floats | None = None  # log p - log(1 - p) of the target class (n,), if stored
    size: NDArray[Any] | None = None  # the number of members (n,), if the rows are groups

    @classmethod
    def of(cls, file: Source) -> "Samples":
        """Return the finite samples of `file`."""
        rows = np.flatnonzero(finite_samples(file))
        names = ("target", "id", "prediction", "margin", "size")
        target, own, prediction, margin, size = map(file.samples.get, names)
        own = own if "position" not in file.samples else token_names(file.samples)
        return cls(
            rows=rows,
            total=file.n,
            index=np.asarray(file.samples["index"])[rows],
            loss=wide(np.asarray(file.samples["loss"])[rows]),
            norm=wide(np.asarray(file.samples["norm"])[rows]),
            target=None if target is None else np.asarray(target)[rows],
            id=None if own is None else np.asarray(own)[rows],
            prediction=None if prediction is None else np.asarray(prediction)[rows],
            margin=None if margin is None else wide(np.asarray(margin)[rows]),
            size=None if size is None else np.asarray(size)[rows],
        )

    @property
    def n(self) -> int:
        """The number of finite samples."""
        return int(self.rows.size)

    def described(self, place: int) -> dict[str, Any]:
        """Return the index, id and target of the sample at `place`."""
        return {
            "index": int(self.index[place]),
            "id": None if self.id is None else plain(self.id[place]),
            "target": None if self.target is None else plain(self.target[place]),
        }

    def place(self, index: int) -> int:
        """Return the place in the table of the row with this `index`."""
        found = np.flatnonzero(self.index == index)
        if not found.size:
            raise SpecError(
                f"no finite row of the file has the index {index}; the indices are "
                f"{self.index.min()} to {self.index.max()}",
                remedy="Give a number from the column `index` of gradscope stats or export.",
            )
        return int(found[0])


def token_names(table: Mapping[str, Any]) -> NDArray[Any]:
    """Return "SAMPLE:POSITION" of rows of tokens (n,); SAMPLE is the sample's id, if known."""
    names = np.atleast_1d(table["id" if "id" in table else "sample"]).tolist()
    pairs = zip(names, np.atleast_1d(table["position"]).tolist(), strict=True)
    texts = ((k.decode() if isinstance(k, bytes) else k, t) for k, t in pairs)
    return np.array([f"{k}:{t}" for k, t in texts])


def keys_of(table: Mapping[str, Any]) -> Positions:
    """Return a key for each row (n,) that is the same in every run: its position in the data set.

    The key of a token is (sample + 1) · 2³² + position, which differs from every sample's key. The
    key of a group is a hash of its id.
    """
    if "size" in table:
        names = np.atleast_1d(table["id"]).tolist()
        digests = [blake2b(str(plain(name)).encode(), digest_size=8).digest() for name in names]
        return np.frombuffer(b"".join(digests), np.int64)
    if "position" not in table:
        return np.asarray(table["index"], np.int64)
    sample, position = (np.asarray(table[k], np.int64) for k in ("sample", "position"))
    return (sample + 1 << 32) + position


def finite_samples(file: Source) -> Mask:
    """Return which samples are finite (N,)."""
    flags: Mask = np.asarray(file.samples["finite"], dtype=bool)
    known: Mask = np.isfinite(np.asarray(file.samples["norm"]))
    return flags & known


def mean_gradient_norm(file: Source, name: str) -> float:
    """Return ‖G‖ of the parameter `name` as recorded."""
    attributes: Mapping[str, Any] = file.norm_attributes.get(name, {})
    if "mean_gradient_norm" not in attributes:
        raise ResultFileError(
            f"the norm of the mean gradient of {name!r} is not recorded",
            where=str(file.path),
            remedy="Compute the file again.",
        )
    return float(attributes["mean_gradient_norm"])


def mean_gradient_squared(file: Source) -> float | None:
    """Return ‖G‖² over all parameters, or None where it is not finite."""
    return number(sum(mean_gradient_norm(file, name) ** 2 for name in file.parameters))


def labels_of(file: Source) -> str:
    """Return which labels the losses were computed with: data, sampled or exact."""
    spec = dict(file.run).get("spec")
    compute = spec.get("compute") if isinstance(spec, dict) else None
    return str((compute or {}).get("labels") or "data")


def noun_of(file: Source) -> str:
    """Return the kind of row: sample, token or group."""
    return texts.noun_of(dict(file.run))


def stages_of(file: Source, chain: Any) -> tuple[Stage, ...]:
    """Return the stages of a chain that a file holds."""
    try:
        return parse(chain.text)
    except SpecError as error:
        raise ResultFileError(
            f"the file holds an invalid chain: {error.what}",
            where=str(file.path),
            remedy=f"{error.remedy}\nCompute the file again: it has been changed.",
        ) from error


def chain_of(file: Source, text: str) -> Arrays | None:
    """Return the chain `text`, {name: array}, or None if it is not stored."""
    return next((chain for chain in file.chains if chain.text == text), None)


def rows_of(file: Source) -> Arrays | None:
    """Return {name: (N, *shape)}, the gradient of each sample, or None if not stored."""
    return chain_of(file, "identity")


def rows_unusable(file: Source) -> str | None:
    """Return why the stored rows cannot be summed, or None."""
    for name, array in (rows_of(file) or {}).items():
        if getattr(array, "overflowed", 0):
            return f"stored rows of {name!r} overflowed; use gradscope compute --dtype float32"
    return None


def in_half(file: Source) -> bool:
    """Whether rows are in half precision. The recorded norms are then more exact."""
    return dict(file.run).get("dtype") in ("float16", "bfloat16")


def gram_of(file: Source, n: int) -> Floats | None:
    """Return ⟨gᵢ, gⱼ⟩ (n, n) of the n finite samples, in their order, from a chain `gram`."""
    found = chain_of(file, "gram")
    if found is None or tuple(found["gram"].shape) != (n, n):
        return None
    index = np.asarray(file.samples["index"])[np.asarray(file.samples["finite"], dtype=bool)]
    back = np.argsort(np.argsort(index, kind="stable"), kind="stable")  # `gram` is sorted by index
    return wide(np.real(found["gram"][...]))[np.ix_(back, back)]


def projections_of(file: Source) -> tuple[str, Floats] | None:
    """Return a chain `project:...` without reducer: its text and P gᵢ (N, dim)."""
    for chain in file.chains:
        stages = stages_of(file, chain)
        alone = not chain.reduced and len(stages) == 1 and stages[0].name == "project"
        if alone and "project" in chain and len(chain["project"].shape) == 2:
            return chain.text, wide(chain["project"][...])
    return None


def aggregate_of(file: Source, text: str) -> dict[str, Floats] | None:
    """Return {name: (*shape)} of the reduced chain `text`, or None if it is not stored."""
    found = chain_of(file, text)
    return None if found is None else {k: np.asarray(v[...]) for k, v in found.items()}


def mean_of(file: Source) -> dict[str, Floats] | None:
    """Return G, {name: (*shape)}, from a chain `mean`, or from the sums stored in small files."""
    found = aggregate_of(file, "mean")
    kept = getattr(file, "states", {}).get("mean_gradient", {})
    if found is None and all(k in kept for k in ("n", *(f"sum:{p}" for p in file.parameters))):
        n = float(kept["n"][...])
        if n == np.count_nonzero(file.samples["finite"]) > 0:
            return {name: np.asarray(kept[f"sum:{name}"][...]) / n for name in file.parameters}
    return found
