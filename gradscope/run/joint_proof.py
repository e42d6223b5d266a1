"""The certificate of a merged file: what was proved of its parts."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from gradscope.stats import Proof
from gradscope.storage import Part

Span = tuple[int, int]


def combined(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the certificate of files that become one.

    The proofs of their first batches stand together: counts are sums, errors the largest. It is
    verified if all of them are; `merged` says of which samples nothing was proved.

    Args:
        parts: In the order of their samples.
    """
    if len(parts) == 1:
        return dict(parts[0].certificate)
    proofs = [Proof.of(part.certificate) for part in parts]
    proved = [part for part, proof in zip(parts, proofs, strict=True) if proof.verified]
    merged = {
        "count": len(parts),
        "verified": len(proved),
        "unverified": _spans(parts, (not proof.verified for proof in proofs)),
        "first_only": _spans(parts, (_is_first_only(proof) for proof in proofs)),
    }
    if not proved:
        return {**parts[0].certificate, "merged": merged}
    return {
        "verified": len(proved) == len(parts),
        **_first_batches([part.certificate for part in proved]),
        "unproved": sorted(set(chain(*(proof.unproved for proof in proofs)))),
        "proves": any(proof.proves for proof in proofs if proof.verified),
        "audit": _audit(parts, proofs),
        "merged": merged,
    }


def _audit(parts: Sequence[Part], proofs: Sequence[Proof]) -> dict[str, Any]:
    worst = max(
        (p for p in proofs if p.error is not None), key=lambda p: p.error or 0, default=None
    )
    words = {proof.verify for proof in proofs}
    counts = [
        proof.batches or -(-len(part) // part.batch) if part.batch else proof.batches or 0
        for part, proof in zip(parts, proofs, strict=True)
    ]
    return {
        "verify": words.pop() if len(words) == 1 else "mixed",
        "batches": sum(counts),
        "proved": sum(proof.proved or int(bool(proof.verified)) for proof in proofs),
        "audited": _joined(chain(*(proof.audited for proof in proofs))),
        "error": 0.0 if worst is None else worst.error,
        "parameter": "" if worst is None else worst.parameter,
    }


def _first_batches(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the proofs of several batches are together."""
    completeness, agreement = (_worst(documents, key) for key in ("completeness", "agreement"))
    compared = sorted(chain(*(_listed(document, "compared", int) for document in documents)))
    counts = {key: sum(_number(d.get(key)) for d in documents) for key in ("samples", "nonfinite")}
    unused = [_listed(document, "unused", str) for document in documents]
    backends = (str(document.get("backend", "")).split(", ") for document in documents)
    dtype = documents[0].get("dtype", "")
    verdict = (
        f"passed: sums of {counts['samples'] - counts['nonfinite']} samples to "
        f"{_number(completeness['error']):.0e}, {len(compared)} of them alone to "
        f"{_number(agreement['error']):.0e} ({dtype})"
    )
    scaled = [d for d in documents if _rank(d.get("completeness")) > 1]
    return {
        "verdict": scaled[0].get("verdict", "") if scaled else verdict,
        "backend": ", ".join(name for name in dict.fromkeys(chain(*backends)) if name),
        "dtype": dtype,
        **counts,
        "completeness": completeness,
        "agreement": agreement,
        "compared": compared,
        "unused": [name for name in unused[0] if all(name in names for names in unused)],
    }


def _worst(documents: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the check that was nearest to failing."""
    found = [document[key] for document in documents if isinstance(document.get(key), Mapping)]
    return {"error": 0.0, "parameter": "", **(max(found, key=_rank) if found else {})}


def _rank(check: Any) -> float:
    if not isinstance(check, Mapping):
        return 0.0
    error, tolerance = _number(check.get("error")), _number(check.get("tolerance"))
    return error / tolerance if tolerance else error


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _listed(document: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = document.get(key)
    return [v for v in values if isinstance(v, kind)] if isinstance(values, list) else []


def _is_first_only(proof: Proof) -> bool:
    """Whether there are batches after the first, and none of them was audited."""
    several = proof.batches is None or proof.batches > 1
    return bool(proof.verified) and several and proof.verify in ("first", None)


def _spans(parts: Sequence[Part], chosen: Iterable[bool]) -> list[list[int]]:
    """Return the samples of some files."""
    pairs = zip(parts, chosen, strict=True)
    return _joined((part.start, part.stop - 1) for part, wanted in pairs if wanted)


def _joined(spans: Iterable[Span]) -> list[list[int]]:
    """Return first and last positions, neighbours as one."""
    found: list[list[int]] = []
    for first, last in spans:
        if found and found[-1][1] + 1 == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
