"""Where a step's bytes are and go, as counted and as predicted; out of memory, the task is named."""

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plan.accuracy import TARGET_BYTES, predicted_bytes
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.side_by_side import PATIENCE_S, Table, ThreadPeers, in_threads, plan_of
from tests.support.distances import assert_same
from tests.support.products import wide_products
from tests.support.rarely import mostly
from tests.support.sliced import Slice, take_gradients, tiny, tokens_of, uncut, with_gradients
from tests.support.sliced import one_gpu_plan as plan_of_slices
from tests.support.step_plans import equal_plan, zero_bubble
from tests.support.tiny_families import EXPERTS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import varlen as vl
from varlen.attention import rectangles, tiles
from varlen.cost.memory import BACKWARD_COUNTS, EARLY, FORWARD_COUNTS, KNOWN, Saved
from varlen.cost.shape import ModelShape
from varlen.errors import DeviceMemoryError, VarlenError
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.clock import Clock, TrackedBytes, bytes_meter, in_host_memory
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.kv_cache import DocumentCache, RowStack
from varlen.runtime.mesh.channels import Channels
from varlen.runtime.mesh.shared_documents import groups_of, shared_documents
from varlen.runtime.stage_run import StageRunner, Took, is_out_of_memory, rows_that_fit
from varlen.runtime.step import chunk_steps, layers_of, run_step, step_data
from varlen.simulate.memory import plan_bytes
from varlen.simulate.schedules import interleaved, sliced
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Mesh, StepPlan, spread
from varlen.types import FloatArray

COPIES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._to_copy.default,
)


@pytest.fixture(autouse=True)
def _wide_products() -> Iterator[None]:
    with wide_products():
        yield


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
def test_bytes_copied_are_linear_in_a_document_however_many_slices_it_has(recompute):
    model, length = tiny("llama", torch.float32), 256
    copied = []
    for count in (8, 64):
        plan = one_gpu_plan(np.array([length], np.int32), length // count, recompute=recompute)
        with CopiedBytes() as copies:
            run_step(model, tokens_of([length]), plan)
        copied.append(copies.total)

    kept = length * 2 * 2 * 16 * 4  # keys and values, of both layers
    # At most 15 copies of keys and values, and as many of their gradients; every slice copying all gives 52.
    assert copied[1] - copied[0] < 2 * 15 * kept


@given(st.integers(2, 400), st.data())
def test_a_cache_gives_back_what_is_free_but_for_a_sixteenth_in_15_copies_at_most(length, data):
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


def test_a_document_given_back_token_by_token_is_copied_15_times_at_most():
    cache, length = DocumentCache(1000), 1000
    rows = torch.zeros(1, 2, length, 3)
    cache.write(0, 0, rows, rows)
    with CopiedBytes() as copies:
        for start in reversed(range(length)):
            cache.release(0, start)

    assert copies.total <= 15 * 2 * rows.numel() * 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 9), max_size=20))
def test_kept_rows_come_back_from_the_end_whatever_pieces_they_came_in(pieces, wanted):
    rows, kept, left = torch.arange(sum(pieces))[:, None], RowStack(), sum(pieces)
    for piece in rows.split(pieces):
        kept.add(piece)

    for count in (min(x, 9) for x in wanted):
        count = min(count, left)
        taken = torch.cat([rows[:0], *kept.take(count)])
        assert torch.equal(taken, rows[left - count : left])
        left -= count


SIX_PASSES: list[list[Slice]] = [
    [(0, 0, 13)],
    [(0, 13, 21), (1, 0, 7)],
    [(0, 21, 26), (0, 26, 30), (2, 0, 1), (3, 0, 4)],
]
SIX_BACK: list[list[Slice]] = [
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
def test_gradients_are_exact_wherever_bytes_are(family, recompute, share, saved, offload):
    settings_of = {"qwen3_moe": EXPERTS, "mistral": {"sliding_window": 9}}
    model, lengths = tiny(family, num_hidden_layers=5, **settings_of.get(family, {})), [30, 7, 1, 4]
    backward = SIX_BACK if recompute == "full" and share == 1 else None
    plan = plan_of_slices(lengths, SIX_PASSES, backward, recompute=recompute)
    plan = replace(plan, recompute_share=share, offload=offload)
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths)

    run = run_step(model, tokens, plan, saved=saved)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert_same(take_gradients(model), wanted)


