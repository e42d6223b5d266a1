"""A run whose every number is known: four parameters, two chains, written in batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, OuterBlock, ScatterBlock
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    FinishedBatch,
    GradientFile,
    open_file,
    open_writer,
)

N, BATCH = 100, 16
SHAPES = {"w": (7, 5), "layer.weight": (40, 30), "emb": (50, 8), "scale": ()}
PLAN = FilePlan(
    run={"seed": 3, "options": {"dtype": "float32"}},
    fingerprint={"checkpoint": "c1", "options": {"seed": 3}},
    attributes={"checkpoint_sha256": "c" * 64, "dataset_sha256": "d" * 64},
    n=N,
    parameters=SHAPES,
    chains=(ChainPlan("identity", False), ChainPlan("mean", True)),
)


def _random() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"w": (7, 5), "left": (1, 2, 40), "right": (1, 2, 30), "rows": (3, 8), "scale": ()}
    made = {k: torch.randn(N, *s, generator=generator) for k, s in sizes.items()}
    return made | {"index": torch.randint(0, 50, (N, 3), generator=generator)}


DATA = _random()


def gradients(start: int, stop: int) -> Gradients:
    part = {k: v[start:stop] for k, v in DATA.items()}
    return Gradients(
        {
            "w": DenseBlock(part["w"]),
            "layer.weight": OuterBlock(part["left"], part["right"], (40, 30)),
            "emb": ScatterBlock(part["index"], part["rows"], 50),
            "scale": DenseBlock(part["scale"]),
        }
    )


def changing(start: int, stop: int) -> Gradients:
    """Return blocks whose structure changes from row 50 on."""
    found = gradients(start, stop)
    return found if start < 50 else found.map(lambda block: DenseBlock(block.dense()))


def expected() -> dict[str, np.ndarray]:
    """The dense rows (N, *shape), by numpy alone."""
    d = {k: v.numpy() for k, v in DATA.items()}
    table = np.zeros((N, 50, 8), np.float32)
    for i in range(N):
        np.add.at(table[i], d["index"][i], d["rows"][i])
    outer = np.einsum("ntr,ntc->nrc", d["left"][:, 0], d["right"][:, 0])
    return {"w": d["w"], "layer.weight": outer, "emb": table, "scale": d["scale"]}


def rows(start: int, stop: int, made: Gradients | None = None, **more: Tensor) -> FinishedBatch:
    found = gradients(start, stop) if made is None else made
    at = torch.arange(start, stop)
    samples = {"index": at, "loss": at / 7, "norm": found.norms, "finite": at % 5 > 0}
    return FinishedBatch(
        samples | {"target": at % 3} | more,
        norms={k: v.sqrt() for k, v in found.squared_norms.items()},
        chains=(found, None),
    )


def batches(start: int = 0, size: int = BATCH) -> Iterator[tuple[int, int]]:
    for at in range(start, N, size):
        yield at, min(at + size, N)


def write(
    path: Path,
    plan: FilePlan = PLAN,
    size: int = BATCH,
    make: Callable[[int, int], Gradients] = gradients,
    stop_at: int | None = None,
    **options: Any,
) -> None:
    """Write the whole run; raise KeyboardInterrupt before row `stop_at`."""
    with open_writer(path, plan, **options) as writer:
        states = writer.states
        for start, stop in batches(writer.completed, size):
            if stop_at is not None and start >= stop_at:
                raise KeyboardInterrupt
            made = make(start, stop)
            state = states.setdefault("chain:1", {})
            for name, block in made.items():
                total = block.dense().double().sum(0)
                state[f"sum:{name}"] = state.get(f"sum:{name}", torch.zeros_like(total)) + total
            writer.append(rows(start, stop, made), states)
        means = {k: v / N for k, v in states.get("chain:1", {}).items()}
        writer.finish(
            {1: {k.removeprefix("sum:"): v for k, v in means.items()}},
            {"verdict": "exact"},
            {name: {"mean_gradient_norm": 0.5 + len(name)} for name in plan.parameters},
            {"1": states.get("chain:1", {})},
        )


def write_block(
    path: Path,
    plan: FilePlan,
    block: Block,
    batch: int = BATCH,
    stop_at: int | None = None,
    **more: Any,
) -> None:
    """Write the rows of one block, or stop after some of them."""
    plan = replace(plan, n=block.n, parameters={"w": block.shape}, chains=PLAN.chains[:1])
    with open_writer(path, plan, **more) as writer:
        for start in range(writer.completed, stop_at or block.n, batch):
            stop = min(start + batch, stop_at or block.n)
            made = Gradients({"w": block.select(slice(start, stop))})
            writer.append(replace(rows(start, stop, made), chains=(made,)))
        if stop_at is None:
            writer.finish({}, {})


def contents(file: GradientFile) -> dict[str, Any]:
    """Everything in the file."""
    found: dict[str, Any] = {f"samples/{k}": v for k, v in file.samples.items()}
    found |= {f"norms/{k}": v for k, v in file.norms.items()}
    for k, chain in enumerate(file.chains):
        found |= {f"chains/{k}/{name}": array[...] for name, array in chain.items()}
    documents = (file.run, file.certificate, file.parameters, file.norm_attributes)
    return found | {"documents": documents, "attributes": file.attributes}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two files' contents agree to the last bit."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        if isinstance(a[k], np.ndarray)
        else a[k] == b[k]
        for k in a
    )


def load(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        return contents(file)


def with_layout(layout: Any, **changes: Any) -> FilePlan:
    return replace(PLAN, layout=layout, **changes)


def names(folder: Path) -> list[str]:
    """The files in a folder."""
    return sorted(p.name for p in folder.iterdir())


def unsealed(data: bytes) -> bytes:
    """A file's bytes without its seal."""
    count = int.from_bytes(data[-48:-40], "little")
    return data[: -48 - 24 * count]
