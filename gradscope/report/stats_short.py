"""The first thing said of a result file: answers to the questions people bring, a line each."""

from gradscope.report.sections import Fact, Section
from gradscope.report.stats_batch import between
from gradscope.report.text import count, short, visible
from gradscope.stats import Distribution, Summary

_LISTED = 3


def in_short(summary: Summary) -> list[Section]:
    """Answer who dominates, where to clip, how large a batch, what learns and what is broken."""
    norm = summary.norm
    if norm is None:
        return []
    rows: list[Fact] = [
        ("who dominates", _dominates(summary)),
        ("where to clip", _clip(summary, norm)),
        ("batch", _batch(summary)),
        ("what learns", _learns(summary)),
        ("broken", _broken(summary)),
    ]
    if summary.largest_losses:
        listed = ", ".join(str(row.index) for row in summary.largest_losses[:_LISTED])
        rows.append(("check labels", f"largest losses: {listed}"))
    return [Section("In short", facts=rows)]


def _dominates(summary: Summary) -> str:
    first = next(iter(summary.samples), None)
    if first is None or first.times_median is None:
        return "no norm but zero" if first is not None and not first.norm else "not listed"
    return f"sample {first.index}, {short(first.times_median)} times the median norm"


def _clip(summary: Summary, norm: Distribution) -> str:
    found = summary.clipping
    if found is None or norm.max == 0:
        return "nothing to clip"
    parts = [f"{short(found.by_share[s].norm)} clips {s}%" for s in ("1", "10")]
    return f"norm {', '.join(parts)}"


def _batch(summary: Summary) -> str:
    noise = summary.noise_scale
    if noise.simple is None:
        return f"unknown: {noise.flag}"
    return f"worth about {short(noise.simple)} samples" + between(noise.simple_interval)


def _learns(summary: Summary) -> str:
    """Say which parameters have a mean gradient larger than noise alone gives."""
    if summary.file.samples - summary.nonfinite.count < 2:
        return "unknown: it needs at least two finite samples"
    rows = [row for row in summary.parameters if row.noise_scale is not None]
    known = sorted(rows, key=lambda row: row.noise_scale or 0.0)
    text = f"{len(known)} of {count(len(summary.parameters), 'parameter')} above the noise"
    return f"{text}, most {visible(known[0].name)}" if known else text


def _broken(summary: Summary) -> str:
    n, twins = summary.nonfinite.count, summary.duplicates
    parts = [f"{count(n, 'sample')} not finite" if n else "none not finite"]
    if twins is not None:
        same = len(twins.same)
        parts.append(f"{count(same, 'pair')} alike" if same else "no duplicates")
        label = sum(pair.same_target is False for pair in twins.same)
        parts += [f"{label} of them with different targets"] * bool(label)
    failed = sum(not check.passed for check in summary.checks)
    parts += [f"{count(failed, 'check')} failed"] * bool(failed)
    return ", ".join(parts)
