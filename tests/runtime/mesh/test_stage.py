"""The pieces of a process of a mesh, each by itself: its coordinate, stage and sums, and its messages."""

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.support.distances import largest
from tests.support.pipelines import batch_of, compare, plan_of, runnable, small
from tests.support.sliced import Slice, one_gpu_plan, take_gradients, tiny
from torch.distributed import HashStore

import varlen as vl
from varlen.cost.memory import num_communicators
from varlen.errors import DeadlockError, ModelError, PlanError, SettingError
from varlen.runtime.chunk import AS_THEY_ARE, ChunkStep, StepData
from varlen.runtime.clock import Clock
from varlen.runtime.mesh import gradients, process_groups
from varlen.runtime.mesh.channels import Channel, Channels
from varlen.runtime.mesh.consistency import batch_fingerprint
from varlen.runtime.mesh.failures import Notes, PeerLostError, WaitReporter, naming_the_missing, wait_until
from varlen.runtime.mesh.gradients import clip
from varlen.runtime.mesh.process_groups import Group, MeshCoordinate, coordinate_of, open_groups
from varlen.runtime.split import Elsewhere, cut_to_stage
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import check_order
from varlen.step_plan import BACKWARD, FORWARD

GRACE_S = 0.2
COST = vl.CostModel(model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"))


@pytest.mark.parametrize("what", ["input_ids", "labels", "weights"])
def test_batches_that_differ_in_anything_have_other_fingerprints(what):
    data = StepData(
        input_ids=torch.arange(6),
        labels=torch.arange(6) + 1,
        weights=torch.full((6,), 1 / 6, dtype=torch.float64),
        offsets=np.array([0, 2, 6]),
    )
    other = getattr(data, what).clone()
    other[3] = 9

    assert batch_fingerprint(data) == batch_fingerprint(replace(data))
    assert batch_fingerprint(data) != batch_fingerprint(replace(data, **{what: other}))
    assert batch_fingerprint(data) != batch_fingerprint(replace(data, offsets=np.array([0, 3, 6])))


@given(*[st.integers(1, 3)] * 4)
def test_ranks_are_numbered_as_the_mesh_says(pp, dp, cp, tp):
    mesh = vl.Mesh(dp=dp, pp=pp, cp=cp, tp=tp)
    coordinates = [MeshCoordinate(mesh=mesh, rank=rank) for rank in range(mesh.num_gpus)]

    seats = [(at.stage, at.dp_rank, at.cp_rank, at.tp_rank) for at in coordinates]
    assert seats == list(itertools.product(range(pp), range(dp), range(cp), range(tp)))  # tp fastest
    for at in coordinates:
        assert at.at() == at.rank
        assert at.at(stage=0, replica=0) == at.tp_rank
        others = [coordinates[at.at(stage=stage)] for stage in range(pp)]
        assert {(other.replica, other.tp_rank) for other in others} == {(at.replica, at.tp_rank)}
        others = [coordinates[at.at(replica=replica)] for replica in range(dp * cp)]
        assert {(other.stage, other.tp_rank) for other in others} == {(at.stage, at.tp_rank)}


def test_ranks_are_named_by_the_axes_that_a_mesh_has():
    assert coordinate_of(vl.Mesh(dp=2, pp=2), 0).name_of(3) == "stage 1 of pipeline 1 (rank 3)"
    assert coordinate_of(vl.Mesh(dp=2, cp=2), 0).name_of(3) == "stage 0 of pipeline 1, cp 1 (rank 3)"


def test_seats_that_a_mesh_lacks_are_refused():
    for rank in (-1, 4, True, None, 1.0):
        with pytest.raises(SettingError, match=r"rank=.*has the ranks 0 to 3"):
            coordinate_of(vl.Mesh(dp=2, pp=2), rank)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="dp=1 x pp=2 x cp=2 has the ranks 0 to 3"):
        coordinate_of(vl.Mesh(pp=2, cp=2), 4)
    with pytest.raises(SettingError, match="dp=1 x pp=1 x tp=2 has the ranks 0 to 1"):
        coordinate_of(vl.Mesh(tp=2), 2)


