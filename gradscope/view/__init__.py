"""`gradscope view`: the samples of a result file on one page that answers."""

from gradscope.view.document import View, look
from gradscope.view.page import page, write_page
from gradscope.view.serve import serve

__all__ = ["View", "look", "page", "serve", "write_page"]
