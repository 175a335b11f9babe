"""Between its first task and its last, a step never makes the host wait for the device.

Models stand on PyTorch's meta device, whose tensors have no values: what would copy one to the host, or make a shape
from its values, is an error there. What is left is a blocking copy from the host, which a dispatch mode finds.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.sliced import one_gpu_plan
from tests.support.tiny_families import family
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.attention import kernels
from varlen.attention.kernels import Lengths
from varlen.runtime import casting
from varlen.runtime.chunk import StepData
from varlen.runtime.clock import Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.main_grads import step_gradients
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import LocalTransport, chunk_steps

META = torch.device("meta")
MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
LENGTHS = [12, 5, 9]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 8,
}
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"experts_implementation": "grouped_mm"},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    "qwen3_moe": {"experts_implementation": "grouped_mm"},
}
SLICES = [[(0, 0, 7), (1, 0, 5)], [(0, 7, 12), (2, 0, 4)], [(2, 4, 9)]]


class BlockingCopies(TorchDispatchMode):
    """Raises where the host would wait for a copy to the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if name in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            is_there = (args[0] if name is torch.ops.aten.copy_ else out).device == META
            waits = not ((kwargs or {}).get("non_blocking") or args[2:3] == (True,))
            source = given[-1]
            assert not (is_there and source.device != META and source.dim() and waits), "a blocking copy"
        return out


class ValuesOfTheHost(TorchFunctionMode):
    """Raises where a tensor of the device is made of numbers of the host, which is a blocking copy too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        assert function not in MAKERS or out.device != META, "a blocking copy"
        return out


def data_there() -> StepData:
    total = sum(LENGTHS)
    ids, labels = (
        torch.zeros(total, dtype=torch.int64, device=META),
        torch.ones(total, dtype=torch.int64, device=META),
    )
    weights = torch.ones(total, dtype=torch.float64, device=META)
    return StepData(input_ids=ids, labels=labels, weights=weights, offsets=np.cumsum([0, *LENGTHS]))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gpt_oss", "llama", "phi3", "qwen3_moe"])
def test_no_task_makes_the_host_wait(name, recompute, monkeypatch):
    monkeypatch.setattr(casting, "is_on", lambda _: False)  # there is no autocast on the meta device
    model = family(name, torch.bfloat16, **MORE.get(name, {})).to("meta")
    plan = one_gpu_plan(LENGTHS, SLICES, recompute=recompute)
    chunks = chunk_steps(DecoderParts.of(model), [range(2)], data_there(), plan, keeps_losses=True)
    runner = StageRunner(plan, 0, 0, chunks, LocalTransport(), clock=Clock(torch.device("cpu")))

    with step_gradients(list(model.parameters())), BlockingCopies(), ValuesOfTheHost():
        while runner.next_task:
            runner.run_next()

    assert all(p.grad is not None for p in model.parameters())


def test_what_kernels_ask_of_lengths_is_copied_without_waiting():
    lengths = Lengths((3, 2), (7, 2))

    with BlockingCopies():
        kernels._ends_on(lengths, META)
        kernels.positions(lengths, META)
    with pytest.raises(AssertionError, match="a blocking copy"), BlockingCopies():
        torch.arange(3).to(META)
