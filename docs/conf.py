"""Settings of Sphinx for `make docs`: the pages of this folder and the docstrings, as a site."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

import gradscope

for public in gradscope.__all__:  # imported here: autodoc imports with TYPE_CHECKING set
    getattr(gradscope, public)

project = "gradscope"
author = "gradscope contributors"
copyright = author
version = release = gradscope.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
nb_execution_mode = "off"  # the tests run the notebooks
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]
default_role = "code"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_use_ivar = True
napoleon_use_rtype = False
pygments_style = "default"
pygments_dark_style = "github-dark"
copybutton_prompt_text = "$ "

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_title = f"gradscope {version}"
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = "mathml"

_OUTSIDE = re.compile(r"\]\((?:\.\./)+(README|CONTRIBUTING|CHANGELOG)\.md")
_PAGE_OF = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
_ACCESSIBLE = {  # what axe-core asks of the theme's pages
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="This page">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper ': '<div tabindex="0" class="table-wrapper ',
    '<dl>\n<dd><em class="sig-param">': '<dl role="none">\n<dd><em class="sig-param">',
    '<th class="head"><p></p></th>': "<td></td>",
}
_CODE_OR_MARK = re.compile(r"(`[^`]*`)|([*|_](?=\W|$)|(?<!\w)[*|])")


def setup(app: Any) -> None:
    """Register the functions that Sphinx calls."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("source-read", _link_pages)
    app.connect("autodoc-process-docstring", _escape, priority=100)
    app.connect("build-finished", _make_accessible)


def _link_pages(_: Any, page: str, source: list[str]) -> None:
    """Replace links to files outside `docs/` by links to the pages that include these files."""
    up = "../" * page.count("/")
    source[0] = _OUTSIDE.sub(lambda m: f"]({up}{_PAGE_OF[m[1]]}.md", source[0])


def _make_accessible(app: Any, failure: Exception | None) -> None:
    """Replace the markup of `_ACCESSIBLE` in every page."""
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for before, after in _ACCESSIBLE.items():
            text = text.replace(before, after)
        page.write_text(text, encoding="utf-8")


def _escape(_: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Escape what is Markdown or plain text in a docstring and markup in reStructuredText.

    A public object without a docstring is an error.
    """
    if not any(lines) and kind not in ("attribute", "data"):
        getLogger(__name__).warning("%s has no docstring", name)
    for i, line in enumerate(lines):
        lines[i] = _CODE_OR_MARK.sub(lambda m: m[1] or f"\\{m[2]}", line)


def _formula(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    block = isinstance(node, nodes.math_block)
    text = convert(node.astext(), display="block" if block else "inline")
    if "\\" in text:
        raise ValueError(f"latex2mathml does not know a command of this formula: {node.astext()}")
    translator.body.append(f'<div style="margin: 1em">{text}</div>' if block else text)
    raise nodes.SkipNode
