"""How the rule of `auto` was chosen: `python -m benchmarks.attribution.study`.

Scores come from the inverse of H = (1 − ρ)F + ρT, or from the mean of H⁻¹ and T⁻¹. T is the damped
EK-FAC. With the forms `raised` and `raised further`, ρ / (1 − ρ) is multiplied by d/N or its power
1.5. d/N is the number of effective directions of T for each sample, if there is more than one. All
is computed in float64 from dense rows, for each training of `kinds`. A rule is a form, a share ρ
and a way to choose the damping without retraining. Leave-one-task-out: for each task, the rule that
is best on all other tasks. The tasks of `UNSEEN` choose no rule.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradscope
from benchmarks.attribution.kinds import KINDS, UNSEEN, Kind, agreement, stored
from benchmarks.attribution.methods import METHODS
from benchmarks.attribution.truth import Truth
from gradscope.attribution.curvature import LEAST, RemainingGradient, Ridge, ekfac_curvature
from gradscope.attribution.sources import scope_source
from gradscope.blocks import DenseBlock, Gradients

Rows = Mapping[str, Tensor]  # {parameter: (n, *shape)}
Rule = tuple[str, float, str]  # form, share, way to choose α
SHARES = (0.95, 0.8, 0.4, 0.2)
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_RAISED = {"raised": 1.0, "raised further": 1.5}  # the power of d/N
_MIXED = ("H", "mean", *_RAISED)
FORMS = [("T", 1.0), *((form, share) for form in _MIXED for share in SHARES)]
OTHERS = tuple(name for name in METHODS if name.startswith("kronfluence"))
OURS = ("auto", "ekfac", "fisher")


@dataclass(frozen=True)
class Products:
    """Products of queries q, training samples g, and samples c of the Fisher, with T⁻¹ between."""

    qg: Tensor
    qc: Tensor
    cc: Tensor
    cg: Tensor
    gg: Tensor  # the diagonal (N,)

    def scores(self, form: str, share: float) -> np.ndarray:
        """Return the scores (M, N): of T⁻¹, of H⁻¹ or of the mean of both, `raised` or not."""
        if form == "T":
            return np.asarray(self.qg)
        n, odds = len(self.cc), share / (1 - share)
        if form in _RAISED:
            odds *= max(1.0, float(self.gg.mean()) / n) ** _RAISED[form]
        matrix = self.cc / n + odds * torch.eye(n, dtype=torch.float64)
        solved = torch.linalg.solve(matrix, self.cg) / n
        found = self.qg - self.qc @ solved
        if form != "H":
            own = self.gg.sum() - (self.cg * solved).sum()
            found = self.qg + found * (self.gg.sum() / own)
        scores: np.ndarray = found.numpy()
        return scores

    def centred(self) -> "Products":
        """Return them with the mean removed from the samples of the Fisher."""
        cc = self.cc - self.cc.mean(0) - self.cc.mean(1, keepdim=True) + self.cc.mean()
        return Products(
            self.qg, self.qc - self.qc.mean(1, keepdim=True), cc, self.cg - self.cg.mean(0), self.gg
        )


class View:
    """The rows of a model, and its EK-FAC, with labels of the data or sampled ones."""

    def __init__(self, kind: Kind, model: nn.Module, *, sampled: bool = False) -> None:
        scope, (inputs, targets) = gradscope.Scope(model, kind.loss), kind.train
        self.g, self.q = (_rows(scope, *part) for part in (kind.train, kind.query))
        self.c = self.g
        if sampled:
            with torch.no_grad():
                targets = kind.sampled(model(inputs))
            self.c = _rows(scope, inputs, targets)
        source = scope_source("training samples", scope, inputs, targets)
        self.moments = source.aggregates(["ekfac"])[0]
        mean = {name: rows.mean(0) for name, rows in self.g.items()}
        drift = RemainingGradient(mean, kind.size)
        self.trusted = ekfac_curvature(self.moments, LEAST, drift).chosen

    def products(self, damping: float | Ridge, names: Callable[[str], bool] = bool) -> Products:
        """Return the products over the parameters of some names."""
        inverse = ekfac_curvature(self.moments, damping).apply
        of_c = inverse(_gradients(self.c), torch.float64)
        of_g = of_c if self.c is self.g else inverse(_gradients(self.g), torch.float64)
        kept = [name for name in self.g if names(name)]

        def together(first: Rows, second: Rows) -> Tensor:
            pairs = (first[k].flatten(1) @ second[k].flatten(1).mT for k in kept)
            return sum(pairs, torch.zeros((), dtype=torch.float64))

        qc, cc = together(self.q, of_c), together(self.c, of_c)
        own = sum((self.g[k] * of_g[k]).flatten(1).sum(1) for k in kept)
        if self.c is self.g:
            return Products(qc, qc, cc, cc, torch.as_tensor(own))
        mixed = together(self.c, of_g), together(self.q, of_g)
        return Products(mixed[1], qc, cc, mixed[0], torch.as_tensor(own))

    def dampings(self) -> dict[str, Ridge]:
        """Return the damping by the way it is chosen: `trust`, times 10, or by N / d times k."""
        directions = float(self.products(self.trusted).gg.mean()) / len(
            next(iter(self.g.values()))
        )  # d / N
        ways = {"trust": self.trusted, "trust × 10": self.trusted.times(10.0)}
        for k in (3, 10, 30):
            times = min(k / directions, 100.0, 100.0 / self.trusted.relative)
            ways[f"trust × {k} N/d"] = self.trusted.times(max(1.0, times))
        return ways


def _rows(scope: gradscope.Scope, inputs: Tensor, targets: Tensor) -> Rows:
    return {k: v.double() for k, v in scope.per_sample_gradients(inputs, targets).items()}


def _gradients(rows: Rows) -> Gradients:
    return Gradients({name: DenseBlock(values) for name, values in rows.items()})


def _embedding(name: str) -> bool:
    return "tokens" in name or "positions" in name


def _norm(name: str) -> bool:
    return "norm" in name


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks (M, S) by row, with mean 0 and norm 1: `lds` without its interval, and ties."""
    found = values.argsort(1).argsort(1) - (values.shape[1] - 1) / 2.0
    ranks: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return ranks


