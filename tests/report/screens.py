"""What a renderer prints, at a width."""

import io

from rich.cells import cell_len
from rich.console import Console

WIDTHS = (40, 80, 200)


def screen(render, result, width, **options):
    file = io.StringIO()
    render(result, Console(file=file, width=width, **options))
    return file.getvalue()


def fits(text, width):
    return all(cell_len(line) <= width for line in text.splitlines())
