"""`gradscope stats` on a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from gradscope.report.bars import print_histogram
from gradscope.report.certificate import unused, verdict
from gradscope.report.layout import Column, facts, heading, names_table, plain_table
from gradscope.report.text import count, fit_names, percent, shape, short, size, visible
from gradscope.stats import Distribution, NoiseScale, ParameterRow, SampleRow, Summary
from gradscope.stats.summary import FileFacts

_WIDEST_TARGET = 24


def render_stats(summary: Summary, console: Console) -> None:
    """Print the whole summary, from what the file is to its largest samples."""
    print_file(summary.file, console)
    if summary.nonfinite.count:
        print_nonfinite(summary, console)
    if summary.norm is not None:
        print_norms(summary, summary.norm, console)
    print_noise_scale(summary.noise_scale, console)
    heading(console, "Parameters")
    print_parameters(summary.parameters, console)
    if summary.samples:
        heading(console, "Samples with the largest gradients")
        print_samples(summary.samples, console)


def print_file(file: FileFacts, console: Console) -> None:
    """Print what the file is."""
    console.print(Text(visible(file.path), style="bold"), overflow="fold")
    rows: list[tuple[str, str | Text]] = [
        ("samples", f"{file.samples:,}"),
        ("parameters", f"{file.parameters:,} ({file.entries:,} entries)"),
        ("size", size(file.bytes)),
        ("backend", file.backend or "not recorded"),
        ("certificate", verdict(file.certificate)),
    ]
    if (names := unused(file.certificate)) is not None:
        rows.append(("unused", names))
    rows += [("chain" if not k else "", chain.text) for k, chain in enumerate(file.chains)]
    facts(console, rows)


def print_nonfinite(summary: Summary, console: Console) -> None:
    """Say which samples are not finite."""
    n, index = summary.nonfinite.count, summary.nonfinite.index
    listed = ", ".join(map(str, index)) + (", ..." if n > len(index) else "")
    text = f"{count(n, 'sample')} not finite and left out below"
    console.print()
    console.print(Text(f"{text}: {listed}" if index else text, style="bold red"))


def print_norms(summary: Summary, norm: Distribution, console: Console) -> None:
    """Print loss and norm in numbers, then the histogram of norms."""
    heading(console, "Loss and gradient norm")
    loss = summary.loss
    columns = [
        Column("", ["loss", "norm"], justify="left"),
        Column("mean", [short(loss.mean if loss else None), short(norm.mean)]),
        Column("std", [short(loss.std if loss else None), short(norm.std)], rank=1),
        Column("min", [short(loss.min if loss else None), short(norm.min)]),
        Column("max", [short(loss.max if loss else None), short(norm.max)]),
    ]
    plain_table(console, columns)
    heading(console, "Percentiles of the norm")
    print_percentiles(norm.percentiles, console)
    heading(console, "Histogram of the norm")
    print_histogram(console, norm.histogram)


def print_percentiles(percentiles: Mapping[str, float], console: Console) -> None:
    """Print the percentiles side by side, in as many lines as the width needs."""
    pairs = [(f"{key}%", short(value)) for key, value in percentiles.items()]
    cell = max(max(map(len, pair)) for pair in pairs) + 2
    lines = math.ceil(len(pairs) / max(1, (console.width + 2) // cell))
    step = math.ceil(len(pairs) / lines)
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        for texts, style in zip(zip(*part, strict=True), ("dim", ""), strict=True):
            line = "".join(f"{text:>{cell}}" for text in texts)[2:]
            console.print(Text(line, style=style), soft_wrap=True)


def print_noise_scale(noise: NoiseScale, console: Console) -> None:
    """Print how large a batch is worth."""
    heading(console, "Gradient noise scale")
    simple = f"{short(noise.simple)} samples" if noise.simple is not None else "undefined"
    rows: list[tuple[str, str | Text]] = [
        ("trace of covariance", short(noise.trace_covariance)),
        ("gradient norm squared", short(noise.gradient_norm_squared)),
        ("simple (their ratio)", simple),
    ]
    if noise.flag is not None:
        rows.append(("", Text(noise.flag, style="yellow")))
    facts(console, rows)


def print_parameters(rows: Sequence[ParameterRow], console: Console) -> None:
    """Print a table with one row a parameter."""
    columns = [
        Column("shape", [shape(r.shape) for r in rows], rank=2),
        Column("entries", [f"{r.entries:,}" for r in rows], rank=5),
        Column("mean norm", [short(r.mean_norm) for r in rows]),
        Column("largest norm", [short(r.max_norm) for r in rows], rank=1),
        Column("norm of mean", [short(r.mean_gradient_norm) for r in rows], rank=4),
        Column("share", [percent(r.share) for r in rows], rank=3),
        Column("SNR", [short(r.signal_to_noise) for r in rows]),
    ]
    names_table(console, "parameter", [r.name for r in rows], columns)


def print_samples(rows: Sequence[SampleRow], console: Console) -> None:
    """Print a table with one row a sample."""
    columns = [
        Column("index", [str(r.index) for r in rows]),
        Column("norm", [short(r.norm) for r in rows]),
        Column("times median", [short(r.times_median) for r in rows], rank=1),
        Column("loss", [short(r.loss) for r in rows]),
    ]
    if any(r.target is not None for r in rows):
        targets = fit_names([_target(r.target) for r in rows], _WIDEST_TARGET)
        columns.append(Column("target", targets, rank=2))
    plain_table(console, columns)


def _target(value: Any) -> str:
    if value is None:
        return short(None)
    return short(value) if isinstance(value, float) else str(value)
