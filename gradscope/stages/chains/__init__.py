"""Transforms of each sample, a reducer over samples, transforms of the aggregate."""

from gradscope.stages.chain import Chain, bind
from gradscope.stages.chains.passes import updated, updated_if_finite, waiting, wanted

__all__ = ["Chain", "bind", "updated", "updated_if_finite", "waiting", "wanted"]
