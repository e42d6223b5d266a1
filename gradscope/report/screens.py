"""Output of commands when they are done: compute, its plan, check, merge, export."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gradscope.core.texts import count, visible
from gradscope.report.terminal import heading, print_facts, print_table
from gradscope.stats import largest_shares, parameter_table
from gradscope.stats.certificate import certificate_facts, unused_facts, verdict
from gradscope.stats.sections import (
    Column,
    Fact,
    Line,
    Styled,
    Table,
    duration,
    facts_under,
    percent,
    shape_text,
    short,
    size,
)

if TYPE_CHECKING:
    from gradscope.blocks import ChosenVariant
    from gradscope.run import DiskSpace, Estimate, Inspection, MergeReport, RunReport
    from gradscope.storage import ExportedFile


def render_kernels(choices: Sequence["ChosenVariant"], console: Console) -> None:
    """Print a row for each request: the chosen kernel, its time, the times of other kernels."""
    if not choices:
        return
    others = [
        ", ".join(f"{name} {duration(s)}" for name, s in one.seconds.items() if name != one.variant)
        for one in choices
    ]
    heading(console, "Kernels and their times")
    columns = [
        Column("kernel", [one.variant for one in choices], justify="left"),
        Column("time", [duration(one.seconds.get(one.variant)) for one in choices]),
        Column("others", others, rank=1, justify="left"),
        Column("", ["" if one.measured else "predicted" for one in choices], justify="left"),
    ]
    print_table(console, Table(columns, "request", [one.request for one in choices]))


def render_run(result: "RunReport", console: Console) -> None:
    """Print the parameters, the proof, the written file and the time of a run."""
    shown = largest_shares(result.parameters)
    print_table(console, parameter_table(shown))
    left = len(result.parameters) - len(shown)
    if left:
        more = f"{count(left, 'parameter')} with a smaller share: gradscope stats --full"
        console.print(Text(more, style="dim"), overflow="fold")
    heading(console, "Run")
    speed = f", {short(result.samples / result.seconds)} {result.noun}s/s" if result.seconds else ""
    samples = count(result.samples, result.noun)
    rows = [
        *_outcome(result, result.audits),
        ("computed", f"{samples} in {duration(result.seconds)}{speed}"),
        ("backend", result.backend),
    ]
    print_facts(console, [*rows, *facts_under("note", result.notes)])


def _outcome(result: "RunReport | MergeReport", audits: str | None = None) -> list[Fact]:
    """Return the proof, non-finite numbers, the written file, and the chains."""
    rows = certificate_facts(result.certificate, result.noun, audits) + _nonfinite(result)
    if result.path is not None:
        rows.append(("written", f"{result.path} ({size(result.bytes)})"))
    return rows + facts_under("chain", result.chains)


def _nonfinite(result: "RunReport | MergeReport") -> list[Fact]:
    """Return the counts of non-finite samples, and of non-finite numbers in each chain."""
    lines = []
    if result.nonfinite:
        samples = count(result.samples, result.noun)
        listing = "" if result.path is None else f": gradscope stats {result.path} lists them"
        lines.append(f"{result.nonfinite:,} of {samples}{listing}")
    for chain, numbers in zip(result.chains, result.chains_nonfinite, strict=False):
        if numbers:
            lines.append(f"{count(numbers, 'number')} in the result of {chain}")
    return facts_under("not finite", [Styled(line, "bold red") for line in lines])


def render_merge(result: "MergeReport", console: Console) -> None:
    """Print the merged samples, their proof, and the written file."""
    merged = f"{count(result.samples, result.noun)} of {count(result.files, 'file')}"
    rows: list[Fact] = [*_outcome(result), ("merged", f"{merged} in {duration(result.seconds)}")]
    if result.recomputed:
        again = f"{count(result.recomputed, result.noun)} one by one, with equal losses and norms"
        rows.append(("recomputed", again))
    rows += facts_under("note", result.notes)
    if result.virtual:
        rows.append(("virtual", "the rows stay in these files"))
    print_facts(console, rows)


def render_export(found: Sequence["ExportedFile"], console: Console) -> None:
    """Print each file with its content and its size."""
    for one in found:
        if one.shape is None:
            what = count(len(one.names), "parameter")
        elif len(one.names) == 1:
            what = f"{one.names[0]} {shape_text(one.shape)}"
        else:
            what = f"{count(one.shape[0], 'row')}, {count(one.shape[1], 'column')}"
        console.print(Text(visible(f"{one.path}: {what}, {size(one.bytes)}")), soft_wrap=True)


def render_plan(plan: "Estimate", console: Console, verbose: bool = False) -> None:
    """Print the choices and the cost of a planned run, with `verbose` also its kernels."""
    known = plan.memory is not None
    memory = f"about {size(plan.memory)} in addition to model and data" if known else "not known"
    samples = f"{count(plan.samples, plan.noun)}, {plan.batch_size:,} at a time"
    rows: list[Fact] = [
        (f"{plan.noun}s", samples),
        ("backend", plan.backend),
        *(("note", note) for note in plan.notes),
        *(("chain", chain) for chain in plan.chains),
        *_space(plan.room),
        ("memory", f"{memory}, {size(plan.available)} available"),
        _time(plan.room),
    ]
    heading(console, "Plan (nothing was written)")
    print_facts(console, rows)
    if verbose:
        render_kernels(plan.ways, console)


def render_disk_space(room: "DiskSpace", console: Console) -> None:
    """Print the disk space and the time of a large run before it starts."""
    print_facts(console, [*_space(room), _time(room)])


def _time(room: "DiskSpace") -> Fact:
    return "time", f"about {duration(room.seconds)}, without the time to write"


def _space(room: "DiskSpace") -> list[Fact]:
    """Return the size of the file, the free space, and the sizes in other layouts."""
    most = "before compression " if room.compressed else ""
    takes = f"{size(room.bytes)} {most}in the {room.layout} layout"
    rows: list[Fact] = [("file", f"{takes}, {size(room.free)} free")]
    if room.limit is not None:
        rows.append(("limit", f"{size(room.limit)} a file"))
    sizes = {size(room.bytes)}
    for name, n in sorted(room.layouts.items(), key=lambda item: item[0] == "auto"):
        if size(n) not in sizes:
            rows.append(("", f"{size(n)} in the {name} layout"))
            sizes.add(size(n))
    return rows


def render_inspection(found: "Inspection", console: Console, verbose: bool = False) -> None:
    """Print the inputs, the results of the first batch, its proof, and the plan."""
    model, checkpoint, data, loss = found.model, found.checkpoint, found.dataset, found.loss
    arrays = data["arrays"]
    sizes = f"{count(model['parameters'], 'parameter')} of {count(model['numbers'], 'number')}"
    placed = f"{model['dtype']} on {model['device']}"
    options = [f"{key}={value}" for key, value in loss.items() if key != "name"]
    heading(console, "Inputs")
    rows: list[Fact] = [
        ("model", f"{model['class']}, {model['mode']}, {sizes}, {placed}"),
        ("weights", checkpoint["path"]),
        ("", f"{checkpoint['format']}, {count(checkpoint['tensors'], 'tensor')}"),
        ("data", str(data["path"])),
        ("", f"{data['format']}, {count(data['samples'], 'sample')}"),
        *(("", f"{k}: {_described(a, model['dtype'])}") for k, a in arrays.items()),
        ("loss", ", ".join([loss["name"], *options])),
    ]
    print_facts(console, rows)
    first = found.first
    samples = count(first.samples, found.plan.noun)
    took = [f"{p.phase}: {duration(p.seconds)}, {p.passes:.2g} plain passes" for p in found.phases]
    lost = Styled(f"{first.nonfinite:,} of {samples}", "bold red")
    heading(console, "The first batch")
    rows = [
        (f"{found.plan.noun}s", samples),
        ("loss", _range(first.loss)),
        ("norm", _range(first.norm)),
        *([] if first.wrong is None else [("wrong", _wrong(first.wrong))]),
        *([("not finite", lost)] if first.nonfinite else []),
        ("certificate", verdict(found.certificate)),
        *unused_facts(found.certificate),
        *facts_under("took", took),
    ]
    print_facts(console, rows)
    render_plan(found.plan, console, verbose)


def _described(array: Mapping[str, Any], computed: str) -> str:
    """Return an array's dtype, the dtype that the model casts it to, and a sample's shape."""
    dtype: str = array["dtype"]
    cast = "float" in dtype and "float" in computed and dtype != computed
    shape = f"{_sizes(array['sample'])} a sample" if "sample" in array else ""
    shape = shape or f"{_sizes(array['whole'])}, whole for every sample"
    return f"{dtype}{f' cast to {computed}' if cast else ''}, {shape}"


def _sizes(shape: Sequence[int]) -> str:
    return shape_text(shape) if shape else "one number"


def _wrong(share: float) -> Line:
    """Return the share of wrong predictions; if it is large, also what to check."""
    text = f"{percent(share)} predicted wrongly"
    hint = "; check that inputs are scaled and classes are ordered as in training"
    return Styled(f"{text}{hint}", "yellow") if share > 0.5 else text


def _range(values: tuple[float, float, float]) -> str:
    least, median, most = map(short, values)
    return f"{least} to {most}, median {median}"
