"""Converts stored columns as a dataset spec says: joins, encodes, pads and casts; reads ids.

Sequences are padded to the longest sequence of the data set, not of the batch, because a sample's
gradient must not depend on its batch.
"""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, reduce
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.config import DatasetSpec
from gradscope.core.groups import GroupIds, Reduction
from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import count
from gradscope.errors import DatasetError
from gradscope.model.locate import first_line
from gradscope.sources.data.columns import (
    NumberColumn,
    Numbers,
    SequenceColumn,
    SequenceSizes,
    StoredArrays,
    StoredColumn,
    TextColumn,
    even,
    length_of,
    runs,
)
from gradscope.sources.formats import need

MASK = "_mask"
UNKNOWN = "\ufffd"  # shown for a number without a word

_CUT = re.compile(r"(?P<name>.*)\[(?P<start>\d{0,9})(?P<colon>:?)(?P<stop>\d{0,9})\]", re.DOTALL)
_FORMS = (
    "Accepted: NAME, NAME[A:B] for a part of its second axis, [A:B] for a range of columns, or a "
    "glob."
)
_TOKENS = 1024  # texts to tokenize at a time
_IDS = 2**14  # ids to read at a time
_OWN_ID = "Give each sample a different id, or leave [dataset] id out."

Convert = Callable[[Tensor], Tensor]


def with_columns(arrays: StoredArrays, spec: DatasetSpec) -> StoredArrays:
    """Return the arrays that [dataset] columns defines, then the arrays of the file.

    `columns = { inputs = ["age", "pixel*", "table[0:3]"], targets = "y" }`: a text names a column;
    a list concatenates columns along axis 1.
    """
    known = dict.fromkeys(arrays.names)

    def named(text: str) -> list[tuple[str, StoredColumn]]:
        names, cut = _columns_of(text, known)
        if cut is not None:
            return [(text, _cut(arrays.load(names[0]), cut))]
        return [(name, arrays.load(name)) for name in names]

    def load(name: str) -> StoredColumn:
        recipe = spec.columns.get(name)
        if recipe is None:
            return arrays.load(name)
        if not isinstance(recipe, str):
            return _side_by_side([c for text in recipe for c in named(text)])
        found = named(recipe)
        if len(found) > 1:
            remedy = f"Write the list [{recipe!r}] to concatenate them."
            raise DatasetError(f"{recipe!r} names {len(found)} columns", remedy=remedy)
        return found[0][1]

    return StoredArrays(tuple(dict.fromkeys((*spec.columns, *arrays.names))), load)


def headings(names: Sequence[str], recipe: str | Sequence[str] | None) -> list[str]:
    """Return the names of the columns that `recipe` concatenates, in order."""
    found: list[str] = []
    for text in () if recipe is None or isinstance(recipe, str) else recipe:
        columns, cut = _columns_of(text, names)
        if cut is None:
            found += columns
            continue
        start = int(cut["start"] or 0)
        found += [f"{columns[0]}[{k}]" for k in range(start, int(cut["stop"] or start + 1))]
    return found


def used(names: Sequence[str], spec: DatasetSpec) -> set[str]:
    """Return the names of a file's arrays that the spec uses."""
    found: set[str] = set()
    for name in (*spec.arrays, spec.id, spec.group, spec.select):
        if not isinstance(name, str):
            continue
        source = name.removesuffix(MASK)
        recipe = spec.columns.get(name, name if name in names else spec.columns.get(source, source))
        for text in [recipe] if isinstance(recipe, str) else recipe:
            found.update(_columns_of(text, names)[0])
    return found


