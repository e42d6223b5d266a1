"""Run a spec: prepare a job, plan its cost, compute the result file, merge files."""

from gradscope.run.budget import MemoryPlan, plan
from gradscope.run.execute import Run
from gradscope.run.inspection import (
    DiskSpace,
    Estimate,
    Inspection,
    Phase,
    estimate,
    inspect,
    preflight,
)
from gradscope.run.job import Job, file_plan, prepare, resolve_names
from gradscope.run.merging import MergeReport, merge, merging
from gradscope.run.model_parallel import compute_model_parallel, connected
from gradscope.run.outcome import RunReport
from gradscope.run.start import compute, refuse_inputs, start

__all__ = [
    "DiskSpace",
    "Estimate",
    "Inspection",
    "Job",
    "MemoryPlan",
    "MergeReport",
    "Phase",
    "Run",
    "RunReport",
    "compute",
    "compute_model_parallel",
    "connected",
    "estimate",
    "file_plan",
    "inspect",
    "merge",
    "merging",
    "plan",
    "preflight",
    "prepare",
    "refuse_inputs",
    "resolve_names",
    "start",
]
