"""Evaluation with proof: a session, a pass over batches, the certificate and its audits."""

from gradscope.engine.audit import Auditor, Audits, drawn
from gradscope.engine.certificate import Answer, Certificate, certify, finite_samples, glimpsed
from gradscope.engine.fold import Folded, fold, over_ranks, request_of, settled, usable
from gradscope.engine.judge import LargestError, require_norms
from gradscope.engine.session import Coupling, NonFinite, Randomness, Session, Settings, Verify
from gradscope.engine.sharded import Lockstep, require_divisible

__all__ = [
    "Answer",
    "Auditor",
    "Audits",
    "Certificate",
    "Coupling",
    "Folded",
    "LargestError",
    "Lockstep",
    "NonFinite",
    "Randomness",
    "Session",
    "Settings",
    "Verify",
    "certify",
    "drawn",
    "finite_samples",
    "fold",
    "glimpsed",
    "over_ranks",
    "request_of",
    "require_divisible",
    "require_norms",
    "settled",
    "usable",
]
