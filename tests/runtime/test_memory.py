"""Where a step's bytes are and go; out of memory, the task, its documents and rows are named."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plan.accuracy import TARGET_BYTES, predicted_bytes
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import mostly
from tests.support.sliced import Slice, one_gpu_plan, take_gradients, tiny, tokens_of, uncut
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.cost.shape import ModelShape
from varlen.errors import DeviceMemoryError, VarlenError
from varlen.plan.one_gpu import one_gpu_plan as planned
from varlen.runtime import flash, tiles
from varlen.runtime.clock import TrackedBytes, bytes_meter, in_host_memory
from varlen.runtime.kv_cache import DocumentCache, KeptRows
from varlen.runtime.stage_run import Took, is_out_of_memory, rows_that_fit
from varlen.runtime.step import run_step

COPIES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._to_copy.default,
)


class CopiedBytes(TorchDispatchMode):
    """Counts bytes of floating tensors that are copied or joined."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in COPIES and made.is_floating_point():
            self.total += made.numel() * made.element_size()
        return made


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_copied_are_linear_in_a_document_however_many_slices_it_has(recompute: Any) -> None:
    model, length = tiny("llama", torch.float32), 256
    copied = []
    for count in (8, 64):
        plan = planned(np.array([length], np.int32), length // count, recompute=recompute)
        with CopiedBytes() as copies:
            run_step(model, tokens_of([length]), plan)
        copied.append(copies.total)

    kept = length * 2 * 2 * 16 * 4  # keys and values, of both layers
    # At most 15 copies of keys and values, and as many of their gradients; every slice copying all gives 52.
    assert copied[1] - copied[0] < 2 * 15 * kept


@given(st.integers(2, 400), st.data())
def test_a_cache_gives_back_what_is_free_but_for_a_sixteenth_in_15_copies_at_most(
    length: int, data: st.DataObject
) -> None:
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length - 1), max_size=60))})
    cache, rows = DocumentCache(length), torch.arange(length, dtype=torch.float32).expand(1, 2, 3, -1).mT
    for start, stop in pairwise(cuts):
        cache.write(0, start, rows[:, :, start:stop], -rows[:, :, start:stop])
    cache.earlier_gradients(0, cuts[-2])
    with CopiedBytes() as copies:
        for start in reversed(cuts[1:-1]):
            cache.release(0, start)
            for of in (cache.pairs[0], cache.gradients[0]):
                assert all(start <= x.shape[2] <= max(start, start / (1 - 1 / 16)) for x in of)
            assert torch.equal(cache.read(0, start)[1], -rows[:, :, :start])
        cache.release(0, 0)

    assert not cache.pairs
    assert not cache.gradients
    assert copies.total <= 15 * 4 * length * 2 * 3 * 4


def test_a_document_given_back_token_by_token_is_copied_15_times_at_most() -> None:
    cache, length = DocumentCache(1000), 1000
    rows = torch.zeros(1, 2, length, 3)
    cache.write(0, 0, rows, rows)
    with CopiedBytes() as copies:
        for start in reversed(range(length)):
            cache.release(0, start)

    assert copies.total <= 15 * 2 * rows.numel() * 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 9), max_size=20))
def test_kept_rows_come_back_from_the_end_whatever_pieces_they_came_in(
    pieces: list[int], wanted: list[int]
) -> None:
    rows, kept, left = torch.arange(sum(pieces))[:, None], KeptRows(), sum(pieces)
    for piece in rows.split(pieces):
        kept.add(piece)

    for count in (min(x, 9) for x in wanted):
        count = min(count, left)
        taken = torch.cat([rows[:0], *kept.take(count)])
        assert torch.equal(taken, rows[left - count : left])
        left -= count


FORWARD: list[list[Slice]] = [
    [(0, 0, 13)],
    [(0, 13, 21), (1, 0, 7)],
    [(0, 21, 26), (0, 26, 30), (2, 0, 1), (3, 0, 4)],
]
BACKWARD: list[list[Slice]] = [
    [(2, 0, 1), (0, 24, 30)],
    [(0, 15, 24), (3, 0, 4)],
    [(1, 0, 7), (0, 9, 15), (0, 0, 9)],
]


PLACES = [
    ("none", 1.0, "layers", "kv"),
    ("selective", 1.0, "layers", "none"),
    ("selective", 1.0, "layers", "kv"),
    ("full", 1.0, "layers", "kv"),
    ("full", 1.0, "stage", "none"),
    ("full", 1.0, "stage", "kv"),
    ("full", 0.6, "stage", "kv"),
    ("full", 0.3, "layers", "none"),
]
CELLS = [(family, *one) for family in ("llama", "qwen3_moe", "phi3", "mistral") for one in PLACES]


