"""`summarize`: what a result file says, from the file alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from gradscope.errors import SpecError
from gradscope.stats.alike import Duplicates, Nearest, by_gram, by_norms, by_rows
from gradscope.stats.alike import nearest as nearest_samples
from gradscope.stats.base import Record, Source, rounding
from gradscope.stats.batches import BatchTests, Cabs, batch_tests, cabs
from gradscope.stats.checks import Check, identities
from gradscope.stats.classes import Classes, Groups, classes, groups
from gradscope.stats.clipping import Clipping, clipping
from gradscope.stats.directions import Directions, cosines, directions
from gradscope.stats.distribution import Distribution, Moments, distribution, moments
from gradscope.stats.entries import Entries, Signal, signal, stored_entries, total
from gradscope.stats.facts import FileFacts, NonFinite, facts, nonfinite
from gradscope.stats.fisher import Fisher, fisher
from gradscope.stats.jensen import Gap, jensen
from gradscope.stats.noise import NoiseScale, noise_scale
from gradscope.stats.products import Missing, Products, missing, products
from gradscope.stats.rows import ParameterRow, parameter_rows
from gradscope.stats.samples import Points, SampleRow, largest, opposed, points
from gradscope.stats.spectrum import Spectrum, cosine_matrix, spectrum
from gradscope.stats.stored import rows_of
from gradscope.stats.table import Table, finite_samples, mean_gradient_squared

_POINTS = 4000


class Summary(Record):
    """The statistics of one result file. docs/statistics.md has every formula.

    What needs products of gradients is None where the file has none, and `missing` says so.

    Attributes:
        file: Facts of the file.
        loss: None when no sample is finite; likewise norm and clipping.
        norm: ‖gᵢ‖ over all parameters.
        clipping: Which clipping norm clips whom.
        noise_scale: How large a batch is worth.
        batch_tests: Whether N samples are a batch large enough.
        cabs: The batch size for a learning rate.
        signal: Signal to noise, and the early-stopping evidence.
        directions: Whether samples agree with the mean gradient.
        parameters: One row each, in the model's order.
        classes: One row each, where the targets are classes.
        samples: Those with the largest norms, largest first.
        largest_losses: Those with the largest losses.
        most_opposed: Those with the most negative ⟨gᵢ, G⟩.
        nearest: The neighbours of one sample, if asked for.
        duplicates: Pairs of equal gradients.
        spectrum: How many directions the gradients take.
        fisher: The trace of the Fisher.
        jensen: How far E[T(g)] is from T(E[g]).
        nonfinite: Samples left out.
        checks: Identities between these numbers.
        missing: What could not be taken, and what it needs.
        points: For pictures; not part of the JSON form. Likewise `cosines`, a matrix of samples.
    """

    schema_: Literal["gradscope.stats"] = Field(
        default="gradscope.stats", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    file: FileFacts
    loss: Moments | None
    norm: Distribution | None
    clipping: Clipping | None
    noise_scale: NoiseScale
    batch_tests: BatchTests
    cabs: Cabs
    signal: Signal
    directions: Directions | None
    parameters: tuple[ParameterRow, ...]
    classes: Classes | None
    samples: tuple[SampleRow, ...]
    largest_losses: tuple[SampleRow, ...]
    most_opposed: tuple[SampleRow, ...] | None
    nearest: Nearest | None
    duplicates: Duplicates | None
    spectrum: Spectrum | None
    fisher: Fisher
    jensen: tuple[Gap, ...]
    nonfinite: NonFinite
    checks: tuple[Check, ...]
    missing: tuple[Missing, ...]
    points: Points | None = Field(default=None, exclude=True, repr=False)
    cosines: tuple[tuple[float, ...], ...] | None = Field(default=None, exclude=True, repr=False)


def summarize(
    file: Source,
    top: int = 10,
    learning_rate: float | None = None,
    clip: Sequence[float] = (),
    nearest: int | None = None,
    rows: bool = True,
) -> Summary:
    """Compute the statistics of an open result file.

    Args:
        file: A `GradientFile`.
        top: How many samples to list in each list.
        learning_rate: For the batch size of CABS.
        clip: Clipping norms whose share is wanted.
        nearest: A sample, by its position in the data set, whose neighbours are wanted.
        rows: Whether to read stored gradients, once or twice over.

    Raises:
        SpecError: An argument is out of its range.
        ResultFileError: The file lacks something it must have, or is damaged.
    """
    _check(top, learning_rate, clip)
    with np.errstate(all="ignore"):  # what overflows becomes None
        table = Table.of(file)
        big, members = mean_gradient_squared(file), groups(table)
        place = None if nearest is None else table.place(nearest)
        found = products(file, table, big, members, place, rows)
        recorded, rounded = (table, big), rounding(file.samples["norm"])
        if found.swept is not None and found.exact:  # rows are exacter than rounded norms
            table = replace(table, norm=np.sqrt(found.swept.squares))
            big, rounded = found.swept.mean_squared, 1e-12
        parts = _entries(file, found)
        known = None if found.dots is None else cosines(found.dots, table.norm, big)
        by_class = (
            None
            if members is None
            else classes(table, members, known, found.group_squares, found.dots)
        )
        tests = batch_tests(table.norm, big, found.dots)
        return Summary(
            file=facts(file),
            loss=moments(table.loss),
            norm=distribution(table.norm),
            clipping=clipping(table.norm, clip),
            noise_scale=noise_scale(table.norm, big, found.dots),
            batch_tests=tests,
            cabs=cabs(table.norm, table.loss, big, learning_rate),
            signal=signal(
                table.norm, big, None if parts is None else total(parts.values()), rounded
            ),
            directions=None if known is None else directions(str(found.source), known),
            parameters=_parameters(file, parts, found),
            classes=by_class,
            samples=largest(table, table.norm, top, known),
            largest_losses=largest(table, table.loss, top, known),
            most_opposed=None if found.dots is None else opposed(table, found.dots, top, known),
            nearest=_nearest(table, found, place, top),
            duplicates=_duplicates(file, table, found),
            spectrum=None
            if found.gram is None
            else spectrum(str(found.pairs), found.gram, table.n),
            fisher=fisher(file, table),
            jensen=jensen(file),
            nonfinite=nonfinite(file, table, top),
            checks=identities(file, *recorded, tests, found, by_class),
            missing=missing(file, found, members, parts is not None, rows),
            points=points(table, _POINTS),
            cosines=_matrix(found, members),
        )


def _entries(file: Source, found: Products) -> dict[str, Entries] | None:
    if found.swept is None:
        return stored_entries(file)
    return {name: part.entries for name, part in found.swept.parts.items()}


def _parameters(
    file: Source, parts: dict[str, Entries] | None, found: Products
) -> tuple[ParameterRow, ...]:
    return parameter_rows(
        file,
        finite_samples(file),
        {name: entries.mean_ratio for name, entries in (parts or {}).items()},
        {} if found.swept is None else {k: v.opposing for k, v in found.swept.parts.items()},
        None
        if found.swept is None or not found.exact
        else {k: (v.mean_square, v.mean_squared) for k, v in found.swept.parts.items()},
    )


def _matrix(found: Products, members: Groups | None) -> tuple[tuple[float, ...], ...] | None:
    if found.gram is None or found.among is None:
        return None
    return cosine_matrix(found.gram, None if members is None else members.of[found.among])


def _nearest(table: Table, found: Products, place: int | None, top: int) -> Nearest | None:
    if place is None or found.probed is None:
        return None
    source = str(found.pairs)
    return nearest_samples(table, source, source in ("rows", "gram"), place, found.probed, top)


def _duplicates(file: Source, table: Table, found: Products) -> Duplicates | None:
    rows = rows_of(file)
    if table.n < 2:
        return None
    if found.swept is not None and rows is not None:
        return by_rows(rows, table, found.swept.sketch)
    return by_norms(file, table) if found.whole is None else by_gram(found.whole, table)


def _check(top: int, rate: float | None, clip: Sequence[float]) -> None:
    if top < 0:
        raise SpecError(f"the number of samples to list must not be negative, not {top}")
    if rate is not None and not 0 < rate < float("inf"):
        raise SpecError(f"a learning rate is a positive number, not {rate:g}")
    for norm in clip:
        if not 0 < norm < float("inf"):
            raise SpecError(f"a clipping norm is a positive number, not {norm:g}")
