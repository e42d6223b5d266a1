"""Every backend, and any implementation of the user's, against the float64 loop."""

from gradscope.comparison.agreement import ParameterAgreement
from gradscope.comparison.run import COMPILED, BackendRow, Comparison, compare, compiled

__all__ = ["COMPILED", "BackendRow", "Comparison", "ParameterAgreement", "compare", "compiled"]
