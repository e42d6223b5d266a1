"""Floor 3: reducers over samples, streamed and mergeable, one family a file."""

from gradscope.reducers import moments
from gradscope.reducers.base import Reducer, State, reducers

__all__ = ["Reducer", "State", "moments", "reducers"]
