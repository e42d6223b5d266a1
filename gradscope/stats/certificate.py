"""Facts of a result file: its run, and the proof of its numbers.

Also a check that the numbers of a few random samples are consistent.
"""

import math
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from gradscope.core import texts
from gradscope.core.texts import count, listed
from gradscope.errors import ResultFileError
from gradscope.stats.records import Floats, Json, Record, wide
from gradscope.stats.sections import Fact, Line, Styled, facts_under, size
from gradscope.stats.source import Source, finite_samples, labels_of, noun_of, rows_of

Span = tuple[int, int]  # first and last position in the data set

_AUDIT = ("batches", "proved", "audited", "error", "parameter")
_LISTED = 4  # the most ranges of samples, and the most parameters, in a line


class MergedFiles(Record):
    """The files that were merged into a file."""

    count: int
    verified: int
    unverified: tuple[Span, ...] = ()
    first_only: tuple[Span, ...] = ()


class Proof(Record):
    """The proof of a file's numbers: its batches, errors and gaps."""

    verified: bool | None = None
    verify: Literal["audit", "first", "always", "never", "mixed"] | None = None
    positions: Span | None = None
    proves: bool = True
    batches: int | None = None
    proved: int | None = None
    audited: tuple[Span, ...] = ()
    error: float | None = None
    parameter: str | None = None
    unproved: tuple[str, ...] = ()
    merged: MergedFiles | None = None

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> "Proof":
        """Return the proof in a certificate; a malformed certificate counts as not recorded."""
        audit = certificate.get("audit")
        audit = audit if isinstance(audit, Mapping) else {}
        verified = certificate.get("verified")
        lists = (document.get("unproved") for document in (certificate, audit))
        names = [str(name) for found in lists if isinstance(found, list | tuple) for name in found]
        found = {
            "verified": verified,
            "verify": audit.get("verify", "never" if verified is False else None),
            "unproved": tuple(dict.fromkeys(names)),
            **{k: certificate[k] for k in ("positions", "proves") if k in certificate},
            **{k: audit[k] for k in _AUDIT if k in audit},
        }
        try:
            return cls.model_validate(found | {"merged": certificate.get("merged")})
        except ValidationError:
            return cls(verified=verified if isinstance(verified, bool) else None)


class ChainFacts(Record):
    """One chain of the file."""

    text: str
    reduced: bool


class FileFacts(Record):
    """Facts of a file; `docs/statistics.md` explains the keys."""

    path: str
    bytes: int | None
    noun: str  # the kind of row: sample or token
    samples: int
    parameters: int
    entries: int
    chains: tuple[ChainFacts, ...]
    backend: str | None
    labels: str
    certificate: Json
    proof: Proof
    run: Json

    @classmethod
    def of(cls, file: Source) -> "FileFacts":
        """Return the facts of `file`; the backend is the proved one, else the requested one."""
        path, run = Path(file.path), dict(file.run)
        sizes = [prod(map(int, shape)) for shape in file.parameters.values()]
        records = (dict(file.certificate), run, run.get("compute") or {})
        backends = (record.get("backend") for record in records)
        return cls(
            path=str(path),
            bytes=path.stat().st_size if path.is_file() else None,
            noun=noun_of(file),
            samples=file.n,
            parameters=len(sizes),
            entries=sum(sizes),
            chains=tuple(ChainFacts(text=c.text, reduced=c.reduced) for c in file.chains),
            backend=next((name for name in backends if isinstance(name, str)), None),
            labels=labels_of(file),
            certificate=file.certificate,
            proof=Proof.of(file.certificate),
            run=file.run,
        )

    def label(self, row: Any) -> str:
        """Return the name of a row in a picture: its index, or SAMPLE:POSITION of a token."""
        return str(row.id if self.noun == "token" else row.index)

    def in_short(self) -> list[Fact]:
        """Return the main facts: size, certificate, unused parameters, labels, chains."""
        sizes = f"{count(self.parameters, 'parameter')} ({self.entries:,} entries)"
        return [
            (f"{self.noun}s", f"{self.samples:,}, {sizes}, {size(self.bytes)}"),
            *facts_under("certificate", _verdicts(self.certificate, self.proof, self.noun)),
            *unused_facts(self.certificate),
            *([("labels", self.labels)] if self.labels != "data" else []),
            *facts_under("chain", [chain.text for chain in self.chains]),
        ]

    def shown(self) -> list[Fact]:
        """Return all facts as labels with their values."""
        return [
            (f"{self.noun}s", f"{self.samples:,}"),
            ("parameters", f"{self.parameters:,} ({self.entries:,} entries)"),
            ("size", size(self.bytes)),
            ("backend", self.backend or "not recorded"),
            *certificate_facts(self.certificate, self.noun),
            *([("labels", self.labels)] if self.labels != "data" else []),
            *facts_under("chain", [chain.text for chain in self.chains]),
        ]