def test_selective_graphs_leave_out_norm_outputs_and_the_product():
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
    model, length = tiny("llama", torch.bfloat16, **sizes), 256
    held = []
    for recompute in ("none", "selective"):
        plan = one_gpu_plan(np.array([length], np.int32), length, recompute=recompute)  # type: ignore[arg-type]
        with bytes_meter(torch.device("cpu")) as meter:
            held.append(run_step(model, tokens_of([length]), plan, meter=meter).task_runs[0].live_bytes[0])

    assert held[0] - held[1] == length * 3 * (4 * 64 + 2 * 176)


WIDE = {
    "hidden_size": 64,
    "intermediate_size": 480,  # wide enough for the head to pass within what layers take
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("saved", "offload"), mostly([("stage", "kv")], product(("layers", "stage"), ("none", "kv")))
)
def test_peaks_of_long_documents_are_what_the_cost_model_says(saved, offload):
    model, length = tiny("llama", torch.bfloat16, **WIDE), 2048
    with_gradients(model)
    plan, tokens = one_gpu_plan(np.array([length], np.int32), 64, offload=offload), tokens_of([length])

    with bytes_meter(torch.device("cpu")) as meter:
        run = run_step(model, tokens, plan, meter=meter, saved=saved).task_runs[0]

    predicted = predicted_bytes(ModelShape.from_config(model.config), plan, saved)
    assert run.peak_bytes.max() - TARGET_BYTES * length == pytest.approx(predicted, rel=0.02)
    layers_far = 0 if offload == "none" else 5
    inputs_far = 2 * 64 if (saved, offload) == ("stage", "kv") else 0
    per_token = layers_far * 2 * 2 * 16 * (2 + 4)
    assert meter.host_peak == pytest.approx(length * (per_token + inputs_far), rel=0.03)


def test_bytes_in_host_memory_are_counted_apart():
    with TrackedBytes() as meter:
        with in_host_memory():
            far = torch.zeros(1000)
        near = far + 1
        assert (meter.live, meter.host_live) == (4000, 4000)
        del near, far
        assert (meter.live, meter.host_live, meter.host_peak) == (0, 0, 4000)


def test_a_short_chunk_has_nothing_to_offload():
    model, length = tiny("llama", torch.float32), 64
    plan = one_gpu_plan(np.array([length], np.int32), 16, offload="kv")
    with bytes_meter(torch.device("cpu")) as meter:
        run_step(model, tokens_of([length]), plan, meter=meter)

    assert meter.host_peak == 0


def test_gradients_of_earlier_keys_that_come_at_once_take_a_thousandth_of_a_card():
    shape = vl.ModelShape.named("llama-3-8b")
    of_a_key = 2 * shape.kv_heads * shape.head_dim * 4

    assert tiles.BACKWARD_KEYS * of_a_key < 0.001 * vl.Hardware.named("h100").memory_bytes


def test_gradients_of_earlier_keys_come_some_at_a_time_and_are_exact(monkeypatch):
    monkeypatch.setattr(tiles, "BACKWARD_KEYS", 5)
    model, tokens = tiny("llama"), tokens_of([40])
    loss, wanted = uncut(model, tokens, [40])
    most: list[int] = []
    backward = rectangles.backward

    def noted(gradient: Any, query: Any, key: Any, *rest: Any, **how: Any) -> Any:
        most.append(key.shape[2])
        return backward(gradient, query, key, *rest, **how)

    monkeypatch.setattr(rectangles, "backward", noted)
    run = run_step(model, tokens, one_gpu_plan(np.array([40], np.int32), 8))

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert max(most) == 8
    assert_same(take_gradients(model), wanted)


LENGTH = 512