@pytest.mark.parametrize("mesh", [vl.Mesh(pp=3), vl.Mesh(pp=2, virtual_stages=2)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_share_a_model_without_rest(mesh, is_tied):
    whole = tiny("llama", num_hidden_layers=5, tie_word_embeddings=is_tied)
    stages = [tiny("llama", num_hidden_layers=5, tie_word_embeddings=is_tied) for _ in range(mesh.pp)]
    for stage, model in enumerate(stages):
        assert cut_to_stage(model, mesh, stage).is_tied == is_tied

    held = [dict(model.state_dict()) for model in stages]

    assert sorted(name for one in held for name in one) == sorted(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(next(one[name] for one in held if name in one), value)


def test_what_other_stages_hold_may_be_on_meta_and_nothing_else():
    mesh = vl.Mesh(pp=2)
    model = tiny("llama", num_hidden_layers=4)
    model.model.layers[3].to("meta")
    assert cut_to_stage(model, mesh, 0).fingerprint
    assert cut_to_stage(model, mesh, 0).stage == 0

    other = tiny("llama", num_hidden_layers=4)
    other.model.layers[3].to("meta")
    with pytest.raises(ModelError, match=r'model\.layers\.3\..* is on "meta" \(9 parameters are\)'):
        cut_to_stage(other, mesh, 1)


def test_a_stage_says_what_it_lacks():
    model = tiny("llama", num_hidden_layers=4)
    cut_to_stage(model, vl.Mesh(pp=2), 0)

    assert isinstance(model.lm_head, Elsewhere)
    assert model.lm_head.in_features == 32
    with pytest.raises(ModelError, match=r"model\.layers\.2 is on another stage than 0 of 2"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(PlanError, match="was cut to stage 0 of pp=2"):
        cut_to_stage(model, vl.Mesh(pp=2), 1)


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(PlanError, match=r"2 layers can't be cut into 4 chunks .*choose pp of at most 2"):
        cut_to_stage(tiny("llama"), vl.Mesh(pp=2, virtual_stages=2), 0)
    more = tiny("llama", num_hidden_layers=4)
    more.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        ModelError, match=r"extra\.\w+ of this llama model \(2 such .*belongs to neither its embedding"
    ):
        cut_to_stage(more, vl.Mesh(pp=2), 0)
    planned = tiny("llama", num_hidden_layers=4)
    planned.config.base_model_pp_plan = {"blocks": (["hidden_states"], ["hidden_states"])}
    with pytest.raises(ModelError, match="own pipeline plan cuts no list of layers, but slices run 4 other"):
        cut_to_stage(planned, vl.Mesh(pp=2), 0)


def test_a_mesh_of_one_is_this_process():
    plan = runnable(plan_of(4, vl.Mesh()))

    found = compare(vl.SliceEngine(small(1), mesh=vl.Mesh(), rank=0), small(1), plan, 4)

    assert largest(found[name] for name in ("loss", "documents", "gradients", "norm", "weights")) <= 1e-12


def test_the_norm_is_that_of_one_process():
    model, again = small(0), small(0)
    plan = runnable(plan_of(4, vl.Mesh()))
    engine = vl.SliceEngine(model)
    for one in (engine, vl.SliceEngine(again)):
        one.step(batch_of(plan), plan)

    norm = engine.clip_grad_norm_(0.1)

    assert norm == float(torch.nn.utils.clip_grad_norm_(again.parameters(), 0.1))
    wanted = take_gradients(again)
    for name, gradient in take_gradients(model).items():
        assert torch.equal(gradient, wanted[name])


def test_engines_without_a_seat_are_refused():
    model = small(0)
    with pytest.raises(SettingError, match="give both"):
        vl.SliceEngine(model, mesh=vl.Mesh(dp=2))
    with pytest.raises(SettingError, match=r"torch\.distributed has none here"):
        vl.SliceEngine(model, mesh=vl.Mesh(dp=2), rank=0)
    with pytest.raises(SettingError, match="gathered='all'"):
        vl.SliceEngine(model, gathered="all")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="deadline_s=0"):
        vl.SliceEngine(model, deadline_s=0)


def test_a_mesh_of_more_gpus_than_the_job_has_processes_is_refused():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            SettingError, match=r"process 0 of 1, .* rank 1 of dp=1 x pp=1 x tp=2 = 2; start as many"
        ):
            vl.SliceEngine(small(0), mesh=vl.Mesh(tp=2), rank=1)
    finally:
        dist.destroy_process_group()


def test_stages_that_would_wait_in_a_circle_are_found_before_anything_runs():
    order = [FORWARD, FORWARD, BACKWARD, BACKWARD]
    packs: list[list[Slice]] = [[(0, 0, 4)], [(1, 0, 4)]]
    plan = one_gpu_plan([4, 4], packs, mesh=vl.Mesh(pp=2), tasks=[*order, *order])
    plan = replace(plan, task_offsets=np.array([0, 4, 8], np.int32))
    mixed = [FORWARD, BACKWARD, FORWARD, BACKWARD]

    check_order(plan, 0)
    with pytest.raises(DeadlockError, match="2 stages wait for each other"):
        check_order(replace(plan, tasks=np.array([*mixed, *order], np.uint8)), 0)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30), st.integers(1, 300))
