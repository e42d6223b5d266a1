"""Processes that train one model together: their agreement, and the layout of parameters.

Each process (rank) has its own samples. With DistributedDataParallel it has the whole model. With
fully_shard (FSDP2) it has a part of every parameter, and a layer is whole only while it is used.

Each participant of a collective call waits for all others. So all ranks decide together (`any`)
whether to make such a call, and an error on one rank becomes an error on every rank.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint as checkpointing

from gradscope.core.batch import Batch
from gradscope.core.precision import on_host, perturbed
from gradscope.errors import GradscopeError, RefusedError, SpecError, UnsupportedError
from gradscope.model.reach import every_module
from gradscope.process.shortage import is_machine_error

T = TypeVar("T")

_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|caused pair closure")


_OUT_OF_STEP = "gradscope/parted"  # key in the store for the failed rank and its error


class OtherProcessError(RefusedError):
    """Another process has failed for a reason that does not concern this process's results."""


class OutOfStepError(OtherProcessError):
    """The processes are out of step: no process may wait for another."""


class Ranks:
    """The processes of a group, each with the whole model.

    Args:
        group: The process group.
        device: The device of the model.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._failed: BaseException | None = None  # the error that all ranks know

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank.

        Raises:
            RefusedError: Another rank has failed.
        """
        return self._all_reduce_max(int(flag)) > 0

    def agree(self, error: BaseException | None = None) -> None:
        """Raise if any rank has an error: its own error there, a `RefusedError` on other ranks.

        The error on other ranks is an `OtherProcessError`, unless a result was refused.
        """
        if error is not None and (error is self._failed or isinstance(error, OutOfStepError)):
            raise error
        self._all_reduce_max(0 if error is None else 2, error)

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Turn an error of the body on one rank into an error on all ranks."""
        try:
            yield
        except Exception as error:
            self.agree(error)
            raise
        self.agree()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Run a backward pass in which other ranks wait for this rank; on failure, end all ranks.

        The error text is written to the shared store. Other ranks read it after this process has
        ended, which closes its connections: nothing else wakes a waiting rank.
        """
        try:
            yield
        except GradscopeError:
            raise
        except Exception as error:
            if error is self._failed:
                raise
            if isinstance(error, RuntimeError) and _LOST.search(str(error)):
                raise lost_process(error) from error
            what = f"process {self.rank} failed: {type(error).__name__}: {error}"
            with suppress(Exception):
                dist.distributed_c10d._get_default_store().set(_OUT_OF_STEP, what)
            raise OutOfStepError(
                f"{what}, during a backward pass in which other processes wait for it",
                remedy="End this process (torchrun then ends all others), and start all again.",
            ) from error

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks.

        Raises:
            RefusedError: Another rank has failed.
        """
        self.agree()
        return self._all_gather_object(value)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of the values of all ranks, which have one shape.

        Raises:
            RefusedError: Another rank has failed.
        """
        self.agree()
        total = value.clone(memory_format=torch.contiguous_format)
        given = torch.view_as_real(total) if total.is_complex() else total
        self._call(lambda: dist.all_reduce(given, group=self.group))
        return total

    def _all_gather_object(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(found, value, group=self.group))
        return found

    def number_samples(self, make: Callable[[], Batch], what: str, *, given: bool = False) -> Batch:
        """Return a batch whose samples are numbered over all ranks; all ranks must call it.

        Args:
            make: Creates this rank's batch.
            what: A description of the request.
            given: Whether the samples already have numbers.
        """
        with self.raise_on_all():
            batch = make()
        self.require_same(what)
        before = sum(self.all_gather(len(batch))[: self.rank])
        return batch if given else replace(batch, index=batch.index + before)

    def require_same(self, what: str) -> None:
        """Raise if other ranks have a different request."""
        asked = self.all_gather(what)
        if len({*asked}) > 1:
            raise SpecError(
                f"the processes make different requests: {', '.join(map(repr, asked))}",
                remedy="Make the same calls, in the same order, on every process.",
            )

    def states(self, state: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor] | None]:
        """Yield each rank's state in turn: tensors by name, or None."""
        shapes = self.all_gather(
            None if state is None else {k: (v.shape, v.dtype) for k, v in state.items()}
        )
        for rank, wanted in enumerate(shapes):
            if wanted is None:
                yield None
                continue
            own = state if rank == self.rank else None
            found = {
                key: torch.empty(shape, dtype=dtype, device=self.device)
                if own is None
                else own[key].to(self.device).contiguous()
                for key, (shape, dtype) in wanted.items()
            }
            for value in found.values():
                self._broadcast(value, rank)
            yield found

    def _broadcast(self, value: Tensor, rank: int) -> None:
        source = dist.get_global_rank(self.group, rank)
        self._call(lambda: dist.broadcast(value, source, group=self.group))

    def _all_reduce_max(self, number: int, error: BaseException | None = None) -> int:
        """Return the largest number of all ranks; 2 stands for an error, which all ranks raise."""
        told = torch.tensor([number], device=self.device)
        self._call(lambda: dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group))
        if int(told) < 2:
            return int(told)
        every = self._all_gather_object(None if error is None else (_words(error), _refutes(error)))
        if error is None:
            failed = {rank: told for rank, told in enumerate(every) if told is not None}
            rank, (text, _) = next(iter(failed.items()))
            refuted = any(refutes for _, refutes in failed.values())
            error = (RefusedError if refuted else OtherProcessError)(
                f"process {rank} failed: {text}",
                remedy="This process had no error, but no process has a result.",
            )
        self._failed = error
        raise error

    def _call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:  # torch has no specific class for errors of gloo
            if is_machine_error(error):
                raise
            raise lost_process(error) from error


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, GradscopeError) else f"{type(error).__name__}: {error}"


