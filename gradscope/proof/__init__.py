"""The proof that numbers are right: of a first batch, and by audits of those that follow."""

from gradscope.proof.audit import Auditor, Audits, Look, drawn
from gradscope.proof.certificate import (
    Certificate,
    certify,
    examined,
    finite_samples,
    glimpsed,
    span,
)
from gradscope.proof.consistency import require_norms
from gradscope.proof.judge import Check

__all__ = [
    "Auditor",
    "Audits",
    "Certificate",
    "Check",
    "Look",
    "certify",
    "drawn",
    "examined",
    "finite_samples",
    "glimpsed",
    "require_norms",
    "span",
]