def test_messages_hold_every_gradient_once_and_few_bytes(sizes, most):
    given = [torch.zeros(n, dtype=torch.float64 if wide else torch.float32) for n, wide in sizes]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradients, "BUCKET_BYTES", most)
        found = list(gradients.buckets(given))

    assert [id(one) for bucket in found for one in bucket] == [id(one) for one in given]
    for bucket in found:
        assert len({one.dtype for one in bucket}) == 1
        assert sum(one.nbytes for one in bucket) <= most or len(bucket) == 1
    for left, right in zip(found, found[1:]):
        fits = sum(one.nbytes for one in [*left, right[0]]) <= most
        assert not (fits and left[0].dtype == right[0].dtype)


def notes_of(store: Any, rank: int) -> Notes:
    return Notes(store=store, rank=rank, world_size=4, grace_s=GRACE_S)


def said_by(notes: Notes, error: Exception) -> str:
    with pytest.raises(Exception) as caught, naming_the_missing(notes, "begin again"):
        raise error
    return f"{type(caught.value).__name__}: {caught.value}"


GONE = "one of 4 processes, and the others can't go on; begin again"


def test_a_chain_of_those_who_lost_each_other_is_followed_to_its_end():
    store = HashStore()
    for rank in (1, 2):
        notes_of(store, rank).leave(f"lost {rank + 1}")

    said = said_by(notes_of(store, 0), PeerLostError(1, "closed"))

    assert said == f"WorkerDiedError: rank 3 is gone (killed, stuck, or out of memory), {GONE}"
    assert notes_of(store, 1).of(0) == "lost 1"


def test_a_chain_of_those_who_wait_for_each_other_is_followed_to_its_end():
    store = HashStore()
    reporters = [WaitReporter(notes_of(store, rank), every_s=0.01) for rank in (1, 2)]

    with reporters[0].waiting(2), reporters[1].waiting(3):
        said = said_by(notes_of(store, 0), PeerLostError(1, "timed out"))
    for wait_reporter in reporters:
        wait_reporter.close()

    assert said == f"WorkerDiedError: rank 3 is gone (killed, stuck, or out of memory), {GONE}"


def test_one_that_waited_when_it_was_killed_is_named_all_the_same():
    store = HashStore()
    notes_of(store, 1).note_awaited(2, 7)

    said = said_by(notes_of(store, 0), PeerLostError(1, "closed"))

    assert said == f"WorkerDiedError: rank 1 is gone (killed, stuck, or out of memory), {GONE}"


