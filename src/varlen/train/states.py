"""What a run holds of its parameters on a device: weights, gradients, masters, and what the optimizer keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from varlen.cost.shape import ModelShape
from varlen.cost.states import States, bytes_per_parameter
from varlen.step_plan import Mesh
from varlen.train.lora import add_adapter, stored_width
from varlen.train.model import bare_model, embedding_names
from varlen.train.optimizers import state_bytes
from varlen.train.settings import RunSettings, TrainSettings


def has_masters(run: RunSettings) -> bool:
    """Return whether a run with `[plan]` has weights in half precision, and the optimizer updates float32 masters."""
    # FSDP2 holds float32 and computes in half precision.
    return run.precision == "bf16" and run.parallel != "fsdp"


def meta_model(settings: TrainSettings, config: Any) -> Any:
    """Return the model of a run without weights, on "meta", with its adapter."""
    model = bare_model(config)
    if settings.adapter is not None:
        add_adapter(model, settings.adapter)
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Parameters of a part of a model."""

    trained: int
    """Number of parameters that are trained."""
    kept: int
    """Bytes that the optimizer keeps of these."""

    @property
    def of_one(self) -> float:
        """Bytes that the optimizer keeps of a trained parameter."""
        return self.kept / self.trained if self.trained else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStates:
    """Parameters of a run, and bytes that they take."""

    states: States
    """What the optimizer updates."""
    parameters: int
    layers: _Part
    ends: _Part
    """Embedding, head and last norm."""
    adapter_width: int | None
    """Of `stored_width`; None without an adapter."""

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return self.layers.trained + self.ends.trained

    def bytes_on(self, mesh: Mesh) -> float:
        """Return bytes on a device that has all parameters, or its share of all."""
        frozen = bytes_per_parameter(mesh, self.states, is_trained=False)
        each = (
            part.trained * bytes_per_parameter(mesh, self.states, optimizer_bytes=part.of_one)
            for part in (self.layers, self.ends)
        )
        return sum(each, (self.parameters - self.trained) * frozen)

    def priced(self, shape: ModelShape) -> dict[str, Any]:
        """Return the options of `CostModel` that price these states, for a model of this shape."""
        options: dict[str, Any] = {"states": self.states}
        adam = bytes_per_parameter(Mesh(), self.states) - bytes_per_parameter(
            Mesh(), self.states, optimizer_bytes=0.0
        )
        if self.adapter_width is not None:  # all of it is counted in the layers
            part = _Part(trained=self.trained, kept=self.layers.kept + self.ends.kept)
            options["adapter_share"] = part.trained / (shape.parameters_per_layer * shape.layers)
            options["adapter_width"] = self.adapter_width / shape.layers
            return options | ({} if part.of_one == adam else {"optimizer_bytes": part.of_one})
        if self.layers.of_one != adam:
            options["optimizer_bytes"] = self.layers.of_one
        if self.ends.of_one != self.layers.of_one:
            options["end_optimizer_bytes"] = self.ends.of_one
        return options


def states_of(settings: TrainSettings, model: Any) -> RunStates:
    """Return what a run holds of its parameters.

    Args:
        settings: of the run.
        model: of `meta_model`.
    """
    parameters = dict(model.named_parameters())
    kept = state_bytes(parameters, settings.optimizer, embedding_names(model))

    def part(*, is_layers: bool) -> _Part:
        names = [name for name in kept if bool(re.search(r"\.\d+\.", name)) == is_layers]
        return _Part(
            trained=sum(parameters[name].numel() for name in names), kept=sum(kept[name] for name in names)
        )

    return RunStates(
        states="masters" if settings.plan is not None and has_masters(settings.run) else "float32",
        parameters=sum(each.numel() for each in parameters.values()),
        layers=part(is_layers=True),
        ends=part(is_layers=False),
        adapter_width=None if settings.adapter is None else stored_width(model),
    )
