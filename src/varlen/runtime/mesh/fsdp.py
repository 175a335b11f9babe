"""`Shards`: a stage whose parameters FSDP2 has divided among its replicas, gathered for each task or once a step.

FSDP2's own hooks reduce gradients after every backward pass of a module, which here is every MicroPack. So modules
are called without their hooks: this file gathers and releases them, adds up whole gradients through the step, and
reduces and scatters them once at its end. (FSDP2: Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277, by its public
calls `unshard` and `reshard`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from varlen.errors import ModelError, SettingError
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.main_grads import add_from_autograd, gradient_of, set_gradient, wide
from varlen.runtime.mesh.gradients import known_to_any, scattered
from varlen.runtime.mesh.process_groups import Group

Gathered = Literal["unit", "step"]  # sharded parameters are whole during each task, or all step


class Unhooked:
    """A module whose forward runs without hooks; all other attributes are its own."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward."""
        return self._module.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


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


class Shards:
    """The sharded modules of a stage during one step."""

    def __init__(
        self,
        model: nn.Module,
        parts: DecoderParts,
        replicas: Group,
        gathered: Gathered,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._parts, self._replicas, self._gathered, self._waiting = parts, replicas, gathered, waiting
        config: Any = model.config
        self._ties = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        self._check()
        self._own = {id(module): list(_own(model, module)) for module in self._modules}
        self._whole: dict[str, nn.Parameter] = {}
        """Parameters that were gathered: PyTorch gives the same object, and its gradient, each time."""
        self._hooks: list[Any] = []

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The sharded parameters by name."""
        return self._sharded

    @property
    def parts(self) -> DecoderParts:
        """The stage taken apart, called past its hooks."""
        parts = self._parts
        return replace(
            parts,
            embedding=_unhooked(parts.embedding),
            layers=tuple(_unhooked(layer) for layer in parts.layers),
            norm=_unhooked(parts.norm),
            head=_unhooked(parts.head),
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Gather all parameters for the whole step if `gathered="step"`."""
        modules = self._modules if self._gathered == "step" else []
        self._gather(modules)
        try:
            yield
        finally:
            self._release(modules)
            for hook in self._hooks:
                hook.remove()

    @contextmanager
    def unit(self, layers: range) -> Iterator[None]:
        """Gather a chunk's parameters for a task if `gathered="unit"`; all replicas do so for the same tasks."""
        modules = self._of_chunk(layers) if self._gathered == "unit" else []
        self._gather(modules)
        try:
            yield
        finally:
            self._release(modules)

    def whole_dtype(self, layers: range) -> torch.dtype:
        """Return the dtype of layers' matrices when gathered; all replicas ask at once."""
        with self.unit(layers):
            held = (p for layer in layers for p in self._parts.layers[layer].parameters() if p.ndim > 1)
            return next(held).dtype

    def reduce(self) -> None:
        """Sum the step's whole gradients over replicas, and give each its part; all do so at once."""
        found = {name: total for name, p in self._whole.items() if (total := gradient_of(p)) is not None}
        self.forget()
        for name in known_to_any(self._sharded, dict.fromkeys(found, True), self._replicas):
            sharded = self._sharded[name]
            whole = found.pop(name, None)
            dtype = wide(sharded.dtype)
            if whole is None:
                whole = torch.zeros(sharded.shape, dtype=dtype, device=self._replicas.device)
            set_gradient(sharded, scattered(whole.to(dtype), sharded))

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        for parameter in self._whole.values():
            set_gradient(parameter, None)

    def _gather(self, modules: Sequence[Any]) -> None:
        for module in modules:
            with self._waiting():
                module.unshard()
            for name, owner, key in self._own[id(module)]:
                if name not in self._whole:
                    self._hooks += add_from_autograd([getattr(owner, key)])
                self._whole[name] = getattr(owner, key)

    def _release(self, modules: Sequence[Any]) -> None:
        for module in modules:
            module.reshard()

    def _of_chunk(self, layers: range) -> list[Any]:
        """Return the sharded modules of a chunk's tasks, in one order on all replicas."""
        parts = self._parts
        used: list[nn.Module] = [parts.layers[layer] for layer in layers]
        used += [parts.embedding] if layers.start == 0 else []
        used += [parts.norm, parts.head] if layers.stop == len(parts.layers) else []
        inside = {id(inner) for module in used for inner in module.modules()}
        return [m for m in self._modules if any(id(owner) in inside for _, owner, _ in self._own[id(m)])]

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
        others = [n for n, p in self._sharded.items() if p.device_mesh.size() != self._replicas.size]
        if others:
            raise SettingError(
                f"{others[0]} is divided among {self._sharded[others[0]].device_mesh.size()} processes, and the "
                f"stage has {self._replicas.size} replicas; give fully_shard the device mesh of the stage's replicas"
            )


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
