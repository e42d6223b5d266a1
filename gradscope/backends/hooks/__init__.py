"""`hooks`: Goodfellow's method on the graph that autograd records, for unmodified models.

It takes one forward pass, and one backward pass to the frontier between operations on samples and
operations on parameters only. At the frontier, a block stores each sample's contribution
separately.
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
    SlowProgramError,
    backends,
    dense_evaluation,
    refusing,
    require_unhooked,
    token_backends,
)
from gradscope.backends.hooks import recurrent
from gradscope.backends.hooks.evidence import gradients_independent
from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.analysis import OTHERS, Analysis, FrontierEdge, analyse
from gradscope.backends.hooks.graph.axes import Axis, OwnerWeights, SpreadError, row_axis
from gradscope.backends.hooks.graph.movement import ELEMENTWISE, operation_name
from gradscope.backends.hooks.graph.ownership import analyse_owners
from gradscope.backends.hooks.graph.trace import Output, Trace, trace
from gradscope.backends.hooks.isolation import isolating
from gradscope.backends.hooks.pullback import pull_back
from gradscope.backends.hooks.rules import (
    DifferentNodesError,
    Site,
    elementwise,
    masked,
    merged,
    node_rules,
)
from gradscope.backends.loop import one_graph, one_sample
from gradscope.blocks import Block, DenseBlock, Evaluation, Gradients, total
from gradscope.core.batch import Batch, Tokens
from gradscope.core.precision import all_finite
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

_REMEMBERED = 256  # analysed programs, for example one per sequence length
_SMALL, _SMALLER = 3, 2  # samples of the forward passes that reveal the sample axes


def block_of(kind: str, site: Site) -> Block:
    """Return the block from the operation's rule, or from the masked fallback."""
    rule = node_rules.find(kind)
    one = site.gradients[0] is not None and site.axes[0] is not None
    # all other rules handle operations with one output
    usable = one or kind in (recurrent.KIND, *recurrent.CELLS)
    if site.lies_along_several:
        usable = one and kind.removesuffix("Backward0") in _BY_ENTRY
    block = rule(site) if rule is not None and usable else None
    if block is None and one and kind.endswith(("0", "1", "2")):  # not a Function in Python
        block = elementwise(site) if operation_name(kind) in ELEMENTWISE else None
    return masked(site) if block is None else block


@backends.register("hooks")
@contextmanager
def hooks(
    problem: Problem, contract: Callable[[str, Site], Block] = block_of
) -> Iterator[Evaluate]:
    """One backward pass over the recorded graph; it keeps structure and attaches nothing."""
    program = _Program(problem, contract)

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require("the hooks backend", internals.probe)
        require_unhooked("hooks", problem)
        with refusing("hooks", problem.model, OTHERS):
            if len(batch) == 1:
                return program.evaluate_one(batch, factors=request.factors)
            together = partial(program.evaluate, proved=request.proved, quick=request.quick)
            alone = partial(program.evaluate_one, factors=True)
            return isolating(problem, batch, together, alone)

    yield evaluate


