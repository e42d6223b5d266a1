"""Products of gradients with each other and with their mean, from whatever a file has.

From stored rows, a chain `gram`, or a chain `cosine:to=mean`, in this order; projections serve the
neighbours of a sample and the spectrum, approximately.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gradscope.stats import stored
from gradscope.stats.base import Floats, Mask, Record, Source
from gradscope.stats.classes import Groups
from gradscope.stats.spectrum import picked
from gradscope.stats.sweep import Sweep, Wanted, sweep
from gradscope.stats.table import Table

_GROUP_BYTES = 2**28  # for the sums of all classes in one parameter


class Missing(Record):
    """What could not be taken.

    Attributes:
        what: In words.
        needs: What the file would have to hold.
    """

    what: str
    needs: str


@dataclass(frozen=True)
class Products:
    """What a file's chains give; None where they do not.

    Attributes:
        source: Where `dots` are from: rows, gram or cosine:to=mean.
        dots: ⟨gᵢ, G⟩ (n,).
        pairs: Where `gram` and `probed` are from: rows, gram or a chain `project`.
        gram: ⟨gᵢ, gⱼ⟩ of some samples, evenly spread (m, m).
        among: Which samples these are (n,).
        whole: ⟨gᵢ, gⱼ⟩ of all samples (n, n), from a chain `gram`.
        probed: ⟨gᵢ, g⟩ with the sample asked for (n,).
        group_squares: ‖G_c‖² of each class's mean gradient (k,).
        swept: All that the rows gave.
        exact: Whether they are exacter than the recorded norms, as all but half precision is.
        unusable: Why stored rows gave nothing.
    """

    source: str | None = None
    dots: Floats | None = None
    pairs: str | None = None
    gram: Floats | None = None
    among: Mask | None = None
    whole: Floats | None = None
    probed: Floats | None = None
    group_squares: Floats | None = None
    swept: Sweep | None = None
    exact: bool = False
    unusable: str | None = None


def products(
    file: Source,
    table: Table,
    big: float | None,
    members: Groups | None,
    place: int | None,
    rows: bool,
) -> Products:
    """Take products from the best that `file` has.

    Args:
        file: The file.
        table: Its finite samples.
        big: ‖G‖².
        members: Their classes.
        place: The sample whose products with all others are wanted, in the table.
        rows: Whether stored rows may be read.
    """
    if not table.n:
        return Products()
    entries = sum(prod(shape) for shape in file.parameters.values())
    arrays = stored.rows_of(file)
    unusable = stored.rows_unusable(file) if rows else None
    if rows and arrays is not None and unusable is None:
        found = _from_rows(file, arrays, table, members, place, entries)
        if found.swept is not None and found.swept.finite:
            return found
        unusable = "stored rows are not finite where their norms are: compute with --dtype float32"
    gram = stored.gram_of(file, table.n)
    if gram is not None:
        return replace(_from_gram(gram, table, members, place), unusable=unusable)
    found = Products(unusable=unusable)
    cosines = stored.cosines_of(file)
    if cosines is not None and big is not None:
        dots = cosines[table.rows] * table.norm * np.sqrt(big)
        found = replace(found, source="cosine:to=mean", dots=dots)
    projected = stored.projections_of(file)
    if projected is None:
        return found
    text, values = projected
    values = values[table.rows]
    among = picked(table, values.shape[1])
    few = values[among]
    probed = None if place is None else values @ values[place]
    return replace(found, pairs=text, gram=few @ few.T, among=among, probed=probed)


def _from_rows(
    file: Source,
    arrays: stored.Arrays,
    table: Table,
    members: Groups | None,
    place: int | None,
    entries: int,
) -> Products:
    width = max((prod(shape) for shape in file.parameters.values()), default=0)
    if members is not None and len(members.targets) * width * 8 > _GROUP_BYTES:
        members = None
    one, among = np.zeros(table.n, np.int64), picked(table, entries, width)
    swept = sweep(
        arrays,
        table,
        Wanted(
            groups=one if members is None else members.of,
            picked=among,
            probe=place,
            mean=stored.mean_of(file),
        ),
    )
    return Products(
        source="rows",
        dots=swept.dots,
        pairs="rows",
        gram=swept.gram,
        among=among,
        probed=None if place is None else swept.probed,
        group_squares=None if members is None else swept.group_squares,
        swept=swept,
        exact=not stored.in_half(file),
    )


def _from_gram(gram: Floats, table: Table, members: Groups | None, place: int | None) -> Products:
    squares = None
    if members is not None:
        one = (members.of == np.arange(len(members.targets))[:, None]) * 1.0  # (k, n)
        squares = np.einsum("kn,kn->k", one @ gram, one) / np.square(one.sum(1))
    among = picked(table, 1)
    return Products(
        source="gram",
        dots=gram.mean(1),
        pairs="gram",
        gram=gram[np.ix_(among, among)],
        among=among,
        whole=gram,
        probed=None if place is None else gram[place],
        group_squares=squares,
    )


def missing(
    file: Source, found: Products, members: Groups | None, entries: bool, rows: bool
) -> tuple[Missing, ...]:
    """Say what could not be taken, and what it needs.

    Args:
        file: The file.
        found: What its chains gave.
        members: Its classes.
        entries: Whether signal and noise by entry are known.
        rows: Whether stored rows were allowed.
    """
    if found.unusable is not None:
        return (Missing(what="whatever needs every sample's gradient", needs=found.unusable),)
    if not rows and stored.rows_of(file) is not None:
        return (
            Missing(what="whatever needs every sample's gradient", needs="leave out --no-rows"),
        )
    wants = [
        (
            found.dots is None,
            "cosines with the mean gradient, opposed samples, intervals, inner-product test",
            '-t identity, -t gram or -t "cosine:to=mean"',
        ),
        (
            not entries,
            "signal to noise by entry, early-stopping evidence",
            "-t identity, or -t mean and -t second_moment",
        ),
        (
            found.gram is None,
            "spectrum, nearest samples",
            "-t identity, -t gram or -t project:dim=256",
        ),
        (
            members is not None and found.group_squares is None,
            "noise within and between classes",
            "-t identity or -t gram",
        ),
    ]
    return tuple(
        Missing(what=what, needs=f"compute with {needs}") for absent, what, needs in wants if absent
    )
