"""Tensors that a run's next step depends on, by the names under which a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from varlen.train.checkpoint import STEP, WEIGHT, Tensors


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tied: Mapping[str, str]
) -> Tensors:
    """Return everything that a run's next step depends on and that is a tensor: weights and AdamW's state.

    A parameter without state yet, since nothing has trained it, gets one of zeros, which AdamW takes for none.

    Args:
        model: bare, sharded or not, whole or a stage.
        optimizer: AdamW over its parameters.
        tied: other names of tied weights, with those under which they are kept.
    """
    names = {tied.get(name, name): parameter for name, parameter in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {f"{WEIGHT}{name}": parameter.detach() for name, parameter in names.items()}
    tensors |= {
        f"{WEIGHT}{name}": value
        for name, value in model.state_dict().items()
        if name not in aliases and _is_kept(value)
    }
    trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        for part in ("exp_avg", "exp_avg_sq"):
            if part not in state:
                state[part] = torch.zeros_like(parameter)
            tensors[f"optimizer.{part}.{name}"] = state[part]
        state.setdefault("step", torch.zeros((), device=parameter.device if _is_fused(optimizer) else "cpu"))
        # By name, as a stage of a pipeline has only some of them.
        tensors[f"{STEP}{name}"] = torch.tensor(float(state["step"]), dtype=torch.float64)
    return tensors


def put_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tied: Mapping[str, str], tensors: Tensors
) -> None:
    """Give every parameter's state the number of its steps, which isn't filled in place.

    Args:
        model: bare, sharded or not, whole or a stage.
        optimizer: AdamW over its parameters.
        tied: as for `state_tensors`.
        tensors: of `state_tensors`, filled.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            optimizer.state[parameter]["step"].fill_(float(tensors[f"{STEP}{tied.get(name, name)}"]))


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


def _is_kept(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
