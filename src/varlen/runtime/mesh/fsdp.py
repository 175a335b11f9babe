"""`Shards`: a stage whose parameters FSDP2 has divided among its replicas, gathered unit by unit or once a step.

FSDP2's own hooks gather a module before its forward pass, and reduce its gradients after its backward pass. Here a
backward task also runs layers forward again, and replicas without rows take part. So modules are called without
their hooks: this file gathers, releases and reduces them. Gradients add up in float32, in each rank's part. (FSDP2:
Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277, by its public calls `unshard` and `reshard`.)

Of a parameter that tp ranks had divided before, all this is about this rank's part: the last axis of its mesh is
tp's, and gathered over the others it is a DTensor of tp alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from varlen.cost.states import Gathered
from varlen.errors import ModelError, SettingError
from varlen.runtime.chunk import Event, Units
from varlen.runtime.decoder import EMBEDDING, DecoderParts
from varlen.runtime.main_grads import (
    add_from_autograd,
    gradient,
    gradient_of,
    local,
    set_gradient,
    take_gradient,
    wide,
)
from varlen.runtime.mesh.gradients import (
    RowSums,
    begin_row_sums,
    buckets,
    known_to_any,
    scattered,
)
from varlen.runtime.mesh.process_groups import Group
from varlen.runtime.mesh.shared_documents import ProcessPeers


class Unhooked:
    """A module whose forward runs without hooks; all other attributes are its own."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward."""
        return self._module.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Embedding(Unhooked):
    """An embedding whose weight is the whole one, which holds the gradient, also while it isn't gathered."""

    def __init__(self, module: Any, weight: Callable[[], Any]) -> None:
        super().__init__(module)
        self._weight = weight

    @property
    def weight(self) -> Any:
        """The weight."""
        return self._weight()


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has divided any of a model's parameters."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def waiting_at_most(seconds: float, model: nn.Module) -> Iterator[None]:
    """Set the timeout of the model's FSDP process groups, and afterwards set it back.

    The groups are the user's; one may be the default group, whose long timeout checkpoints need.
    """
    meshes = {id(p.device_mesh): p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    before = [
        (group, group._get_backend(torch.device(mesh.device_type)).options._timeout)
        for mesh in meshes.values()
        for group in mesh.get_all_groups()
    ]
    for group, _ in before:
        _set_pg_timeout(timedelta(seconds=seconds), group)
    try:
        yield
    finally:
        for group, timeout in before:
            _set_pg_timeout(timeout, group)


class Shards(Units):
    """The sharded modules of a stage during one step.

        gathered="unit": gather a unit, and the next one meanwhile ──► its work ──► release ──► reduce its gradients
        gathered="step": gather all ──► all tasks ──► release all ──► reduce all gradients

    All replicas gather and reduce the same units in the same order, whatever rows they have.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: DecoderParts,
        replicas: Group,
        gathered: Gathered,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        splits_backward: bool = False,
        divided: Collection[str] = (),
    ) -> None:
        """Take a stage's model; `divided` names what tp ranks divide."""
        self._parts, self._replicas, self._waiting = parts, replicas, waiting
        self._divided = divided
        self._by_step = gathered == "step"
        config: Any = model.config
        self._ties = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._sharded = {
            name: parameter
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor) and not (name in divided and parameter.device_mesh.ndim == 1)
        }
        self._check()
        self._own = {id(module): list(_own(model, module)) for module in self._modules}
        self._reduced: dict[int, list[str]] = {}
        """Parameters of units, a shared one of the first alone: the backward pass comes to that last."""
        self._held: dict[int, list[Any]] = {}
        """Sharded modules that hold units' parameters, in one order on all replicas."""
        seen: set[str] = set()
        for unit in range(EMBEDDING, parts.head_unit + 1):
            names = self._names(unit)
            self._reduced[unit] = sorted(names - seen)
            self._held[unit] = [m for m in self._modules if any(n in names for n, _, _ in self._own[id(m)])]
            seen.update(names)
        self._whole: dict[str, nn.Parameter] = {}
        """Parameters that were gathered: PyTorch gives the same object, and its gradient, each time."""
        self._has: set[str] = set()
        """Parameters with a gradient on this rank."""
        # Else autograd gives a parameter one gradient in a task, which is reduced then.
        self._adds_up = self._by_step or splits_backward or not parts.head_is_plain
        self._hooks: list[Any] = []
        self._events: deque[Event] = deque()
        self._used: list[int] = []
        self._coming: dict[int, Any] = {}
        """Modules that are being gathered, by id."""
        self._reducing: list[tuple[list[str], RowSums]] = []
        """Parameters whose gradients are being summed, and the sums."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The sharded parameters by name."""
        return self._sharded

    @property
    def parts(self) -> DecoderParts:
        """The stage taken apart, called past its hooks."""
        parts = self._parts
        names = self._reduced[EMBEDDING]
        embedding: Any = _unhooked(parts.embedding)
        if names:
            embedding = _Embedding(embedding, lambda: self._whole[names[0]])
        return replace(
            parts,
            embedding=embedding,
            layers=tuple(_unhooked(layer) for layer in parts.layers),
            norm=_unhooked(parts.norm),
            head=_unhooked(parts.head),
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Gather all parameters for the whole step if `gathered="step"`."""
        modules = self._modules if self._by_step else []
        self._gather(modules)
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
            for hook in self._hooks:
                hook.remove()

    @contextmanager
    def task(self, events: Sequence[Event], **_: bool) -> Iterator[None]:
        """As `Units.task`."""
        self._events = deque(events)
        yield
        while self._events:
            event, unit = self._events[0]
            getattr(self, event)(unit)
        self._end_sums()

    def gather(self, unit: int) -> None:
        """Gather a unit, and begin with the task's next one."""
        assert self._events.popleft() == ("gather", unit)
        self._used.append(unit)
        if self._by_step:
            return
        self._gather(self._held[unit])
        if unit != EMBEDDING:  # looking up takes no time in which another unit could come
            for module in self._next():
                self._coming[id(module)] = module.unshard(async_op=True)

    def release(self, unit: int) -> None:
        """Release what neither other units that run now nor the next one need."""
        assert self._events.popleft() == ("release", unit)
        self._used.remove(unit)
        kept = {id(module) for used in self._used for module in self._held[used]} | set(map(id, self._next()))
        for module in self._held[unit]:
            if not self._by_step and id(module) not in kept:
                module.reshard()

    def reduce(self, unit: int) -> None:
        """Begin to add the sum of all replicas' gradients of a unit to each replica's part."""
        assert self._events.popleft() == ("reduce", unit)
        if not self._by_step:
            self._sum(self._reduced[unit])

    def whole_dtype(self, layers: range) -> torch.dtype:
        """Return the dtype of layers' matrices when gathered; all replicas ask at once."""
        modules = self._held[layers.start]
        held = [p for p in self._parts.layers[layers.start].parameters() if p.ndim > 1]
        if not self._by_step and modules:
            self._gather(modules)
            held = [p for p in self._parts.layers[layers.start].parameters() if p.ndim > 1]
            for module in modules:
                module.reshard()
        return held[0].dtype

    def finish(self) -> None:
        """Reduce what is left; what no replica has a gradient of has none. All replicas do so at once."""
        if self._by_step:
            for unit in reversed(self._reduced):
                self._sum(self._reduced[unit])
            self._end_sums()
        known = known_to_any(self._sharded, dict.fromkeys(self._has, True), self._replicas)
        for name in self._sharded.keys() - set(known):
            set_gradient(self._sharded[name], None)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        for parameter in self._whole.values():
            take_gradient(parameter)

    def _sum(self, names: Sequence[str]) -> None:
        self._end_sums()
        learning = {id(self._whole[n]): n for n in names if self._sharded[n].requires_grad}
        for bucket in buckets([self._whole[n] for n in learning.values()]):
            held = [learning[id(parameter)] for parameter in bucket]
            found = {n: self._whole[n] for n in held}
            self._has |= {n for n, p in found.items() if p.grad is not None or gradient_of(p) is not None}
            if not all(map(self._is_by_rows, held)):
                for name in held:
                    self._add(name, self._scattered(name))
                continue
            sums = begin_row_sums(bucket, ProcessPeers(self._replicas, self._waiting))
            self._reducing.append((held, sums))

    def _end_sums(self) -> None:
        for names, sums in self._reducing:
            for name, rows in zip(names, sums()):
                own = local(self._sharded[name].detach())
                self._add(name, rows[: own.numel()].view(own.shape))
        self._reducing.clear()

    def _scattered(self, name: str) -> torch.Tensor:
        whole = take_gradient(self._whole[name])
        dtype = wide(self._whole[name].dtype)
        if whole is None:
            whole = torch.zeros_like(self._whole[name], dtype=dtype)
        with self._waiting():
            return scattered(whole.to(dtype), self._sharded[name])

    def _add(self, name: str, part: torch.Tensor) -> None:
        local(gradient(self._sharded[name])).add_(local(part))

    def _gather(self, modules: Sequence[Any]) -> None:
        for module in modules:
            handle = self._coming.pop(id(module), None)
            with self._waiting():
                if handle is None:
                    module.unshard()
                else:
                    handle.wait()
            for name, owner, key in self._own[id(module)]:
                if name not in self._whole and self._adds_up:
                    self._hooks += add_from_autograd([getattr(owner, key)])
                self._whole[name] = getattr(owner, key)

    def _next(self) -> list[Any]:
        """Return the sharded modules of the unit that the task gathers next."""
        return next((self._held[unit] for event, unit in self._events if event == "gather"), [])

    def _names(self, unit: int) -> set[str]:
        held = {id(p) for module in self._parts.unit(unit) for p in module.parameters()}
        return {name for name, parameter in self._sharded.items() if id(parameter) in held}

    def _check(self) -> None:
        within = [
            name
            for layer in self._parts.layers
            for name, module in layer.named_modules()
            if module is not layer and isinstance(module, FSDPModule)
        ]
        if within:
            raise ModelError(
                f"{within[0]} is sharded within its layer ({len(within):,} modules are); call fully_shard on whole "
                "layers and on the model"
            )
        one, other = (getattr(end, "weight", None) for end in (self._parts.embedding, self._parts.head))
        if self._ties and one is not None and other is not None and one is not other:
            raise ModelError(
                "embedding and head share a weight, and fully_shard was called on one of them, which unties them; "
                "call it on whole layers and on the model, so that both stay tied"
            )
        others = [n for n in self._sharded if self._mesh_of(n).numel() != self._replicas.size]
        if others:
            raise SettingError(
                f"{others[0]} is divided among {self._mesh_of(others[0]).numel()} processes, and the "
                f"stage has {self._replicas.size} replicas; give fully_shard the device mesh of the stage's replicas"
            )
        odd = [n for n in self._sharded if n in self._divided and not self._is_by_rows(n)]
        if odd:
            raise SettingError(
                f"tp ranks divide {odd[0]}, and fully_shard hasn't divided rows of theirs among all replicas "
                f"({len(odd):,} parameters are so); give it the one axis of all replicas, and no shard_placement_fn"
            )

    def _mesh_of(self, name: str) -> torch.Tensor:
        """Return the ranks of the mesh that `fully_shard` was given for a parameter."""
        mesh = self._sharded[name].device_mesh
        return mesh.mesh[..., mesh.get_local_rank(mesh.ndim - 1)] if name in self._divided else mesh.mesh

    def _is_by_rows(self, name: str) -> bool:
        """Return whether replicas divide a parameter's rows in their own order."""
        placements = self._sharded[name].placements
        if name not in self._divided:
            is_divided = placements == (Shard(0),)
        else:  # strided, where tp ranks divide rows as well: the rows of each of them are divided
            is_divided = len(placements) == 2 and getattr(placements[0], "dim", None) == 0
        return is_divided and self._mesh_of(name).tolist() == list(self._replicas.ranks)


def _unhooked(module: Any) -> Any:
    return Unhooked(module) if isinstance(module, FSDPModule) else module


def _own(model: nn.Module, sharded: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the parameters that a sharded module divides itself: name in the model, owner, key."""
    names = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()
    waiting: list[nn.Module] = [sharded]
    while waiting:
        module = waiting.pop()
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and id(parameter) in names:
                seen.add(id(parameter))
                yield names[id(parameter)], module, key
        waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]