@pytest.mark.parametrize(
    ("family", "recompute", "share", "saved", "offload"),
    mostly([one for one in CELLS if one[0] == "llama" or one[1:] in (PLACES[2], PLACES[6])], CELLS),
)
def test_gradients_are_exact_wherever_bytes_are(
    family: str, recompute: Any, share: float, saved: Any, offload: Any
) -> None:
    settings_of = {
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "experts_implementation": "eager",
        },
        "mistral": {"sliding_window": 9},
    }
    model, lengths = tiny(family, num_hidden_layers=5, **settings_of.get(family, {})), [30, 7, 1, 4]
    backward = BACKWARD if recompute == "full" and share == 1 else None
    plan = one_gpu_plan(lengths, FORWARD, backward, recompute=recompute)
    plan = replace(plan, recompute_share=share, offload=offload)
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths)

    run = run_step(model, tokens, plan, saved=saved)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    found = take_gradients(model)
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


def test_selective_graphs_leave_out_norm_outputs_and_the_product() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
    model, length = tiny("llama", torch.bfloat16, **sizes), 256
    held = []
    for recompute in ("none", "selective"):
        plan = planned(np.array([length], np.int32), length, recompute=recompute)  # type: ignore[arg-type]
        with bytes_meter(torch.device("cpu")) as meter:
            held.append(run_step(model, tokens_of([length]), plan, meter=meter).places[0].live_bytes[0])

    assert held[0] - held[1] == length * 3 * (4 * 64 + 2 * 176)


WIDE = {
    "hidden_size": 64,
    "intermediate_size": 480,  # wide enough for the head to pass within what layers take
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("saved", "offload"),
    mostly([("layers", "none"), ("stage", "kv")], product(("layers", "stage"), ("none", "kv"))),
)
def test_peaks_of_long_documents_are_what_the_cost_model_says(saved: Any, offload: Any) -> None:
    model, length = tiny("llama", torch.bfloat16, **WIDE), 2048
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan, tokens = planned(np.array([length], np.int32), 64, offload=offload), tokens_of([length])

    with bytes_meter(torch.device("cpu")) as meter:
        run = run_step(model, tokens, plan, meter=meter, saved=saved).places[0]

    predicted = predicted_bytes(ModelShape.from_config(model.config), plan, saved)
    assert run.peak_bytes.max() - TARGET_BYTES * length == pytest.approx(predicted, rel=0.02)
    layers_far = 0 if offload == "none" else 5
    inputs_far = 2 * 64 if (saved, offload) == ("stage", "kv") else 0
    per_token = layers_far * 2 * 2 * 16 * (2 + 4)
    assert meter.host_peak == pytest.approx(length * (per_token + inputs_far), rel=0.03)


def test_bytes_in_host_memory_are_counted_apart() -> None:
    with TrackedBytes() as meter:
        with in_host_memory():
            far = torch.zeros(1000)
        near = far + 1
        assert (meter.live, meter.host_live) == (4000, 4000)
        del near, far
        assert (meter.live, meter.host_live, meter.host_peak) == (0, 0, 4000)


def test_a_short_chunk_has_nothing_to_offload() -> None:
    model, length = tiny("llama", torch.float32), 64
    plan = planned(np.array([length], np.int32), 16, offload="kv")
    with bytes_meter(torch.device("cpu")) as meter:
        run_step(model, tokens_of([length]), plan, meter=meter)

    assert meter.host_peak == 0


