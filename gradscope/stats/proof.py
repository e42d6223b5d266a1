"""How far the numbers of a result file are proved, from its certificate."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from gradscope.stats.base import Record

Span = tuple[int, int]  # first and last position in the data set


class Parts(Record):
    """The files that one was merged from.

    Attributes:
        count: How many.
        verified: Of how many of them something was proved.
        unverified: Samples of those of which nothing was proved.
        first_only: Samples of those of which the first batch was proved, and no later one.
    """

    count: int
    verified: int
    unverified: tuple[Span, ...] = ()
    first_only: tuple[Span, ...] = ()


class Proof(Record):
    """What was proved of a file's numbers, and of which batches.

    Attributes:
        verified: Whether anything was; None where that is not recorded.
        verify: What was asked for: audit, first, always or never; None where that is not recorded,
            "mixed" where merged files differ.
        positions: The first and last sample of the batch that the certificate is about; of merged
            files None.
        proves: Whether some gradient was not zero: zeros prove nothing of others.
        batches: How many there were; None where that is not recorded.
        proved: How many of them were proved whole.
        audited: Their samples, neighbouring batches as one.
        error: The largest relative error found in them.
        parameter: Where it was.
        unproved: Parameters whose gradient was too small to be told from rounding.
        merged: What is particular to merged files.
    """

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
    merged: Parts | None = None

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> "Proof":
        """Read it off a certificate, of whatever version; what is malformed is not recorded."""
        audit = certificate.get("audit")
        audit = audit if isinstance(audit, Mapping) else {}
        verified = certificate.get("verified")
        names = [*_names(certificate), *_names(audit)]
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


_AUDIT = ("batches", "proved", "audited", "error", "parameter")


def _names(document: Mapping[str, Any]) -> list[str]:
    names = document.get("unproved")
    return [str(name) for name in names] if isinstance(names, list | tuple) else []
