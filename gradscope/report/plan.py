"""What a run would cost, as `--dry-run` tells it."""

from rich.console import Console

from gradscope.pipeline import Estimate
from gradscope.report.layout import facts, heading
from gradscope.report.text import count, duration, size


def render_plan(plan: Estimate, console: Console) -> None:
    """Print the choice and the cost."""
    heading(console, "Plan (nothing was written)")
    facts(
        console,
        [
            ("samples", f"{count(plan.samples, 'sample')}, {plan.batch_size:,} at a time"),
            ("backend", plan.backend),
            *(("note", note) for note in plan.notes),
            *(("chain", chain) for chain in plan.chains),
            ("file", f"about {size(plan.bytes)} in the dense layout, {size(plan.free)} free"),
            ("time", f"about {duration(plan.seconds)}"),
        ],
    )
