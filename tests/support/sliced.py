"""Steps for tests of the runtime: tiny models, plans of one GPU from lists of slices, and the uncut gradients."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

from varlen.runtime.main_grads import gradient, is_narrow
from varlen.step_plan import BACKWARD, FORWARD, Mesh, MicroPacks, StepPlan

# Memory that nobody has written is NaN, and not what the last tensor there held, which may be right.
torch.use_deterministic_algorithms(True)

Slice = tuple[int, int, int]
"""Document, start, stop."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 3,
}


def tiny(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    if family == "mistral4":  # transformers has it in no list of causal models
        return Mistral4ForCausalLM._from_config(config, dtype=dtype).train()  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def with_gradients(model: Any) -> Any:
    """The model, with gradients of zeros, as an earlier batch leaves them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        if is_narrow(parameter):
            gradient(parameter)
    return model


def micropacks(steps: Sequence[Sequence[Slice]]) -> MicroPacks:
    flat = [piece for step in steps for piece in step]
    columns = np.array(flat, np.int32).reshape(-1, 3).T
    return MicroPacks(
        rank_offsets=np.array([0, len(steps)], np.int32),
        slice_offsets=np.cumsum([0, *map(len, steps)], dtype=np.int32),
        document_ids=columns[0].copy(),
        starts=columns[1].copy(),
        stops=columns[2].copy(),
    )


def one_gpu_plan(
    lengths: Sequence[int],
    forward: Sequence[Sequence[Slice]],
    backward: Sequence[Sequence[Slice]] | None = None,
    *,
    recompute: Literal["none", "selective", "full"] = "none",
    tasks: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    splits_backward: bool = False,
) -> StepPlan:
    """A plan of one GPU: all forward tasks, then all backward; by default the same MicroPacks, last to first."""
    back = [pack[::-1] for pack in reversed(forward)] if backward is None else backward
    order = [FORWARD] * len(forward) + [BACKWARD] * len(back) if tasks is None else tasks
    return StepPlan(
        lengths=np.array(lengths, np.int32),
        first_ranks=np.zeros(len(lengths), np.int32),
        num_ranks=np.ones(len(lengths), np.int32),
        forward=micropacks(forward),
        backward=micropacks(back),
        tasks=np.array(order, np.uint8),
        task_offsets=np.array([0, len(order)], np.int32),
        mesh=Mesh() if mesh is None else mesh,
        splits_backward=splits_backward,
        recompute=recompute,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], Any]:
    """Documents cut anywhere in both passes, slices of one or several in MicroPacks of up to three."""
    lengths = draw(st.lists(st.integers(2, 24), min_size=1, max_size=4))
    recompute = draw(st.sampled_from(["none", "full"]))

    def cut() -> list[list[Slice]]:
        queues = []
        for document, length in enumerate(lengths):
            cuts = sorted({0, length, *draw(st.lists(st.integers(1, length), max_size=3))})
            queues.append([(document, a, b) for a, b in zip(cuts, cuts[1:])])
        packs = []
        while waiting := [d for d, queue in enumerate(queues) if queue]:
            chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3))
            packs.append([queues[d].pop(0) for d in chosen if queues[d]])
        return packs

    forward = cut()
    backward = [pack[::-1] for pack in reversed(cut())] if recompute == "full" else None
    return lengths, one_gpu_plan(lengths, forward, backward, recompute=recompute)


def tokens_of(lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (sum(lengths),), generator=made)  # type: ignore[call-overload]


def uncut(
    model: Any, tokens: torch.Tensor, lengths: Sequence[int], attention: str = "sdpa"
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model as a whole, document by document, with no slice."""
    model.set_attn_implementation(attention)  # eager computes its softmax in float32
    targets = sum(length - 1 for length in lengths)
    total = 0.0
    for document in torch.split(tokens, list(lengths)):
        if len(document) > 1:
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
    return total, take_gradients(model)


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, which are then cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