class FullCard(TrackedBytes):
    """A device with so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def _add(self, size: int, is_on_host: bool) -> None:
        if not is_on_host and size > 0 and self.live + size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        super()._add(size, is_on_host)


def refuses_more_rows_than(model: Any, most: int) -> None:
    """Let a layer find no memory for more rows than that."""

    def look(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")

    model.model.layers[1].register_forward_pre_hook(look)


def test_a_task_without_memory_is_named_with_its_documents_and_the_rows_that_run():
    model = tiny("llama")
    refuses_more_rows_than(model, 9)
    plan = plan_of_slices([30, 5], [[(0, 0, 8)], [(0, 8, 18), (1, 0, 5)], [(0, 18, 30)]])

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
    run_step(model, tokens_of([30, 5]), one_gpu_plan(np.array([30, 5], np.int32), caught.value.rows_that_fit))


def peak_of(model: Any, recompute: Any) -> int:
    """The most bytes alive at once while one document runs as one slice."""
    with_gradients(model)
    with TrackedBytes() as free:
        run = run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, recompute), meter=free)
    return int(run.task_runs[0].peak_bytes.max())


def one_slice(rows: int, recompute: Any) -> Any:
    return one_gpu_plan(np.array([LENGTH], np.int32), rows, recompute=recompute)


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
def test_slices_as_short_as_is_said_come_to_a_step_that_runs(share):
    model = tiny("llama", torch.float32)
    rows = advised(model, int(share * peak_of(model, "full")), "full")

    assert 2 <= len(rows) <= 3
    assert rows[-1] >= 32


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_that_is_tried_again_has_the_gradients_of_one_step(recompute):
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


def test_where_gradients_were_there_before_the_error_says_that_they_have_a_part_now():
    model = tiny("llama", torch.float32)
    run_step(model, tokens_of([LENGTH]), one_slice(32, "full"))

    with FullCard(int(0.9 * peak_of(model, "full"))) as card, pytest.raises(DeviceMemoryError) as found:
        run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, "full"), meter=card)

    assert any("call optimizer.zero_grad" in note for note in found.value.__notes__)


def test_where_held_rows_alone_are_too_many_no_slice_is_said_to_fit():
    model = tiny("llama", torch.float32)

    assert advised(model, peak_of(model, "none") // 4, "none")[-1] == 0


@given(
    st.integers(2, 9999),
    st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 10**6)), max_size=5),
    st.integers(0, 10**9),
)
def test_rows_that_fit_are_fewer_and_take_what_is_there_at_most(rows, took, room):
    ran = [Took(rows=count, bytes=size) for count, size in took]
    fits = rows_that_fit(rows, ran, room)

    assert 0 <= fits < rows
    if room and any(each.bytes for each in ran):
        assert all(fits * each.bytes <= 0.91 * room * each.rows for each in ran)
    elif any(each.rows < rows for each in ran):
        assert fits in {each.rows for each in ran}
    else:
        assert fits == rows // 2


def test_memory_that_nobody_has_is_known_by_what_python_and_torch_say():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    )
    assert not is_out_of_memory(RuntimeError("shapes don't match"))
    assert not is_out_of_memory(DeviceMemoryError("said already"))


NARROW = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
MODELS: dict[str, dict[str, int]] = {
    "GQA": {**NARROW, "num_key_value_heads": 2, "intermediate_size": 224, "num_hidden_layers": 5},
    "MHA": {**NARROW, "num_key_value_heads": 4, "intermediate_size": 172, "num_hidden_layers": 6},
    "wide": {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 896,
        "num_hidden_layers": 6,
        "vocab_size": 512,
    },
}
WAYS = [
    (recompute, saved, offload)
    for recompute, saved in (
        ("none", "layers"),
        ("selective", "layers"),
        ("full", "layers"),
        ("full", "stage"),
    )
    for offload in ("none", "kv")
]
HEADS = pytest.mark.parametrize("name", mostly(["GQA"], ["GQA", "MHA"]))
OFTEN = [
    ("none", "layers", "none"),
    ("selective", "layers", "kv"),
    ("full", "layers", "none"),
    ("full", "stage", "kv"),
]
EACH_WAY = pytest.mark.parametrize(("recompute", "saved", "offload"), mostly(OFTEN, WAYS))
MOST_AND_LEAST = pytest.mark.parametrize(
    ("recompute", "saved", "offload"), mostly([OFTEN[0], OFTEN[-1]], WAYS)
)
"""Everything kept, and as little as can be."""
ON_ONE = [(name, *held) for name in MODELS for held in (((600,), 100), ((500, 40, 160, 90, 60), 250))]


def check(name: str, plan: StepPlan, saved: Any, rel: float = 0.02, precision: Any = "bf16") -> None:
    model = tiny("llama", torch.bfloat16 if precision == "bf16" else torch.float32, **MODELS[name])

    found = measured(model, spread(plan), saved)
    said = predicted(model, plan, saved, precision).repeat(plan.mesh.cp, axis=0)

    for place, (one, other) in enumerate(zip(found.ravel().tolist(), said.ravel().tolist())):
        print(f"place {place}: measured {one:,.0f}, predicted {other:,.0f}, {other / one - 1:+.2%}")
    np.testing.assert_allclose(said, found, rtol=rel)


def pipelined(schedule: Any, count: int, slices: int, rows: int, mesh: Mesh, **settings: Any) -> StepPlan:
    """Documents of `slices` slices of `rows` each, in a closed-form order."""
    plan = equal_plan(schedule, count, mesh, slices=slices)
    passes = {
        each: replace(packs, starts=rows * packs.starts, stops=rows * packs.stops)
        for each, packs in (("forward", plan.forward), ("backward", plan.backward))
    }
    return replace(plan, lengths=rows * plan.lengths, **passes, **settings)


@EACH_WAY
@pytest.mark.parametrize(("name", "lengths", "slice_tokens"), mostly([ON_ONE[1]], ON_ONE))
def test_a_stage_holds_what_is_predicted(name, recompute, saved, offload, lengths, slice_tokens):
    held = np.array(lengths, np.int32)
    check(name, one_gpu_plan(held, slice_tokens, recompute=recompute, offload=offload), saved)


@pytest.mark.parametrize("name", mostly(["MHA"], MODELS))
@EACH_WAY
@pytest.mark.parametrize(
    ("count", "slices", "rows"), [(5, 5, 100), pytest.param(3, 1, 250, marks=pytest.mark.soak)]
)
def test_two_stages_hold_what_is_predicted(name, recompute, saved, offload, count, slices, rows):
    schedule = sliced(2, count, slices)
    plan = pipelined(schedule, count, slices, rows, Mesh(pp=2), recompute=recompute, offload=offload)
    check(name, plan, saved)


@HEADS
@MOST_AND_LEAST
def test_documents_that_begin_while_others_end_hold_what_is_predicted(name, recompute, saved, offload):
    plan = pipelined(sliced(2, 9, 3), 9, 3, 120, Mesh(pp=2), recompute=recompute, offload=offload)
    check(name, plan, saved)


@MOST_AND_LEAST
def test_chunks_in_turn_hold_what_is_predicted(recompute, saved, offload):
    mesh = Mesh(pp=2, virtual_stages=2)
    plan = pipelined(interleaved(2, 2, 4), 4, 1, 200, mesh, recompute=recompute, offload=offload)
    check("GQA", plan, saved)


@EACH_WAY
@pytest.mark.parametrize("splits", mostly([True], [False, True]))
@pytest.mark.parametrize("name", mostly(["MHA"], ["GQA", "MHA"]))
def test_micropacks_of_whole_documents_hold_what_is_predicted(name, recompute, saved, offload, splits):
    packs: list[list[Slice]] = [[(3 * pack + d, 0, 80 + 40 * d) for d in range(3)] for pack in range(4)]
    plan = plan_of_slices([80, 120, 160] * 4, packs, recompute=recompute, splits_backward=splits)
    if splits:
        tasks = np.array([FORWARD] * 4 + [BACKWARD, WEIGHT] * 4, np.uint8)
        plan = replace(plan, tasks=tasks, task_offsets=np.array([0, len(tasks)], np.int32))
    check(name, replace(plan, offload=offload), saved, 0.005)


@HEADS
@MOST_AND_LEAST
def test_weight_gradients_apart_hold_what_is_predicted(name, recompute, saved, offload):
    settings = {"recompute": recompute, "offload": offload, "splits_backward": True}
    check(name, pipelined(zero_bubble(2, 3), 3, 1, 300, Mesh(pp=2), **settings), saved)


@HEADS
@MOST_AND_LEAST
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 5), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_ranks_that_share_a_document_hold_what_is_predicted(name, recompute, saved, offload, ranks, count):
    cuts: list[list[Slice]] = [[(0, *each)] for each in pairwise(range(0, 1601, 1600 // count))]
    plan = plan_of([1600], [(0, ranks)], [cuts] * ranks, [cuts[::-1]] * ranks, recompute=recompute)
    check(name, replace(plan, offload=offload), saved)


@pytest.mark.parametrize(("ranks", "count"), mostly([(2, 5)], [(2, 1), (2, 5), (4, 2)]))
@pytest.mark.parametrize("name", mostly(["GQA"], MODELS))
@MOST_AND_LEAST
def test_gpus_of_context_parallelism_hold_what_is_predicted(name, recompute, saved, offload, ranks, count):
    cuts = [[(0, *each)] for each in pairwise(range(0, 1601, 1600 // count))] + [[(1, 0, 320)]]
    plan = plan_of_slices([1600, 320], cuts, recompute=recompute, mesh=Mesh(cp=ranks))
    plan = replace(plan, offload=offload)
    check(name, plan, saved)


CUTS: list[list[Slice]] = [[(0, *each)] for each in pairwise(range(0, 1601, 320))]
IN_FLOAT32: dict[str, StepPlan] = {
    "slices": one_gpu_plan(np.array([600], np.int32), 100),
    "packs": one_gpu_plan(np.array([500, 40, 160, 90, 60], np.int32), 250),
    "stages": pipelined(sliced(2, 5, 5), 5, 5, 100, Mesh(pp=2)),
    "weights apart": pipelined(zero_bubble(2, 3), 3, 1, 300, Mesh(pp=2), splits_backward=True),
    "shared": plan_of([1600], [(0, 2)], [CUTS] * 2, [CUTS[::-1]] * 2),
    "cp": plan_of_slices([1600, 320], [*CUTS, [(1, 0, 320)]], mesh=Mesh(cp=2)),
}


@pytest.mark.parametrize("name", mostly(["GQA"], MODELS))
@MOST_AND_LEAST
@pytest.mark.parametrize("kind", IN_FLOAT32)
def test_float32_holds_what_is_predicted(name, kind, recompute, saved, offload):
    plan = replace(IN_FLOAT32[kind], recompute=recompute, offload=offload)
    check(name, plan, saved, precision="fp32")


SHARES = [("none", 1.0), ("full", 1.0), ("full", 0.5)]


@pytest.mark.parametrize(
    ("count", "recompute", "saved", "offload"),
    mostly([(4, "full", "layers", "kv")], [(count, *way) for count in (1, 4, 8) for way in WAYS]),
)
@pytest.mark.parametrize("ranks", mostly([2], [1, 2, 4]))
def test_the_gradient_of_the_head_is_there_before_its_norm_runs_backward(
    ranks, count, recompute, saved, offload
):
    """Slices of few rows, where a matrix counts; and a norm that takes more than the logits."""
    cuts: list[list[Slice]] = [
        [(0, *each)] for each in pairwise(800 * ranks * k // count for k in range(count + 1))
    ]
    plan = plan_of([800 * ranks], [(0, ranks)], [cuts] * ranks, [cuts[::-1]] * ranks, recompute=recompute)
    check("wide", replace(plan, offload=offload), saved)


@pytest.mark.parametrize("name", mostly(["wide"], MODELS))
@pytest.mark.parametrize(
    ("other", "recompute", "share"),
    mostly([(300, "none", 1.0), (900, "full", 0.5)], [(n, *way) for n in (300, 900) for way in SHARES]),
)
def test_what_ranks_gather_ahead_is_predicted_beside_other_documents(name, other, recompute, share):
    """A short shared document leaves room to gather the long one ahead, and a longer one doesn't."""
    first, last = [(0, 0, 400)], [(0, 1000, 1600)]
    forward = [[first, [(0, 400, 1000), (1, 0, other), (2 + rank, 0, 200)], last] for rank in range(2)]
    backward = [packs[::-1] for packs in forward]
    holders = [(0, 2), (0, 2), (0, 1), (1, 1)]
    plan = plan_of([1600, other, 200, 200], holders, forward, backward, recompute=recompute)
    check(name, replace(plan, recompute_share=share), "layers")


