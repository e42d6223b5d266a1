"""`gradscope view`: the samples of a result file on one page that answers."""

from gradscope.view.document import View, open_view
from gradscope.view.page import page, serve, write_page

__all__ = ["View", "open_view", "page", "serve", "write_page"]
