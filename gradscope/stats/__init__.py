"""Statistics of a result file, from the file alone, in float64 with numpy."""

from gradscope.stats.difference import Difference, difference
from gradscope.stats.distribution import Distribution, Histogram, Moments
from gradscope.stats.history import History, Step, read_history, record
from gradscope.stats.measure import measure
from gradscope.stats.noise import NoiseScale, noise_scale
from gradscope.stats.proof import Proof
from gradscope.stats.rows import ParameterRow, parameter_row, parameter_rows
from gradscope.stats.run import RunReport
from gradscope.stats.samples import Points, SampleRow
from gradscope.stats.spot_checks import require_consistent
from gradscope.stats.summary import Summary, summarize

__all__ = [
    "Difference",
    "Distribution",
    "Histogram",
    "History",
    "Moments",
    "NoiseScale",
    "ParameterRow",
    "Points",
    "Proof",
    "RunReport",
    "SampleRow",
    "Step",
    "Summary",
    "difference",
    "measure",
    "noise_scale",
    "parameter_row",
    "parameter_rows",
    "read_history",
    "record",
    "require_consistent",
    "summarize",
]