def test_tasks_whose_layers_are_wide_take_as_much_more_for_gathering_ahead_as_is_predicted(monkeypatch):
    """Where the peak is in a layer's products, and not in its attention."""
    cuts: list[list[Slice]] = [[(0, 0, 1400)], [(0, 1400, 2000)]]
    plan = plan_of([2000], [(0, 2)], [cuts] * 2, [cuts[::-1]] * 2, recompute="full")
    model, found = tiny("llama", torch.bfloat16, **MODELS["wide"], tie_word_embeddings=False), []
    for most in (0, 2000):
        monkeypatch.setattr("varlen.runtime.mesh.shared_documents.AHEAD_TOKENS", most)
        measured(model, plan)
        found.append(TOLD[0, 0][0].peak_bytes[[1, 2]])

    cost = vl.CostModel(model=vl.ModelShape.from_config(model.config), hardware=H100, kernels="eager")
    memory = cost.as_planned(plan).memory(plan.mesh)
    without = replace(
        memory,
        forward_peaks=np.where(np.arange(FORWARD_COUNTS) == EARLY, 0.0, memory.forward_peaks),
        backward_peaks=np.where(
            np.isin(np.arange(BACKWARD_COUNTS), [EARLY, KNOWN]), 0.0, memory.backward_peaks
        ),
    )
    each = [plan_bytes(plan, one) for one in (without, memory)]
    said = [[one.forward_peaks[0, 1], one.backward_peaks[0, 0]] for one in each]
    np.testing.assert_allclose(np.subtract(*said[::-1]), found[1] - found[0], rtol=0.001)
    assert min(found[1] - found[0]) > 0


