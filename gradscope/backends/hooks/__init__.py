"""`hooks`: Goodfellow's method on the graph that autograd records, for any model, untouched.

One forward pass, one backward pass to the frontier between operations on samples and operations on
parameters alone; there each sample's contribution is kept apart, as a block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.base import (
    ROWS,
    Evaluate,
    Request,
    backends,
    dense_evaluation,
    refusing,
    require_unhooked,
    token_backends,
)
from gradscope.backends.hooks import recurrent
from gradscope.backends.hooks.evidence import are_apart
from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.analysis import OTHERS, Analysis, FrontierEdge, analyse
from gradscope.backends.hooks.graph.axes import Axis, OwnerWeights, SpreadError, row_axis
from gradscope.backends.hooks.graph.ownership import analyse_owners
from gradscope.backends.hooks.graph.trace import Output, Trace, trace
from gradscope.backends.hooks.isolation import isolating
from gradscope.backends.hooks.pullback import pull_back
from gradscope.backends.hooks.rules import Site, masked, node_rules
from gradscope.backends.loop import one_graph, one_sample
from gradscope.blocks import Block, DenseBlock, Evaluation, Gradients, total
from gradscope.core.batch import Batch, Tokens
from gradscope.core.texts import listed
from gradscope.errors import CoupledSamplesError, ModelError, UnsupportedError
from gradscope.model.independence import (
    coupled_remedy,
    mixing_layer,
    require_independent,
    require_unaffected,
)
from gradscope.model.problem import Problem, differentiable_inputs, unfused
from gradscope.model.releases import require

__all__ = ["hooks"]

_REMEMBERED = 256  # programs: sequences of so many lengths, for example
_SMALL, _SMALLER = 3, 2  # samples of forward passes that show the sample axes


def block_of(kind: str, site: Site) -> Block:
    """Return the block by the operation's rule, or by the masked fallback."""
    rule = node_rules.find(kind)
    one = site.gradients[0] is not None and site.axes[0] is not None
    # all other rules are of operations with one output
    usable = one or kind in (recurrent.KIND, *recurrent.CELLS)
    if site.lies_along_several:
        usable = one and kind.removesuffix("Backward0") in _BY_ENTRY
    block = rule(site) if rule is not None and usable else None
    return masked(site) if block is None else block


@backends.register("hooks")
@contextmanager
def hooks(
    problem: Problem, contract: Callable[[str, Site], Block] = block_of
) -> Iterator[Evaluate]:
    """One backward pass over the recorded graph; structure is kept, nothing is attached."""
    program = _Program(problem, contract)

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require("the hooks backend", internals.probe)
        require_unhooked("hooks", problem)
        with refusing("hooks", problem.model, OTHERS):
            if len(batch) == 1:
                return program.evaluate_one(batch, factors=request.factors)
            together = partial(program.evaluate, proved=request.proved)
            alone = partial(program.evaluate_one, factors=True)
            return isolating(problem, batch, together, alone)

    yield evaluate


