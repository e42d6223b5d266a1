"""What a run would cost, as `--dry-run` tells it."""

from rich.console import Console

from gradscope.report.layout import facts, heading
from gradscope.report.text import count, duration, size
from gradscope.report.ways import render_ways
from gradscope.run import Estimate, Room


def render_plan(plan: Estimate, console: Console, verbose: bool = False) -> None:
    """Print the choice and the cost."""
    heading(console, "Plan (nothing was written)")
    facts(
        console,
        [
            ("samples", f"{count(plan.samples, 'sample')}, {plan.batch_size:,} at a time"),
            ("backend", plan.backend),
            *(("note", note) for note in plan.notes),
            *(("chain", chain) for chain in plan.chains),
            *space(plan.room),
            ("memory", f"{_memory(plan)}, {size(plan.available)} available"),
            ("time", f"about {duration(plan.room.seconds)}, and what the disk takes"),
        ],
    )
    if verbose:
        render_ways(plan.ways, console, measured=False)


def render_room(room: Room, console: Console) -> None:
    """Print, before a large run, what it will write and how long it will take."""
    time = ("time", f"about {duration(room.seconds)}, and what the disk takes")
    facts(console, [*space(room), time])


def space(room: Room) -> list[tuple[str, str]]:
    """Return what is said about the file: its bytes, those free, what other layouts take."""
    most = "before compression " if room.compressed else ""
    takes = f"{size(room.bytes)} {most}in the {room.layout} layout"
    rows = [("file", f"{takes}, {size(room.free)} free")]
    if room.limit is not None:
        rows.append(("limit", f"{size(room.limit)} a file"))
    told = {size(room.bytes)}
    for name, n in sorted(room.layouts.items(), key=lambda item: item[0] == "auto"):
        if size(n) not in told:
            rows.append(("", f"{size(n)} in the {name} layout"))
            told.add(size(n))
    return rows


def _memory(plan: Estimate) -> str:
    if plan.memory is None:
        return "not known"
    return f"about {size(plan.memory)} beside model and data"