@HEADS
@pytest.mark.parametrize("offload", mostly(["kv"], ["none", "kv"]))
@pytest.mark.parametrize("share", mostly([0.5], [0.2, 0.5, 0.8]))
def test_layers_some_of_which_are_computed_again_hold_what_is_predicted(name, offload, share):
    plan = one_gpu_plan(np.array([1000], np.int32), 125, recompute="full", offload=offload)
    check(name, replace(plan, recompute_share=share), "layers", 0.005)


def by_dice(random: Random, lengths: list[int]) -> list[list[Slice]]:
    """MicroPacks of slices of documents, each cut anywhere, mixed anyhow, in their order."""
    chains = []
    for document, length in enumerate(lengths):
        inner = {60 * random.randrange(1, length // 60) for _ in range(random.randrange(6))}
        chains.append([(document, *each) for each in pairwise(sorted({0, length, *inner}))])
    packs: list[list[Slice]] = []
    while any(chains):
        if taken := [chain.pop(0) for chain in chains if chain and random.random() < 0.6]:
            packs.append(taken)
    return packs


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "stages"), mostly([(2, 1)], [(1, 1), (2, 1), (1, 2)]))
@pytest.mark.parametrize("weights", mostly(["apart and late"], ["at once", "apart", "apart and late"]))
@pytest.mark.parametrize("seed", mostly([6], range(10)))  # it misses nothing of what is counted
def test_any_cuts_of_both_passes_hold_what_is_predicted(seed, weights, ranks, stages):
    random = Random(seed)
    lengths = [random.choice([600, 1200, 1800]) for _ in range(random.randrange(1, 4))]
    passes = by_dice(random, lengths), by_dice(random, lengths)[::-1]
    cuts = ([each] * ranks for each in passes)
    plan = plan_of(lengths, [(0, ranks)] * len(lengths), *cuts, recompute="full")
    backward = {"at once": [BACKWARD], "apart": [BACKWARD, WEIGHT], "apart and late": [BACKWARD]}[weights]
    tasks = [FORWARD] * len(passes[0]) + backward * len(passes[1])
    tasks += [WEIGHT] * len(passes[1]) * (weights == "apart and late")
    plan = replace(
        plan,
        tasks=np.tile(np.array(tasks, np.uint8), ranks * stages),
        task_offsets=np.arange(ranks * stages + 1, dtype=np.int32) * len(tasks),
        mesh=Mesh(dp=ranks, pp=stages),
        splits_backward=weights != "at once",
    )
    saved, offload = random.choice(["layers", "stage"]), random.choice(["none", "kv"])
    check(random.choice(["GQA", "wide"]), replace(plan, offload=offload), saved, 0.01)


