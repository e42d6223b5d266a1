"""Every backend, and any implementation of the user's, against the float64 loop."""

from gradscope.comparison.result import BackendRow, Comparison, ParameterAgreement
from gradscope.comparison.run import COMPILED, compare, compiled

__all__ = ["COMPILED", "BackendRow", "Comparison", "ParameterAgreement", "compare", "compiled"]
