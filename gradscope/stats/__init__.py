"""Statistics of a result file, from the file alone, in float64 with numpy.

A statistic is in one file of `builtin/`; `statistic` registers one from anywhere.
"""

from gradscope.stats.summary import (  # first: the statistics register with it
    Data,
    Options,
    Summary,
    statistic,
    statistics,
    summarize,
)

from gradscope.stats import builtin  # isort: skip
from gradscope.stats.builtin.batch import noise_scale
from gradscope.stats.builtin.parameters import (
    ParameterRow,
    largest_shares,
    parameter_rows,
    parameter_table,
)
from gradscope.stats.certificate import Proof, require_consistent, spot_check_rows, tolerances
from gradscope.stats.difference import Difference, difference
from gradscope.stats.records import Json, Record, wide
from gradscope.stats.sections import Picture, Section, numbers, short

__all__ = [
    "Data",
    "Difference",
    "Json",
    "Options",
    "ParameterRow",
    "Picture",
    "Proof",
    "Record",
    "Section",
    "Summary",
    "builtin",
    "difference",
    "largest_shares",
    "noise_scale",
    "numbers",
    "parameter_rows",
    "parameter_table",
    "require_consistent",
    "short",
    "spot_check_rows",
    "statistic",
    "statistics",
    "summarize",
    "tolerances",
    "wide",
]
