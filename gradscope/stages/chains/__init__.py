"""Transforms of each sample, a reducer over samples, transforms of the aggregate."""

from gradscope.stages.chains.binding import bind
from gradscope.stages.chains.chain import Chain

__all__ = ["Chain", "bind"]