def certificate_facts(
    certificate: Mapping[str, Any], noun: str, audits: str | None = None
) -> list[Fact]:
    """Return what was proved. `audits` replaces the recorded line on audited batches."""
    proof = Proof.of(certificate)
    rows = facts_under("certificate", _verdicts(certificate, proof, noun))
    rows += facts_under("audits", _audits(proof, audits, noun))
    if proof.unproved:
        names = texts.listed(proof.unproved, _LISTED)
        rows.append(("not proved", f"{names}: as small as rounding errors"))
    return rows + unused_facts(certificate)


def verdict(certificate: Mapping[str, Any]) -> Styled:
    """Return the result of the proof of one batch."""
    verified = certificate.get("verified")
    if verified is None:
        return Styled("not recorded", "yellow")
    if not verified:
        return Styled("NOT VERIFIED: verification was switched off", "bold yellow")
    if certificate.get("proves") is False:
        finite = certificate.get("nonfinite", 0) != certificate.get("samples")
        what = "every gradient is zero" if finite else "no gradient is finite"
        return Styled(f"nothing is proved: {what}", "yellow")
    return Styled(str(certificate.get("verdict", "passed")), "green")


def unused_facts(certificate: Mapping[str, Any]) -> list[Fact]:
    """Return the parameters that no sample's loss depends on, if there are any."""
    names = certificate.get("unused")
    known = isinstance(names, list | tuple) and names
    return [("unused", listed(map(str, known)))] if known else []


def spans(found: Sequence[Span], noun: str) -> str:
    """Return "samples 0 to 13, 1288 to 1301"; a long list is shortened in the middle."""
    words = [str(a) if a == b else f"{a} to {b}" for a, b in found]
    if len(words) > _LISTED:
        words = [*words[:2], f"... ({len(words) - 3:,} more)", words[-1]]
    one = len(found) == 1 and found[0][0] == found[0][1]
    return f"{noun if one else f'{noun}s'} {', '.join(words)}"


def _verdicts(certificate: Mapping[str, Any], proof: Proof, noun: str) -> list[Styled]:
    """Return the samples that are not verified, then the verdict with its batches."""
    merged, lost, which = proof.merged, [], "the first batch"
    if merged is not None and merged.verified:
        files = count(merged.count, "file")
        which += f" of each of {files}" if proof.verified else f" of {merged.verified:,} of {files}"
        certificate = {**certificate, "verified": True}
        if merged.unverified:
            said = f"NOT VERIFIED: {spans(merged.unverified, noun)} (verify = never)"
            lost = [Styled(said, "bold yellow")]
    elif proof.positions and proof.audited and proof.positions[0] != proof.audited[0][0]:
        which = spans([proof.positions], noun)  # earlier gradients are all zero
    text, style = verdict(certificate)
    if text.startswith("passed") and (proof.verified or merged is not None):
        text = f"{which} {text}"
    return [*lost, Styled(text, style)]


