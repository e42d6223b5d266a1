"""Pictures of what changes: between two files, and over the steps of a training."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradscope.report.panels import (
    BLUE,
    ORANGE,
    RASTER,
    Panel,
    bars,
    empty,
    label_outliers,
    log_when_wide,
)
from gradscope.report.stats_history import CURVES
from gradscope.stats import Difference, History, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 40
_LAYERS = 8


def difference_panels(found: Difference) -> list[Panel]:
    """Return the pictures of two files."""
    rows = found.parameters[:_MOST]
    names = [row.name for row in rows]
    height = max(1.8, 1.0 + 0.2 * len(rows))
    which = f" (first {len(rows)} of {len(found.parameters)})" * (len(rows) < len(found.parameters))
    ratios = [row.mean_norm.ratio for row in rows]
    panels = [
        Panel(
            "Mean norm of each parameter, second file over first",
            lambda axes: bars(axes, f"Mean norm, second / first{which}", names, ratios, BLUE),
            height,
        )
    ]
    if found.cosine is not None:
        cosines = [row.cosine for row in rows]
        panels.append(
            Panel(
                "Cosine of the mean gradients of each parameter",
                lambda axes: bars(axes, f"Cosine of the means{which}", names, cosines, ORANGE),
                height,
            )
        )
    if found.samples:
        panels.append(Panel("Norms of the samples in both files", lambda axes: _moved(axes, found)))
    return panels


def history_panels(history: History) -> list[Panel]:
    """Return the pictures of a training."""
    panels = [
        Panel(f"{name} by step", partial(_curve, steps=history.steps, name=name))
        for name, _ in CURVES
    ]
    layers = Panel("Signal to noise of the parameters by step", partial(_layers, history=history))
    return [*panels, layers]


def _curve(axes: "Axes", steps: Sequence[Step], name: str) -> None:
    take = dict(CURVES)[name]
    axes.set_title(name)
    axes.set_xlabel("step")
    known = [(s.step, value) for s in steps if (value := take(s)) is not None]
    if not known:
        empty(axes, "not known at any step")
        return
    axes.plot(*zip(*known, strict=True), color=BLUE, marker=".", markersize=4)
    log_when_wide(axes.set_yscale, [value for _, value in known])
    if name == "noise scale":
        _band(axes, steps)


def _band(axes: "Axes", steps: Sequence[Step]) -> None:
    """Shade the intervals, up to the top where there is no upper end."""
    between = [(s.step, s.noise_scale.simple_interval) for s in steps]
    known = [(step, i.low, i.high) for step, i in between if i is not None and i.low]
    if known:
        axes.set_yscale("log")
        top = 2 * max([high for *_, high in known if high is not None], default=axes.get_ylim()[1])
        where, low = [step for step, *_ in known], [low or 0.0 for _, low, _ in known]
        high = [top if high is None else high for *_, high in known]
        axes.fill_between(where, low, high, color=BLUE, alpha=0.25, linewidth=0)
        axes.set_ylim(top=top)


def _layers(axes: "Axes", history: History) -> None:
    """Draw the parameters whose signal to noise is largest at the end."""
    axes.set_title("Signal to noise by parameter")
    axes.set_xlabel("step")
    last = sorted(history.steps[-1].parameters, key=lambda p: -(p.signal_to_noise or 0.0))
    every: list[float] = []
    for layer in last[:_LAYERS]:
        known = [
            (step.step, p.signal_to_noise)
            for step in history.steps
            for p in step.parameters
            if p.name == layer.name and p.signal_to_noise
        ]
        if known:
            axes.plot(*zip(*known, strict=True), marker=".", markersize=4, label=layer.name)
            every += [value for _, value in known]
    if not every:
        empty(axes, "not known at any step")
        return
    log_when_wide(axes.set_yscale, every)
    for text in axes.legend(frameon=False, fontsize=7).get_texts():
        text.set_parse_math(False)


def _moved(axes: "Axes", found: Difference) -> None:
    axes.set_title("Norms, second against first")
    axes.set_xlabel("norm in the first")
    axes.set_ylabel("norm in the second")
    listed = [(r.norm.first or 0.0, r.norm.second or 0.0) for r in found.samples]
    pairs = found.norms or listed
    first, second = zip(*pairs, strict=True)
    axes.scatter(
        first, second, s=9, alpha=0.5, color=BLUE, linewidths=0, rasterized=len(pairs) > RASTER
    )
    log_when_wide(axes.set_xscale, first + second)
    log_when_wide(axes.set_yscale, first + second)
    ends = [min(first + second), max(first + second)]
    axes.plot(ends, ends, color=ORANGE, linewidth=0.8)
    points = [(*place, row.index) for place, row in zip(listed, found.samples, strict=True)]
    label_outliers(axes, points)