def _columns_of(text: str, names: Collection[str]) -> tuple[list[str], re.Match[str] | None]:
    """Return the columns for a name, a glob or a range, and the match of a range within a column.

    "table[0:3]" is a part of the column "table". "[0:3]" is three full columns.
    """
    cut = _CUT.fullmatch(text)
    if text in names:
        return [text], None
    if cut and cut["name"] in names:
        return [cut["name"]], cut
    if cut and not cut["name"]:
        chosen = [*names][_span(cut, len(names))]
    else:
        chosen = [*filter(re.compile(fnmatch.translate(text)).match, names)]
    if not chosen:
        some = [*names] if len(names) <= 20 else [*islice(names, 20), "..."]
        hint = suggestion(text, some)
        raise DatasetError(
            f"there is no column {text!r} in the file",
            remedy=f"{hint.replace('Supported', 'It has')} {_FORMS}",
        )
    return chosen, None


def _cut(stored: StoredColumn, cut: re.Match[str]) -> StoredColumn:
    """Return some columns of a table (N, k, ...); a single column loses this axis."""
    table = None if isinstance(stored, TextColumn) else even(stored)
    if table is None or len(table.shape) < 2:
        raise DatasetError(
            f"{cut[0]!r} names a part of a column without second axis", remedy=_FORMS
        )
    span = _span(cut, table.shape[1])
    kept = (span.stop - span.start,) if cut["colon"] else ()

    def read(start: int, stop: int) -> Tensor:
        rows = table[start:stop][:, span]
        return rows if cut["colon"] else rows[:, 0]

    return NumberColumn((table.shape[0], *kept, *table.shape[2:]), table.dtype, read)


def _span(cut: re.Match[str], width: int) -> slice:
    start = int(cut["start"] or 0)
    stop = int(cut["stop"]) if cut["stop"] else width if cut["colon"] else start + 1
    if not 0 <= start < stop <= width:
        raise DatasetError(
            f"{cut[0]!r} is out of range: there are {count(width, 'column')}",
            remedy=f"Give A:B with A < B ≤ {width}. Columns are counted from 0.",
        )
    return slice(start, stop)


def _side_by_side(columns: Sequence[tuple[str, StoredColumn]]) -> Numbers:
    """Return columns (N,) and tables (N, k, ...) concatenated along axis 1."""
    for name, column in columns:
        if isinstance(column, TextColumn):
            raise DatasetError(
                f"the column {name!r} cannot be joined with numbers: it has {_texts(column)}",
                remedy="Write a missing number as an empty field. Or convert the texts to numbers, "
                "or leave the column out.",
            )
    tables = [even(column) for _, column in columns if not isinstance(column, TextColumn)]
    shapes = [(*t.shape, 1) if len(t.shape) == 1 else tuple(t.shape) for t in tables]
    if len({(s[:1], s[2:]) for s in shapes}) > 1 or not shapes[0]:
        raise DatasetError(
            f"columns of shapes {shapes} cannot be concatenated",
            remedy="Give columns that agree in all axes except the second.",
        )
    dtype = reduce(torch.promote_types, (t.dtype for t in tables))
    shape = (shapes[0][0], sum(s[1] for s in shapes), *shapes[0][2:])

    def read(start: int, stop: int) -> Tensor:
        rows = [table[start:stop].to(dtype) for table in tables]
        return torch.cat([r[:, None] if r.dim() == 1 else r for r in rows], 1)

    return NumberColumn(shape, dtype, read)