def _audits(proof: Proof, audits: str | None, noun: str) -> list[Line]:
    """Return which batches were audited, and the largest error."""
    if not proof.batches or not proof.proved:
        return []
    batches = count(proof.batches, "batch")
    lines: list[Line] = []
    if audits is not None:
        lines.append(audits)
    elif proof.verify == "first" and proof.batches > 1:
        which = ", the first" if proof.proved == 1 else ""  # merged files have one each
        said = f"{proof.proved:,} of {batches} proved{which} (verify = first)"
        lines.append(Styled(said, "yellow"))
    elif proof.batches == proof.proved:
        lines.append(batches if proof.batches == 1 else f"all {batches} proved")
    else:
        lines.append(f"{proof.proved:,} of {batches} audited: {spans(proof.audited, noun)}")
    if proof.error is not None and proof.parameter:
        where = f", in {proof.parameter}" if proof.error else ""
        lines.append(f"largest error {proof.error:.0e}{where}")
    if proof.merged is not None and proof.verify != "first" and proof.merged.first_only:
        which = spans(proof.merged.first_only, noun)
        lines.append(Styled(f"{which}: only the first batch (verify = first)", "bold yellow"))
    return lines


RowPositions = NDArray[np.intp]

_FEW = 4  # samples checked in a file
_MOST = 64  # the most parameters whose rows are read
# tolerances by the run's dtype: relative to the parameter's norm and to the norm of the sample's
# whole gradient; norms lose half their digits where terms cancel
_HALF, _SINGLE, _DOUBLE = (0.02, 0.05), (1e-3, 0.02), (1e-6, 1e-5)
_PRECISIONS = {"float16": _HALF, "bfloat16": _HALF, "float64": _DOUBLE, "complex128": _DOUBLE}
_PIECE = 2**20  # entries squared at a time


def spot_check_rows(file: Source, seed: int) -> RowPositions:
    """Return the rows of up to four finite samples: the last one and random ones."""
    finite = np.flatnonzero(finite_samples(file))
    draw = np.random.default_rng(seed)
    others = finite[:-1]
    drawn = draw.choice(others, min(_FEW - 1, len(others)), replace=False)
    return np.sort(np.append(finite[-1:], drawn).astype(np.intp))


def tolerances(dtype: str) -> tuple[float, float]:
    """Return the tolerances relative to the norm, and to the norm of the whole gradient."""
    return _PRECISIONS.get(dtype, _SINGLE)


def require_consistent(file: Source, seed: int = 0) -> None:
    """Check the norms of a few samples against their parameters' norms and stored rows.

    Rows of the chain `identity` are read if stored, for up to 64 parameters.

    Raises:
        ResultFileError: A norm differs.
    """
    rows = spot_check_rows(file, seed)
    if labels_of(file) == "exact" or not len(rows):  # expectations do not add up
        return
    index = [int(i) for i in np.asarray(file.samples["index"])[rows]]
    whole, squares = wide(np.asarray(file.samples["norm"])[rows]), np.zeros(len(rows))
    stored: Mapping[str, Any] = rows_of(file) or {}
    read = set(np.random.default_rng(seed).permutation(list(stored))[:_MOST].tolist())
    limit, share = tolerances(str(dict(file.run).get("dtype")))

    def require(recorded: Floats, found: Floats, slack: Floats, by: str, source: str) -> None:
        for i, a, b, most in zip(index, recorded, found, slack, strict=True):
            if not abs(a - b) <= most:
                norm, other = texts.unequal(a, b)
                raise ResultFileError(
                    f"the numbers of sample {i} contradict each other: the recorded norm of its "
                    f"gradient {by}is {norm}, but {source} {other}",
                    where=str(file.path),
                    remedy="Compute the file again.",
                )

    for name in file.norms:
        norms = wide(np.asarray(file.norms[name])[rows])
        squares += np.square(norms)
        if name in read and not getattr(stored[name], "overflowed", 0):
            found = np.array([_norm(stored[name][int(row)]) for row in rows])
            slack = limit * norms + share * whole
            require(norms, found, slack, f"for {name!r} ", "the norm of its stored row is")
    slack = limit * whole + np.finfo(np.float32).tiny
    require(whole, np.sqrt(squares), slack, "", "the norms of its parameters give")


def _norm(row: np.ndarray) -> float:
    """Return the L2 norm of a row (*shape), in float64."""
    flat, total = row.reshape(-1), 0.0
    for start in range(0, flat.size, _PIECE):
        piece = np.abs(flat[start : start + _PIECE]).astype(np.float64)
        total += float(piece @ piece)
    return math.sqrt(total)
