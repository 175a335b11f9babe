"""Runs with `[plan]` for tests: settings, rates that make tiny documents worth cutting, float64 throughout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.training import LLAMA, Notes, table
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from varlen.cost.hardware import Hardware, RateCurve, RateTable, save_hardware
from varlen.train import step as step_module
from varlen.train import trainer as trainer_module
from varlen.train.settings import TrainSettings, as_settings
from varlen.train.trainer import train

PLAIN = {"model__settings": {**LLAMA, "attention_dropout": 0.0}, "optimizer__schedule": "constant"}
EVEN = {"slice_tokens": 24}


def write_hardware(path: Path) -> str:
    """Write rates so slow, and without time between tasks, that tiny documents are worth cutting."""
    rows = np.array([1.0, 1e6])
    flat = RateTable(query_rows=rows, key_lengths=rows, tflops=np.full((2, 2), 1e-3))
    slow = replace(
        Hardware.named("h100"),
        name="slow",
        attention=(flat, flat),
        gemm=RateCurve(rows=rows, tflops=np.full(2, 1e-3)),
        launch_s=0.0,
    )
    save_hardware(slow, path)
    return str(path)


def priced(hardware: str, **more: Any) -> dict[str, Any]:
    """A plan by those rates."""
    return {"hardware": hardware, "least_rows": 8, **more}


def planned_table(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """The configuration of a run by plans; None: of whole packs."""
    made = table(store, output, **PLAIN | changes)
    return made if plan is None else made | {"plan": plan}


def planned(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> TrainSettings:
    return as_settings(TrainSettings, planned_table(store, output, plan, **changes), "")


def run(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> Notes:
    notes = Notes()
    train(planned(store, output, plan, **changes), notes)
    return notes


def use_float64(put: Any = setattr) -> None:
    """Train in float64, so that a wrong term can't hide behind rounding.

    Llama's norms and the trainer's own loss round to float32 whatever comes in, and are put aside.
    """
    inner = trainer_module.build_model
    put(trainer_module, "build_model", lambda *given, **named: inner(*given, **named).double())
    put(LlamaRMSNorm, "forward", _norm)
    put(step_module, "target_loss_sum", _loss_sum)


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden * scale


def _loss_sum(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    targets = torch.as_tensor(labels).roll(-1, -1)
    targets[..., -1] = -100
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def same_weights(one: Path, other: Path) -> None:
    """Require two trained models of the same bytes."""
    ours, theirs = (output / "model/model.safetensors" for output in (one, other))
    assert ours.read_bytes() == theirs.read_bytes()
