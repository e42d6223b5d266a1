"""Results for people: tables, progress, errors, pictures, a page.

Parameter names, targets, paths and messages come from users and files: they are shown as plain
text with unprintable characters made visible, never as markup.
"""

from gradscope.report.comparison import render_comparison
from gradscope.report.console import console
from gradscope.report.errors import render_error
from gradscope.report.html import write_html
from gradscope.report.merge import render_merge
from gradscope.report.plots import plot_stats
from gradscope.report.progress import track
from gradscope.report.results import render
from gradscope.report.run import render_run
from gradscope.report.stats import render_stats

__all__ = [
    "console",
    "plot_stats",
    "render",
    "render_comparison",
    "render_error",
    "render_merge",
    "render_run",
    "render_stats",
    "track",
    "write_html",
]
