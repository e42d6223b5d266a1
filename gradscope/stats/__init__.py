"""Floor 7: statistics of a result file, from the file alone, in float64 with numpy."""

from gradscope.stats.distribution import Distribution, Histogram, Moments
from gradscope.stats.noise import NoiseScale, noise_scale
from gradscope.stats.rows import ParameterRow, parameter_row, parameter_rows
from gradscope.stats.run import RunReport
from gradscope.stats.samples import Points, SampleRow
from gradscope.stats.summary import Summary, summarize

__all__ = [
    "Distribution",
    "Histogram",
    "Moments",
    "NoiseScale",
    "ParameterRow",
    "Points",
    "RunReport",
    "SampleRow",
    "Summary",
    "noise_scale",
    "parameter_row",
    "parameter_rows",
    "summarize",
]
