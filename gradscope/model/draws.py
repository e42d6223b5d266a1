"""Results of torch's random operations, computed from words: 32 random bits per number.

A rule takes the operation's arguments and a function that returns words of a shape. The results
have the operation's distribution. They are the same on any device and in any precision, up to
rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.core.precision import double
from gradscope.errors import UnsupportedError

# maps a shape to int32 words with random bits
Words = Callable[[Sequence[int], torch.device], Tensor]

EVAL = "Use mode eval, or set the dropout probabilities to zero."

cast = torch.ops.aten._to_copy.default  # like `Tensor.to`, which is not available below autograd


def draw(func: Any, args: Any, kwargs: dict[str, Any], words: Words) -> Any:
    """Return the result of a random operation computed from `words`, or NotImplemented."""
    rule = _RULES.get(kind_of(func))
    outs = [a.name for a in func._schema.arguments if a.is_out]
    if rule is None or len(outs) > 1:
        return NotImplemented
    given = _bound(func, args, kwargs)
    if not outs:
        return rule(func, given, words)
    out: Tensor = given.pop(outs[0])
    drawn = rule(func, given | {"dtype": out.dtype, "device": out.device}, words)
    if drawn is NotImplemented:
        return drawn
    return (out if out.shape == drawn.shape else out.resize_(drawn.shape)).copy_(drawn)


@cache
def is_random(func: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def kind_of(func: Any) -> str:
    """Return an operation's name; in-place and out-of-place forms have the same name."""
    name: str = func._schema.name
    return name.partition("::")[2].rstrip("_")