def _texts(column: TextColumn) -> str:
    """Return a description of a column of texts, with three texts that are not numbers, if any."""
    parts = (column.read(k, min(k + _IDS, column.n)) for k in range(0, column.n, _IDS))
    found = list(islice((text for part in parts for text in part if not _is_number(text)), 3))
    return f"text, such as {', '.join(map(repr, found or column.read(0, min(3, column.n))))}"


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def encode_arrays(
    arrays: StoredArrays, spec: DatasetSpec
) -> tuple[tuple[str, ...], Callable[[str], Numbers]]:
    """Return the names of all arrays, and a function from a name to its numbers (N, ...).

    Texts become class numbers or tokens. Sequences are padded, and NAME_mask marks the entries that
    are not padding.
    """
    padded = dict.fromkeys((*spec.pad, *spec.length, *spec.tokenizer))
    names = tuple(dict.fromkeys((*arrays.names, *(f"{name}{MASK}" for name in padded))))

    @cache
    def as_numbers(name: str) -> tuple[StoredColumn, float | None]:
        """Return a column (texts as numbers) and its padding value."""
        stored, value = arrays.load(name), spec.pad.get(name)
        if name not in spec.tokenizer and name not in spec.classes:
            return stored, value
        if not isinstance(stored, TextColumn):
            remedy = f"Remove {name} from [dataset] tokenizer and classes."
            raise DatasetError("it has numbers, not texts", remedy=remedy)
        if name not in spec.tokenizer:
            return _numbered(stored, spec.classes[name]), value
        ids, own = _tokenized(stored, spec.tokenizer[name])
        return ids, own if value is None else value

    def column(name: str) -> Numbers:
        source = name.removesuffix(MASK)
        if name in arrays.names or source not in padded:
            source = name
        stored, value = as_numbers(source)
        if isinstance(stored, TextColumn):
            raise DatasetError(
                f"it has {_texts(stored)}",
                remedy="List the texts that become 0, 1, ... in [dataset] classes, or convert them "
                "to token ids with [dataset] tokenizer.",
            )
        if source not in padded:
            return even(stored)
        if not isinstance(stored, SequenceColumn):
            stored = _as_sequences(stored, source)
        width = spec.length.get(source) or int(stored.lengths.max())
        tokens = as_numbers(spec.masks[name])[0] if spec.masks.get(name) in padded else stored
        if isinstance(tokens, SequenceColumn):
            _require_alike(stored.lengths, tokens.lengths, spec.masks.get(name, ""))
        if source == name:
            return _padded(stored, width, value, name)
        lengths = stored.lengths
        shape = (len(lengths), width)  # the mask of entries that are not padding
        return NumberColumn(
            shape, torch.bool, lambda a, b: torch.arange(width) < lengths[a:b, None]
        )

    return names, column


def _numbered(stored: TextColumn, classes: Sequence[str]) -> NumberColumn:
    numbers = {text: k for k, text in enumerate(classes)}

    def read(start: int, stop: int) -> Tensor:
        try:
            return torch.tensor([numbers[text] for text in stored.read(start, stop)])
        except KeyError as error:
            what = f"it has {error}, which is not one of the classes"
            remedy = suggestion(error.args[0], list(classes))
            raise DatasetError(what, remedy=remedy) from None

    return NumberColumn((stored.n,), torch.int64, read)


def _tokenized(texts: TextColumn, path: Path) -> tuple[SequenceColumn, float | None]:
    """Return the token ids of texts, and the tokenizer's padding id, if it has any.

    `path` is a tokenizer.json, or a folder written by `save_pretrained`.
    """
    tokenizer = _tokenizer(path)

    def read(start: int, stop: int) -> list[Tensor]:
        found = tokenizer(list(texts.read(start, stop)))["input_ids"]
        return [torch.tensor(row, dtype=torch.int64) for row in found]

    def sizes() -> SequenceSizes:
        parts = (read(k, min(k + _TOKENS, texts.n)) for k in range(0, texts.n, _TOKENS))
        return torch.tensor([len(row) for part in parts for row in part]), ()

    own: Any = tokenizer.pad_token_id
    return SequenceColumn(torch.int64, read, sizes), None if own is None else int(own)


def words(spec: DatasetSpec, name: str) -> Callable[[list[int]], str] | None:
    """Return the function that decodes an array's numbers to text, or None if it is not known.

    Raises:
        DatasetError: The tokenizer cannot be read.
    """
    if name in spec.tokenizer:
        tokenizer = _tokenizer(spec.tokenizer[name])
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    known = spec.vocabulary.get(name)
    if known is None:
        return None
    between = "" if isinstance(known, str) else " "
    return lambda ids: between.join(known[k] if 0 <= k < len(known) else UNKNOWN for k in ids)


