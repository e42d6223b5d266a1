"""What a finished file says of its run: which numbers are finite, and what of them is proved.

Numbers of a chain that are not finite although the gradients are come from a stage. They are
counted in rows as they are written, and in aggregates when these are taken, before the stages that
follow the reducer as well as after them (a sign hides what has overflowed).
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

NONFINITE = "nonfinite"  # the counts by chain, among the reducers' states
MEAN_GRADIENT = "mean_gradient"  # kept in every run, for signal-to-noise
_REPORT = "This is a mistake in gradscope: please report it."


def _with_counts(a: State, b: State) -> State:
    zero = torch.tensor(0)
    return {key: a.get(key, zero) + b.get(key, zero) for key in a | b}


COUNTS = Reducer(start=lambda _: {}, merge=_with_counts, result=dict)  # adds up NONFINITE's counts


class RunReport(Record):
    """What one `gradscope compute` did, for its last words and its `--json`."""

    schema_: Literal["gradscope.compute"] = "gradscope.compute"
    version: Literal[1] = 1
    parameters: tuple[ParameterRow, ...]  # one row each, in the model's order
    certificate: Json  # the proof of the first batch, and what was audited
    backend: str  # which one ran
    notes: tuple[str, ...] = ()  # why that backend, unused parameters, what else is worth a line
    noun: str = "sample"  # what has a row: sample or token
    samples: int
    nonfinite: int  # samples that are not finite
    chains_nonfinite: tuple[int, ...] = ()  # numbers by chain, of samples that are finite
    seconds: float  # wall time
    path: str | None = None  # of what was written
    bytes: int | None = None
    chains: tuple[str, ...] = ()  # in canonical spelling
    audits: str | None = None  # what was audited, in a line


def nonfinite_of_rows(rows: Gradients, finite: Tensor) -> Tensor:
    """Return how many numbers (0-d) of a chain's rows (n, ...) are not finite.

    Of samples only that are themselves: `finite` is (n,) bool.
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
    """Return the results of reduced chains, how many numbers of each are not finite, and states.

    Where all are, but some were not before the last stages, how many these were. The states have
    the counts, too, where there is anything to count. Unless `keep_states`, what results are made
    of is removed from them.
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
    """Return how many numbers are not finite: none where their sum is, which takes no memory."""
    return 0 if bool(values.sum().isfinite()) else int((~values.isfinite()).sum())


def nonfinite_of_file(file: GradientFile, *, aggregates: bool) -> tuple[int, ...]:
    """Return the counts by chain that a file shows; of `aggregates`, not only what is recorded."""
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
    if state is None:  # no sample is finite
        return {name: {"mean_gradient_norm": nan} for name in names}
    n = float(state["n"])
    sums = {key.removeprefix("sum:"): value for key, value in state.items() if key != "n"}
    return {name: {"mean_gradient_norm": float(g.norm()) / n} for name, g in sums.items()}


def require_written(
    file: GradientFile,
    index: Sequence[int],
    chains: Mapping[int, Chain],
    states: Mapping[str, State],
    *,
    nonfinite: NonFinite,
) -> None:
    """Hold a file that has just been written against itself before it takes its place.

    The checksums tell that the bytes are those that were handed over; this tells whether these were
    the right ones: rows of the samples `index`, and states of reducers that have counted as many
    samples as there are (with `nonfinite` "keep" all of them, else the finite ones). What a reducer
    of the user's own has in its state is not known.
    """
    if not np.array_equal(file.samples["index"], np.asarray(index)):
        raise OutputError(
            "its rows are of other samples than were asked for",
            where="/samples/index",
            remedy=_REPORT,
        )
    right = file.n if nonfinite == "keep" else int(np.count_nonzero(file.samples["finite"]))
    own = {str(k) for k, chain in chains.items() if ".py:" in chain.text}
    for owner, state in states.items():
        n = None if owner in own else state.get("n")
        if isinstance(n, Tensor) and n.numel() == 1 and float(n) != right:
            raise OutputError(
                f"its aggregates are of {float(n):,.0f} samples, of {right:,} that there are",
                where=owner,
                remedy=_REPORT,
            )


class _Check(BaseModel, extra="allow"):
    error: float = 0.0
    tolerance: float = 0.0
    parameter: str = ""

    @property
    def rank(self) -> float:
        """How near it was to failing."""
        return self.error / self.tolerance if self.tolerance else self.error


class _FirstBatch(BaseModel):
    """What a file's certificate says of its first batch; nothing, where that is malformed."""

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
    """Return the certificate of files that become one, given in the order of their rows.

    The proofs of their first batches stand together: counts are sums, errors the largest. It is
    verified if all of them are; `merged` says of which samples nothing was proved. `noun` is what
    has a row, sample or token.
    """
    if len(parts) == 1:
        return dict(parts[0].certificate)
    proofs = [(part, Proof.of(part.certificate)) for part in parts]
    proved = [(part, proof) for part, proof in proofs if proof.verified]
    first_only = [
        (part.start, part.stop - 1)
        for part, proof in proved  # with batches after the first, none of which was audited
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
    """Return what the proofs of several batches are together."""
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
    scaled = (one.verdict for one in found if one.completeness.rank > 1)  # sums do not add up
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
    """Return first and last positions, neighbours as one."""
    found: list[list[int]] = []
    for first, last in spans:
        if found and found[-1][1] + 1 == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
