"""Whether a step in this process would learn: nobody else holds the model too, and gradients are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from varlen.errors import SettingError
from varlen.runtime.shards import is_sharded


def check_alone(model: Any) -> None:
    """Refuse to run a model by itself that this process holds with others, who would learn something else.

    Args:
        model: of an engine without a mesh.

    Raises:
        SettingError: other processes have replicas or shards of it.
    """
    if isinstance(model, DistributedDataParallel) and model.process_group.size() > 1:
        held = f"DistributedDataParallel holds the model in {model.process_group.size():,} processes"
    elif isinstance(model, nn.Module) and is_sharded(model):
        held = "fully_shard has divided the model among processes"
    else:
        return
    raise SettingError(
        f"{held}, and the engine has no mesh, so gradients would not be summed over them; give "
        "mesh=vl.Mesh(dp=dist.get_world_size()), rank=dist.get_rank()"
    )


def check_grad() -> None:
    """Refuse a step where PyTorch keeps no graphs.

    Raises:
        SettingError: gradients are off.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise SettingError(
            "a step computes gradients, and they are off (torch.no_grad or torch.inference_mode); call engine.step "
            "outside of it"
        )
