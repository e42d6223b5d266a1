"""The outcome of a run: its report, counts of nonfinite numbers, and combined certificates.

If gradients are finite and a chain's numbers are not, a stage of the chain caused it. The run
counts these numbers in rows when they are written. It counts them in aggregates before and after
the stages that follow the reducer, because a stage such as `sign` hides infinite numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain as chained
from math import nan
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.blocks.base import as_rows
from gradscope.engine.session import NonFinite
from gradscope.errors import OutputError
from gradscope.stages.chain import Chain
from gradscope.stages.reducers.base import Reducer, State, taken_result
from gradscope.stats import Json, ParameterRow, Proof, Record
from gradscope.storage import GradientFile, PartialFile

NONFINITE = "nonfinite"  # key of the counts by chain, among the reducers' states
MEAN_GRADIENT = "mean_gradient"  # computed in every run, for the signal-to-noise ratio
_REPORT = "This is a bug in gradscope: please report it."


def _with_counts(a: State, b: State) -> State:
    zero = torch.tensor(0)
    return {key: a.get(key, zero) + b.get(key, zero) for key in a | b}


COUNTS = Reducer(start=lambda _: {}, merge=_with_counts, result=dict)  # adds the counts by chain


class RunReport(Record):
    """The report of `gradscope compute`, for its output and its `--json`."""

    schema_: Literal["gradscope.compute"] = "gradscope.compute"
    version: Literal[1] = 1
    parameters: tuple[ParameterRow, ...]  # one row for each, in the model's order
    certificate: Json  # the proof of the first batch, and the audits
    backend: str  # the backend that ran
    notes: tuple[str, ...] = ()  # for example the reason for the backend, unused parameters
    noun: str = "sample"  # the word for a row: sample or token
    samples: int
    nonfinite: int  # samples that are not finite
    chains_nonfinite: tuple[int, ...] = ()  # per chain: nonfinite numbers of finite samples
    seconds: float  # wall time
    path: str | None = None  # the path of the result file
    bytes: int | None = None
    chains: tuple[str, ...] = ()  # in canonical spelling
    audits: str | None = None  # a summary of the audits


def nonfinite_of_rows(rows: Gradients, finite: Tensor) -> Tensor:
    """Return the count (0-d) of numbers in a chain's rows (n, ...) that are not finite.

    Only samples with finite gradients count: `finite` is (n,) bool.
    """
    found = torch.zeros((), dtype=torch.int64, device=finite.device)
    if rows.has_finite_bounds():
        return found
    for block in rows.values():
        for part, tile in block.tiles():
            bad = (~as_rows(tile).isfinite()).sum(1)
            found += (bad.to(finite.device) * finite[part]).sum()
    return found


def results_of(
    chains: Mapping[int, Chain], states: Mapping[str, State], *, keep_states: bool
) -> tuple[dict[int, dict[str, Tensor]], dict[int, int], dict[str, State]]:
    """Return the results of reduced chains, their counts of nonfinite numbers, and the states.

    If all numbers of a result are finite, the count is from before the stages after the reducer.
    Positive counts are also stored in the returned states. Without `keep_states`, the states that
    results are computed from are emptied to save memory.
    """
    results, counts = {}, {}
    for k, chain in chains.items():
        if chain.reducer is None or str(k) not in states:
            continue
        state = states[str(k)]
        before = taken_result(chain.reducer, {**state} if keep_states else state)
        results[k], counts[k] = chain.finish(before), 0
        for result in (results[k], before):
            bad = sum(map(_nonfinite, result.values()))
            counts[k] = counts[k] or bad
    others = {owner: state for owner, state in states.items() if owner != NONFINITE}
    every = {k: n for k, n in states.get(NONFINITE, {}).items() if int(k) not in counts}
    every |= {str(k): torch.tensor(count) for k, count in counts.items() if count}
    return results, counts, others | ({NONFINITE: every} if every else {})


def _nonfinite(values: Tensor) -> int:
    """Return the count of numbers that are not finite; a finite sum shows that it is 0."""
    return 0 if bool(values.sum().isfinite()) else int((~values.isfinite()).sum())


def nonfinite_of_file(file: GradientFile, *, aggregates: bool) -> tuple[int, ...]:
    """Return a file's nonfinite counts by chain; `aggregates` also counts in stored results."""
    noted = file.states.get(NONFINITE, {})
    found = []
    for k, chain in enumerate(file.chains):
        kept = int(noted[str(k)][...]) if str(k) in noted else 0
        if chain.reduced:
            arrays = chain.values() if aggregates else ()
            found.append(max(kept, sum(int((~np.isfinite(a[...])).sum()) for a in arrays)))
        else:
            found.append(kept + sum(int(getattr(a, "overflowed", 0)) for a in chain.values()))
    return tuple(found)


