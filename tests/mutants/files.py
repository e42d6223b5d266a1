"""Defects on the way into a result file: rows, columns, states, chunks, checksums, the seal."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients, OuterBlock
from gradscope.run import execute
from gradscope.run.merging import Merge
from gradscope.storage import Rows, Writer
from gradscope.storage.format import seal
from gradscope.storage.write import create
from gradscope.storage.write.region import Region
from gradscope.storage.write.target import Target
from tests.mutants.base import Install, after, around, before, mutant
from tests.mutants.written import Written


def _caught(name: str, defect: str, scenario: Written, guard: str, install: Install) -> None:
    mutant(name, "files", defect, scenario, guard, install)


PLAIN = Written("plain")


def _of_rows(change: Callable[[Rows], Rows]) -> Install:
    return around(execute, "rows_of", after(lambda rows, *_: change(rows)))


_caught(
    "index off by one",
    "samples are recorded by the position after theirs",
    PLAIN,
    "completion",
    _of_rows(lambda rows: replace(rows, index=rows.index + 1)),
)
_caught(
    "norms shifted by a row",
    "a column of norms begins with the last sample of the batch",
    PLAIN,
    "completion",
    _of_rows(
        lambda rows: replace(rows, norms={k: v.roll(1, 0) for k, v in rows.norms.items()}),
    ),
)


def _first_twice(gradients: Gradients | None) -> Gradients | None:
    if gradients is None:
        return None
    return gradients.select(torch.arange(gradients.n).sub(1).clamp_min(0))


_caught(
    "a row written twice",
    "the first row of every batch is stored twice, and the last one not",
    PLAIN,
    "completion",
    _of_rows(lambda rows: replace(rows, chains=tuple(map(_first_twice, rows.chains)))),
)


def _rounded(region: Region, values: Tensor, target: Target) -> tuple[Any, ...]:
    wide = values.is_floating_point()
    return region, values.half().to(values.dtype) if wide else values, target


_caught(
    "rounded to half",
    "numbers go through half precision on their way to the file",
    PLAIN,
    "completion",
    around(Region, "add", before(_rounded)),
)


def _chunks_late(region: Region, chunks: Any, target: Target) -> tuple[Any, ...]:
    def later(start: int, data: np.ndarray) -> int:
        there = start + region.chunks.chunk
        return there if there + len(data) <= region.chunks.size else start

    return region, [(later(start, data), data) for start, data in chunks], target


_caught(
    "offset of a chunk too many",
    "chunks of rows are written one chunk further than they belong",
    PLAIN,
    "completion",
    around(Region, "_write", before(_chunks_late)),
)
_caught(
    "checksum not kept",
    "the checksum of a piece is not taken when it is written",
    PLAIN,
    "completion",
    around(Target, "write_chunks", after(lambda found, *_: [0] * len(found))),
)


def _without_tail(original: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: Region, values: Tensor, target: Target) -> None:
        original(self, values, target)
        self.mark = replace(self.mark, tail=np.zeros_like(self.mark.tail))

    return add


_caught(
    "held back and lost",
    "rows that wait until their chunk is full are zeros when it is",
    PLAIN,
    "completion",
    around(Region, "add", _without_tail),
)


def _short_once(original: Callable[..., bytes]) -> Callable[..., bytes]:
    asked: list[int] = []

    def digest(descriptor: int, table: np.ndarray, size: int) -> bytes:
        asked.append(size)
        return original(descriptor, table, size - 16 if len(asked) == 1 else size)

    return digest


_caught(
    "seal of other bytes",
    "the seal is taken over the file without its last bytes",
    PLAIN,
    "completion",
    around(seal, "_digest", _short_once),
)


def _renamed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"first.bias", b"first.bier"))


def _written_late(path: Path) -> None:
    with h5py.File(path, "r", locking=False) as file:
        place = file["chains/0/first.weight"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(bytes(64))


def _then(change: Callable[[Path], None]) -> Install:
    return around(create, "sync_folder", after(lambda _, path: change(path)))


_caught(
    "changed after the seal",
    "a name is written over in a file that is sealed",
    PLAIN,
    "seal",
    _then(_renamed),
)
_caught(
    "written too late",
    "a thread writes zeros over rows of a file that is complete",
    PLAIN,
    "seal",
    _then(_written_late),
)


def _next_left(found: Any, *_: Any) -> Any:
    return found._replace(tensors=found.tensors | {"left": found.tensors["left"].roll(1, 0)})


_caught(
    "factors of two samples",
    "one of the two factors that a row is stored as is that of the next sample",
    Written("factored"),
    "completion",
    around(OuterBlock, "factors", after(_next_left)),
)


def _first_chunk(target: Target, path: str, start: int, data: np.ndarray) -> tuple[Any, ...]:
    return target, path, 0 if path.startswith("/chains") else start, data


_caught(
    "chunks in one place",
    "every compressed chunk is written where the first one is",
    Written("packed"),
    "completion",
    around(Target, "pack_chunk", before(_first_chunk)),
)


def _forgetting(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Writer, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        self.states = {k: v for k, v in self.states.items() if k == execute.PROGRESS}

    return init


_caught(
    "state lost on the way",
    "a run that goes on begins its sums anew",
    Written("resumed"),
    "completion",
    around(Writer, "__init__", _forgetting),
)
_caught(
    "last part for the whole",
    "of files that are merged, aggregates are those of the last",
    Written("merged"),
    "completion",
    around(Merge, "_merge_of", lambda original: lambda self, owner: lambda a, b: b),
)
_caught(
    "batch reduced twice",
    "every batch is added to the sums two times",
    PLAIN,
    "completion",
    around(
        import_module("gradscope.engine.fold"),
        "_updated",
        lambda original: (
            lambda chains, states, *more: original(chains, original(chains, states, *more), *more)
        ),
    ),
)
