"""Output for people: tables, progress, errors, pictures, a page.

Parameter names, targets, paths and messages come from users and files. They are shown as plain
text, never as markup. Unprintable characters are made visible.
"""

from gradscope.report.console import console, render_error
from gradscope.report.page import write_html
from gradscope.report.plots import plot, plot_stats
from gradscope.report.progress import follow, track
from gradscope.report.screens import (
    render_comparison,
    render_disk_space,
    render_export,
    render_inspection,
    render_merge,
    render_plan,
    render_run,
)
from gradscope.report.terminal import print_facts, render

__all__ = [
    "console",
    "follow",
    "plot",
    "plot_stats",
    "print_facts",
    "render",
    "render_comparison",
    "render_disk_space",
    "render_error",
    "render_export",
    "render_inspection",
    "render_merge",
    "render_plan",
    "render_run",
    "track",
    "write_html",
]
