"""`gradscope view`: an interactive page of the samples of a result file."""

from gradscope.view.document import View
from gradscope.view.page import page, serve, write_page

__all__ = ["View", "page", "serve", "write_page"]
