"""From a run spec to a result file: prepare a job, run it, report."""

from gradscope.run.estimate import Estimate, estimate
from gradscope.run.inspection import Inspection, inspect
from gradscope.run.job import Job, prepare
from gradscope.run.merging import MergeReport, merge, merging
from gradscope.run.preflight import Room, preflight
from gradscope.run.run import Run
from gradscope.run.start import compute, start

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