@pytest.mark.parametrize("name", mostly(["GQA"], MODELS))
def test_cuts_of_the_backward_pass_alone_hold_what_is_predicted(name):
    forward: list[list[Slice]] = [[(0, 0, 500)], [(0, 500, 700), (1, 0, 300)], [(0, 700, 1000)]]
    backward: list[list[Slice]] = [[(0, 850, 1000)], [(0, 300, 850)], [(0, 0, 300), (1, 0, 300)]]
    plan = plan_of([1000, 300], [(0, 1), (0, 1)], [forward], [backward], recompute="full")
    check(name, plan, "layers")


H100 = vl.Hardware.named("h100")


TOLD = {}


class Pipe:
    """One direction between two threads, which has sent a message once it was told of it."""

    def __init__(self) -> None:
        self._going: queue.Queue[torch.Tensor] = queue.Queue()

    def send(self, rows: torch.Tensor, _: int) -> Any:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            self._going.put(rows.clone())
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def receive(self, rows: torch.Tensor, _: int) -> Any:
        def wait() -> None:
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                rows.copy_(self._going.get(timeout=PATIENCE_S))

        return SimpleNamespace(wait=wait)


class End:
    """A stage's end of a pipe, as channels know groups."""

    index, ranks = 0, (0, 1)

    def __init__(self, pipe: Pipe) -> None:
        self.send, self.receive = pipe.send, pipe.receive


