"""From a run spec to a result file: prepare a job, run it, report."""

from gradscope.pipeline.estimate import Estimate, estimate
from gradscope.pipeline.inspection import Inspection, inspect
from gradscope.pipeline.job import Job, prepare
from gradscope.pipeline.merging import MergeReport, merge, merging
from gradscope.pipeline.preflight import Room, preflight
from gradscope.pipeline.run import Run
from gradscope.pipeline.start import compute, start

__all__ = [
    "Estimate",
    "Inspection",
    "Job",
    "MergeReport",
    "Room",
    "Run",
    "compute",
    "estimate",
    "inspect",
    "merge",
    "merging",
    "preflight",
    "prepare",
    "start",
]
