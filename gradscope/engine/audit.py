"""Audits: the choice of the batches after the first that are proved.

The auditor proves the last batch and one of every 64 batches, chosen by the seed. (A scope: one of
every 256.) The choice depends only on the seed, so the same run records the same audits. The
auditor also proves each batch of a new size, or computed by new code. If time permits (5 % of the
time of evaluations), it proves further batches, or compares one sample of a batch with a batch of
one.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from gradscope.core.texts import count
from gradscope.engine.certificate import Certificate

SHARE = 0.04  # the share of the time for audits; about 5 % with their overhead
WINDOW = 64  # one of this many batches is audited
# the same for a scope: its loops are long, and a proof of a small model takes ten evaluations
SCOPE_WINDOW = 256
_SINGLES = 32  # samples of an audited batch that are evaluated alone, at most
_SAVED = 0.1  # seconds of unused audit time that are kept, at least


@dataclass(frozen=True)
class Audits:
    """The audited batches of a run, including the first batch."""

    batches: int = 0
    proved: int = 0  # batches proved whole, without those that depend on the time
    audited: tuple[tuple[int, int], ...] = ()  # spans (first, last) of positions, joined
    error: float = 0.0  # the largest relative error of Σ wᵢ gᵢ
    parameter: str = ""  # the parameter with the largest error
    unproved: tuple[str, ...] = ()  # parameters whose gradient was only rounding in some batch
    proves: bool = False  # whether a proved batch had a nonzero gradient
    more: int = 0  # further batches proved whole, because there was time
    singles: int = 0  # further batches with one sample compared with a batch of one

    def with_proof(self, proof: Certificate) -> "Audits":
        """Return the audits with a further batch that was proved whole."""
        worst, first, last = proof.completeness, *proof.positions
        larger, spans = worst.error >= self.error, self.audited
        if spans and spans[-1][0] <= first <= spans[-1][1] + 1:  # adjacent or overlapping
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
        """Return the audits that do not depend on the time, as plain data."""
        return {k: v for k, v in vars(self).items() if k not in ("more", "singles")}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> "Audits":
        """Return the audits stored by `to_json`; unknown keys are ignored."""
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
        return f"{said}, and one sample of {self.singles:,} further" if self.singles else said


@dataclass(frozen=True)
class AuditPlan:
    """The extent of an audit: nothing, the whole batch, or single samples."""

    whole_batch: bool = False  # whether the whole batch is proved
    singles: int = 0  # the number of samples that are compared with a batch of one
    recorded: bool = False  # whether the same run always does this audit


@dataclass
class Auditor:
    """Chooses the batches to audit, and limits the time for audits."""

    seed: int  # chooses the batches
    verify: str = "audit"  # with "always", every batch is proved and recorded
    clock: Callable[[], float] = time.perf_counter
    audits: Audits = field(default_factory=Audits)
    window: int = WINDOW
    _sizes: set[int] = field(default_factory=set)  # batch sizes so far
    # seconds of the last proof of a batch, without single samples
    _batch_seconds: float = 0.0
    _sample_seconds: float = 0.0  # seconds of the last evaluation of one sample alone
    _credit: float = 0.0  # seconds available for audits
    _last: float = 0.0

    def __post_init__(self) -> None:
        self._last = self.clock()

    def start(self) -> None:
        """Start the time of an evaluation; the time before it is the caller's."""
        self._last = self.clock()

    def begin(
        self, n: int, ordinal: int, *, last: bool, new: bool, proof: Certificate | None
    ) -> AuditPlan:
        """Return the plan for the audit of a batch; a batch with a `proof` needs no audit."""
        if proof is not None and not self._batch_seconds:  # slow, because it warmed up kernels
            self._batch_seconds, self._sample_seconds = proof.seconds / 3, proof.seconds / 10
        new = new or n not in self._sizes
        self._sizes.add(n)
        now = self.clock()
        earned = self._credit + SHARE * (now - self._last)
        self._credit, self._last = min(earned, max(_SAVED, 4 * self._batch_seconds)), now
        batch, sample = self._batch_seconds, self._sample_seconds
        due = proof is not None and (self.verify == "always" or not self.audits.proves)
        recorded = last or due or is_chosen(ordinal, self.seed, self.window)
        if self.verify != "audit" or proof is not None:
            return AuditPlan(recorded=recorded)
        if recorded:
            spare = (self._credit - batch) / sample if sample else 0.0
            return AuditPlan(True, max(1, min(n, _SINGLES, int(spare))), recorded=True)
        left = self._credit - 1.5 * batch  # this time is reserved for the last batch
        return AuditPlan(new or left >= batch + sample, int(new or left >= sample))

    def end(self, plan: AuditPlan, proof: Certificate | None) -> None:
        """Record a batch and the time since `begin`."""
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


@lru_cache(maxsize=4)
def _chosen_place(seed: int, window: int, size: int) -> int:
    return derive_seed(seed, window) % size


def is_chosen(ordinal: int, seed: int, size: int) -> bool:
    """Whether the seed selects a batch: the first, and one in each later window of this size."""
    window, place = divmod(ordinal, size)
    return ordinal == 0 or (window > 0 and _chosen_place(seed, window, size) == place)


def derive_seed(*words: int) -> int:
    """Return a pseudorandom number that depends only on the words."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
