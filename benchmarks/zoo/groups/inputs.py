"""Inputs of a model whose signature is all that is known: several guesses, until it runs."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo.subject import MOST, NotBuiltError, outputs_of, parts, shaken

_TRIES = 60  # guesses at most
Make = Callable[[int, int], Any]


class Shape(NamedTuple):
    """One sample of an input.

    Attributes:
        kind: "real", "positive", "ids", "ones", "boxes", "steps", or "image:TOKEN": text of which
            the first `bound` tokens are an image's.
        size: Shape of one sample.
        bound: Upper bound of integers.
    """

    kind: str
    size: tuple[int, ...]
    bound: int = 0


Guess = Mapping[str, Shape]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what libraries warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def small(build: Callable[[], nn.Module], most: int = MOST) -> nn.Module:
    """Return the model that `build` makes, with random weights, unless it has too many of them.

    Raises:
        NotBuiltError: It has more than `most` parameters.
    """
    with quiet():
        try:
            with torch.device("meta"):
                _require_small(build(), most)
        except NotBuiltError:
            raise
        except Exception:  # its constructor reads numbers, which tensors of no device have not
            pass
        torch.manual_seed(0)
        model = build()
    _require_small(model, most)
    return shaken(model.float())


def _require_small(model: nn.Module, most: int) -> None:
    size = sum(p.numel() for p in model.parameters())
    if size > most:
        raise NotBuiltError(f"{size} parameters are more than {most}")


def runnable(model: nn.Module, makes: Iterable[Make]) -> Make:
    """Return the first maker of inputs with which the model runs.

    Raises:
        NotBuiltError: It runs with none, or no output has a sample axis.
    """
    reasons = []
    for make in islice(makes, _TRIES):
        try:
            tried = copy.deepcopy(model)  # or what it caches would stay in the model
            with torch.no_grad(), quiet():
                two, single = outputs_of(tried, make(0, 2)), outputs_of(tried, make(0, 1))
            found, alone = parts(two), parts(single)
            if any(
                t.dim() and len(t) == 2 and place in alone and len(alone[place]) == 1
                for place, t in found.items()
            ):
                return make
            raise NotBuiltError("no output has a sample axis")
        except Exception as error:  # models raise any class of error here
            reasons.append(f"{type(error).__name__}: {error}")
    raise NotBuiltError("; ".join(dict.fromkeys(reasons)) or "there is no guess at its inputs")


def maker(guess: Guess, fixed: Mapping[str, Any] | None = None) -> Make:
    """Return what makes inputs by name (n, ...); sample i is the same in batches of any size."""

    def make(seed: int, n: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        found: dict[str, Any] = {}
        for key, shape in guess.items():
            found[key] = torch.stack([_sample(shape, generator) for _ in range(n)])
        return found | dict(fixed or {})

    return make


def _sample(shape: Shape, generator: torch.Generator) -> Tensor:
    kind, size, bound = shape
    if kind == "ids":
        return torch.randint(3, max(bound, 4), size, generator=generator)
    if kind == "steps":
        return torch.randint(1, max(bound, 2), size, generator=generator).float()
    if kind == "ones":
        return torch.ones(size, dtype=torch.long)
    if kind == "boxes":
        low = torch.randint(0, bound // 2, (*size, 2), generator=generator)
        return torch.cat([low, low + bound // 4], -1)
    if kind.startswith("image:"):
        text = torch.randint(3, 90, size, generator=generator)
        text[1 : 1 + bound] = int(kind.removeprefix("image:"))
        return text
    drawn = torch.randn(size, generator=generator)
    return drawn.abs() + 0.1 if kind == "positive" else drawn


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without a default."""
    return [
        key
        for key, p in inspect.signature(function).parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and key != "self"
    ]


def guesses(options: Mapping[str, Sequence[Shape]]) -> Iterator[dict[str, Shape]]:
    """Yield guesses: the first input takes each of its shapes, with each number of the others'."""
    longest = max(map(len, options.values()), default=0)
    seen = set()
    for k in range(longest):
        for j in range(longest if len(options) > 1 else 1):
            guess = {
                key: shapes[(k if i == 0 else j) % len(shapes)]
                for i, (key, shapes) in enumerate(options.items())
            }
            if tuple(guess.items()) not in seen:
                seen.add(tuple(guess.items()))
                yield guess