def _unit(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1): the same in any precision, up to rounding down."""
    digits = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    whole: Tensor = cast((w >> 32 - digits) & 2**digits - 1, dtype=dtype)
    return whole.mul_(2.0**-digits)


def _inner(w: Tensor) -> Tensor:
    """Return numbers in (0, 1), in the widest precision of the device."""
    dtype = double(w.device)
    return _unit(w, dtype).add_(2.0**-25)


def _chance(w: Tensor, p: Any) -> Tensor:
    """Return a mask of an event with probability p."""
    if isinstance(p, Tensor):
        return _unit(w, torch.promote_types(p.dtype, torch.float32)) < p
    level = round(float(p) * 2**32) - 2**31
    return (w >> 31) <= 0 if level >= 2**31 else w < level


def _normal(w: Tensor) -> Tensor:
    return torch.erfinv(_inner(w).mul_(2).sub_(1)).mul_(2**0.5)


def _whole(w: Tensor, low: int, high: int) -> Tensor:
    if not 0 < high - low <= 2**31:
        raise UnsupportedError(
            f"there are no fixed random integers from {low} to {high}: the interval is too large",
            remedy="Draw from an interval of at most 2³¹ integers.",
        )
    words: Tensor = cast(w, dtype=torch.int64) & 2**32 - 1
    return ((words * (high - low)) >> 32) + low


def _least(
    below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, *, whole: bool = False
) -> Tensor:
    """Return the least number in (low, high] that is not `below`, by bisection."""
    for _ in range(32 if whole else 64):
        middle = (low + high) / 2
        middle = middle.floor() if whole else middle
        short = below(middle)
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return high


def _poisson(w: Tensor, rate: Tensor) -> Tensor:
    """Return the least k with P(X ≤ k) = Q(k + 1, rate) not below a uniform number."""
    # outside, P is below 2⁻²⁵, the least u, or above 1 - 2⁻²⁵
    u, spread = _inner(w), 8 * rate.sqrt()
    rate = cast(rate, dtype=u.dtype)
    low, high = (rate - spread - 8).floor().clamp(min=-1), (rate + spread + 24).ceil()
    return _least(
        lambda k: (k < 0) | (torch.special.gammaincc(k + 1, rate) < u), low, high, whole=True
    )


def _log_gamma(w: Tensor, a: Tensor) -> Tensor:
    """Return log x such that P(X ≤ x) = P(a, x), which is below xᵃ / Γ(a + 1), is uniform."""
    u = _inner(w)
    a = cast(a, dtype=u.dtype)
    low, high = (u.log() + torch.lgamma(a + 1)) / a, (a + 8 * a.sqrt() + 24).log()
    return _least(lambda x: torch.special.gammainc(a, x.exp()) < u, low, high)


def _binomial(w: Tensor, count: Tensor, p: Tensor) -> Tensor:
    """Return the number of k with P(X ≤ k), a sum of terms, below a uniform number."""
    u = _inner(w).unsqueeze(-1)
    n, p = (cast(t, dtype=u.dtype).unsqueeze(-1) for t in (count, p))
    spread = 8 * (n * p * (1 - p)).sqrt() + 24
    low = (n * p - spread).floor().clamp(min=0)
    # rounded, for few different widths
    terms = 1 << int(2 * spread.amax()).bit_length() if spread.numel() else 0
    k = low + torch.arange(terms, device=u.device)
    choices = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    rest = (n - k).clamp(min=0)
    law = (choices + torch.special.xlogy(k, p) + torch.special.xlog1py(rest, -p)).exp()
    below = torch.where(k < n, law, 1.0).cumsum(-1) < u
    found: Tensor = low.squeeze(-1) + below.sum(-1)
    return found


# functions from words and the operation's arguments to its result, by operation name
_DRAWS: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "bernoulli": lambda w, g: _chance(w, g["self"] if g.get("p") is None else g["p"]),
    "rand": lambda w, g: _unit(w, g["dtype"]),
    "rand_like": lambda w, g: _unit(w, g["dtype"]),
    "uniform": lambda w, g: _unit(w, g["dtype"]) * (g["to"] - g["from"]) + g["from"],
    "randn": lambda w, g: _normal(w),
    "randn_like": lambda w, g: _normal(w),
    "normal": lambda w, g: _normal(w) * g["std"] + g["mean"],
    "log_normal": lambda w, g: (_normal(w) * g["std"] + g["mean"]).exp(),
    "exponential": lambda w, g: _inner(w).log() / -g["lambd"],
    "cauchy": lambda w, g: (_inner(w).sub(0.5) * math.pi).tan() * g["sigma"] + g["median"],
    "geometric": lambda w, g: (_inner(w).log() / math.log1p(-g["p"])).ceil(),
    "randint": lambda w, g: _whole(w, g.get("low", 0), g["high"]),
    "randint_like": lambda w, g: _whole(w, g.get("low", 0), g["high"]),
    "random": lambda w, g: _whole(w, g.get("from") or 0, g.get("to") or 2**63),
    "randperm": lambda w, g: w.argsort(stable=True),
    "poisson": lambda w, g: _poisson(w, g["self"]),
    "binomial": lambda w, g: _binomial(w, g["count"], g["prob"]),
    "_standard_gamma": lambda w, g: (
        _log_gamma(w, g["self"]).exp().clamp(min=torch.finfo(g["dtype"]).tiny)
    ),
    "_sample_dirichlet": lambda w, g: _log_gamma(w, g["self"]).softmax(-1),
}


def _made(func: Any, given: dict[str, Any], words: Words) -> Any:
    """Compute the result of an operation that creates or fills a tensor of random numbers."""
    found = [t for t in given.values() if isinstance(t, Tensor)]
    if "size" in given:
        shape = given["size"]
    elif "n" in given:
        shape = [given["n"]]
    elif "self" in given:
        shape = given["self"].shape
    else:
        shape = np.broadcast_shapes(*(t.shape for t in found))
    place = found[0].device if found else given.get("device")
    kind = kind_of(func)
    whole = torch.int64 if kind in ("randint", "randperm") else torch.get_default_dtype()
    dtype = given.get("dtype")
    if not isinstance(dtype, torch.dtype):  # a number: the default in the schema
        dtype = found[0].dtype if found else whole
    if dtype.is_complex or (kind == "uniform" and not dtype.is_floating_point):
        raise UnsupportedError(
            f"fixed random numbers of dtype {dtype} are not supported", remedy=EVAL
        )
    values = _DRAWS[kind](words(shape, torch.device(place or "cpu")), given | {"dtype": dtype})
    if func._schema.name.endswith("_"):
        return given["self"].copy_(values)
    return cast(values, dtype=dtype)


def _dropout(func: Any, given: dict[str, Any], words: Words) -> Any:
    """`native_dropout`: the kept entries, scaled, and the mask."""
    x, p = given["input"], given["p"]
    if given["train"] is False:
        return NotImplemented
    kept = _chance(words(x.shape, x.device), 1 - p)
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _rrelu(func: Any, given: dict[str, Any], words: Words) -> Any:
    """`rrelu_with_noise`: random slopes below zero, which are stored in `noise`."""
    x, low, high = given["self"], given["lower"], given["upper"]
    if not given["training"]:
        return NotImplemented
    slopes = _unit(words(x.shape, x.device), x.dtype) * (high - low) + low
    given["noise"].copy_(torch.where(x <= 0, slopes, torch.ones_like(x)))
    found = x * given["noise"]
    return x.copy_(found) if func._schema.name.endswith("_") else found


def _multinomial(func: Any, given: dict[str, Any], words: Words) -> Any:
    """`multinomial` (n, k): by the order of exponential clocks, or by uniform numbers."""
    weights, k = given["self"], given["num_samples"]
    again = given["replacement"]
    w = words((*weights.shape[:-1], k) if again else weights.shape, weights.device)
    # all 32 bits, so that few numbers are equal
    u = cast(w, dtype=_inner(w).dtype).add_(2**31 + 0.5).mul_(2.0**-32)
    if not again:
        return (u.log() / weights).sort(dim=-1, descending=True, stable=True)[1].narrow(-1, 0, k)
    ends = cast(weights, dtype=u.dtype).cumsum(-1)
    return (ends.unsqueeze(-2) <= (u * ends.narrow(-1, -1, 1)).unsqueeze(-1)).sum(-1)


_RULES = {
    **dict.fromkeys(_DRAWS, _made),
    "native_dropout": _dropout,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
}


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, including defaults."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given.update({a.name: value for a, value in zip(arguments, args, strict=False)})
    return given | kwargs
