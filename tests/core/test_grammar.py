"""The grammar of chains: examples, errors that point at the place, and properties."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscope.core.grammar import Stage, parse
from gradscope.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path as OnlyForCheckers

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
texts = st.text(
    st.characters(exclude_characters='|,="', exclude_categories=["Z", "C"]), min_size=1, max_size=6
)
chains = st.lists(
    st.builds(Stage, names, st.dictionaries(names, texts, max_size=3)), min_size=1, max_size=4
)
spaces = st.sampled_from(["", " ", "  ", "\t"])


def shape(stages):
    return [(stage.name, stage.arguments) for stage in stages]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("mean", [("mean", {})]),
        ("clip:max_norm=1.0 | mean", [("clip", {"max_norm": "1.0"}), ("mean", {})]),
        (" a : x = 1 , y = b:c |b|c ", [("a", {"x": "1", "y": "b:c"}), ("b", {}), ("c", {})]),
        ("square|var:ddof=0", [("square", {}), ("var", {"ddof": "0"})]),
    ],
)
def test_chains(text, right):
    assert shape(parse(text)) == right


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 0, "empty"),
        ("a | | b", 4, "empty"),
        ("a |", 3, "empty"),
        ("a | 2b", 4, "'2b'"),
        ("a b", 0, "'a b'"),
        ("clip:", 5, "name=value"),
        ("clip:1.0", 5, "'1.0'"),
        ("mean | clip:x=1,y", 16, "'y'"),
        ("clip:x=", 5, "name=value"),
        ("clip:=1", 5, "name=value"),
        ("clip:x=1,x=2", 9, "twice"),
        ("clip:x=1,", 9, "name=value"),
    ],
)
def test_errors_point_at_the_place(text, column, words):
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert words in caught.value.what
    shown, caret = caught.value.remedy.splitlines()[:2]
    assert shown == f"  {text}"
    assert caret.index("^") == column + 2


@given(st.text(max_size=40) | st.text("ab1:|=, _", max_size=20))
def test_any_text_parses_or_is_a_spec_error(text):
    try:
        stages = parse(text)
    except SpecError as error:
        assert "^" in str(error)
    else:
        assert shape(parse(" | ".join(map(str, stages)))) == shape(stages)


@given(chains, spaces)
def test_what_is_printed_is_what_was_parsed(stages, space):
    """White space around stages means nothing, and positions point at the stages."""
    text = space + f"{space}|{space}".join(map(str, stages)) + space
    found = parse(text)
    assert shape(found) == shape(stages)
    assert all(text[s.position :].startswith(s.name) and s.chain == text for s in found)


def bound(text, factory):
    return parse(text)[0].bind(factory)


def factory(count: int, rate: float = 0.5, exact: bool = False, kind: Literal["l1", "l2"] = "l2"):
    if count < 0:
        raise ValueError("count must not be negative")
    return count, rate, exact, kind


def test_arguments_are_converted_as_annotated():
    assert bound("f:count=3", factory) == (3, 0.5, False, "l2")
    assert bound("f:count=3,rate=1e-2,exact=TRUE,kind=l1", factory) == (3, 0.01, True, "l1")


def untyped(count=3, rate=0.5, exact=False, kind="l2", sides=(1, 2.5), other=None, *, needed):
    return count, rate, exact, kind, sides, other, needed


def hinted(
    outputs: "OnlyForCheckers", rate: "float" = 0.5, sides: list[float] = (), p: Literal[1, 2] = 2
):
    return rate, sides, p


def others(
    rate: "OnlyForCheckers | float | None" = None,
    sides: "list[float] | None" = None,
    either: int | float = 1,
    any_text: str | int = 1,
    kind: Literal["a"] | float = "a",
    file: Path = Path(),
    metres: "Annotated[float, 'm']" = 1.0,
    checked: "OnlyForCheckers | None" = None,
    **more,
):
    return rate, sides, either, any_text, kind, file, metres, more


@pytest.mark.parametrize(
    ("text", "factory", "right"),
    [
        ("f:needed=x", untyped, (3, 0.5, False, "l2", (1, 2.5), None, "x")),
        ("f:exact=false,needed=true", untyped, (3, 0.5, False, "l2", (1, 2.5), None, True)),
        ("f:rate=2,kind=7,needed=7", untyped, (3, 2.0, False, "7", (1, 2.5), None, 7)),
        ('f:sides="3,4.5",needed="1,2"', untyped, (3, 0.5, False, "l2", (3, 4.5), None, (1, 2))),
        ("f:other=0.25,needed=a1", untyped, (3, 0.5, False, "l2", (1, 2.5), 0.25, "a1")),
        ('f:outputs=0,rate=2,sides="1,2",p=1', hinted, None),
        ("f:rate=2,p=1", partial(hinted, 0), (2.0, (), 1)),
        ('f:sides="1,2"', partial(hinted, 0), (0.5, [1.0, 2.0], 2)),
        ('f:sides="1,2",new=3', others, (None, [1.0, 2.0], 1, 1, "a", Path(), 1.0, {"new": 3})),
        ("f:either=.5,any_text=7,kind=2", others, (None, None, 0.5, 7, 2.0, Path(), 1.0, {})),
        ("f:any_text=x,kind=a,file=y/z", others, (None, None, 1, "x", "a", Path("y/z"), 1.0, {})),
        ("f:metres=2,either=3", others, (None, None, 3, 1, "a", Path(), 2.0, {})),
    ],
)
def test_arguments_without_a_type_have_that_of_their_default(text, factory, right):
    """`exact=false` is no text that counts as true; what only checkers know is not evaluated."""
    if right is None:
        with pytest.raises(SpecError, match="has the type OnlyForCheckers"):
            bound(text, factory)
        return
    found = bound(text, factory)
    assert found == right and [type(v) for v in found] == [type(v) for v in right]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f", "needs count"),
        ("f:count=3.5", "must be int"),
        ("f:count=x", "must be int, not 'x'"),
        ("f:count=1,rate=fast", "must be float"),
        ("f:count=1,exact=maybe", "must be bool"),
        ("f:count=1,rat=2", "no argument 'rat'"),
        ("f:count=1,rat=2", "Did you mean 'rate'"),
        ("f:count=1,kind=l3", "must be l1 or l2, not 'l3'"),
        ("f:count=-1", "count must not be negative"),
        ("g:either=x", "either must be int or float, not 'x'"),
        ("g:kind=x", "kind must be a or float, not 'x'"),
        ("g:sides=x", "sides must be numbers such as"),
        ("g:checked=x", "has the type OnlyForCheckers | None: text cannot"),
    ],
)
def test_arguments_that_do_not_fit(text, words):
    with pytest.raises(SpecError) as caught:
        bound(text, factory if text[0] == "f" else others)
    assert words in str(caught.value) and text in str(caught.value)
