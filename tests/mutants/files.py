"""Defects on the way into a result file: rows, columns, states, chunks, checksums, the seal."""

from functools import partial

from tests.mutants.base import mutant
from tests.mutants.written import Written

plain = partial(mutant, scenario=Written("plain"), guard="completion")
rows = partial(plain, "run/execute.py")
region = partial(plain, "storage/write/region.py")
target = partial(plain, "storage/write/target.py")
sealed = partial(plain, "storage/write/create.py", guard="seal")

rows(
    "index off by one: samples are recorded by the position after theirs",
    '"index": batch.index,',
    '"index": batch.index + 1,',
)
rows(
    "norms shifted by a row: a column of norms begins with the last sample of the batch",
    "name: mean_norm(value.sqrt(), shown) for",
    "name: mean_norm(value.sqrt(), shown).roll(1, 0) for",
)
rows(
    "a row written twice: the first row of every batch is stored twice, and the last one not",
    "else chain.rows(gradients, job.session.problem, shown)",
    "else chain.rows(gradients, job.session.problem, shown)"
    ".select(torch.arange(gradients.n).sub(1).clamp_min(0))",
)
region(
    "rounded to half: numbers go through half precision on their way to the file",
    "as_bytes(values), self.mark",
    "as_bytes(values.half().to(values.dtype) if values.is_floating_point() else values), self.mark",
)
region(
    "offset of a chunk too many: chunks of rows are written one chunk further on",
    "[self.chunks.number(start) for start, _ in chunks]",
    "[min(self.chunks.number(start) + 1, self.chunks.count - 1) for start, _ in chunks]",
)
target(
    "checksum not kept: the checksum of a piece is not taken when it is written",
    "sums.append(crc32c(end, crc32c(data.data)))",
    "sums.append(0)",
)
region(
    "held back and lost: rows that wait until their chunk is full are zeros when it is",
    "position=position, tail=tail)",
    "position=position, tail=np.zeros_like(tail))",
)
plain(
    "storage/format/seal.py",
    "seal of other bytes: the seal is taken over the file without its last bytes",
    "_digest(descriptor, stored, size)",
    "_digest(descriptor, stored, size - 16)",
)
sealed(
    "changed after the seal: a name is written over in a file that is sealed",
    "    sync_folder(paths.final)",
    "    data = paths.final.read_bytes()\n"
    "    paths.final.write_bytes(data.replace(b'first.bias', b'first.bier'))",
)
sealed(
    "written too late: a thread writes zeros over rows of a file that is complete",
    "    sync_folder(paths.final)",
    "    late = regions.by_path['/chains/0/first.weight'].extents[0, 0]\n"
    "    with paths.final.open('r+b') as file:\n"
    "        file.seek(int(late))\n"
    "        file.write(bytes(64))",
)
plain(
    "blocks/outer.py",
    "factors of two samples: one of the two factors of a row is that of the next sample",
    '{"left": self.left,',
    '{"left": self.left.roll(1, 0),',
    scenario=Written("factored"),
)
target(
    "chunks in one place: every compressed chunk is written where the first one is",
    "np.unravel_index(start // ",
    "np.unravel_index(start * (not path.startswith('/chains')) // ",
    scenario=Written("packed"),
)
plain(
    "storage/write/writer.py",
    "state lost on the way: a run that goes on begins its sums anew",
    "self.states: Any = self._point.states\n",
    "self.states: Any = {k: v for k, v in self._point.states.items() if k == 'progress'}\n",
    scenario=Written("resumed"),
)
plain(
    "run/merging.py",
    "last part for the whole: of files that are merged, aggregates are those of the last",
    "        self.total.add(self.joiner.add(part))",
    "        self.total.states.clear()\n        self.total.add(self.joiner.add(part))",
    scenario=Written("merged"),
)
plain(
    "engine/fold.py",
    "batch reduced twice: every batch is added to the sums two times",
    "    return [next(made) if start is None else {**start} for start in starts]",
    "    found = [next(made) if start is None else {**start} for start in starts]\n"
    "    return [c.reducer.merge(s, s) for c, s in zip(chains, found, strict=True)]",
)