def _tokenizer(path: Path) -> Any:
    """Load a tokenizer without running any code that it names."""
    remedy = "Give a tokenizer.json, or a folder written by save_pretrained."
    if not path.exists():
        raise DatasetError("there is no such tokenizer", where=str(path), remedy=remedy)
    library = need("transformers", "a tokenizer")
    try:
        if path.is_file():
            return library.PreTrainedTokenizerFast(tokenizer_file=str(path))
        return library.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the parsers can raise anything
        what = f"the tokenizer cannot be read: {first_line(error)}"
        raise DatasetError(what, where=str(path), remedy=remedy) from error


def _as_sequences(stored: Numbers, name: str) -> SequenceColumn:
    if len(stored.shape) < 2:
        raise DatasetError(
            "its samples are single numbers, not sequences, and cannot be padded",
            remedy=f"Remove {name} from [dataset] pad and length.",
        )
    n, length, *row = stored.shape
    sizes = torch.full((n,), length), tuple(row)
    return SequenceColumn(stored.dtype, lambda a, b: list(stored[a:b]), lambda: sizes)


def _require_alike(mask: Tensor, tokens: Tensor, name: str) -> None:
    if len(mask) == len(tokens) and bool((mask != tokens).any()):
        k = int((mask != tokens).nonzero()[0])
        raise DatasetError(
            f"its sample {k} has {int(mask[k]):,} entries, but {int(tokens[k]):,} in {name}",
            remedy="Give a mask with an entry for each token.",
        )


def _padded(found: SequenceColumn, width: int, value: float | None, name: str) -> NumberColumn:
    """Return sequences (N, t, ...), cut or padded to `width`."""
    if value is None and bool((found.lengths < width).any()):
        raise DatasetError(
            f"it has samples with fewer than {width:,} entries",
            remedy=f"Give a padding value, such as [dataset] pad = {{ {name} = 0 }}.",
        )
    wanted = torch.tensor(value or 0, dtype=torch.float64)
    filler = wanted.to(found.dtype)  # a truncated or wrapped value is an error:
    rounded = found.dtype.is_floating_point or found.dtype.is_complex
    if not (filler.isfinite() if rounded else filler.to(torch.float64) == wanted):
        raise DatasetError(
            f"its dtype {dtype_name(found.dtype)} cannot represent the padding value {value}",
            remedy="Give a number of this dtype in [dataset] pad.",
        )
    shape = (len(found.lengths), width, *found.measured[1])

    def read(start: int, stop: int) -> Tensor:
        rows = filler.expand(stop - start, *shape[1:]).clone()
        for row, sequence in zip(rows, found.read(start, stop), strict=True):
            row[: len(sequence)] = sequence[:width]
        return rows

    return NumberColumn(shape, found.dtype, read)


