"""Pages explain their own terms, and leave the user's words alone."""

from html.parser import HTMLParser

import pytest

from gradscope import markup
from gradscope.markup.glossary import TERMS, explained


class Explained(HTMLParser):
    """The terms of a page that have an explanation: {term: explanation}."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "abbr":
            assert given["tabindex"] == "0"  # the keyboard reaches it
            self.open = given["title"]

    def handle_data(self, data: str) -> None:
        if self.open is not None:
            self.found[data], self.open = self.open, None


@pytest.mark.parametrize("term", TERMS)
def test_each_term_is_explained(term: str) -> None:
    assert Explained(explained(term)).found == {term: TERMS[term]}
    assert Explained(explained(term.capitalize())).found == {term.capitalize(): TERMS[term]}
    for sentence in TERMS[term].rstrip(".").split(". "):
        assert len(sentence.split()) <= 25


def test_words_without_an_explanation_are_escaped() -> None:
    assert explained("<b>&") == "&lt;b&gt;&amp;"


def test_labels_and_headings_are_explained_and_names_from_data_are_not() -> None:
    columns = [
        markup.Column("SNR", ["1"], [1.0]),
        markup.Column("share", ["2"], [2.0], from_data=True),
    ]
    names = markup.Column("parameter", ["noise scale"])
    assert Explained(markup.table(columns, names)).found == {"SNR": TERMS["SNR"]}
    own = markup.Column("", ["noise scale"])
    assert {*Explained(markup.table(columns, own)).found} == {"SNR", "noise scale"}
    assert {*Explained(markup.facts([("opposed", "SNR"), ("", "norm")])).found} == {"opposed"}
