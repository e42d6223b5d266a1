"""Binding of chains, which reads the files they name: code, stored vectors, optimiser states."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from gradscope.errors import SpecError
from gradscope.model.optimizer import OptimizerState, ParameterNames
from gradscope.sources.code import load_function
from gradscope.sources.weights.optimizer import read_names, read_optimizer
from gradscope.stages import chain
from gradscope.stages.chain import Chain, Chained, Readers
from gradscope.stages.transforms.base import Vector
from gradscope.storage import find_chain, open_file


def stored_vector(reference: str) -> Vector:
    """Read the stored aggregate FILE.h5:CHAIN; CHAIN is the chain's text or number."""
    path, _, name = reference.rpartition(".h5:")
    if not path:
        remedy = "Give FILE.h5:K; K is the number or the text of a chain with a reducer."
        raise SpecError(f"{reference!r} does not name a stored vector", remedy=remedy)
    with open_file(f"{path}.h5") as file:
        if chain := find_chain(file, name, reduced=True):
            values = {}
            for key, array in chain.items():
                stored = array[:]
                dtype = np.complex128 if np.iscomplexobj(stored) else np.float64
                values[key] = torch.from_numpy(np.asarray(stored, dtype=dtype))
            return Vector(values, reference)
        known = [f"{k} ({c.text})" for k, c in enumerate(file.chains) if c.reduced]
    raise SpecError(
        f"the file has no chain {name!r} with a reducer",
        remedy=f"Its chains with a reducer: {', '.join(known) or 'none'}.",
    )


READERS = Readers(
    function=partial(load_function, kind="stage"),
    arguments={
        Vector: stored_vector,
        OptimizerState: lambda text: read_optimizer(Path(text)),
        ParameterNames: read_names,
    },
)


def bind(text: Chained, *, reduced: bool = False) -> Chain:
    """Bind a chain and read the files that it names; see `gradscope.stages.chain.bind`.

    Raises:
        SpecError: A name is unknown, an argument is invalid, or a second reducer follows.
        InputError: A file that a stage names cannot be read.
    """
    return chain.bind(text, reduced=reduced, readers=READERS)