def test_gradients_of_earlier_keys_come_some_at_a_time_and_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BACKWARD_KEYS", 5)
    model, tokens = tiny("llama"), tokens_of([40])
    loss, wanted = uncut(model, tokens, [40])
    most: list[int] = []
    backward = flash.backward

    def noted(gradient: Any, query: Any, key: Any, *rest: Any, **how: Any) -> Any:
        most.append(key.shape[2])
        return backward(gradient, query, key, *rest, **how)

    monkeypatch.setattr(flash, "backward", noted)
    run = run_step(model, tokens, planned(np.array([40], np.int32), 8))

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert max(most) == 8
    for name, gradient in take_gradients(model).items():
        assert (gradient - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


LENGTH = 512


class FullCard(TrackedBytes):
    """A device with so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def _add(self, size: int, is_far: bool) -> None:
        if not is_far and size > 0 and self.live + size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        super()._add(size, is_far)


def refuses_more_rows_than(model: Any, most: int) -> None:
    """Let a layer find no memory for more rows than that."""

    def look(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")

    model.model.layers[1].register_forward_pre_hook(look)


def test_a_task_without_memory_is_named_with_its_documents_and_the_rows_that_run() -> None:
    model = tiny("llama")
    refuses_more_rows_than(model, 9)
    plan = one_gpu_plan([30, 5], [[(0, 0, 8)], [(0, 8, 18), (1, 0, 5)], [(0, 18, 30)]])

    with pytest.raises(DeviceMemoryError) as caught:
        run_step(model, tokens_of([30, 5]), plan)

    assert str(caught.value).startswith(
        "out of memory (tried to allocate 2.50 GiB) in forward of MicroPack 1, layers 0-1, of stage 0 of pipeline 0, "
        "with 15 rows: 0-5 of document 1, 8-18 of document 0; MicroPacks of at most 8 rows would fit, by estimate: "
        "plan with slice_tokens=8; "
    )
    assert isinstance(caught.value, VarlenError)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__notes__ == ["in stage 0 of pipeline 0, forward, MicroPack 1, layers 0-1"]
    take_gradients(model)
    run_step(model, tokens_of([30, 5]), planned(np.array([30, 5], np.int32), caught.value.rows_that_fit))


def peak_of(model: Any, recompute: Any) -> int:
    """The most bytes alive at once while one document runs as one slice."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with TrackedBytes() as free:
        run = run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, recompute), meter=free)
    return int(run.places[0].peak_bytes.max())


def one_slice(rows: int, recompute: Any) -> Any:
    return planned(np.array([LENGTH], np.int32), rows, recompute=recompute)


def advised(model: Any, limit: int, recompute: Any) -> list[int]:
    """Rows as advised, one after the other, until a step runs or none is advised any more."""
    rows = [LENGTH]
    while rows[-1]:
        try:
            with FullCard(limit) as card:
                run_step(model, tokens_of([LENGTH]), one_slice(rows[-1], recompute), meter=card)
            return rows
        except DeviceMemoryError as error:
            rows.append(error.rows_that_fit)
    return rows


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_slices_as_short_as_is_said_come_to_a_step_that_runs(share: float) -> None:
    model = tiny("llama", torch.float32)
    rows = advised(model, int(share * peak_of(model, "full")), "full")

    assert 2 <= len(rows) <= 3
    assert rows[-1] >= 32


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_that_is_tried_again_has_the_gradients_of_one_step(recompute: Any) -> None:
    model = tiny("llama", torch.float32)
    limit = int(0.9 * peak_of(model, recompute))
    take_gradients(model)
    run_step(model, tokens_of([LENGTH]), one_slice(32, recompute))
    wanted = take_gradients(model)

    with FullCard(limit) as card, pytest.raises(DeviceMemoryError):
        run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, recompute), meter=card)
    assert all(parameter.grad is None for parameter in model.parameters())
    run_step(model, tokens_of([LENGTH]), one_slice(32, recompute))

    for name, gradient in take_gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name


def test_where_gradients_were_there_before_the_error_says_that_they_have_a_part_now() -> None:
    model = tiny("llama", torch.float32)
    run_step(model, tokens_of([LENGTH]), one_slice(32, "full"))

    with FullCard(int(0.9 * peak_of(model, "full"))) as card, pytest.raises(DeviceMemoryError) as found:
        run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, "full"), meter=card)

    assert any("call optimizer.zero_grad" in note for note in found.value.__notes__)


def test_where_held_rows_alone_are_too_many_no_slice_is_said_to_fit() -> None:
    model = tiny("llama", torch.float32)

    assert advised(model, peak_of(model, "none") // 4, "none")[-1] == 0


@given(
    st.integers(2, 9999),
    st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 10**6)), max_size=5),
    st.integers(0, 10**9),
)
def test_rows_that_fit_are_fewer_and_take_what_is_there_at_most(
    rows: int, took: list[tuple[int, int]], room: int
) -> None:
    ran = [Took(rows=count, bytes=size) for count, size in took]
    fits = rows_that_fit(rows, ran, room)

    assert 0 <= fits < rows
    if room and any(each.bytes for each in ran):
        assert all(fits * each.bytes <= 0.91 * room * each.rows for each in ran)
    elif any(each.rows < rows for each in ran):
        assert fits in {each.rows for each in ran}
    else:
        assert fits == rows // 2


def test_memory_that_nobody_has_is_known_by_what_python_and_torch_say() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    )
    assert not is_out_of_memory(RuntimeError("shapes don't match"))
    assert not is_out_of_memory(DeviceMemoryError("said already"))
