"""The table of a sweep and its page: outcomes by group and tool."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.zoo.libraries import NEEDS

Record = dict[str, Any]
OUTCOMES = ("right", "wrong", "refused", "raised")
HEAD = (
    "group",
    "tool",
    "cases",
    *OUTCOMES,
    "backends",
    "cost of rows",
    "of norms",
)


def lines(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return the rows of the table: for each group and tool, what it did with its cases.

    Only cases with independent samples count. Costs are medians of a later call, as a multiple of
    a plain forward and backward pass.
    """
    known = list(NEEDS)
    groups = sorted({group(r) for r in records}, key=known.index)
    found = []
    for name in groups:
        judged = [r for r in records if group(r) == name and independent(r)]
        tools = list(dict.fromkeys(tool for r in judged for tool in r["tools"]))
        for tool in tools:
            found.append(
                (name, tool, *_cells([r["tools"][tool] for r in judged if tool in r["tools"]]))
            )
    return found


def _cells(answers: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    counts = Counter(a["outcome"] for a in answers)
    backends = Counter(a["backend"] for a in answers if a["outcome"] == "right" and "backend" in a)
    costs = [_median(a.get(f"cost_{what}") for a in answers) for what in ("rows", "norms")]
    used = ", ".join(f"{name} {count}" for name, count in backends.most_common())
    return (str(len(answers)), *(str(counts[o]) for o in OUTCOMES), used, *costs)


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.1f}" if known else ""


def group(record: Record) -> str:
    """Return the group of a case."""
    return str(record["case"]).partition("/")[0]


def independent(record: Record) -> bool:
    """Whether a case was judged and its samples are independent."""
    return record["status"] == "judged" and record.get("facts", {}).get("nature") == "independent"


def markdown_table(records: Sequence[Record]) -> list[str]:
    """Return the table in Markdown."""
    right = {"cases", *OUTCOMES, "cost of rows", "of norms"}
    rule = ["---:" if name in right else "---" for name in HEAD]
    rows = [HEAD, tuple(rule), *lines(records)]
    return [f"| {' | '.join(row)} |" for row in rows]


def page(records: Sequence[Record], runs: Sequence[Record]) -> str:
    """Return the page of the documentation."""
    last = runs[-1]["run"] if runs else {}
    versions = ", ".join(f"{name} {version}" for name, version in last.get("versions", {}).items())
    dates = list(dict.fromkeys(r["run"]["date"] for r in runs))
    selections = dict.fromkeys(r["run"]["selection"] for r in runs if r["run"].get("selection"))
    parts = [
        "# The zoo: every architecture, operator and module against a batch of one",
        "",
        _INTRODUCTION.read_text(encoding="utf-8").rstrip(),
        "",
        f"{', '.join(dates)}; {versions}; {last.get('machine', '')}.",
        *[f"Selection: {said}." for said in selections],
        "",
        *markdown_table(records),
        "",
        *_others(records),
        *_section(
            "Wrong answers of gradscope",
            [(r, r["tools"]["gradscope"]) for r in _with(records, "wrong")],
            "None.",
        ),
        *_section(
            "Refused or raised by gradscope, with independent samples",
            [(r, r["tools"]["gradscope"]) for r in _with(records, "refused", "raised")],
            "None.",
        ),
        *_section(
            "Answered by another backend than `hooks`",
            [
                (r, {"reason": " ".join([r["tools"]["gradscope"]["backend"] + ".", *_notes(r)])})
                for r in _with(records, "right")
                if r["tools"]["gradscope"]["backend"] != "hooks"
            ],
            "None.",
        ),
    ]
    return "\n".join(parts).rstrip() + "\n"


_INTRODUCTION = Path(__file__).with_name("introduction.md")


def _answered(record: Record) -> str:
    return f"`{record['case']}` ({record['tools']['gradscope']['outcome']})"


def _others(records: Sequence[Record]) -> list[str]:
    """Return the sentences about cases that the table leaves out."""
    coupled = [r for r in records if r["status"] == "judged" and not independent(r)]
    answered = [
        r for r in coupled if r["tools"].get("gradscope", {}).get("outcome") in ("right", "wrong")
    ]
    absent = Counter((group(r), r["status"]) for r in records if r["status"] != "judged")
    said = [
        f"{len(coupled)} more cases have samples that depend on each other or on random numbers. "
        f"gradscope refuses {len(coupled) - len(answered)} of these and answers {len(answered)}"
        + (": " + ", ".join(map(_answered, answered)) if answered else "")
        + ". An answer is right if its rows are those of the reference: such a model may round to "
        "float32 within itself, which makes losses differ in the batch.",
        "",
    ]
    if absent:
        counts = ", ".join(
            f"{count} of {name} {status}" for (name, status), count in absent.items()
        )
        said += [
            f"Without a verdict: {counts} (no small configuration runs, "
            "or a batch of one does not run in float64).",
            "",
        ]
    return said


def _with(records: Sequence[Record], *outcomes: str) -> list[Record]:
    return [
        r
        for r in records
        if independent(r) and r["tools"].get("gradscope", {}).get("outcome") in outcomes
    ]


def _notes(record: Record) -> list[str]:
    return [note for note in record["tools"]["gradscope"].get("notes", []) if "hooks" in note][:1]


def _section(title: str, cases: Sequence[tuple[Record, dict[str, Any]]], none: str) -> list[str]:
    found = [f"## {title}", ""]
    found += [f"- `{r['case']}`: {_short(a.get('reason', ''))}" for r, a in cases] or [none]
    return [*found, ""]


def _short(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= 240 else text[:237] + "..."
