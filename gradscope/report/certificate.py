"""What the certificate says: what was proved, and of which batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from gradscope.report.text import count, visible
from gradscope.stats import Proof

Row = tuple[str, str | Text]

_LISTED = 4  # ranges of samples, and parameters


def certificate_facts(certificate: Mapping[str, Any], audits: str | None = None) -> list[Row]:
    """Return what was proved, as labels with their values.

    Args:
        certificate: As recorded.
        audits: What the run itself says of them: it knows of those that are not recorded.
    """
    proof = Proof.of(certificate)
    rows = [*_labelled("certificate", _verdicts(certificate, proof))]
    rows += _labelled("audits", _audits(proof, audits))
    if proof.unproved:
        rows.append(("not proved", f"{_listed(proof.unproved)}: too small to tell from rounding"))
    if (names := unused(certificate)) is not None:
        rows.append(("unused", names))
    return rows


def verdict(certificate: Mapping[str, Any]) -> Text:
    """Return what the proof of one batch came to."""
    verified = certificate.get("verified")
    if verified is None:
        return Text("not recorded", style="yellow")
    if not verified:
        return Text("NOT VERIFIED: verification was switched off", style="bold yellow")
    if certificate.get("proves") is False:
        return Text("nothing is proved: every gradient is zero", style="yellow")
    return Text(visible(str(certificate.get("verdict", "passed"))), style="green")


def unused(certificate: Mapping[str, Any]) -> str | None:
    """Return the names of the parameters that no sample's loss reached, or None."""
    names = certificate.get("unused")
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) and names else None


def _verdicts(certificate: Mapping[str, Any], proof: Proof) -> list[Text]:
    """Return the verdict, with the batches that it is about, after what is not verified."""
    merged = proof.merged
    if merged is None or merged.verified == 0:
        which = "the first batch"
        if proof.positions and proof.audited and proof.positions[0] != proof.audited[0][0]:
            which = spans([proof.positions])  # those before have no gradient but zero
        found = verdict(certificate)
        return [_of(which, found) if proof.verified else found]
    files = f"{merged.verified:,} of {count(merged.count, 'file')}"
    which = f"each of {count(merged.count, 'file')}" if proof.verified else files
    passed = _of(f"the first batch of {which}", verdict({**certificate, "verified": True}))
    return [*_told("NOT VERIFIED: {} (verify = never)", merged.unverified), passed]


def _of(which: str, found: Text) -> Text:
    passed = found.plain.startswith("passed")
    return Text(f"{which} ", style=found.style).append(found) if passed else found


def _audits(proof: Proof, audits: str | None) -> list[str | Text]:
    """Return which batches were audited, and what was found."""
    if not proof.batches or not proof.proved:
        return []
    batches = "1 batch" if proof.batches == 1 else f"{proof.batches:,} batches"
    lines: list[str | Text] = []
    if audits is not None:
        lines.append(audits)
    elif proof.verify == "first" and proof.batches > 1:
        which = ", the first" if proof.proved == 1 else ""  # of merged files, that of each
        said = f"{proof.proved:,} of {batches} proved{which} (verify = first)"
        lines.append(Text(said, style="yellow"))
    elif proof.batches == proof.proved:
        lines.append(batches if proof.batches == 1 else f"all {batches} proved")
    else:
        lines.append(f"{proof.proved:,} of {batches} audited: {spans(proof.audited)}")
    if proof.error is not None and proof.parameter:
        where = f", in {visible(proof.parameter)}" if proof.error else ""
        lines.append(f"largest error {proof.error:.0e}{where}")
    if proof.merged is not None and proof.verify != "first":
        lines += _told("of {} the first batch alone (verify = first)", proof.merged.first_only)
    return lines


def _told(text: str, of: Sequence[tuple[int, int]]) -> list[Text]:
    return [Text(text.format(spans(of)), style="bold yellow")] if of else []


def spans(found: Sequence[tuple[int, int]]) -> str:
    """Return "samples 0 to 13, 1288 to 1301", of many the first and the last."""
    words = [str(a) if a == b else f"{a} to {b}" for a, b in found]
    if len(words) > _LISTED:
        words = [*words[:2], f"... ({len(words) - 3:,} more)", words[-1]]
    one = len(found) == 1 and found[0][0] == found[0][1]
    return f"{'sample' if one else 'samples'} {', '.join(words)}"


def _labelled(label: str, values: Sequence[str | Text]) -> list[Row]:
    return [(label if not k else "", value) for k, value in enumerate(values)]


def _listed(names: Sequence[str]) -> str:
    """Return a few names, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")
