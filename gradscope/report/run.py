"""The last words of `gradscope compute`."""

from rich.console import Console
from rich.text import Text

from gradscope.report.certificate import certificate_facts
from gradscope.report.layout import facts, heading
from gradscope.report.stats import print_parameters
from gradscope.report.text import count, duration, short, size, visible
from gradscope.run import MergeReport
from gradscope.stats import RunReport


def render_run(result: RunReport, console: Console) -> None:
    """Print what was computed, what of it was proved, and what was written where."""
    print_parameters(result.parameters, console)
    heading(console, "Run")
    samples = count(result.samples, "sample")
    rows = certificate_facts(result.certificate, result.audits)
    rows += nonfinite(result)
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


def nonfinite(result: RunReport | MergeReport) -> list[tuple[str, str | Text]]:
    """Return what is not finite: samples, and numbers that chains have made so."""
    lines = []
    if result.nonfinite:
        samples = count(result.samples, "sample")
        lines.append(f"{result.nonfinite:,} of {samples}: they are flagged in the file")
    for chain, numbers in zip(result.chains, result.chains_nonfinite, strict=False):
        if numbers:
            lines.append(f"{count(numbers, 'number')} of {visible(chain)}")
    shown = (Text(line, style="bold red") for line in lines)
    return [("not finite" if not k else "", text) for k, text in enumerate(shown)]
