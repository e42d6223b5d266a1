"""Comparison of backends, users' implementations and other libraries with a float64 loop."""

from gradscope.comparison.agreement import ParameterAgreement
from gradscope.comparison.peers import PEERS, peer, peer_version
from gradscope.comparison.run import COMPILED, BackendRow, Comparison, compare, compiled

__all__ = [
    "COMPILED",
    "PEERS",
    "BackendRow",
    "Comparison",
    "ParameterAgreement",
    "compare",
    "compiled",
    "peer",
    "peer_version",
]
