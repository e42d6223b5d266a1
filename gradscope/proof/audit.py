"""Which of the batches after the first are audited, and how closely.

Of every 64 batches one is drawn by the seed and proved whole, and the last one always is: about a
thirtieth of the work. That choice depends on nothing else, so the same run records the same audits.
So is a batch with something new about it: its number of samples, or how it is computed. Where the
clock shows that more can be had for a twentieth of the time, further batches are proved whole, or
one sample of them alone.
"""

import hashlib
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from gradscope.core.batch import Batch
from gradscope.proof.certificate import Certificate

Depth = Literal["whole", "one"]

SHARE = 0.05  # of the time that audits may take
WINDOW = 64  # batches, of which one is audited


@dataclass(frozen=True)
class Audits:
    """What was audited of a run, the proof of its first batch included.

    Attributes:
        batches: How many batches there were.
        audited: First and last data-set position of each batch that was proved whole, of those
            that are chosen by the seed, and the last.
        more: How many others were proved whole, since there was time for it.
        alone: Of how many others one sample was compared with a batch of one.
        error: The largest relative error among those of `audited`.
        parameter: Where it was.
    """

    batches: int = 0
    audited: tuple[tuple[int, int], ...] = ()
    more: int = 0
    alone: int = 0
    error: float = 0.0
    parameter: str = ""

    def with_proof(self, batch: Batch, proof: Certificate) -> "Audits":
        """Add a batch that was proved whole."""
        worst = max(proof.completeness, proof.agreement, key=lambda check: check.error)
        larger = worst.error >= self.error
        return replace(
            self,
            audited=(*self.audited, (int(batch.index.min()), int(batch.index.max()))),
            error=worst.error if larger else self.error,
            parameter=worst.parameter if larger else self.parameter,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what the same run always finds, as plain data."""
        document = asdict(self)
        del document["more"], document["alone"]
        return document

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> "Audits":
        """Return what `to_json` gave."""
        audited = tuple((int(a), int(b)) for a, b in document["audited"])
        return cls(**{**document, "audited": audited})

    @property
    def text(self) -> str:
        """The audits in one line."""
        whole = len(self.audited) + self.more
        said = f"{whole:,} of {self.batches:,} batches audited"
        return f"{said}, of {self.alone:,} more a sample alone" if self.alone else said


@dataclass
class Auditor:
    """Decides how closely a batch is looked at, and watches the time that this takes.

    Attributes:
        seed: Of which batches are audited.
        audits: What was audited so far.
    """

    seed: int
    audits: Audits = field(default_factory=Audits)
    _sizes: set[int] = field(default_factory=set)  # numbers of samples that were seen
    _costs: dict[Depth, float] = field(default_factory=dict)  # seconds that it took last
    _credit: float = 0.0  # seconds that audits may take by now
    _last: float = field(default_factory=time.perf_counter)

    def begin(
        self, n: int, ordinal: int, *, last: bool, new: bool, proof: Certificate | None
    ) -> tuple[Depth | None, bool]:
        """Return how closely a batch is looked at, and whether that is to be recorded.

        Args:
            n: How many samples it has; a number that has not come before is something new.
            ordinal: The number of the batch in its run, from 0.
            last: Whether it is the last of the run.
            new: Whether it is computed in another way than those before.
            proof: Of this batch, where it was proved when it was evaluated.
        """
        new = new or n not in self._sizes
        self._sizes.add(n)
        if proof is not None:  # audits take about as long
            self._costs = {"whole": proof.seconds, "one": proof.seconds / 4}
        now = time.perf_counter()
        whole, one = (self._costs.get(depth, 0.0) for depth in ("whole", "one"))
        self._credit = min(self._credit + SHARE * (now - self._last), 3 * whole)
        self._last = now
        if last or is_chosen(ordinal, self.seed):
            return "whole", True
        left = self._credit - whole  # which is kept for the last batch
        return ("whole" if new or left >= whole else "one" if left >= one else None), False

    def end(
        self, batch: Batch, depth: Depth | None, proof: Certificate | None, *, recorded: bool
    ) -> None:
        """Count a batch, and the time since `begin`.

        Args:
            batch: The samples.
            depth: How closely they were looked at.
            proof: Of the whole batch, if it was proved.
            recorded: Whether that is to be recorded.
        """
        now, audits = time.perf_counter(), self.audits
        if depth is not None and now > self._last:
            self._costs[depth] = now - self._last
            self._credit -= now - self._last
        self._last = now
        audits = replace(audits, batches=audits.batches + 1)
        if proof is not None and recorded:
            audits = audits.with_proof(batch, proof)
        elif proof is not None:
            audits = replace(audits, more=audits.more + 1)
        elif depth is not None:
            audits = replace(audits, alone=audits.alone + 1)
        self.audits = audits


def is_chosen(ordinal: int, seed: int) -> bool:
    """Whether a batch is proved whole in any case: the first, and one of each 64 after 64."""
    window, place = divmod(ordinal, WINDOW)
    return ordinal == 0 or (window > 0 and drawn(seed, window) % WINDOW == place)


def drawn(*words: int) -> int:
    """Return a random number that is the same for the same words."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
