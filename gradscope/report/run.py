"""The last words of `gradscope compute`."""

from rich.console import Console
from rich.text import Text

from gradscope.report.certificate import unused, verdict
from gradscope.report.layout import facts, heading
from gradscope.report.stats import print_parameters
from gradscope.report.text import count, duration, short, size
from gradscope.stats import RunReport


def render_run(result: RunReport, console: Console) -> None:
    """Print what was computed, whether it was proved, and what was written where."""
    print_parameters(result.parameters, console)
    heading(console, "Run")
    samples = count(result.samples, "sample")
    rows: list[tuple[str, str | Text]] = [("certificate", verdict(result.certificate))]
    if result.audits is not None:
        rows.append(("audits", result.audits))
    if (names := unused(result.certificate)) is not None:
        rows.append(("unused", names))
    if result.nonfinite:
        text = f"{result.nonfinite:,} of {samples}: they are flagged in the file"
        rows.append(("not finite", Text(text, style="bold red")))
    if result.path is not None:
        rows += [("written", f"{result.path} ({size(result.bytes)})")]
    rows += [("chain" if not k else "", chain) for k, chain in enumerate(result.chains)]
    speed = f", {short(result.samples / result.seconds)} samples/s" if result.seconds > 0 else ""
    rows += [
        ("computed", f"{samples} in {duration(result.seconds)}{speed}"),
        ("backend", result.backend),
    ]
    rows += [("note" if not k else "", note) for k, note in enumerate(result.notes)]
    facts(console, rows)