# Rules in which an entry of the output gradient contributes only to its owner's row, for any owner.
# The second list also supports owners along several axes.
_MERGED = ("Mm", "Bmm", "Addmm", "Baddbmm", "GroupedMm", "Linear")
_NORMS = ("NativeLayerNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "FusedRmsNorm")
_BY_ENTRY = ("Add", "Sub", "Mul", "Div", "Expand", *_NORMS)
_BY_OWNER = ("Convolution", "Embedding", *_BY_ENTRY)


def row_block(kind: str, site: Site) -> Block:
    """Return the block of an operation, with one row per token.

    Raises:
        UnsupportedError: No rule keeps the positions of a sample separate here.
    """
    name = kind.removesuffix("Backward0")
    usable = name in _BY_OWNER or (name in _MERGED and not site.lies_along_several)
    if name == "Embedding":  # depends on how often the whole sample looks up a row
        usable = not site.saved("scale_grad_by_freq")
    rule = (
        node_rules.find(kind) if usable and None not in (site.gradients[0], site.axes[0]) else None
    )
    block = None if rule is None else rule(site)
    if block is None:
        raise UnsupportedError(
            "no rule computes the gradients of single positions", where=f"operation {kind}"
        )
    return block


@token_backends.register("hooks")
@contextmanager
def hooks_of_tokens(problem: Problem) -> Iterator[Evaluate]:
    """One backward pass for all positions if the model keeps them separate, else one per position.

    The positions must stay separate between the parameters and the losses: true for a head on
    frozen attention. Each batch is checked.
    """
    program, note = _Program(problem, row_block), ""  # the reason against a joint pass, once known

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        nonlocal note
        assert isinstance(batch, Tokens)
        require("the hooks backend", internals.probe)
        require_unhooked("hooks", problem)
        if not note:  # the reason found for one batch holds for later batches
            try:
                with refusing("hooks", problem.model, OTHERS):
                    together = partial(program.evaluate_rows, proved=request.proved)
                    return isolating(problem, batch, together, partial(one_graph, problem))
            except UnsupportedError as error:
                why = f"{error.what} ({error.where})"
                note = f"each token takes a backward pass ({batch.positions} per sample): {why}"
        with refusing("hooks", problem.model, OTHERS):
            return replace(one_graph(problem, batch), note=note)

    yield evaluate


class _Program:
    """A problem with the analyses made so far."""

    def __init__(self, problem: Problem, contract: Callable[[str, Site], Block]) -> None:
        self.problem, self.contract = problem, contract
        self.analyses: list[Analysis] = []
        self.singles: list[Analysis] = []  # valid only for one sample and its copies
        self.doubles_single = False  # whether to evaluate a single token sample twice
        self.stepwise = False  # whether to record fused recurrent layers step by step
        self.data_paths = True  # inputs require a gradient, so that the graph shows their paths
        self.is_independent = False  # float64 has shown that gradients do not mix samples
        self.quick = False  # whether to raise instead of a slow analysis
        self.evaluations = 0

    def evaluate(self, batch: Batch, *, proved: bool = False, quick: bool = False) -> Evaluation:
        self.quick = quick
        losses, recorded = self._record(batch)
        if recorded is None and self.problem.model_parallel is not None:
            raise ModelError(
                "the losses have no autograd graph",
                remedy="Remove detach() and no_grad() from the model and the loss.",
            )
        if recorded is None:
            return Evaluation(losses.detach(), self._gradients({}, losses), new=True)
        known = self._fitting(recorded)
        new = self.problem.any(known is None)  # if one process analyses, all do
        if new and not proved:  # otherwise the caller checks
            require_independent(self.problem, batch, recorded.losses.detach())
        sharding = self.problem.model_parallel
        with nullcontext() if sharding is None else sharding.exchange():
            analysis = self._analysis(recorded, batch) if new or known is None else known
            if new:
                self.problem.any(False)  # if one process raises, no other process starts a pass
            try:
                parts = self._parts(recorded, analysis)
            except UnsupportedError as error:  # for example a row that two samples use
                self.analyses = [other for other in self.analyses if other is not analysis]
                parts = self._parts(recorded, self._by_owners(recorded, batch, error))
                new = True
        if sharding is None and self._mixed(analysis, losses.detach()):
            raise SpreadError
        return Evaluation(losses.detach(), self._gradients(parts, losses), new=new)

    def _mixed(self, analysis: Analysis, losses: Tensor) -> bool:
        """Whether an operation may have multiplied non-finite values of another sample by 0.

        If no recorded operation moves samples, an operation without a derivative may have mixed
        them. Then no loss is finite although the parameters are.
        """
        if all_finite(losses):
            return False
        finite = losses.isfinite()
        if analysis.moves:
            return True
        sound = all(bool(p.isfinite().all()) for p in self.problem.parameters.values())
        return sound and not bool(finite.any())

    def evaluate_one(self, sample: Batch, *, factors: bool = False) -> Evaluation:
        """Return the gradient of a single sample, for which no sample axis is needed.

        If larger batches have revealed the structure, or if factors are requested, the sample is
        evaluated twice in one batch to keep the structure.
        """
        twice = sample.resized(2)
        _, recorded = self._record(twice) if self.analyses or factors else (None, None)
        analysis = None if recorded is None else self._fitting(recorded)
        if recorded is not None and analysis is None and factors:
            with suppress(UnsupportedError, SpreadError):
                analysis = self._of_single(recorded, twice)
        if recorded is not None and analysis is not None:
            with suppress(SpreadError):  # the two copies cannot be distinguished
                both = self._gradients(self._parts(recorded, analysis, alike=True), recorded.losses)
                return Evaluation(recorded.losses.detach()[:1], both.select(slice(0, 1)))
        loss, gradients = one_sample(self.problem, sample)
        return dense_evaluation(loss[None], {name: g[None] for name, g in gradients.items()})

    def evaluate_rows(self, batch: Tokens, *, proved: bool = False) -> Evaluation:
        """Return the gradients of tokens whose positions stay separate up to the losses.

        Raises:
            UnsupportedError: The positions interact or cannot be distinguished.
        """
        if len(batch.sample_batch) == 1 and not self.doubles_single:
            try:
                return self._rows(batch, batch.sample_batch, proved=proved)
            except UnsupportedError:  # the model may run differently on one sample
                self.doubles_single = True
        samples = batch.sample_batch
        samples = samples.resized(2) if len(samples) == 1 else samples
        return self._rows(batch, samples, proved=proved)

    def _rows(self, batch: Tokens, samples: Batch, *, proved: bool) -> Evaluation:
        """Return the gradients of tokens; `samples` begins with the tokens' samples."""
        losses, recorded = self._record(samples)
        rows = torch.full(losses.shape, -1, device=losses.device)
        sample, position = batch.sample.to(losses.device), batch.position.to(losses.device)
        rows[sample, position] = torch.arange(len(batch), device=losses.device)
        own = losses.detach()[sample, position]
        if recorded is None:
            return Evaluation(own, self._gradients({}, own), new=True)
        recorded = replace(recorded, loss_weights=(rows >= 0).to(losses.dtype))
        known, single = self._fitting(recorded), len(batch.sample_batch) == 1
        if known is None and single:
            known = next((a for a in self.singles if a.fits(recorded)), None)
        if known is None and not proved:
            require_independent(self.problem, batch, own)
        find = self._of_single if single else self._analysis
        analysis = find(recorded, samples) if known is None else known
        parts = self._parts(recorded, analysis, rows)
        return Evaluation(own, self._gradients(parts, own), new=known is None)

    def _record(self, batch: Batch) -> tuple[Tensor, Trace | None]:
        """Return the losses (n,) and their graph, or None if they have no graph."""
        if not self.stepwise:
            losses, recorded = self._forward(batch)
            if recorded is None or all(
                recurrent.shows_its_steps(node)
                for node in recorded.of_kinds(internals.FUSED_RECURRENT)
            ):
                return losses, recorded
            self.stepwise = True  # a fused recurrent layer hides steps that no rule supports
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
            losses = self.problem.losses(batch)  # raises again if the model is the cause
            # the model sets requires_grad on its own tensors
            self.data_paths = self.problem.any(False)
        return losses, trace(losses) if losses.requires_grad else None

    def _fitting(self, recorded: Trace) -> Analysis | None:
        return next((analysis for analysis in self.analyses if analysis.fits(recorded)), None)

    def _analysis(self, recorded: Trace, batch: Batch) -> Analysis:
        """Analyse a new program, with as few samples as possible."""
        losses = recorded.losses.detach()
        finite = losses.reshape(len(losses), -1).isfinite().all(1).nonzero().flatten().cpu()
        rows = finite if len(finite) else torch.arange(len(batch))  # 0 · NaN looks like coupling
        spread = batch.select(rows[torch.linspace(0, len(rows) - 1, _SMALL).long()])
        apart = self.problem.any(recorded.n != _SMALL or len(rows) < _SMALL)
        found = None
        with suppress(UnsupportedError, ModelError):  # the full batch may still succeed
            first: Trace | None = recorded
            other: Trace | None = recorded
            if recorded.n == _SMALL:
                other = self._record(batch.resized(_SMALLER))[1]
            if apart:
                first = self._record(spread)[1]
            found = self._analysed(recorded, spread, first, other)
        if not self.problem.any(found is None) and found is not None:
            return found
        other = self._record(batch.resized(2 * len(batch)))[1]
        try:
            return self._analysed(recorded, batch, self._record(batch)[1], other)
        except UnsupportedError as error:
            return self._by_owners(recorded, batch, error)

    def _by_owners(self, recorded: Trace, batch: Batch, error: UnsupportedError) -> Analysis:
        """Analyse a program from the gradients of its batch only.

        Comparing batches of two sizes shows where samples interact. This analysis does not: a value
        that all samples use may depend on them. So float64 must show once that it does not. For
        later programs, unaffected losses suffice.
        """
        if self.problem.model_parallel is not None or recorded.loss_weights is not None:
            raise error
        if not bool(recorded.losses.isfinite().all()):
            raise SpreadError  # the finite samples can be analysed
        if self.quick:
            raise SlowProgramError(error.what, where=error.where, remedy=error.remedy)
        show = require_unaffected if self.is_independent else gradients_independent
        if not show(self.problem, batch, recorded.losses.detach()):
            raise error
        self.is_independent = True
        named = {id(p) for p in self.problem.parameters.values()}
        analysis = analyse_owners(recorded, named, seed=self.evaluations)
        self.analyses = [*self.analyses[-_REMEMBERED:], analysis]
        return analysis

    def _of_single(self, recorded: Trace, twice: Batch) -> Analysis:
        """Analyse a program with one sample and its copies; valid only for such batches."""
        found = next((a for a in self.singles if a.fits(recorded)), None)
        if found is None:
            found = self._analysis(recorded, twice)
            self.singles.append(self.analyses.pop())
        return found

    def _analysed(
        self, recorded: Trace, batch: Batch, first: Trace | None, second: Trace | None
    ) -> Analysis:
        if first is None or second is None:
            raise UnsupportedError(
                "the losses of some samples have no autograd graph", remedy=OTHERS
            )
        try:
            analysis = analyse(first, second, {id(p) for p in self.problem.parameters.values()})
        except CoupledSamplesError as error:
            # this takes forward passes, which other processes may not make
            layer = None if self.problem.model_parallel else mixing_layer(self.problem, batch)
            error.where, error.remedy = (
                layer or error.where,
                coupled_remedy(layer, batch, self.problem.model),
            )
            raise
        if not analysis.fits(recorded):
            raise UnsupportedError(
                "two forward passes on the same samples run different operations", remedy=OTHERS
            )
        self.analyses = [*self.analyses[-_REMEMBERED:], analysis]
        return analysis

    def _parts(
        self,
        recorded: Trace,
        analysis: Analysis,
        rows: Tensor | None = None,
        *,
        alike: bool = False,
    ) -> dict[str, list[Block]]:
        """Contract the gradients at the frontier and propagate the blocks to the parameters.

        With `rows` (n, t), the blocks have one row per token; -1 marks positions without a row.
        `alike` means that all samples are copies of one sample.
        """
        outputs = analysis.outputs
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
        reached = {node for (node, _), t in at.items() if t is not None and t.numel()}

        def site(edge: FrontierEdge) -> Site:
            source, output = edge.source
            own = outputs[edge.node]
            return Site(
                node=recorded.nodes[edge.node],
                slot=edge.slot,
                n=n,
                shape=recorded.shapes[source][output],
                gradients=tuple([at[k] for k in own]),
                axes=tuple([axes.get(k) for k in own]),
                shared=shared,
                identical=alike,
            )

        def contracted(edges: Sequence[FrontierEdge]) -> Iterator[Block]:
            """Yield the blocks of edges by which one kind of operation uses one value."""
            used = [e for e in edges if e.node in reached]
            if len(used) > 1 and all(len(outputs[e.node]) == 1 for e in used):
                own = [outputs[e.node][0] for e in used]
                nodes, gradients = [recorded.nodes[e.node] for e in used], [at[k] for k in own]
                together = merged(site(used[0]), nodes, gradients, [axes.get(k) for k in own])
                with suppress(DifferentNodesError, UnsupportedError):  # then one by one
                    if together is not None:
                        yield self._contracted(recorded, used[0], together)
                        return
            for edge in used:
                yield self._contracted(recorded, edge, site(edge))

        parts: dict[str, list[Block]] = {}
        with torch.no_grad():  # saved tensors still have their graph
            for edges in self._windows(recorded, analysis):
                arrived = [(same[0].source, block) for same in edges for block in contracted(same)]
                for name, blocks in pull_back(recorded, arrived, self.problem.parameters).items():
                    parts.setdefault(name, []).extend(blocks)
        return parts

    def _contracted(self, recorded: Trace, edge: FrontierEdge, site: Site) -> Block:
        """Return the block at an edge in the value's dtype; kernels may save half as float32."""
        source, output = edge.source
        block = self.contract(recorded.kinds[edge.node], site)
        dtype = internals.output_dtypes(recorded.nodes[source])[output]
        return block if block.dtype == dtype else block.to(dtype)

    def _windows(
        self, recorded: Trace, analysis: Analysis
    ) -> Iterator[Sequence[tuple[FrontierEdge, ...]]]:
        """Yield the frontier in parts, with the parameters of each part unsharded meanwhile.

        A part has groups of edges that one rule may contract together.
        """
        sharding, frontier = self.problem.model_parallel, analysis.frontier
        if sharding is None:
            yield analysis.alike
            return
        leaves = [recorded.leaves(edge.source[0]) for edge in frontier]
        for chosen in sharding.windows(leaves):
            yield [(frontier[k],) for k in chosen]

    def _row_axes(
        self,
        recorded: Trace,
        analysis: Analysis,
        at: Mapping[Output, Tensor | None],
        axes: Mapping[Output, Axis],
        rows: Tensor,
    ) -> dict[Output, Axis]:
        """Return the token that owns each entry at the frontier, from marks on the positions."""
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
                where = f"parameters {self._used(recorded, analysis, output[0])}"
                raise UnsupportedError(str(error), where=where, remedy=OTHERS) from error
        return own

    def _used(self, recorded: Trace, analysis: Analysis, node: int) -> str:
        """Return the names of the parameters that an operation at the frontier uses."""
        edges = (edge for edge in analysis.frontier if edge.node == node)
        leaves = {id(leaf) for edge in edges for leaf in recorded.leaves(edge.source[0])}
        return listed(name for name, p in self.problem.parameters.items() if id(p) in leaves)

    def _gradients(self, parts: dict[str, list[Block]], losses: Tensor) -> Gradients:
        rows: dict[str, Block] = {}
        for name, p in self.problem.parameters.items():
            own = parts.get(name)
            rows[name] = total(own) if own else DenseBlock(p.new_zeros(len(losses), *p.shape))
        return Gradients(rows)
