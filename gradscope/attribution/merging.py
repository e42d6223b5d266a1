"""Merge the score files of shards into the file that a single process would have written.

Each file has the scores of all queries with some of the training samples.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.attribution.scores import CERTIFICATE, SCORES, TRAINING, Scores, open_scores, packed
from gradscope.attribution.sources import COLUMNS, joined_columns, sample_column
from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import ResultFileError
from gradscope.process.memory import slices
from gradscope.run import MergeReport
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    FinishedBatch,
    RunFiles,
    check_files,
    dtype_named,
    forms_of,
    open_joiner,
    writing,
)

_BYTES = 2**26  # of scores in memory
_POWERS = {"influence": 1.0, "relative": 0.5, "cosine": 0.0}  # a score has the factor N^-power


def merge_scores(paths: Iterable[Path], output: Path, *, overwrite: bool = False) -> MergeReport:
    """Merge score files of shards.

    Raises:
        ResultFileError: A file cannot be read or is of another attribution; training samples are
            missing or in two files.
        OutputError: The output exists or cannot be written.
    """
    begun = time.perf_counter()
    parts = check_files(paths, samples="chains/1/index")
    with ExitStack() as stack:
        files = [stack.enter_context(open_scores(part.path)) for part in parts.files]
        tables = [{k: sample_column(v) for k, v in one.samples.items()} for one in files]
        training = {k: joined_columns([table[k] for table in tables]) for k in tables[0]}
        finite = training["finite"].bool()
        scale, own_scale = _scales(parts, files[0].record, training, finite)
        if "self_influence" in training:
            training["self_influence"] = training["self_influence"] * own_scale
        plan = _plan(parts, files[0])
        queries = {k: sample_column(v) for k, v in files[0].queries.items() if k in COLUMNS}

        def batches() -> Iterator[FinishedBatch]:
            for rows in slices(plan.n, 16 * len(finite), _BYTES):
                scores = np.concatenate([one.values[rows] for one in files], 1) * scale
                block = DenseBlock(torch.from_numpy(scores).to(plan.dtype))
                columns = {k: v[rows] for k, v in queries.items()}
                yield FinishedBatch(columns, chains=(Gradients({"scores": block}), None))

        first = next(batches())
        parts = replace(parts, forms=forms_of(plan, first))
        with open_joiner(output, plan, parts, len(first), overwrite=overwrite) as joiner:
            for batch in batches():
                joiner.append(batch)
            joiner.finish({1: packed(training)}, CERTIFICATE, {}, {})
    with writing(output):
        size = output.stat().st_size
    return MergeReport(
        path=str(output),
        bytes=size,
        files=len(files),
        virtual=False,
        noun=files[0].noun,
        samples=len(finite),
        nonfinite=int((~finite).sum()),
        chains=(SCORES,),
        certificate=CERTIFICATE,
        seconds=time.perf_counter() - begun,
    )


def _scales(
    parts: RunFiles, record: Mapping[str, Any], training: Mapping[str, Tensor], finite: Tensor
) -> tuple[float, float]:
    """Return the factors of scores and self-influences, which the shards divided by a larger N.

    A shard does not know how many samples of other shards are not finite, and counts them in N.
    """
    counted = int(parts.identity["shard"]["members"])
    sizes = training.get("size", torch.ones_like(finite, dtype=torch.int64))
    known = max(1, int(sizes[finite].sum()))
    if known == counted:
        return 1.0, 1.0
    if len(record["checkpoints"]) > 1:
        raise ResultFileError(
            f"{int((~finite).sum()):,} training samples have no finite gradient at one of several "
            "checkpoints, so the number of samples at each checkpoint is unknown",
            where=str(parts.files[0].path),
            remedy="Score these checkpoints in one process, or without these samples.",
        )
    more = counted / known
    return more ** _POWERS[str(record["score"])], more


def _plan(parts: RunFiles, first: Scores) -> FilePlan:
    """Return the plan of the same attribution in a single process."""
    stored = parts.identity["stored"]
    return FilePlan(
        run={**parts.run, "attribution": dict(first.record)},
        fingerprint={k: v for k, v in parts.identity.items() if k not in ("stored", "shard")},
        attributes={},
        n=first.shape[0],
        parameters={},
        chains=(ChainPlan(SCORES, False), ChainPlan(TRAINING, True)),
        dtype=dtype_named(stored["dtype"]),
        layout="dense",
    )