def _refutes(error: BaseException) -> bool:
    return isinstance(error, RefusedError) and not isinstance(error, OtherProcessError)


def lost_process(error: BaseException) -> GradscopeError:
    """Return the error for a collective call that failed."""
    what = (
        "another process of the group has ended or does not respond: "
        f"{str(error).strip().partition(chr(10))[0]}"
    )
    with suppress(Exception):  # the process with the store may have ended
        store = dist.distributed_c10d._get_default_store()
        what = store.get(_OUT_OF_STEP).decode() if store.check([_OUT_OF_STEP]) else what
    return OutOfStepError(
        what,
        remedy="Start all processes again. Each must make the same calls in the same order.",
    )


class ModelParallel(Ranks):
    """The processes of a model that is sharded by fully_shard.

    Args:
        model: The model; every process binds it at the same time.
        modules: The modules to which fully_shard was applied.

    Attributes:
        sharded: The optimiser's parameters by name: a part on each process.
        unsharded: The same parameters in the form of the forward pass; their memory exists only
            during it.
        rounds_to: The narrowest dtype that a forward pass was found to round to.

    Raises:
        UnsupportedError: The model uses tensor parallelism, or several meshes.
    """

    def __init__(self, model: nn.Module, modules: Sequence[Any]) -> None:
        from torch.distributed.tensor import DTensor

        self.model, self.modules = model, list(modules)
        self.rounds_to = torch.float64
        self.reshard()
        named = dict(model.named_parameters())
        self.sharded = {k: p for k, p in named.items() if isinstance(p, DTensor)}
        meshes = {p.device_mesh for p in self.sharded.values()}
        if len(meshes) != 1:
            raise _unsupported(f"its parameters are on {len(meshes)} device meshes")
        (self.mesh,) = meshes
        if self.mesh.ndim > 1 and self.mesh.size() != dist.get_world_size():
            raise _unsupported(
                "its device mesh has several axes and does not include all processes"
            )
        group = self.mesh.get_group() if self.mesh.ndim == 1 else dist.group.WORLD
        super().__init__(group, next(iter(self.sharded.values())).to_local().device)
        self.unsharded: dict[str, nn.Parameter] = {}
        self._home: dict[int, Any] = {}
        # for each layer: one parameter, as the module that has it and its name there
        self._first: dict[int, tuple[nn.Module, str]] = {}
        self._unsharded_of: dict[int, nn.Parameter] = {}
        for module in self.modules:
            with self._present(module):
                for name, p in model.named_parameters():
                    if name not in self.unsharded and p is not named[name]:
                        self.unsharded[name], self._home[id(p)] = p, module
                        path, _, last = name.rpartition(".")
                        self._first.setdefault(id(module), (model.get_submodule(path), last))
                        self._unsharded_of.setdefault(id(module), p)
        # the layers in the order in which a forward pass gathers them, as far as known
        self._order = [m for m in self.modules if id(m) in self._first]
        self.device = next(iter(self.unsharded.values())).device
        for name, p in self.unsharded.items():
            if isinstance(p, DTensor):
                raise _tensor_parallel(name)

    def reshard(self) -> None:
        """Release every layer's gathered parameters, because an evaluation may have left some.

        Also forget the order of forward passes without a backward pass, which torch uses to
        prefetch layers. A rank that failed in such a pass has a different order from other ranks.
        """
        for module in self.modules:
            module.reshard()
            state = module._get_fsdp_state()
            # missing in some torch releases, and before the first pass
            with suppress(AttributeError):
                state._comm_ctx.post_forward_order.clear()
            for group in _groups(state):
                group._post_forward_indices.clear()

    @contextmanager
    def perturbing(self, seed: int, share: float) -> Iterator[None]:
        """Let the body see parameters scaled at random, by factors within 1 ± `share`.

        Each process changes its parts, and restores them exactly.
        """
        parts = [p.to_local().data for p in self.sharded.values()]
        kept = [part.clone() for part in parts]
        draw = torch.Generator(on_host(parts[0]).device).manual_seed(seed)
        try:
            for part in parts:
                part.copy_(perturbed(part, share, draw))
            self.reshard()
            yield
        finally:
            for part, own in zip(parts, kept, strict=True):
                part.copy_(own)
            self.reshard()

    @contextmanager
    def _present(self, module: Any) -> Iterator[None]:
        try:
            module.unshard()
        except RuntimeError as error:
            raise lost_process(error) from error
        try:
            yield
        finally:
            module.reshard()

    def windows(self, leaves: Iterable[Iterable[Tensor]]) -> Iterator[list[int]]:
        """Yield the indices of the tasks to do while the parameters that each task needs are whole.

        Each process visits all layers in the same order, even if it has no task.

        Args:
            leaves: The parameters that each task needs.
        """
        homes = [{id(h): h for p in own if (h := self._home.get(id(p)))} for own in leaves]
        yield [k for k, home in enumerate(homes) if not home]
        several = [k for k, home in enumerate(homes) if len(home) > 1]
        for module in self.modules:
            self.agree()  # if a process has failed, no other waits for it in the next layer
            with self._present(module):
                yield [k for k, home in enumerate(homes) if [*home] == [id(module)]]
        if self.any(bool(several)):
            raise _unsupported("a value is computed from the parameters of several of its layers")

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the body, a forward pass; if it fails here, let no other process wait for it.

        After a failure, this process makes the collective calls of the layers that did not run.
        Activation checkpointing is off: its recomputation can happen at any time, and would need
        collective calls for a layer's parameters.
        """
        self.agree()  # if a process has failed, no other waits for it in this pass
        self.reshard()  # a pass without a backward pass leaves the outermost layer whole
        gathered: list[Any] = []

        def note(module: nn.Module, _: Any) -> None:
            owner, name = self._first.get(id(module), (module, ""))
            if name and owner._parameters[name] is not self._unsharded_of[id(module)]:
                gathered.append(module)

        handle, own = register_module_forward_pre_hook(note), checkpointing._checkpoint_hook
        checkpointing._checkpoint_hook = nullcontext  # type: ignore[assignment,misc]
        try:
            yield
            self._order = gathered
        except Exception as error:
            cause = error.__cause__
            if isinstance(cause, RuntimeError) and _LOST.search(str(cause)):
                raise lost_process(cause) from error
            for module in self._order[len(gathered) :]:
                with self._present(module):
                    pass
            self._reset_unfinished_forward()
            raise
        finally:
            checkpointing._checkpoint_hook = own  # type: ignore[misc]
            handle.remove()

    def _reset_unfinished_forward(self) -> None:
        """Make torch forget an unfinished forward pass."""
        reset = getattr(self.modules[0], "reset_iter_state", None)  # since torch 2.13
        if reset is not None:
            leaves = [*self.sharded.values(), *self.unsharded.values()]
            gradients = [p.grad for p in leaves]  # the training's gradients, which reset drops
            reset()
            for p, gradient in zip(leaves, gradients, strict=True):
                p.grad = gradient
            return
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        for module in self.modules:
            state = module._get_fsdp_state()
            for part in (state, *_groups(state)):
                part._training_state = TrainingState.IDLE
            state._modules_to_run_forward.clear()
            state._state_ctx.iter_forward_root = None

    def shard_rows(self, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Exchange rows between ranks: each rank gets its part of every row.

        Args:
            name: The name of a parameter.
            rows: (counts[rank], *shape), the rows of this rank.
            counts: The number of rows of each rank.

        Returns:
            (Σ counts, *part), in the order of the ranks; `part` is this rank's part of the
            parameter.
        """
        pieces = [self._part(name, rows, rank) for rank in range(self.size)]
        one = pieces[self.rank][:0].shape[1:]
        sizes = [n * one.numel() for n in counts]
        found = rows.new_empty(sum(sizes))
        sent, cut = torch.cat([t.flatten() for t in pieces]), [t.numel() for t in pieces]
        self._call(lambda: dist.all_to_all_single(found, sent, sizes, cut, group=self.group))
        return found.reshape(sum(counts), *one)

    def _part(self, name: str, rows: Tensor, rank: int) -> Tensor:
        """Return a rank's part of rows (m, *shape) of a parameter, divided as by `torch.chunk`."""
        place = (self.mesh.mesh == dist.get_global_rank(self.group, rank)).nonzero()[0]
        for axis, placement in enumerate(self._placements(name, 1)):
            if placement.is_shard():
                whole = rows.shape[placement.dim]
                each = -(-whole // self.mesh.size(axis))
                start = min(int(place[axis]) * each, whole)
                rows = rows.narrow(placement.dim, start, min(each, whole - start))
        return rows

    def to_dtensor(self, name: str, part: Tensor, *lead: int) -> Tensor:
        """Return this rank's part (*lead, *part) as a DTensor (*lead, *shape)."""
        from torch.distributed.tensor import DTensor

        if name not in self.sharded:
            return part
        shape = torch.Size((*lead, *self.sharded[name].shape))
        return DTensor.from_local(
            part,
            self.mesh,
            self._placements(name, len(lead)),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _placements(self, name: str, lead: int) -> list[Any]:
        """Return a parameter's placements, shifted by `lead` leading axes."""
        from torch.distributed.tensor import Replicate, Shard

        if name not in self.sharded:
            return [Replicate()] * self.mesh.ndim
        own: Any = self.sharded[name]
        return [Shard(k.dim + lead) if k.is_shard() else k for k in own.placements]


def _groups(state: Any) -> list[Any]:
    several = hasattr(state, "_fsdp_param_groups")  # torch 2.13
    groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the processes that train a model, or None for a single process.

    Raises:
        UnsupportedError: Exact gradients are not supported for this kind of parallelism.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    modules = list(model.modules())
    if sharded := [m for m in modules if isinstance(m, FSDPModule)]:
        return ModelParallel(model, sharded)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise _tensor_parallel(name)
    if any(isinstance(m, FullyShardedDataParallel) for m in modules):
        raise _unsupported("it is wrapped in the older FullyShardedDataParallel")
    wrapped = parallel(model)
    if len({id(m.process_group) for m in wrapped}) > 1:
        raise _unsupported("its parts are trained by different process groups")
    if any(m.mixed_precision is not None for m in wrapped):
        raise _unsupported("DistributedDataParallel casts its parameters (mixed_precision)")
    return Ranks(wrapped[0].process_group, wrapped[0].device) if wrapped else None


def parallel(model: nn.Module) -> list[Any]:
    """Return the modules that are wrapped in DistributedDataParallel."""
    kind = nn.parallel.DistributedDataParallel
    return [m for m in every_module(model) if isinstance(m, kind)]


@contextmanager
def without_ddp(wrapped: Sequence[nn.Module]) -> Iterator[None]:
    """Run forward passes of DistributedDataParallel modules without other processes."""
    before = [(vars(m), vars(m).get("forward")) for m in wrapped]
    try:
        for own, _ in before:
            own["forward"] = own["_modules"]["module"]
        yield
    finally:
        for own, forward in before:
            del own["forward"]
            if forward is not None:
                own["forward"] = forward


def apply_fully_shard(model: nn.Module, device: str) -> nn.Module:
    """Shard a model over all processes: each repeated layer separately, and the rest together.

    A layer that shares a parameter with code outside it stays with the rest.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def count_parameters(module: nn.Module) -> Counter[int]:
        tables = (m._parameters.values() for m in module.modules())
        return Counter(id(p) for table in tables for p in table if p is not None)

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    whole = count_parameters(model)
    for layer in [*_repeated(model)]:
        own = count_parameters(layer)
        if own and all(whole[key] == count for key, count in own.items()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists and sequences of layers."""
    lists = (nn.ModuleList, nn.Sequential)
    for child in module.children():
        if isinstance(module, lists) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _repeated(child)


def _tensor_parallel(name: str) -> UnsupportedError:
    return UnsupportedError(
        "the parameter is divided within its layer (tensor parallel): each process computes a part "
        "of every sample, and no process has a sample's whole gradient",
        where=f"parameter {name!r}",
        remedy="Shard the model by fully_shard (FSDP2), or gather the parameter by full_tensor().",
    )


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"this kind of distributed model is not supported: {what}",
        remedy="Use fully_shard (FSDP2) on one mesh, or DistributedDataParallel.",
    )
