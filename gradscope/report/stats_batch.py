"""Sections about the batch: clipping, how large it need be, whether its samples agree."""

from rich.text import Text

from gradscope.report.sections import Fact, Section, Spark
from gradscope.report.text import count, percent, short
from gradscope.stats import Summary
from gradscope.stats.base import Interval


def clipping(summary: Summary) -> list[Section]:
    """Say whom a clipping norm clips."""
    found = summary.clipping
    if found is None:
        return []
    rows: list[Fact] = [(f"clips {s}%", f"norm {short(c.norm)}") for s, c in found.by_share.items()]
    rows += [(f"norm {short(c.norm)}", f"clips {percent(c.clipped)}") for c in found.asked]
    return [Section("Which clipping norm", "clipping", rows)]


def batch(summary: Summary) -> Section:
    """Say how large a batch is worth: noise scale, tests, CABS, evidence."""
    noise, tests = summary.noise_scale, summary.batch_tests
    simple = f"{short(noise.simple)} samples" if noise.simple is not None else "undefined"
    trace, signal = short(noise.trace_covariance), short(noise.gradient_norm_squared)
    rows: list[Fact] = [
        ("noise scale", simple + between(noise.simple_interval)),
        ("trace of covariance", trace + between(noise.trace_covariance_interval)),
        ("gradient norm squared", signal + between(noise.gradient_norm_squared_interval)),
    ]
    if noise.flag is not None:
        rows.append(("", Text(noise.flag, style="yellow")))
    rows.append(("norm test", short(tests.norm)))
    if tests.inner_product is not None:
        rows.append(("inner-product test", short(tests.inner_product)))
        rows.append(("orthogonality test", short(tests.orthogonality)))
    return Section("How large a batch is worth", "batch", [*rows, *_cabs(summary), *_left(summary)])


def directions(summary: Summary) -> list[Section]:
    """Say whether the samples agree with the mean gradient."""
    found = summary.directions
    if found is None:
        return []
    low, high = found.percentiles["5"], found.percentiles["95"]
    rows: list[Fact] = [
        ("opposed", f"{percent(found.opposing)} of {count(found.samples, 'sample')}"),
        ("mean", short(found.cosine.mean)),
        ("5% to 95%", f"{short(low)} to {short(high)}"),
        ("from -1 to 1", Spark(found.histogram.counts)),
    ]
    return [Section("Cosine with the mean gradient", "directions", rows)]


def between(interval: Interval | None) -> str:
    """Return an interval as it follows a number, or nothing."""
    if interval is None:
        return ""
    if interval.high is None:
        return f" (95%: {short(interval.low)} or more)"
    return f" (95%: {short(interval.low)} to {short(interval.high)})"


def _cabs(summary: Summary) -> list[Fact]:
    found = summary.cabs
    if found.per_learning_rate is None:
        return [("CABS batch size", Text(f"undefined: {found.flag}", style="yellow"))]
    if found.batch_size is None:
        text = f"{short(found.per_learning_rate)} x learning rate; give --lr"
        return [("CABS batch size", text)]
    asked = f"{short(found.unclipped)} at a learning rate of {short(found.learning_rate)}"
    return [("CABS batch size", f"{found.batch_size:,} ({asked})")]


def _left(summary: Summary) -> list[Fact]:
    found = summary.signal
    rows: list[Fact] = [("signal to noise", short(found.signal_to_noise))]
    if found.mean_entry is not None:
        rows.append(("its mean over entries", short(found.mean_entry)))
    if found.evidence is not None and found.stop:
        text = f"{short(found.evidence)}: what is left is noise"
        rows.append(("evidence to stop", Text(text, style="yellow")))
    elif found.evidence is not None:
        rows.append(("evidence to stop", f"{short(found.evidence)}: there is signal left"))
    return rows