def measured(model: Any, plan: StepPlan, saved: Saved = "layers") -> FloatArray:
    """The most bytes of tensors on each stage of each rank beside parameters, gradients and tokens, `[dp, pp]`."""
    mesh, tokens = plan.mesh, tokens_of(plan.lengths.tolist())
    tables = {
        (stage, *group): Table(group[1])
        for rank in range(mesh.dp)
        for group in groups_of(plan, rank)
        for stage in range(mesh.pp)
    }
    models = [copy.deepcopy(model) for _ in range(mesh.dp * mesh.pp)]
    for each in models:
        with_gradients(each)
    pipes: dict[Any, Pipe] = defaultdict(Pipe)
    guard, peaks = threading.Lock(), np.zeros((mesh.dp, mesh.pp))
    TOLD.clear()

    def run(number: int) -> None:
        rank, stage = divmod(number, mesh.pp)
        mine = models[number]
        groups: dict[tuple[int, int], Any] = {
            (first, size): ThreadPeers(tables[stage, first, size], rank - first)
            for first, size in groups_of(plan, rank)
        }
        with TrackedBytes() as meter:
            parts, data = DecoderParts.of(mine), step_data(plan, tokens, None)
            shared = shared_documents(plan, rank, groups, tokens.device)
            chunks = chunk_steps(parts, layers_of(mine, mesh), data, plan, shared=shared, saved=saved)
            before = meter.live
            with guard:
                ends = {
                    (kind, takes): End(pipes[rank, kind, takes])
                    for kind, step in ((FORWARD, 1), (BACKWARD, -1))
                    for takes in range(mesh.num_chunks)
                    if 0 <= takes - step < mesh.num_chunks
                    and stage in ((takes - step) % mesh.pp, takes % mesh.pp)
                }
            coordinate = SimpleNamespace(mesh=mesh, stage=stage, dp_rank=rank, replica=rank)
            here: Any = SimpleNamespace(coordinate=coordinate, channels=ends)
            wait_reporter: Any = SimpleNamespace(waiting=nullcontext, check=lambda: None)
            like = torch.empty(mine.config.hidden_size, dtype=mine.dtype)
            transport = Channels(here, plan, like, wait_reporter, shared)
            clock, its_chunks = Clock(tokens.device), chunks[stage :: mesh.pp]
            place = StageRunner(plan, rank, stage, its_chunks, transport, clock=clock, meter=meter)
            while place.next_task:
                place.run_next()
            TOLD[rank, stage] = (place.task_run(), before)
            peaks[rank, stage] = place.task_run().peak_bytes.max(initial=0) - before

    in_threads(run, len(models), list(tables.values()))
    return peaks


def predicted(model: Any, plan: StepPlan, saved: Saved = "layers", precision: Any = "bf16") -> FloatArray:
    """The simulator's peaks beside states, float64 `[dp, pp]`."""
    shape = vl.ModelShape.from_config(model.config)
    cost = vl.CostModel(model=shape, hardware=H100, kernels="eager", saved=saved, precision=precision)
    return vl.simulate(plan, cost).peaks_bytes - cost.as_planned(plan).memory(plan.mesh).state_bytes
