"""Sums over replicas begin as soon as gradients are whole, in one order."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.sliced import one_gpu_plan, tiny, tokens_of

from varlen.runtime.clock import Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.main_grads import gradient_of, step_gradients
from varlen.runtime.mesh.gradients import Reduction
from varlen.runtime.mesh.rank import _last
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import LocalTransport, chunk_steps, step_data

LENGTHS = [12, 5]
SLICES = [[(0, 0, 7)], [(0, 7, 12), (1, 0, 5)]]


class Doubling:
    """A group of two ranks with the same gradients; notes what it was given, and adds when it is waited for."""

    size, device = 2, torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin_sum(self, tensors: Sequence[torch.Tensor]) -> Any:
        self.given += [(tensor, tensor.clone()) for tensor in tensors]
        return SimpleNamespace(wait=lambda: [tensor.mul_(2) for tensor in tensors])

    def most(self, tensor: torch.Tensor) -> None:
        """The other rank has gradients of the same parameters."""

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_but_the_embedding_is_given_while_the_last_task_runs(
    recompute, dtype, splits_backward, monkeypatch
):
    model, group = tiny("llama", dtype, num_hidden_layers=3), Doubling()
    tasks = [0, 0, 1, 2, 1, 2] if splits_backward else None
    plan = one_gpu_plan(LENGTHS, SLICES, recompute=recompute, tasks=tasks, splits_backward=splits_backward)
    parts, parameters = DecoderParts.of(model), dict(model.named_parameters())
    chunks = chunk_steps(parts, [range(3)], step_data(plan, tokens_of(LENGTHS), None), plan)
    reduction = Reduction(parameters, group, most_bytes=1)
    found = []
    run_embedding = DecoderParts.embed_backward

    def embed_backward(*given: Any) -> None:
        found.append(len(group.given))
        run_embedding(*given)

    monkeypatch.setattr(DecoderParts, "embed_backward", embed_backward)
    runner = StageRunner(
        plan,
        0,
        0,
        chunks,
        LocalTransport(),
        clock=Clock(group.device),
        last=partial(_last, parts, reduction),
    )
    with step_gradients(parameters.values(), is_apart=True):
        while runner.next_task:
            runner.run_next()
        whole = [gradient_of(p).clone() for p in parameters.values()]
        reduction.finish()
        summed = [gradient_of(p) for p in parameters.values()]

    assert found[0] == 0
    assert found[-1] == (0 if splits_backward else len(parameters) - 1)
    assert len(group.given) == len(parameters)
    for (_, given), mine, total in zip(reversed(group.given), whole, summed):
        torch.testing.assert_close(given, mine, rtol=0, atol=0)
        torch.testing.assert_close(total, 2 * mine, rtol=0, atol=0)