# Rules in which an entry of the output gradient adds to its owner's row alone, whoever that is;
# the second go by axes that lie side by side as well.
_MERGED = ("Mm", "Bmm", "Addmm", "Baddbmm", "GroupedMm", "Linear")
_NORMS = ("NativeLayerNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "FusedRmsNorm")
_BY_ENTRY = ("Add", "Sub", "Mul", "Div", "Expand", *_NORMS)
_APART = ("Convolution", "Embedding", *_BY_ENTRY)


def row_block(kind: str, site: Site) -> Block:
    """Return the block of an operation by rows of tokens.

    Raises:
        UnsupportedError: No rule keeps a sample's positions apart here.
    """
    name = kind.removesuffix("Backward0")
    usable = name in _APART or (name in _MERGED and not site.lies_along_several)
    if name == "Embedding":  # by how often the whole sample looks a row up
        usable = not site.saved("scale_grad_by_freq")
    rule = (
        node_rules.find(kind) if usable and None not in (site.gradients[0], site.axes[0]) else None
    )
    block = None if rule is None else rule(site)
    if block is None:
        raise UnsupportedError("positions are not kept apart", where=f"operation {kind}")
    return block


@token_backends.register("hooks")
@contextmanager
def hooks_of_tokens(problem: Problem) -> Iterator[Evaluate]:
    """One backward pass for all positions of a model that keeps them apart, else one for each.

    What is looked at lies between the parameters and the losses: a head on frozen attention does.
    Each batch shows it by itself.
    """
    program, note = _Program(problem, row_block), ""  # and what is in the way of it

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        nonlocal note
        assert isinstance(batch, Tokens)
        require("the hooks backend", internals.probe)
        require_unhooked("hooks", problem)
        if not note:  # what one batch shows is known from then on
            try:
                with refusing("hooks", problem.model, OTHERS):
                    together = partial(program.evaluate_rows, proved=request.proved)
                    return isolating(problem, batch, together, partial(one_graph, problem))
            except UnsupportedError as error:
                why = f"{error.what} ({error.where})"
                note = f"each token takes a backward pass, {batch.positions} a sample: {why}"
        with refusing("hooks", problem.model, OTHERS):
            return replace(one_graph(problem, batch), note=note)

    yield evaluate


class _Program:
    """A problem with what was found out about it so far."""

    def __init__(self, problem: Problem, contract: Callable[[str, Site], Block]) -> None:
        self.problem, self.contract = problem, contract
        self.known: list[Analysis] = []
        self.singles: list[Analysis] = []  # by one sample and its copies: for such batches alone
        self.doubled = False  # a single sample whose positions are asked for stands twice
        self.stepwise = False  # record fused recurrent layers step by step
        self.data_paths = True  # inputs require a gradient, so that their paths show
        self.apart = False  # whether float64 has shown that gradients do not mix samples
        self.evaluations = 0

    def evaluate(self, batch: Batch, *, proved: bool = False) -> Evaluation:
        losses, recorded = self._record(batch)
        if recorded is None and self.problem.model_parallel is not None:
            raise ModelError("the losses have no graph", remedy="Look for detach or no_grad.")
        if recorded is None:
            return Evaluation(losses.detach(), self._gradients({}, losses), new=True)
        known = self._fitting(recorded)
        new = self.problem.any(known is None)  # what one process looks into, all do
        if new and not proved:  # by who asks
            require_independent(self.problem, batch, recorded.losses.detach())
        sharding = self.problem.model_parallel
        with nullcontext() if sharding is None else sharding.exchange():
            analysis = self._analysis(recorded, batch) if new or known is None else known
            if new:
                self.problem.any(False)  # where one process refuses, no other begins a pass
            try:
                parts = self._parts(recorded, analysis)
            except UnsupportedError as error:  # a row that two samples use, for example
                self.known = [other for other in self.known if other is not analysis]
                parts = self._parts(recorded, self._by_owners(recorded, batch, error))
                new = True
        if sharding is None and self._mixed(analysis, losses.detach()):
            raise SpreadError
        return Evaluation(losses.detach(), self._gradients(parts, losses), new=new)

    def _mixed(self, analysis: Analysis, losses: Tensor) -> bool:
        """Whether an operation may have multiplied by 0 what is not finite of another sample.

        If no operation is seen to move samples, one without a derivative might: then no loss is
        finite, although the parameters are.
        """
        finite = losses.isfinite()
        if bool(finite.all()):
            return False
        if analysis.moves:
            return True
        sound = all(bool(p.isfinite().all()) for p in self.problem.parameters.values())
        return sound and not bool(finite.any())

    def evaluate_one(self, sample: Batch, *, factors: bool = False) -> Evaluation:
        """Return the gradient of a single sample: nothing has to be told apart.

        Once larger batches have shown the structure, or if it is asked for, it is kept: the sample
        stands twice.
        """
        twice = sample.resized(2)
        _, recorded = self._record(twice) if self.known or factors else (None, None)
        analysis = None if recorded is None else self._fitting(recorded)
        if recorded is not None and analysis is None and factors:
            with suppress(UnsupportedError, SpreadError):
                analysis = self._of_single(recorded, twice)
        if recorded is not None and analysis is not None:
            with suppress(SpreadError):  # nothing tells the two copies apart
                both = self._gradients(self._parts(recorded, analysis, alike=True), recorded.losses)
                return Evaluation(recorded.losses.detach()[:1], both.select(slice(0, 1)))
        loss, gradients = one_sample(self.problem, sample)
        return dense_evaluation(loss[None], {name: g[None] for name, g in gradients.items()})

    def evaluate_rows(self, batch: Tokens, *, proved: bool = False) -> Evaluation:
        """Return the gradients of tokens whose positions do not meet before the losses.

        Raises:
            UnsupportedError: They do, or nothing tells them apart.
        """
        if len(batch.whole) == 1 and not self.doubled:
            try:
                return self._rows(batch, batch.whole, proved=proved)
            except UnsupportedError:  # it may run otherwise than two samples do
                self.doubled = True
        samples = batch.whole.resized(2) if len(batch.whole) == 1 else batch.whole
        return self._rows(batch, samples, proved=proved)

    def _rows(self, batch: Tokens, samples: Batch, *, proved: bool) -> Evaluation:
        """Return the gradients of tokens of the first of some samples."""
        losses, recorded = self._record(samples)
        rows = torch.full(losses.shape, -1, device=losses.device)
        sample, position = batch.sample.to(losses.device), batch.position.to(losses.device)
        rows[sample, position] = torch.arange(len(batch), device=losses.device)
        own = losses.detach()[sample, position]
        if recorded is None:
            return Evaluation(own, self._gradients({}, own), new=True)
        recorded = replace(recorded, asked=(rows >= 0).to(losses.dtype))
        known, single = self._fitting(recorded), len(batch.whole) == 1
        if known is None and single:
            known = next((a for a in self.singles if a.fits(recorded)), None)
        if known is None and not proved:
            require_independent(self.problem, batch, own)
        find = self._of_single if single else self._analysis
        analysis = find(recorded, samples) if known is None else known
        parts = self._parts(recorded, analysis, rows)
        return Evaluation(own, self._gradients(parts, own), new=known is None)

    def _record(self, batch: Batch) -> tuple[Tensor, Trace | None]:
        """Return the losses (n,) and their graph, or None where they have none."""
        if not self.stepwise:
            losses, recorded = self._forward(batch)
            if recorded is None or not any(
                kind in internals.FUSED_RECURRENT and not recurrent.shows_its_steps(node)
                for kind, node in zip(recorded.kinds, recorded.nodes, strict=True)
            ):
                return losses, recorded
            self.stepwise = True  # a fused recurrent layer hides steps that no rule knows
        with unfused():
            return self._forward(batch)

    def _forward(self, batch: Batch) -> tuple[Tensor, Trace | None]:
        given, losses = differentiable_inputs(batch) if self.data_paths else batch, None
        try:
            losses = self.problem.losses(given)
        except ModelError:
            if not self.data_paths:
                raise
        if self.problem.any(losses is None) or losses is None:
            losses = self.problem.losses(batch)  # raises again where it is the model's fault
            self.data_paths = self.problem.any(False)  # it sets requires_grad on what it makes
        return losses, trace(losses) if losses.requires_grad else None

    def _fitting(self, recorded: Trace) -> Analysis | None:
        return next((analysis for analysis in self.known if analysis.fits(recorded)), None)

    def _analysis(self, recorded: Trace, batch: Batch) -> Analysis:
        """Find out about a program that is new, by as few samples as will do."""
        losses = recorded.losses.detach()
        finite = losses.reshape(len(losses), -1).isfinite().all(1).nonzero().flatten().cpu()
        rows = finite if len(finite) else torch.arange(len(batch))  # 0 · NaN looks like coupling
        spread = batch.select(rows[torch.linspace(0, len(rows) - 1, _SMALL).long()])
        found = None
        with suppress(UnsupportedError, ModelError):  # it may still hold for all of them
            other = recorded if recorded.n != _SMALL else self._record(batch.resized(_SMALLER))[1]
            found = self._analysed(recorded, spread, other)
        if not self.problem.any(found is None) and found is not None:
            return found
        other = self._record(batch.resized(2 * len(batch)))[1]
        try:
            return self._analysed(recorded, batch, other)
        except UnsupportedError as error:
            return self._by_owners(recorded, batch, error)

    def _by_owners(self, recorded: Trace, batch: Batch, error: UnsupportedError) -> Analysis:
        """Find out about a program by the gradients of its batch alone.

        Comparing batches of two sizes shows what samples compute together. This does not: a value
        that all of them use may depend on them. So float64 has to show once that it does not;
        of later programs, losses that other samples leave unchanged do.
        """
        if self.problem.model_parallel is not None or recorded.asked is not None:
            raise error
        if not bool(recorded.losses.isfinite().all()):
            raise SpreadError  # the samples that are finite show it
        show = require_unaffected if self.apart else are_apart
        if not show(self.problem, batch, recorded.losses.detach()):
            raise error
        self.apart = True
        named = {id(p) for p in self.problem.parameters.values()}
        analysis = analyse_owners(recorded, named, seed=self.evaluations)
        self.known = [*self.known[-_REMEMBERED:], analysis]
        return analysis

    def _of_single(self, recorded: Trace, twice: Batch) -> Analysis:
        """Find out about a program by one sample and its copies: for such batches alone."""
        found = next((a for a in self.singles if a.fits(recorded)), None)
        if found is None:
            found = self._analysis(recorded, twice)
            self.singles.append(self.known.pop())
        return found

    def _analysed(self, recorded: Trace, batch: Batch, second: Trace | None) -> Analysis:
        _, first = self._record(batch)
        if first is None or second is None:
            raise UnsupportedError("some samples' losses have no graph", remedy=OTHERS)
        try:
            analysis = analyse(first, second, {id(p) for p in self.problem.parameters.values()})
        except CoupledSamplesError as error:
            # which takes forward passes, that other processes may not make
            layer = None if self.problem.model_parallel else mixing_layer(self.problem, batch)
            error.where, error.remedy = (
                layer or error.where,
                coupled_remedy(layer, batch, self.problem.model),
            )
            raise
        if not analysis.fits(recorded):
            raise UnsupportedError("the model does not run alike twice", remedy=OTHERS)
        self.known = [*self.known[-_REMEMBERED:], analysis]
        return analysis

    def _parts(
        self,
        recorded: Trace,
        analysis: Analysis,
        rows: Tensor | None = None,
        *,
        alike: bool = False,
    ) -> dict[str, list[Block]]:
        """Contract the gradients at the frontier and pull the blocks back to the parameters.

        With `rows` (n, t), those of tokens, -1 where there is none. The samples are `alike` where
        they are copies of a single one.
        """
        nodes = sorted({edge.node for edge in analysis.frontier})
        outputs = {k: [(k, j) for j in range(len(recorded.shapes[k]))] for k in nodes}
        if not outputs:
            return {}
        every = [output for found in outputs.values() for output in found]
        at = recorded.gradients(every, torch.ones_like(recorded.losses))
        self.evaluations += 1
        sharding = self.problem.model_parallel
        agree = None if sharding is None else sharding.any
        axes = analysis.located(recorded, at, seed=self.evaluations, agree=agree)
        n = recorded.n
        if rows is not None:
            n, axes = int((rows >= 0).sum()), self._row_axes(recorded, analysis, at, axes, rows)
        shared: dict[Node, Any] = {}

        def site(edge: FrontierEdge) -> Site:
            source, output = edge.source
            own = outputs[edge.node]
            return Site(
                node=recorded.nodes[edge.node],
                slot=edge.slot,
                n=n,
                shape=recorded.shapes[source][output],
                gradients=tuple(at[k] for k in own),
                axes=tuple(axes.get(k) for k in own),
                shared=shared,
                alike=alike,
            )

        parts: dict[str, list[Block]] = {}
        with torch.no_grad():  # what was saved still has its graph
            for edges in self._windows(recorded, analysis):
                sites = [(edge, site(edge)) for edge in edges]
                arrived = [
                    (edge.source, self._contracted(recorded, edge, at_edge))
                    for edge, at_edge in sites
                    if any(g is not None and g.numel() for g in at_edge.gradients)
                ]
                for name, blocks in pull_back(recorded, arrived, self.problem.parameters).items():
                    parts.setdefault(name, []).extend(blocks)
        return parts

    def _contracted(self, recorded: Trace, edge: FrontierEdge, site: Site) -> Block:
        """Return the block at an edge; some kernels save float32 of values in half precision."""
        source, output = edge.source
        block = self.contract(recorded.kinds[edge.node], site)
        dtype = internals.output_dtypes(recorded.nodes[source])[output]
        return block if block.dtype == dtype else block.to(dtype)

    def _windows(self, recorded: Trace, analysis: Analysis) -> Iterator[Sequence[FrontierEdge]]:
        """Yield the frontier, in parts whose parameters are there while they are worked on."""
        sharding, frontier = self.problem.model_parallel, analysis.frontier
        if sharding is None:
            yield frontier
            return
        leaves = [recorded.leaves(edge.source[0]) for edge in frontier]
        for chosen in sharding.windows(leaves):
            yield [frontier[k] for k in chosen]

    def _row_axes(
        self,
        recorded: Trace,
        analysis: Analysis,
        at: Mapping[Output, Tensor | None],
        axes: Mapping[Output, Axis],
        rows: Tensor,
    ) -> dict[Output, Axis]:
        """Return which tokens own the entries at the frontier, by marks on the positions."""
        late = sorted(axes, key=lambda k: -internals.moment(recorded.nodes[k[0]]))
        given = {k: gradient for k in late if (gradient := at.get(k)) is not None}
        wanted = {k: gradient for k, gradient in given.items() if gradient.numel()}
        marks = OwnerWeights.of(recorded.losses.detach()[0], self.evaluations, recorded.dtypes)
        passes = [recorded.gradients([*wanted], weights) for weights in marks.weights]
        own: dict[Output, Axis] = {}
        for output, once in wanted.items():
            every = (found[output] for found in passes)
            often = [torch.zeros_like(once) if t is None else t for t in every]
            try:
                own[output] = row_axis(once, often, axes[output], rows, marks)
            except ValueError as error:
                where = f"by {self._used(recorded, analysis, output[0])}"
                raise UnsupportedError(str(error), where=where, remedy=OTHERS) from error
        return own

    def _used(self, recorded: Trace, analysis: Analysis, node: int) -> str:
        """Return the names of the parameters that an operation at the frontier takes."""
        edges = (edge for edge in analysis.frontier if edge.node == node)
        leaves = {id(leaf) for edge in edges for leaf in recorded.leaves(edge.source[0])}
        return listed(name for name, p in self.problem.parameters.items() if id(p) in leaves)

    def _gradients(self, parts: dict[str, list[Block]], losses: Tensor) -> Gradients:
        rows: dict[str, Block] = {}
        for name, p in self.problem.parameters.items():
            own = parts.get(name)
            rows[name] = total(own) if own else DenseBlock(p.new_zeros(len(losses), *p.shape))
        return Gradients(rows)
