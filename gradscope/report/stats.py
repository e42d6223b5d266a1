"""`gradscope stats` of one result file, in sections."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gradscope.report.certificate import certificate_facts
from gradscope.report.layout import Column, facts, numbers, whole
from gradscope.report.sections import Fact, Section, Table, print_sections, print_table
from gradscope.report.stats_batch import batch, clipping, directions
from gradscope.report.stats_samples import alike, neighbours, samples
from gradscope.report.stats_short import in_short
from gradscope.report.text import count, percent, shape, short, size, visible
from gradscope.stats import ParameterRow, Summary


def render_stats(summary: Summary, console: Console) -> None:
    """Print the whole summary, from what the file is to its largest samples."""
    console.print(Text(visible(summary.file.path), style="bold"), overflow="fold")
    facts(console, file_facts(summary))
    for line in warnings(summary):
        console.print()
        console.print(Text(line, style="bold red"))
    print_sections(sections(summary), console)


def sections(summary: Summary) -> list[Section]:
    """Return everything but what the file is."""
    return [
        *in_short(summary),
        *_norms(summary),
        *clipping(summary),
        batch(summary),
        *directions(summary),
        _parameters(summary),
        *_classes(summary),
        *_spectrum(summary),
        _chains(summary),
        *_missing(summary),
        *alike(summary),
        *neighbours(summary),
        *samples(summary),
    ]


def file_facts(summary: Summary) -> list[tuple[str, str | Text]]:
    """Return what the file is."""
    file = summary.file
    rows: list[tuple[str, str | Text]] = [
        ("samples", f"{file.samples:,}"),
        ("parameters", f"{file.parameters:,} ({file.entries:,} entries)"),
        ("size", size(file.bytes)),
        ("backend", file.backend or "not recorded"),
        *certificate_facts(file.certificate),
    ]
    if file.labels != "data":
        rows.append(("labels", file.labels))
    rows += [("chain" if not k else "", chain.text) for k, chain in enumerate(file.chains)]
    return rows


def warnings(summary: Summary) -> list[str]:
    """Return what is wrong: samples that are not finite, identities that do not hold."""
    lines = []
    n, index = summary.nonfinite.count, summary.nonfinite.index
    if n:
        listed = ", ".join(map(str, index)) + (", ..." if n > len(index) else "")
        text = f"{count(n, 'sample')} not finite and left out below"
        lines.append(f"{text}: {listed}" if index else text)
    return lines + [
        f"does not hold to {c.tolerance:g}: {c.name} ({short(c.left)} and {short(c.right)})"
        for c in summary.checks
        if not c.passed
    ]


def print_parameters(rows: Sequence[ParameterRow], console: Console) -> None:
    """Print a table with one row a parameter."""
    print_table(parameter_table(rows), console)


def parameter_table(rows: Sequence[ParameterRow]) -> Table:
    """Return a row a parameter."""
    columns = [
        Column("shape", [shape(r.shape) for r in rows], rank=2),
        whole("entries", [r.entries for r in rows], rank=6),
        numbers("mean norm", [r.mean_norm for r in rows]),
        numbers("largest norm", [r.max_norm for r in rows], rank=1),
        numbers("norm of mean", [r.mean_gradient_norm for r in rows], rank=5),
        numbers("share", [r.share for r in rows], rank=3, show=percent),
        numbers("SNR", [r.signal_to_noise for r in rows]),
        numbers("noise scale", [r.noise_scale for r in rows], rank=4),
    ]
    if any(r.opposing is not None for r in rows):
        columns.append(numbers("opposed", [r.opposing for r in rows], rank=7, show=percent))
    return Table(columns, "parameter", [r.name for r in rows])


def _parameters(summary: Summary) -> Section:
    n = summary.file.samples - summary.nonfinite.count
    notes = [f"Noise alone gives an SNR of about 1/N = {short(1 / n)}."] if n > 1 else []
    table = parameter_table(summary.parameters)
    return Section("Parameters", "parameters", table=table, notes=notes)


def _norms(summary: Summary) -> list[Section]:
    loss, norm = summary.loss, summary.norm
    if norm is None:
        return []
    both = [loss, norm]
    columns = [
        Column("", ["loss", "norm"], justify="left"),
        numbers("mean", [None if m is None else m.mean for m in both]),
        numbers("std", [None if m is None else m.std for m in both], rank=1),
        numbers("min", [None if m is None else m.min for m in both]),
        numbers("max", [None if m is None else m.max for m in both]),
    ]
    pairs = [(f"{key}%", short(value)) for key, value in norm.percentiles.items()]
    return [
        Section("Loss and gradient norm", "norm", table=Table(columns)),
        Section("Percentiles of the norm", pairs=pairs),
        Section("Histogram of the norm", histogram=norm.histogram),
    ]


def _classes(summary: Summary) -> list[Section]:
    found = summary.classes
    if found is None:
        return []
    rows = found.rows
    columns = [
        whole("samples", [r.samples for r in rows], rank=1),
        numbers("mean loss", [r.mean_loss for r in rows], rank=2),
        numbers("mean norm", [r.mean_norm for r in rows]),
    ]
    if any(r.mean_cosine is not None for r in rows):
        columns.append(numbers("mean cosine", [r.mean_cosine for r in rows]))
        columns.append(numbers("opposed", [r.opposing for r in rows], rank=3, show=percent))
    if any(r.cosine is not None for r in rows):
        columns.append(numbers("cosine of mean", [r.cosine for r in rows], rank=4))
        columns.append(numbers("noise", [r.trace_covariance for r in rows]))
    notes = []
    if found.between is not None and found.within is not None and found.between + found.within:
        share = found.between / (found.between + found.within)
        notes.append(f"{percent(share)} of the noise lies between the classes, the rest within.")
    table = Table(columns, "class", [str(r.target) for r in rows])
    return [Section("Classes", "classes", table=table, notes=notes)]


def _spectrum(summary: Summary) -> list[Section]:
    found = summary.spectrum
    if found is None or found.effective_rank is None:
        return []
    rows: list[Fact] = [
        ("effective rank", short(found.effective_rank)),
        ("directions for 90%", f"{found.directions_for_90}"),
        ("from", f"{found.source}, {found.samples:,} of {count(found.of, 'sample')}"),
    ]
    return [Section("Spectrum of the gradients", "spectrum", rows)]


def _chains(summary: Summary) -> Section:
    rows: list[Fact] = [(f"{summary.fisher.kind} Fisher, trace", short(summary.fisher.trace))]
    for gap in summary.jensen:
        share = "undefined" if gap.gap is None else percent(gap.gap)
        text = f"{visible(gap.transform)}: E[T(g)] is {share} off T(E[g])"
        rows.append(("Jensen gap", f"{text}, cosine {short(gap.cosine)}"))
    return Section("Expectations", "expectations", rows)


def _missing(summary: Summary) -> list[Section]:
    if not summary.missing:
        return []
    notes = [f"{missing.what}: {missing.needs}" for missing in summary.missing]
    return [Section("Not in this file", notes=notes)]
