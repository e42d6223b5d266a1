"""Which of the batches after the first are audited, and how closely.

One of every 64 batches, drawn by the seed, and the last batch are proved whole: about a thirtieth
of the work. The choice depends on the seed alone, so the same run records the same audits. A batch
of a new size, or computed in a new way, is proved whole, too. If time permits (a twentieth of the
run), further batches are proved whole, or one sample of them alone.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from gradscope.core.texts import count
from gradscope.engine.certificate import Certificate

SHARE = 0.04  # of the time that audits may take: a twentieth with what goes with them
WINDOW = 64  # batches, of which one is audited
_SINGLES = 32  # samples of a batch, at most, that are evaluated alone
_SAVED = 0.1  # seconds that are not lost while the caller does other things


@dataclass(frozen=True)
class Audits:
    """The batches of a run that were audited, its first batch included."""

    batches: int = 0
    proved: int = 0  # batches that were proved whole, of those that every equal run proves
    audited: tuple[tuple[int, int], ...] = ()  # first and last positions, neighbours as one
    error: float = 0.0  # the largest relative error of Σ wᵢ gᵢ among them
    parameter: str = ""  # where it was
    unproved: tuple[str, ...] = ()  # whose gradient was no more than rounding in one of them
    proves: bool = False  # some gradient of them was not zero
    more: int = 0  # other batches that were proved whole, since there was time for it
    singles: int = 0  # other batches of which one sample was compared with a batch of one

    def with_proof(self, proof: Certificate) -> "Audits":
        """Add a batch that was proved whole."""
        worst, first, last = proof.completeness, *proof.positions
        larger, spans = worst.error >= self.error, self.audited
        if spans and spans[-1][0] <= first <= spans[-1][1] + 1:  # it follows, or repeats
            *_, (first, known) = spans
            spans, last = spans[:-1], max(known, last)
        return replace(
            self,
            proved=self.proved + 1,
            audited=(*spans, (first, last)),
            error=worst.error if larger else self.error,
            parameter=worst.parameter if larger else self.parameter,
            unproved=tuple(sorted({*self.unproved, *proof.unproved})),
            proves=self.proves or proof.proves,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what the same run always finds, as plain data."""
        document = asdict(self)
        del document["more"], document["singles"]
        return document

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> "Audits":
        """Return what `to_json` gave; further keys are ignored."""
        known = {
            field.name: document[field.name] for field in fields(cls) if field.name in document
        }
        audited = tuple((int(a), int(b)) for a, b in document["audited"])
        return cls(**{**known, "audited": audited, "unproved": tuple(document.get("unproved", ()))})

    @property
    def text(self) -> str:
        """The audits in one line."""
        whole = self.proved + self.more
        said = f"{whole:,} of {count(self.batches, 'batch')} audited"
        return f"{said}, of {self.singles:,} more a sample alone" if self.singles else said


@dataclass(frozen=True)
class AuditPlan:
    """How much of a batch an audit proves: nothing, all of it, or single samples."""

    whole_batch: bool = False  # all of it is proved
    singles: int = 0  # samples that are compared with a batch of one
    recorded: bool = False  # the same run does so every time


@dataclass
class Auditor:
    """Decides which batches are audited, and watches the time that audits take."""

    seed: int  # of which batches are audited
    verify: str = "audit"  # with "always" every batch is proved, and recorded
    clock: Callable[[], float] = time.perf_counter
    audits: Audits = field(default_factory=Audits)
    _sizes: set[int] = field(default_factory=set)  # numbers of samples that were seen
    # seconds that it took last to prove a batch, besides single samples
    _batch_seconds: float = 0.0
    _sample_seconds: float = 0.0  # and to evaluate one sample alone
    _credit: float = 0.0  # seconds that audits may take by now
    _last: float = 0.0

    def __post_init__(self) -> None:
        self._last = self.clock()

    def begin(
        self, n: int, ordinal: int, *, last: bool, new: bool, proof: Certificate | None
    ) -> AuditPlan:
        """Return what the audit of a batch is to prove; nothing of a batch with a `proof`."""
        if proof is not None and not self._batch_seconds:  # which took kernels for the first time
            self._batch_seconds, self._sample_seconds = proof.seconds / 3, proof.seconds / 10
        new = new or n not in self._sizes
        self._sizes.add(n)
        now = self.clock()
        earned = self._credit + SHARE * (now - self._last)
        self._credit, self._last = min(earned, max(_SAVED, 4 * self._batch_seconds)), now
        batch, sample = self._batch_seconds, self._sample_seconds
        due = proof is not None and (self.verify == "always" or not self.audits.proves)
        recorded = last or due or is_chosen(ordinal, self.seed)
        if self.verify != "audit" or proof is not None:
            return AuditPlan(recorded=recorded)
        if recorded:
            spare = (self._credit - batch) / sample if sample else 0.0
            return AuditPlan(True, max(1, min(n, _SINGLES, int(spare))), recorded=True)
        left = self._credit - 1.5 * batch  # which is kept for the last batch
        return AuditPlan(new or left >= batch + sample, int(new or left >= sample))

    def end(self, plan: AuditPlan, proof: Certificate | None) -> None:
        """Count a batch, and the time since `begin`."""
        now, audits = self.clock(), self.audits
        took, self._last = now - self._last, now
        self._credit -= took
        if plan.whole_batch:
            own = max(took - plan.singles * self._sample_seconds, took / 4)
            self._batch_seconds = min(own, 2 * self._batch_seconds or took)
        elif plan.singles:
            self._sample_seconds = min(took / plan.singles, 2 * self._sample_seconds or took)
        audits = replace(audits, batches=audits.batches + 1)
        if proof is not None and plan.recorded:
            audits = audits.with_proof(proof)
        elif proof is not None:
            audits = replace(audits, more=audits.more + 1)
        elif plan.singles:
            audits = replace(audits, singles=audits.singles + 1)
        self.audits = audits


def is_chosen(ordinal: int, seed: int) -> bool:
    """Whether a batch is proved whole in any case: the first, and one of each 64 after 64."""
    window, place = divmod(ordinal, WINDOW)
    return ordinal == 0 or (window > 0 and derive_seed(seed, window) % WINDOW == place)


def derive_seed(*words: int) -> int:
    """Return a random number that is the same for the same words."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