def converter(spec: DatasetSpec, name: str, shape: Sequence[int], stored: torch.dtype) -> Convert:
    """Return the function that converts stored rows (n, *shape) to a new tensor (n, ...).

    It scales, casts and reshapes as the spec says for `name`. Without a dtype in the spec,
    floating-point numbers keep their dtype, and integers become int64, which class labels and
    embedding indices require. Scaled integers become float32.
    """
    dtype, scale = spec.dtype.get(name), spec.scale.get(name)
    if dtype is not None:
        goal: torch.dtype = getattr(torch, dtype)
    elif stored.is_floating_point or stored.is_complex or (scale is None and stored == torch.bool):
        goal = stored
    else:
        goal = torch.int64 if scale is None else torch.float32
    if stored.is_complex and not goal.is_complex:
        remedy = "Give a complex dtype, or leave dtype out."
        raise DatasetError(f"complex numbers cannot be cast to {dtype}", remedy=remedy)
    new = spec.reshape.get(name, tuple(shape))
    size, known = prod(shape), prod(k for k in new if k != -1)
    if size != known and (-1 not in new or size % known):
        raise DatasetError(
            f"a sample of shape {tuple(shape)} ({size} numbers) cannot be reshaped to {new}",
            remedy="Give a shape with the same number of entries; one size may be -1.",
        )
    new = tuple(size // known if k == -1 else k for k in new)

    def convert(rows: Tensor) -> Tensor:
        values = rows.clone()  # the model must not write to the stored array
        if scale is not None:
            values = values.to(torch.promote_types(stored, torch.float64)) * scale
        result = values.to(goal)
        if not (goal.is_floating_point or goal.is_complex or goal == values.dtype):
            lost = result.to(values.dtype) != values
            if lost.any():  # values are never truncated or wrapped
                told = f"{int(lost.sum())} values cannot be cast to {dtype_name(goal)}"
                first = values[lost][0].item()
                remedy = "Give a dtype that can represent them."
                raise DatasetError(f"{told}; the first is {first}", remedy=remedy)
        return result.reshape(len(rows), *new)

    return convert


def ids_of(stored: StoredColumn, n: int) -> Callable[[Tensor], Tensor]:
    """Check the ids of n samples, and return a function from positions (m,) to their ids.

    Ids are integers (m,) int64, or UTF-8 texts (m, w) uint8, padded with zeros to the same width w.
    """
    if length_of(stored) != n:
        raise DatasetError(f"there are {length_of(stored):,} ids for {n:,} samples", remedy=_OWN_ID)
    if isinstance(stored, TextColumn):
        return _text_ids(stored)
    fractional = stored.dtype.is_floating_point or stored.dtype.is_complex
    if isinstance(stored, SequenceColumn) or len(stored.shape) != 1 or fractional:
        raise DatasetError("ids must be an integer or a text for each sample", remedy=_OWN_ID)
    _require_distinct(stored[0:n].to(torch.int64).numpy(), lambda k: int(stored[k : k + 1]))
    return lambda index: torch.cat([stored[a:b] for a, b in runs(index.tolist())]).long()


def groups_of(stored: StoredColumn, reduction: Reduction) -> GroupIds:
    """Return the groups for a column of ids: one of each sample, or one of each position.

    Shorter sequences of ids are padded with missing ids.
    """
    if isinstance(stored, TextColumn):
        return GroupIds.of([*stored.read(0, stored.n)], reduction)
    if not isinstance(stored, SequenceColumn):
        return GroupIds.of(stored[0 : length_of(stored)], reduction)
    rows = stored.read(0, length_of(stored))
    wide = np.full((len(rows), int(stored.lengths.max())), None)
    for row, sequence in zip(wide, rows, strict=True):
        row[: len(sequence)] = sequence.tolist()
    return GroupIds.of(wide, reduction)


def _text_ids(texts: TextColumn) -> Callable[[Tensor], Tensor]:
    n = texts.n

    def encoded_texts(start: int, stop: int) -> list[bytes]:
        found = [text.encode("utf-8", "surrogatepass") for text in texts.read(start, stop)]
        if any(b"\0" in text for text in found):
            raise DatasetError(
                "an id has a NUL character", remedy="Remove it, or leave [dataset] id out."
            )
        return found

    digests, width = np.empty(n, np.uint64), 1
    for start in range(0, n, _IDS):
        for k, text in enumerate(encoded_texts(start, min(start + _IDS, n)), start):
            digests[k] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            width = max(width, len(text))
    _require_distinct(digests, lambda k: repr(texts.read(k, k + 1)[0]))

    def padded(index: Tensor) -> Tensor:
        found = [text for a, b in runs(index.tolist()) for text in encoded_texts(a, b)]
        content = b"".join(text.ljust(width, b"\0") for text in found)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(len(found), width)

    return padded


def _require_distinct(values: np.ndarray, shown: Callable[[int], Any]) -> None:
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(same):
        first, second = (int(k) for k in order[same[0] : same[0] + 2])
        raise DatasetError(
            f"samples {first} and {second} have the same id {shown(first)}",
            remedy=_OWN_ID,
        )
