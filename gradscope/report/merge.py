"""The last words of `gradscope merge`."""

from rich.console import Console

from gradscope.report.certificate import certificate_facts
from gradscope.report.layout import facts
from gradscope.report.run import nonfinite
from gradscope.report.text import count, duration, size
from gradscope.run import MergeReport


def render_merge(result: MergeReport, console: Console) -> None:
    """Print what was merged, what of it was proved, and what was written where."""
    samples = count(result.samples, "sample")
    rows = certificate_facts(result.certificate)
    rows += nonfinite(result)
    rows.append(("written", f"{result.path} ({size(result.bytes)})"))
    rows += [("chain" if not k else "", chain) for k, chain in enumerate(result.chains)]
    files = count(result.files, "file")
    rows.append(("merged", f"{samples} of {files} in {duration(result.seconds)}"))
    if result.recomputed:
        anew = count(result.recomputed, "sample")
        rows.append(("recomputed", f"{anew} one by one: the same losses and norms"))
    rows += [("note" if not k else "", note) for k, note in enumerate(result.notes)]
    if result.virtual:
        rows.append(("virtual", "the rows stay in these files"))
    facts(console, rows)