def mean_gradient_norms(
    states: Mapping[str, State], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return ‖mean gᵢ‖ of each parameter, for /norms."""
    state = states.get(MEAN_GRADIENT)
    if state is None:  # no sample has a finite gradient
        return {name: {"mean_gradient_norm": nan} for name in names}
    n = float(state["n"])
    sums = {key.removeprefix("sum:"): value for key, value in state.items() if key != "n"}
    return {name: {"mean_gradient_norm": float(g.norm()) / n} for name, g in sums.items()}


def require_written(
    file: GradientFile,
    index: range,
    chains: Mapping[int, Chain],
    states: Mapping[str, State],
    *,
    nonfinite: NonFinite,
) -> None:
    """Raise if a written file has wrong samples, or aggregates of a wrong number of samples.

    Checksums only show that the bytes were written correctly. The rows must belong to the samples
    `index`. Each reducer must have counted all samples with `nonfinite` "keep", else all finite
    samples. Reducers from the user's code are not checked.
    """
    if not np.array_equal(file.samples["index"], np.arange(index.start, index.stop)):
        raise OutputError(
            "the rows in the file belong to other samples than the selected ones",
            where="/samples/index",
            remedy=_REPORT,
        )
    right = file.n if nonfinite == "keep" else int(np.count_nonzero(file.samples["finite"]))
    own = {str(k) for k, chain in chains.items() if ".py:" in chain.text}
    for owner, state in states.items():
        n = None if owner in own else state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"the aggregate has {float(n):,.0f} samples instead of {right:,}",
                where=owner,
                remedy=_REPORT,
            )


class _Check(BaseModel, extra="allow"):
    error: float = 0.0
    tolerance: float = 0.0
    parameter: str = ""

    @property
    def rank(self) -> float:
        """The error relative to the tolerance."""
        return self.error / self.tolerance if self.tolerance else self.error


class _FirstBatch(BaseModel):
    """The first batch in a file's certificate; empty if the certificate is malformed."""

    verdict: str = ""
    backend: str = ""
    dtype: str = ""
    samples: int = 0
    nonfinite: int = 0
    completeness: _Check = _Check()
    agreement: _Check = _Check()
    compared: list[int] = []
    unused: list[str] = []

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> "_FirstBatch":
        try:
            return cls.model_validate(certificate, strict=True)
        except ValidationError:
            return cls()


def combine_certificates(parts: Sequence[PartialFile], noun: str = "sample") -> dict[str, Any]:
    """Return the combined certificate of partial files, given in the order of their rows.

    The proofs of the first batches are combined: counts are added, and errors are the largest. The
    result is verified if all files are. `merged` lists the samples without a proof. `noun` is the
    word for a row, sample or token.
    """
    if len(parts) == 1:
        return dict(parts[0].certificate)
    proofs = [(part, Proof.of(part.certificate)) for part in parts]
    proved = [(part, proof) for part, proof in proofs if proof.verified]
    first_only = [
        (part.start, part.stop - 1)
        for part, proof in proved  # files with several batches, of which only the first is proved
        if proof.verify in ("first", None) and (proof.batches is None or proof.batches > 1)
    ]
    unverified = [(part.start, part.stop - 1) for part, proof in proofs if not proof.verified]
    merged = {
        "count": len(parts),
        "verified": len(proved),
        "unverified": _merge_spans(unverified),
        "first_only": _merge_spans(first_only),
    }
    if not proved:
        return {**parts[0].certificate, "merged": merged}
    return {
        "verified": len(proved) == len(parts),
        **_first_batches([_FirstBatch.of(part.certificate) for part, _ in proved], noun),
        "unproved": sorted(set(chained(*(proof.unproved for _, proof in proofs)))),
        "proves": any(proof.proves for _, proof in proved),
        "audit": _audit(proofs),
        "merged": merged,
    }


def _audit(proofs: Sequence[tuple[PartialFile, Proof]]) -> dict[str, Any]:
    counted = [proof for _, proof in proofs if proof.error is not None]
    worst = max(counted, key=lambda proof: proof.error or 0.0, default=Proof())
    words = {proof.verify for _, proof in proofs}
    batches = [
        p.batches or (-(-len(part) // part.batch_size) if part.batch_size else 0)
        for part, p in proofs
    ]
    return {
        "verify": words.pop() if len(words) == 1 else "mixed",
        "batches": sum(batches),
        "proved": sum(proof.proved or int(bool(proof.verified)) for _, proof in proofs),
        "audited": _merge_spans(chained(*(proof.audited for _, proof in proofs))),
        "error": worst.error or 0.0,
        "parameter": worst.parameter or "",
    }


def _first_batches(found: Sequence[_FirstBatch], noun: str) -> dict[str, Any]:
    """Return the combined proof of several first batches."""
    completeness = max((one.completeness for one in found), key=lambda check: check.rank)
    agreement = max((one.agreement for one in found), key=lambda check: check.rank)
    counts = {key: sum(getattr(one, key) for one in found) for key in ("samples", "nonfinite")}
    compared = sorted(chained(*(one.compared for one in found)))
    names = dict.fromkeys(chained(*(one.backend.split(", ") for one in found)))
    passed = (
        f"passed: sums of {counts['samples'] - counts['nonfinite']} {noun}s to "
        f"{completeness.error:.0e}, {len(compared)} of them alone to {agreement.error:.0e} "
        f"({found[0].dtype})"
    )
    scaled = (one.verdict for one in found if one.completeness.rank > 1)  # sums do not agree
    return {
        "verdict": next(scaled, passed),
        "backend": ", ".join(name for name in names if name),
        "dtype": found[0].dtype,
        **counts,
        "completeness": completeness.model_dump(),
        "agreement": agreement.model_dump(),
        "compared": compared,
        "unused": [name for name in found[0].unused if all(name in one.unused for one in found)],
    }


def _merge_spans(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return spans [first, last], with adjacent spans joined."""
    found: list[list[int]] = []
    for first, last in spans:
        if found and found[-1][1] + 1 == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