class LostStore(HashStore):
    """The store of a process that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise ConnectionError(f"nothing answers for {keys}")

    set = check  # type: ignore[assignment]


def test_the_end_of_the_process_that_keeps_the_store_makes_no_other_rank_gone():
    notes = notes_of(LostStore(), 1)
    lost = said_by(notes, PeerLostError(0, "closed"))
    for error in (PeerLostError(None, "over"), RuntimeError("gloo: timed out")):
        assert "the process that keeps the job's store has ended" in said_by(notes, error)

    assert lost == f"WorkerDiedError: rank 0 is gone (killed, stuck, or out of memory), {GONE}"


def test_one_that_failed_by_itself_is_named_with_its_error():
    store = HashStore()
    assert said_by(notes_of(store, 2), ValueError("seven")) == "ValueError: seven"
    notes_of(store, 1).leave("lost 2")

    for error in (PeerLostError(1, "closed"), PeerLostError(None, "over"), RuntimeError("gloo: timed out")):
        said = said_by(notes_of(store, 0), error)
        assert said.startswith("WorkerDiedError: rank 2 failed (ValueError: seven), one of 4"), said


def test_of_a_group_those_who_say_nothing_are_named():
    store = HashStore()
    notes_of(store, 1).leave("waits")
    wait_reporter = WaitReporter(notes_of(store, 3), every_s=0.01)

    with wait_reporter.waiting():
        said = said_by(notes_of(store, 0), RuntimeError("gloo: Connection closed by peer"))
    wait_reporter.close()

    assert said.startswith("WorkerDiedError: rank 2 is gone"), said


def test_a_group_that_broke_while_all_waited_says_that_one_was_slow():
    store = HashStore()
    for rank in (1, 2, 3):
        notes_of(store, rank).leave("waits")

    for error in (RuntimeError("gloo: Connection closed by peer"), PeerLostError(None, "timed out")):
        said = said_by(notes_of(store, 0), error)

        assert said.startswith(
            f"WorkerDiedError: the process group is broken ({type(error).__name__}: {error}): no "
        )
        assert said.endswith("varlen train), or the network failed; begin again"), said


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not holds():
        threading.Event().wait(0.005)
    return holds()


def test_who_waits_for_long_says_so_until_it_has_what_it_waits_for():
    store = HashStore()
    notes = notes_of(store, 0)
    wait_reporter = WaitReporter(notes, every_s=0.01)

    with wait_reporter.waiting(3):
        assert within(5, lambda: notes.awaited_by(0, {0: ""}) == 3)
        with wait_reporter.waiting():
            assert within(5, lambda: notes.awaited_by(0, {0: ""}) == -1)
    assert within(5, lambda: notes.awaited_by(0, {0: ""}) is None)
    wait_reporter.close()


def test_a_device_that_waits_for_one_that_ended_is_given_up():
    store = HashStore()
    moments = iter([False, False, True])
    wait_until(lambda: next(moments), notes_of(store, 0), 60)
    with pytest.raises(PeerLostError, match=r"from others any more: the device has waited"):
        wait_until(lambda: False, notes_of(store, 0), 0.01)
    notes_of(store, 2).leave("ValueError: seven")
    with pytest.raises(PeerLostError, match=r"from rank 2 any more: it has ended"):
        wait_until(lambda: False, notes_of(store, 0), 60)


class Silent:
    """A backend that notes nothing and does nothing."""

    def allreduce(self, *_: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)

    send = recv = allreduce


@given(*[st.integers(1, 3)] * 5)
def test_a_mesh_opens_as_many_communicators_as_its_memory_counts(pp, dp, cp, tp, virtual_stages):
    mesh = vl.Mesh(dp=dp, pp=pp, cp=cp, tp=tp, virtual_stages=virtual_stages if pp > 1 else 1)
    counted = num_communicators(mesh)
    for rank in range(mesh.num_gpus):
        opened: list[tuple[tuple[int, ...], bool]] = []

        def backend(_: Any, group: Group, __: float, *, is_channel: bool, into: Any = opened) -> Any:
            into.append((group.ranks, is_channel))
            return Silent()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_groups, "_backend", backend)
            coordinate = coordinate_of(mesh, rank)
            groups = open_groups(coordinate, HashStore(), torch.device("cpu"), 1.0, lambda _: None)
            collectives = [ranks for ranks, is_channel in opened if not is_channel]
            assert len(collectives) == len(set(collectives)) == counted[0][coordinate.stage]
            assert len(opened) - len(collectives) == counted[1][coordinate.stage]
            groups.peers(0, dp * cp)  # documents that all replicas share need no more
            assert len(opened) == sum(counted)[coordinate.stage]


def test_communicators_of_large_meshes_leave_most_of_the_margin_to_the_allocator():
    for axes in ({"dp": 8, "pp": 8, "tp": 8}, {"dp": 2, "pp": 4, "cp": 4, "tp": 4, "virtual_stages": 4}):
        mesh = vl.Mesh(**axes)
        margin = COST.hardware.memory_bytes - COST.limit_bytes
        assert 1e9 < COST.communicator_bytes(mesh).max() < 0.7 * margin
    assert COST.communicator_bytes(vl.Mesh()).tolist() == [0.0]
    assert COST.communicator_bytes(vl.Mesh(dp=2)).tolist() == [688e6]


class Line:
    """A group of two ranks; notes when receives begin and end, which wait for nothing."""

    index, ranks = 0, (0, 5)

    def __init__(self, noted: list[Any], name: Any) -> None:
        self._noted, self._name = noted, name

    def send(self, *_: Any) -> Any:
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def receive(self, *_: Any) -> Any:
        self._noted.append(("begins", self._name))
        return SimpleNamespace(wait=lambda: self._noted.append(("ends", self._name)))


class OnDevice(torch.Tensor):
    """A tensor that says it is on CUDA."""

    is_cuda = True


class NotedTasks(ChunkStep):
    """Notes when a task runs."""

    def __init__(self, noted: list[Any], *, is_first: bool) -> None:
        self.layers, self.units, self._noted, self._is_first = range(1), AS_THEY_ARE, noted, is_first

    def events(self, _: int) -> list[Any]:
        return []

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        self._noted.append("task")
        return torch.empty(0)

    def backward(self, *_: Any, **__: Any) -> torch.Tensor | None:
        rows = self.forward()
        return None if self._is_first else rows

    weight = forward


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_receive_begins_one_task_before_the_one_that_takes_it(stage, virtual_stages):
    mesh = vl.Mesh(pp=2, virtual_stages=virtual_stages)
    plan, noted = vl.plan_step([64] * 12, cost=COST, mesh=mesh, method="packed", capacity=64), []
    lines = {
        (kind, receiver): Line(noted, (kind, receiver))
        for kind, first in ((FORWARD, 1), (BACKWARD, 0))
        for receiver in range(first, first + mesh.num_chunks - 1)
    }
    groups: Any = SimpleNamespace(coordinate=MeshCoordinate(mesh=mesh, rank=stage), channels=lines)
    wait_reporter = WaitReporter(Notes(store=None, rank=0, world_size=1))
    channels = Channels(groups, plan, torch.empty(8), wait_reporter)
    assert not noted  # none is due
    firsts = [chunk + stage == 0 for chunk in range(virtual_stages)]
    steps = [NotedTasks(noted, is_first=is_first) for is_first in firsts]
    runner = StageRunner(plan, 0, stage, steps, channels, clock=Clock(torch.device("cpu")))
    while runner.next_task:
        runner.run_next()

    begun: dict[Any, int] = {}
    for number, one in enumerate(noted):
        if one == "task":
            continue
        what, name = one
        if what == "begins":
            assert not begun  # one at a time
            begun[name] = number
        else:
            assert noted[begun.pop(name) : number].count("task") <= 1
    assert sum(one[0] == "ends" for one in noted) == 12 * (2 * virtual_stages - 1)
    assert noted[0] == ("task" if stage == 0 else ("begins", (FORWARD, 1)))


def test_a_message_that_the_device_waits_for_is_given_up_in_time_though_the_host_went_on():
    given_up = threading.Event()
    wait_reporter = WaitReporter(notes_of(HashStore(), 0), every_s=0.01, timeout_s=0.3, give_up=given_up.set)
    done = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    never = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)  # as NCCL's: the host goes on
    works = iter([done, never])
    group: Any = SimpleNamespace(index=0, ranks=(0, 5), receive=lambda *_: next(works))
    like: Any = torch.empty(8).as_subclass(OnDevice)
    channel = Channel(group, like, [3, 3, 3], wait_reporter)
    channel.make_room()
    begun = time.monotonic()

    channel.receive(0)
    channel.receive(1)

    assert time.monotonic() - begun < 0.3
    assert given_up.wait(5)  # ends what the host waits for, as where CUDA's queue of launches is full
    assert 0.3 <= time.monotonic() - begun < 3
    with pytest.raises(PeerLostError, match=r"from rank 5 any more: the device has waited for 0\.3 s"):
        channel.receive(2)
    wait_reporter.close()


def test_a_process_that_waits_for_a_message_takes_no_processor_time():
    store, cpu = HashStore(), torch.device("cpu")

    def join(rank: int) -> Group:
        return Group(store, "pair", [0, 1], rank, cpu, 30.0, lambda _: None)

    with ThreadPoolExecutor(1) as other:
        joining = other.submit(join, 1)
        groups = [join(0), joining.result()]
        wait_reporter = WaitReporter(notes_of(store, 0))
        channels = [Channel(group, torch.empty(8), [4, 4], wait_reporter) for group in groups]
        channels[1].make_room()
        channels[1].expect(0)
        waiting = other.submit(channels[1].receive, 0)
        before = time.process_time()
        time.sleep(0.5)
        taken = time.process_time() - before
        channels[0].send(0, torch.ones(1, 4, 8))
        assert waiting.result(10).sum() == 32
        channels[0].finish()
    wait_reporter.close()

    assert taken < 0.1


@pytest.mark.filterwarnings("ignore:engine.step adds to gradients")
def test_gradients_of_earlier_batches_stay_where_a_step_fails():
    plan, model = runnable(plan_of(4, vl.Mesh())), small(1)
    engine = vl.SliceEngine(model, mesh=vl.Mesh(), rank=0)
    engine.step(batch_of(plan), plan)
    earlier = {name: p.grad.clone() for name, p in model.named_parameters()}

    def fail(*_: object) -> None:
        raise ValueError("a wrong number")

    hook = model.model.layers[0].mlp.register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="a wrong number"):
        engine.step(batch_of(plan), plan)
    hook.remove()

    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, earlier[name]), name


def test_a_norm_that_is_no_number_is_not_hidden_by_clipping():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, torch.nan, 2.0])

    clip({"weight": weight}, math.nan, 1.0)

    assert weight.grad.isnan().all()


def test_the_rank_that_holds_the_store_stays_until_the_others_have_read_it():
    store = HashStore()
    host, other = (Notes(store=store, rank=rank, world_size=3, grace_s=20) for rank in (0, 1))
    left = threading.Event()
    thread = threading.Thread(target=lambda: (host.await_readers({2}), left.set()))
    thread.start()

    assert not left.wait(0.3)
    other.await_readers({2})
    assert left.wait(10)
    thread.join()


def test_nobody_waits_for_ranks_that_are_gone_or_for_long():
    begun = time.monotonic()
    Notes(store=HashStore(), rank=0, world_size=3, grace_s=20).await_readers({1, 2})
    Notes(store=HashStore(), rank=0, world_size=2, grace_s=0.2).await_readers(set())

    assert time.monotonic() - begun < 10
