"""Floor 4: transforms of each sample, a reducer over samples, transforms of the aggregate."""

from gradscope.chains.binding import bind
from gradscope.chains.chain import Chain
from gradscope.chains.passes import updated, updated_if_finite, waiting, wanted

__all__ = ["Chain", "bind", "updated", "updated_if_finite", "waiting", "wanted"]
