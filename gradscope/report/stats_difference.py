"""`gradscope stats A.h5 B.h5`: what changed, in sections."""

from rich.console import Console
from rich.text import Text

from gradscope.report.layout import Column, facts, numbers
from gradscope.report.sections import Section, Table, print_sections
from gradscope.report.stats_samples import index_columns, target_column
from gradscope.report.text import count, short, size, visible
from gradscope.stats import Difference


def render_difference(found: Difference, console: Console) -> None:
    """Print both files, what changed over all, by parameter, and by sample."""
    facts(console, file_facts(found))
    print_sections(sections(found), console)


def file_facts(found: Difference) -> list[tuple[str, str | Text]]:
    """Return what is compared."""
    rows: list[tuple[str, str | Text]] = []
    for word, file in zip(("first", "second"), found.files, strict=True):
        labels = "" if file.labels == "data" else f", labels {file.labels}"
        rows.append((word, Text(visible(file.path), style="bold")))
        rows.append(("", f"{count(file.samples, 'sample')}, {size(file.bytes)}{labels}"))
    return rows


def sections(found: Difference) -> list[Section]:
    """Return everything but what the files are."""
    return [_overall(found), _parameters(found), *_samples(found)]


def _overall(found: Difference) -> Section:
    rows = [
        ("mean loss", found.loss),
        ("mean norm", found.norm),
        ("median norm", found.median_norm),
        ("noise scale", found.noise_scale),
        (_fisher(found), found.fisher_trace),
    ]
    columns = [
        numbers("first", [both.first for _, both in rows]),
        numbers("second", [both.second for _, both in rows]),
        numbers("second / first", [both.ratio for _, both in rows]),
    ]
    notes = []
    if found.cosine is not None:
        notes.append(Text(f"cosine of the two mean gradients: {short(found.cosine)}"))
    table = Table(columns, "", [name for name, _ in rows])
    return Section("What changed", "difference", table=table, notes=notes)


def _fisher(found: Difference) -> str:
    kinds = [each.kind for each in found.fisher]
    return "trace of Fisher" if kinds[0] == kinds[1] else f"trace of {kinds[0]}, {kinds[1]} Fisher"


def _parameters(found: Difference) -> Section:
    rows = found.parameters
    columns = [
        numbers("mean norm", [r.mean_norm.first for r in rows], rank=2),
        numbers("mean norm then", [r.mean_norm.second for r in rows], rank=2),
        numbers("ratio of norms", [r.mean_norm.ratio for r in rows]),
        numbers("SNR", [r.signal_to_noise.first for r in rows], rank=3),
        numbers("SNR then", [r.signal_to_noise.second for r in rows], rank=3),
        numbers("ratio of means", [r.mean_gradient_norm.ratio for r in rows], rank=1),
    ]
    if found.cosine is not None:
        columns.append(numbers("cosine of means", [r.cosine for r in rows]))
    lone = (("first", found.only_first), ("second", found.only_second))
    notes = [f"only in the {word}: {visible(', '.join(names))}" for word, names in lone if names]
    return Section(
        "Parameters", table=Table(columns, "parameter", [r.name for r in rows]), notes=notes
    )


def _samples(found: Difference) -> list[Section]:
    if not found.same_data:
        note = "The data are not the same, so samples are not compared one by one."
        return [Section("Samples", notes=[note])]
    rows = found.samples
    if not rows:
        return []
    columns: list[Column] = [
        *index_columns(rows),
        numbers("moved" if found.exact else "at least", [r.moved for r in rows]),
        numbers("norm", [r.norm.first for r in rows]),
        numbers("norm then", [r.norm.second for r in rows]),
        numbers("loss", [r.loss.first for r in rows], rank=1),
        numbers("loss then", [r.loss.second for r in rows], rank=1),
    ]
    if any(r.target is not None for r in rows):
        columns.append(target_column([r.target for r in rows]))
    return [Section("Samples that moved most", "moved", table=Table(columns))]
