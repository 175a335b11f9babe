"""Lets torchtitan 0.3.0 run where there is no accelerator, to see it with one's own eyes; import it before the rest.

What is replaced: the device, what reads its memory, FlexAttention's kernel, which has no backward on CPUs (here it is
torch's own attention under the same mask), and two things that gloo or CPUs don't have. Nothing that touches data.
"""

import types

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402


def attend(query, key, value, *, block_mask, scale=None, enable_gqa=False, **_):
    mask = create_mask(block_mask.mask_mod, len(query), None, query.shape[2], key.shape[2], device="cpu")
    given = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given), None


def memory():
    stats = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    return types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None
    )


def sum_gradients(trainer):
    """Have gloo add gradients up: the scaled sum that torchtitan asks for is NCCL's alone."""
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


metrics.build_device_memory_monitor = memory
distributed.set_pg_timeouts = lambda **_: None
attention._compiled_create_block_mask = create_block_mask
attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
