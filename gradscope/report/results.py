"""What `gradscope stats` shows: one file, two, or a history; each in its sections."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gradscope.report import stats, stats_difference, stats_history
from gradscope.report.sections import Section
from gradscope.stats import Difference, History, Summary

Result = Summary | Difference | History


def render(found: Result, console: Console) -> None:
    """Print it."""
    if isinstance(found, Summary):
        stats.render_stats(found, console)
    elif isinstance(found, Difference):
        stats_difference.render_difference(found, console)
    else:
        stats_history.render_history(found, console)


def facts(found: Result) -> list[tuple[str, str | Text]]:
    """Return what it is about."""
    if isinstance(found, Summary):
        return stats.file_facts(found)
    if isinstance(found, Difference):
        return stats_difference.file_facts(found)
    return stats_history.file_facts(found)


def sections(found: Result) -> Sequence[Section]:
    """Return its sections."""
    if isinstance(found, Summary):
        return stats.sections(found)
    if isinstance(found, Difference):
        return stats_difference.sections(found)
    return stats_history.sections(found)
