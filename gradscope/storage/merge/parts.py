"""Files that are parts of one run: each is sealed, all are of that run, one follows the other."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py

from gradscope.errors import ResultFileError
from gradscope.storage.format.files import reading
from gradscope.storage.format.forms import Form, stored_form
from gradscope.storage.format.layout import SOURCES, TABLES
from gradscope.storage.plan import differences
from gradscope.storage.read.opening import Opened, document, opened

_NUMBER = re.compile(r"\.shard-\d+-of-")


@dataclass(frozen=True)
class Part:
    """One file."""

    path: Path  # where it is
    start: int  # the position in the data set of its first sample
    stop: int  # one beyond that of its last
    index: int | None  # which shard it is, if it is one
    seal: bytes  # the SHA-256 of its seal
    certificate: Mapping[str, Any]  # the proof of its numbers
    batch: int | None  # how many samples were computed at a time, where it says so

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Parts:
    """The files of one run."""

    files: tuple[Part, ...]  # in the order of their samples
    start: int  # the position in the data set of the run's first sample
    stop: int  # one beyond that of its last
    # what is equal in all of them: `FilePlan.identity` without what tells them apart
    identity: dict[str, Any]
    run: dict[str, Any]  # the resolved run of the first one
    attributes: dict[str, str]  # the hashes of its inputs
    parameters: dict[str, tuple[int, ...]]  # {name: shape}
    chains: tuple[tuple[str, bool], ...]  # text, and whether it ends in an aggregate
    forms: Mapping[str, Form]  # how each column of the whole is to be stored, by its path
    # the paths of those that not all files store in the same form
    uneven: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.stop - self.start


def check_parts(paths: Iterable[Path]) -> Parts:
    """Open every file, and return what they are together.

    Raises:
        ResultFileError: One cannot be read, is damaged or of another run, samples are missing, or
            two files have the same.
    """
    found: Parts | None = None
    for path in paths:
        with opened(path) as source, reading(str(path)):
            one = _parts(path, source)
        found = one if found is None else _joined(found, one)
    if found is None:
        raise ResultFileError("there is no file to merge", remedy="Name the shards, or a folder.")
    return _in_order(found)


def _parts(path: Path, source: Opened) -> Parts:
    """Return what one file is, as the only one of its run."""
    file = source.file
    if SOURCES in file.attrs:
        raise ResultFileError(
            "this is a virtual file: its rows are elsewhere",
            where=str(path),
            remedy="Give the files that it was merged from.",
        )
    facts, n = document(file.attrs, "identity"), len(file["samples/index"])
    try:
        start, stop = (int(position) for position in facts.pop("samples"))
        shard = facts.get("shard") or {}
        index = shard.get("index")
        whole = [int(position) for position in shard.get("samples", (start, stop))]
        facts["stored"] = {k: v for k, v in facts["stored"].items() if k != "samples"}
        facts["shard"] = {k: v for k, v in shard.items() if k != "index"}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultFileError(
            "the file does not say which samples of which run it holds",
            where=str(path),
            remedy="Give files that gradscope compute wrote.",
        ) from error
    if n != stop - start:
        raise ResultFileError(
            f"the file says that it has samples {start:,} to {stop:,}, and has {n:,}",
            where=str(path),
            remedy="Compute it again.",
        )
    run = document(file.attrs, "run")
    batch = run.get("batch_size")
    part = Part(
        path=path,
        start=start,
        stop=stop,
        index=index,
        seal=source.seal,
        certificate=document(file.attrs, "certificate"),
        batch=batch if isinstance(batch, int) and batch > 0 else None,
    )
    return Parts(
        files=(part,),
        start=whole[0],
        stop=whole[-1],
        identity=facts,
        run=run,
        attributes={key: str(file.attrs[key]) for key in file.attrs if key.endswith("_sha256")},
        parameters={k: tuple(s) for k, s in document(file.attrs, "parameters").items()},
        chains=tuple(
            (str(chain.attrs["chain"]), bool(chain.attrs["reduced"]))
            for chain in (file["chains"][str(k)] for k in range(len(file["chains"])))
        ),
        forms=_forms_of(file),
    )


def _joined(a: Parts, b: Parts) -> Parts:
    """Add a file that must be of the same run."""
    path = b.files[0].path
    different = list(differences(a.identity, b.identity))
    different = different or list(differences(a.attributes, b.attributes))
    if different or a.chains != b.chains:
        raise ResultFileError(
            f"this is another run than {a.files[0].path}: " + "; ".join(different or ["chains"]),
            where=str(path),
            remedy="Give files of one run only.",
        )
    return replace(
        a,
        files=(*a.files, *b.files),
        start=min(a.start, b.start),
        stop=max(a.stop, b.stop),
        forms=_common_forms(a.forms, b.forms, path),
        uneven=a.uneven | {key for key, form in a.forms.items() if form != b.forms.get(key)},
    )


def _forms_of(file: h5py.File) -> dict[str, Form]:
    """Return the form of each column of tables and chains, by its path."""
    groups = [f"/{table}" for table in TABLES]
    groups += [f"/chains/{k}" for k, c in file["chains"].items() if not c.attrs["reduced"]]
    return {f"{g}/{name}": stored_form(item) for g in groups for name, item in file[g].items()}


def _common_forms(a: Mapping[str, Form], b: Mapping[str, Form], path: Path) -> dict[str, Form]:
    """Return the forms that hold the rows of both.

    Factors of different sizes have none in common, so their rows become dense, as they do when
    sizes change within one run.
    """
    kept = {}
    for key, form in a.items():
        other = b.get(key)
        if form == other:
            kept[key] = form
        elif other and (form.shape, form.dtype) == (other.shape, other.dtype):
            kept[key] = form.dense
    if len(kept) < len(a) or len(a) != len(b):
        raise ResultFileError(
            f"{', '.join(sorted((a.keys() | b.keys()) - kept.keys()))}: "
            "these are stored in another form than in the other files",
            where=str(path),
            remedy="Give files of one run only.",
        )
    return kept


def _in_order(parts: Parts) -> Parts:
    """Sort the files by their samples, of which none may be missing or there twice."""
    files = sorted(parts.files, key=lambda part: (part.start, part.stop))
    for before, after in pairwise(files):
        if after.start < before.stop:
            raise ResultFileError(
                f"samples {after.start:,} to {min(before.stop, after.stop):,} are in two files: "
                f"here and in {before.path}",
                where=str(after.path),
                remedy="Give each file once, and the shards of one division only.",
            )
    gaps = list(_gaps(parts, files))
    if gaps:
        more = f", and {len(gaps) - 3:,} more gaps" if len(gaps) > 3 else ""
        raise ResultFileError(
            f"samples are missing: {'; '.join(gaps[:3])}{more}",
            where=str(files[0].path.parent),
            remedy="Compute the missing shards (the same command again), and merge then.",
        )
    batch = parts.identity.get("batch_size") or 1  # it is there where the answer depends on it
    for part in files:
        if (part.start - parts.start) % batch:
            raise ResultFileError(
                f"its first sample is none of a batch of {batch:,}, and with own-loss coupling the "
                "answer depends on which samples share a batch",
                where=str(part.path),
                remedy="Compute shards, which are cut between batches.",
            )
    return replace(parts, files=tuple(files))


def _gaps(parts: Parts, files: list[Part]) -> Iterator[str]:
    """Yield what lies between the files, before the first and after the last."""
    position = parts.start
    last, count = -1, parts.identity["shard"].get("count")
    for part in files:
        if part.start > position:
            yield f"{position:,} to {part.start:,}{_absent(part, last, part.index)}"
        position, last = part.stop, -1 if part.index is None else part.index
    if parts.stop > position:
        yield f"{position:,} to {parts.stop:,}{_absent(files[-1], last, count)}"


def _absent(like: Part, last: int, index: int | None) -> str:
    """Return which shards lie between two, and whether they are on their way."""
    numbers = range(last + 1, last + 1 if index is None else index)
    if not numbers:
        return ""
    places = [like.path.with_name(_NUMBER.sub(f".shard-{k}-of-", like.path.name)) for k in numbers]
    begun = [path.name for path in places if path.with_name(f"{path.name}.part").exists()]
    which = f"shard {numbers[0]}" if len(numbers) == 1 else f"shards {numbers[0]} to {numbers[-1]}"
    return f" ({which}{'; not finished: ' + ', '.join(begun[:3]) if begun else ''})"