def measure(kind: Kind, truth: Truth, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return LDS of one model: of `rules`, the `grid` of dampings, the `switches`, `methods`."""
    model = kind.fit(np.arange(kind.size), seed)

    losses = _ranks(truth.mean.T)

    def agrees(scores: np.ndarray) -> float:
        found = _ranks(-(scores @ truth.subsets.T.astype(np.float64)))
        return float((found * losses).sum(1).mean())

    view = View(kind, model)
    rules: dict[str, float] = {}
    for way, damping in view.dampings().items():
        found = view.products(damping)
        rules |= {str((*one, way)): agrees(found.scores(*one)) for one in FORMS}
    grid: dict[str, float] = {}
    for damping in DAMPINGS:
        found = view.products(damping)
        grid |= {f"{one}, {damping}": agrees(found.scores(*one)) for one in FORMS}
    chosen, damping = ("raised further", 0.4), view.dampings()["trust × 10 N/d"]
    whole = view.products(damping)
    switches = {"as it is": agrees(whole.scores(*chosen))}
    switches["mean removed"] = agrees(whole.centred().scores(*chosen))
    for what, left_out in (("embeddings out", _embedding), ("norms out", _norm)):
        if any(map(left_out, view.g)):
            some = view.products(damping, lambda name, out=left_out: not out(name))  # type: ignore[misc]
            switches[what] = agrees(some.scores(*chosen))
    torch.manual_seed(seed)
    drawn = View(kind, model, sampled=True)
    switches["labels sampled"] = agrees(drawn.products(damping).scores(*chosen))
    methods = {}
    for name in (*(f"gradscope {one}" for one in OURS), *OTHERS):
        if METHODS[name].present:
            methods[name] = agrees(METHODS[name].scores(kind, deepcopy(model)))  # type: ignore[arg-type]
    return {"rules": rules, "grid": grid, "switches": switches, "methods": methods}


def left_out(found: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return {task: the rule that is best on the other tasks, and its LDS on this one}."""
    chosen, known = {}, [name for name in found if name not in UNSEEN]
    for name in found:
        others = [found[other]["rules"] for other in known if other != name]
        rule = max(others[0], key=lambda r: sum(other[r] for other in others))
        chosen[name] = rule, found[name]["rules"][rule]
    return chosen


def hindsight(one: Mapping[str, Mapping[str, float]]) -> float:
    """Return the best LDS of a task over all that was measured of gradscope."""
    return max(max(one[part].values()) for part in ("rules", "grid", "switches"))


def table(found: Mapping[str, Any], ceilings: Mapping[str, float]) -> list[str]:
    """Return the lines of a table in Markdown: a task a line, and the means of both lists."""
    chosen = left_out(found)
    known = list(next(iter(found.values()))["methods"])
    heads = ["ceiling", "hindsight", "rule of the others", *known, "gradscope shrunk"]
    heads += ["labels sampled", "embeddings out", "norms out", "mean removed"]
    lines = [f"| LDS | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for kinds, mean in ((KINDS, "mean"), (UNSEEN, "mean, unseen")):
        rows = {}
        for name in (name for name in kinds if name in found):
            one = found[name]
            switches = [one["switches"].get(what) for what in heads[4 + len(known) :]]
            own = [ceilings[name], hindsight(one), chosen[name][1], *one["methods"].values()]
            rows[kinds[name].title] = [*own, one["rules"][str(("H", 0.95, "trust"))], *switches]
        if rows:
            columns = zip(*rows.values(), strict=True)
            each = ([v for v in column if v is not None] for column in columns)
            rows[mean] = [float(np.mean(values)) if values else None for values in each]
        for title, row in rows.items():
            cells = ("" if v is None else f"{v:.3f}" for v in row)
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the tasks that were asked for, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attribution.study",
        description="Measure how the rule of auto generalises, leaving out one task after another.",
    )
    every = ", ".join(KINDS | UNSEEN)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"{every} [all]")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="keep what was measured")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.json
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    names, ceilings = options.tasks or [*KINDS, *UNSEEN], {}
    if len(set(names) - UNSEEN.keys()) < 2:
        known = ", ".join(KINDS)
        parser.error(f"give at least two tasks of {known}: the rule is chosen on other tasks")
    for name in names:
        kind, truth = stored(name)
        ceilings[name] = agreement(truth)
        if name not in found:
            found[name] = measure(kind, truth)
            print(f"{name}: {found[name]['methods']}", file=sys.stderr)
            if path is not None:
                path.write_text(json.dumps(found))
    chosen = {name: found[name] for name in names}
    print("\n".join(table(chosen, ceilings)))
    for name, (rule, _) in left_out(chosen).items():
        print(f"without {name}: {rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
