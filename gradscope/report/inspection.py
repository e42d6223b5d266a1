"""What a run would be, as `gradscope check` tells it."""

from typing import Any

from rich.console import Console
from rich.text import Text

from gradscope.report.certificate import unused, verdict
from gradscope.report.layout import facts, heading
from gradscope.report.plan import render_plan
from gradscope.report.text import count, short
from gradscope.run import Inspection


def render_inspection(found: Inspection, console: Console, verbose: bool = False) -> None:
    """Print what was loaded, what the first batch gave, its proof, and the plan."""
    model, checkpoint, data = found.model, found.checkpoint, found.dataset
    heading(console, "What is read")
    facts(
        console,
        [
            (
                "model",
                f"{model['class']}, {model['mode']}, {count(model['parameters'], 'parameter')} of "
                f"{count(model['numbers'], 'number')}, {model['dtype']} on {model['device']}",
            ),
            ("weights", checkpoint["path"]),
            ("", f"{checkpoint['format']}, {count(checkpoint['tensors'], 'tensor')}"),
            ("data", str(data["path"])),
            ("", f"{data['format']}, {count(data['samples'], 'sample')}"),
            *(("", _array(name, array)) for name, array in data["arrays"].items()),
            ("loss", ", ".join([found.loss["name"], *_options(found.loss)])),
        ],
    )
    first = found.first
    rows: list[tuple[str, str | Text]] = [
        ("samples", count(first.samples, "sample")),
        ("loss", _range(first.loss)),
        ("norm", _range(first.norm)),
    ]
    if first.nonfinite:
        text = f"{first.nonfinite:,} of {count(first.samples, 'sample')}"
        rows.append(("not finite", Text(text, style="bold red")))
    rows.append(("certificate", verdict(found.certificate)))
    if (names := unused(found.certificate)) is not None:
        rows.append(("unused", names))
    heading(console, "The first batch")
    facts(console, rows)
    render_plan(found.plan, console, verbose)


def _array(name: str, array: dict[str, Any]) -> str:
    shape = "x".join(map(str, array["sample"])) or "one number"
    return f"{name}: {array['dtype']}, {shape} a sample"


def _options(loss: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in loss.items() if key != "name"]


def _range(values: tuple[float, float, float]) -> str:
    least, median, most = map(short, values)
    return f"{least} to {most}, median {median}"
