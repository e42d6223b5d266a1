"""The proof that numbers are right: of a first batch, and by audits of those that follow."""

from gradscope.engine.audit import Auditor, Audits, Look, drawn
from gradscope.engine.certificate import (
    Certificate,
    certify,
    examined,
    finite_samples,
    glimpsed,
    span,
)
from gradscope.engine.consistency import require_norms
from gradscope.engine.judge import Check

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
