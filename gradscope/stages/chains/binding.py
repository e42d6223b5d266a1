"""From a chain's text to a chain: every name is resolved, every argument checked."""

import numpy as np
import torch
from torch import Tensor

from gradscope.core.grammar import Stage, parse
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError
from gradscope.sources.code import load_function
from gradscope.stages.chains.chain import Chain
from gradscope.stages.reducers import Reducer, reducers
from gradscope.stages.reducers.declared import is_reducer
from gradscope.stages.transforms import NeedsMean, NeedsProblem, Scope, Step, Vector, transforms
from gradscope.storage import open_file


def bind(text: str, *, reduced: bool = False) -> Chain:
    """Parse a chain and bind every name and argument in it.

    Args:
        text: For example "clip:max_norm=1 | mean".
        reduced: Append `mean` when the chain has no reducer.

    Raises:
        SpecError: A name is unknown, an argument does not fit, or a second reducer follows.
        InputError: A file that a stage names cannot be read.
    """
    stages = parse(text)
    before: list[Step] = []
    after: list[Step] = []
    reducer: Reducer | None = None
    for stage in stages:
        made = _bound(stage)
        if isinstance(made, Reducer):
            if reducer is not None:
                raise stage.error(
                    "a second reducer has no samples left to reduce", "Keep one reducer a chain."
                )
            if made.raw and before:
                raise stage.error(
                    f"{stage.name!r} reads the factors of raw gradients",
                    "Put no transform before it.",
                )
            reducer = made
        elif reducer is None:
            before.append(made)
        elif isinstance(made, NeedsMean | NeedsProblem):
            raise stage.error(f"{stage.name!r} needs samples, and none are left after a reducer")
        else:
            after.append(made)
    if reducer is None and reduced:
        stages, reducer = (*stages, Stage("mean")), reducers.get("mean")()
    whole = " | ".join(map(str, stages))
    files = any(".py:" in stage.name or "with" in stage.arguments for stage in stages)
    lasting = not files and not any(isinstance(step, NeedsMean) for step in before)
    return Chain(whole, tuple(before), reducer, tuple(after), lasting)


def _bound(stage: Stage) -> Step | Reducer:
    converters = {Vector: stored_vector}
    if ".py:" in stage.name:
        own = load_function(stage.name, "stage")
        if not (is_reducer(own) or isinstance(getattr(own, "scope", None), Scope)):
            raise stage.error(
                f"{stage.name!r} does not say what it is",
                'Put @gradscope.transform("elementwise") above a function of a tensor ("factor" '
                'for one of norms, "vector" for one of dense rows), or @gradscope.reducer above '
                "one that returns a reducer.",
            )
        made: Step | Reducer = stage.bind(own, converters)
        return made
    for registry in (transforms, reducers):
        factory = registry.find(stage.name)
        if factory is not None:
            return stage.bind(factory, converters)
    known = [*transforms.names(), *reducers.names()]
    raise stage.error(f"unknown transform or reducer {stage.name!r}", suggestion(stage.name, known))


def stored_vector(reference: str) -> Vector:
    """Read a stored aggregate.

    Args:
        reference: FILE.h5:CHAIN, where CHAIN is the chain's text or its number.

    Raises:
        ResultFileError: The file cannot be read.
        SpecError: It has no such reduced chain.
    """
    path, _, name = reference.rpartition(".h5:")
    if not path:
        raise ValueError(reference)
    with open_file(f"{path}.h5") as file:
        wanted = "".join(name.split())
        for k, chain in enumerate(file.chains):
            if chain.reduced and wanted in (str(k), "".join(chain.text.split())):
                values = {key: _tensor(array[:]) for key, array in chain.items()}
                return Vector(values, reference)
        known = [f"{k} ({c.text})" for k, c in enumerate(file.chains) if c.reduced]
    raise _no_such_chain(name, known)


def _tensor(array: np.ndarray) -> Tensor:
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return torch.from_numpy(np.asarray(array, dtype=wide))


def _no_such_chain(name: str, known: list[str]) -> SpecError:
    return SpecError(
        f"there is no reduced chain {name!r} in the file",
        remedy=f"Reduced chains in it: {', '.join(known) or 'none'}.",
    )
