"""What the transforms refuse, with the place in the chain and the remedy."""

from collections.abc import Callable

import numpy as np
import pytest

from gradscope.errors import SpecError
from gradscope.stages import chains
from gradscope.stages.chains import bind, binding
from gradscope.stages.transforms import Scope, Vector, transforms
from tests.stages.transforms.rows import Rows, everything, run, stored

__all__ = ["stored"]

REFUSED = [
    ("power", "needs p"),
    ("power:p=0", "positive"),
    ("power:p=-1", "positive"),
    ("power:p=inf", "finite"),
    ("power:q=2", "no argument 'q'"),
    ("clamp", "give min, max or both"),
    ("clamp:min=2,max=1", "above max"),
    ("clamp:min=nan", "min"),
    ("clamp:mim=1", "Did you mean 'min'"),
    ("threshold", "value"),
    ("threshold:value=-1", "negative"),
    ("threshold:value=nan", "negative"),
    ("quantize", "bits"),
    ("quantize:bits=1", "2 to 24"),
    ("quantize:bits=25", "2 to 24"),
    ("quantize:bits=2.5", "int"),
    ("scale", "by"),
    ("scale:by=inf", "finite"),
    ("clip:max_norm=1,p=0", "positive"),
    ("clip:max_norm=1,p=nan", "positive"),
    ("clip:max_norm=1,per=layer", "sample or parameter"),
    ("clip:max_norm=-1", "positive"),
    ("clip:maxnorm=1", "Did you mean 'max_norm'"),
    ("normalize:per=x", "sample or parameter"),
    ("normalize:p=-2", "positive"),
    ("norm:p=0", "positive"),
    ("norm:per=layer", "sample or parameter"),
    ("topk", "one of them"),
    ("topk:k=1,fraction=0.5", "one of them"),
    ("topk:k=0", "at least 1"),
    ("topk:fraction=0", "above 0"),
    ("topk:fraction=1.5", "at most 1"),
    ("center:x=1", "takes no arguments"),
    ("mean | center", "needs samples"),
    ("mean | cosine:to=mean", "needs samples"),
    ("mean | hvp", "needs samples"),
    ("project", "dim"),
    ("project:dim=0", "from 1 to 16,777,216"),
    ("project:dim=1000000000000", "from 1 to 16,777,216"),
    ("project:dim=99999999999999999999", "64 bits"),
    ("noise:std=1,seed=99999999999999999999", "64 bits"),
    ("var:ddof=99999999999999999999", "64 bits"),
    ("histogram:bins=1000000000000", "from 2 to 16,777,216"),
    ("project:dim=4,kind=gausian", "gaussian"),
    ("cosine", "one of them"),
    ("cosine:to=mean,with=stored", "one of them"),
    ("cosine:to=median", "mean"),
    ("dot", "with"),
    ("dot:to=mean", "no argument 'to'"),
    ("precondition", "with"),
    ("precondition:with=stored,damping=-1", "negative"),
    ("precondition:with=stored,damping=nan", "finite"),
    ("noise", "std"),
    ("noise:std=-1", "negative"),
    ("noise:std=inf", "finite"),
    ("hvp:x=1", "no argument 'x'"),
    ("projekt:dim=4", "Did you mean 'project'"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refused(text: str, words: str, stored: Callable[[Rows], None]) -> None:
    stored({"w": np.ones(2)})
    with pytest.raises(SpecError) as caught:
        bind(text)
    assert words in str(caught.value) and "^" in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, np.nan, 1j])
def test_what_is_no_second_moment(bad: complex, stored: Callable[[Rows], None]) -> None:
    stored({"w": np.array([1.0, bad])})
    with pytest.raises(SpecError, match="no second moment") as caught:
        bind("mean | precondition:with=stored")
    assert " " * 9 + "^" in str(caught.value)


@pytest.mark.parametrize("text", ["dot", "cosine", "precondition"])
def test_a_vector_that_does_not_fit(text: str, stored: Callable[[Rows], None]) -> None:
    gradients, rows = everything()
    vector = {k: np.abs(v[0]) for k, v in rows.items()}
    stored(vector | {"outer": np.ones((3, 4))})
    with pytest.raises(SpecError, match=r"'outer' is of shape \(3, 4\)"):
        run(f"{text}:with=stored", gradients)
    del vector["table"]
    stored(vector)
    with pytest.raises(SpecError, match="'table' is absent"):
        run(f"{text}:with=stored", gradients)


def test_every_transform_declares_its_scope_and_says_what_it_is() -> None:
    for name in transforms.names():
        factory = transforms.get(name)
        assert isinstance(factory.scope, Scope), name  # type: ignore[attr-defined]
        first, _, rest = (factory.__doc__ or "").partition("\n")
        assert first.endswith((".", ";", ",")) or rest, name


def test_first_passes_of_different_vectors_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quoted argument may hold the sign that parts stages."""
    monkeypatch.setattr(binding, "stored_vector", lambda reference: Vector({}, reference))
    texts = [f'precondition:with="v.h5:square | mean{tail}" | center' for tail in ("", " | abs")]
    waiting = chains.waiting([bind(text) for text in texts])
    assert list(waiting) == [text.replace("center", "mean") for text in texts]
