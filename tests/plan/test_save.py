"""A plan and its settings come back from bytes as they were; anything else is refused in a sentence."""

import json
import threading
import tracemalloc
import zlib
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.random_plans import large_plan, random_plan
from tests.support.rarely import examples

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.errors import PlanError, SettingError, SourceError, StalledError
from varlen.plan.assign import assign
from varlen.plan.check import check_plan
from varlen.plan.serialize import (
    _FRONT,
    _MAGIC,
    broadcast_plan,
    from_json,
    load_plan,
    named,
    plan_fingerprint,
    plan_from_bytes,
    plan_to_bytes,
    save_plan,
    to_json,
)
from varlen.step_plan import Mesh, MicroPacks, StepPlan


def same(one: StepPlan, other: StepPlan) -> bool:
    """Whether two plans hold the same settings and arrays, of the same dtypes, none of which can be written."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(StepPlan)]
    for first, second in ((one.forward, other.forward), (one.backward, other.backward)):
        pairs += [(getattr(first, field.name), getattr(second, field.name)) for field in fields(MicroPacks)]
    for value, back in pairs:
        if isinstance(value, np.ndarray):
            if back.dtype != value.dtype or back.tolist() != value.tolist() or back.flags.writeable:
                return False
        elif not isinstance(value, MicroPacks) and (back != value or type(back) is not type(value)):
            return False
    return True


def packed(said: object, arrays: bytes = b"", size: int | None = None, version: int = 1) -> bytes:
    """Bytes in the form of a plan, with any head."""
    head = said if isinstance(said, bytes) else json.dumps(said).encode()
    content = len(head).to_bytes(4, "little") + head + arrays
    front = _FRONT.pack(version, bytes(32), len(content) if size is None else size)
    return _MAGIC + front + zlib.compress(content)


@given(st.integers(0, 10**9))
def test_a_plan_comes_back_as_it_was(seed):
    plan = replace(
        random_plan(seed), answered_by="micropack: graded, „größer“", recompute="full", offload="kv"
    )

    content = plan_to_bytes(plan)
    back = plan_from_bytes(content)

    assert same(plan, back)
    assert plan_to_bytes(back) == content
    assert plan_fingerprint(back) == plan_fingerprint(plan)


def plain(content: bytes | bytearray) -> tuple[bytes, bytes] | None:
    """What the bytes of a plan hold, behind what stands in front of it; None where they can't be unpacked."""
    start = len(_MAGIC) + _FRONT.size
    try:
        return bytes(content[:start]), zlib.decompress(content[start:])
    except zlib.error:
        return None


@examples(120, 300)
@given(st.integers(0, 30), st.integers(0, 10**9))
def test_damaged_bytes_are_refused_in_a_sentence(seed, dice):
    content, random = bytearray(plan_to_bytes(random_plan(seed))), Random(dice)
    whole = bytes(content)
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(content))
        what = random.choice(["flip", "cut", "drop", "add"])
        if what == "flip":
            content[place] ^= 1 << random.randrange(8)
        elif what == "cut":
            del content[place:]
            content = content or bytearray(b"x")
        elif what == "drop":
            del content[place]
            content = content or bytearray(b"x")
        else:
            content.insert(place, random.randrange(256))
    if bytes(content) == whole:
        return

    # One of the few bits behind the last code of a zlib stream, which say nothing.
    if plain(content) == plain(whole):
        assert same(random_plan(seed), plan_from_bytes(bytes(content)))
        return
    with pytest.raises(PlanError, match=r"no plan of varlen|this varlen reads format"):
        plan_from_bytes(bytes(content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no plan of varlen.* 0 bytes that begin with b''"),
        (b"PK\x03\x04" + bytes(200), "204 bytes that begin with b'PK"),
        (_MAGIC, "no plan of varlen"),
        (packed({}, version=2), "the plan has format 2, and this varlen reads format 1; plan the step again"),
        (packed({}), "no plan of varlen.*'sizes'"),
        (packed([1]), "no plan of varlen"),
        (packed(b"\xff\xfe"), "no plan of varlen"),
        (packed(b"[" * 100_000), "no plan of varlen"),
        (packed({"sizes": [0] * 3}), "3 arrays, 15 belong to a plan"),
        (packed({"sizes": [-1] * 15}), "15 arrays"),
        (packed({"sizes": [2**40] * 15}), "the array lengths of 1,099,511,627,776 entries ends outside"),
        (packed({"sizes": ["many"] * 15}), "no plan of varlen"),
        (packed({"sizes": [0] * 15}, b"more"), "4 bytes are too many"),
        (packed({"sizes": [0] * 15}), "KeyError: 'mesh'"),
        (packed({"sizes": [0] * 15, "mesh": {"dp": 0}}), "mesh dp=0"),
        (packed({"sizes": [0] * 15, "mesh": {"gpus": 8}}), "no plan of varlen.*gpus"),
        (packed({}, size=2**40), r"can't hold the 1,099,511,627,776 that they claim"),
        (packed({}, size=1), "hold other than the 1 bytes that they claim"),
        (packed({}) + b"tail", "hold other than"),
    ],
)
def test_bytes_of_something_else_are_refused_in_a_sentence(content, words):
    with pytest.raises(PlanError, match=words):
        plan_from_bytes(content)


def test_a_plan_with_settings_that_no_plan_has_is_refused():
    content = plan_to_bytes(random_plan(1))
    head = zlib.decompress(content[len(_MAGIC) + _FRONT.size :])
    size = int.from_bytes(head[:4], "little")
    said = json.loads(head[4 : 4 + size])
    for name, value in (("method", "magic"), ("recompute", None), ("splits_backward", 3), ("answered_by", 4)):
        wrong = said | {"settings": said["settings"] | {name: value}}
        with pytest.raises(PlanError, match=f"no plan of varlen.*{name.replace('_', '.')}"):
            plan_from_bytes(packed(wrong, head[4 + size :]))


def test_bytes_that_unpack_to_far_more_take_no_memory():
    bomb = _MAGIC + _FRONT.pack(1, bytes(32), 1000) + zlib.compress(bytes(10**8), 9)
    tracemalloc.start()
    with pytest.raises(PlanError, match="hold other than the 1,000 bytes"):
        plan_from_bytes(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 10**6


def test_a_plan_of_a_thousand_documents_on_a_thousand_stages_takes_less_than_100_kilobytes():
    plan = large_plan()
    check_plan(plan)

    content = plan_to_bytes(plan)

    assert len(plan.tasks) == 64 * 16 * 48 * 3
    assert len(content) < 60_000
    assert same(plan, plan_from_bytes(content))


def test_the_fingerprint_is_the_same_on_every_machine():
    assert (
        plan_fingerprint(random_plan(2)) == "d72c5a966bf4b048617a0c47e731cc4b8e8f3a9ec7d78d6d070cd9535fb87eff"
    )


def test_the_fingerprint_tells_apart_what_is_run_and_not_what_people_read():
    plan = random_plan(4, mesh=Mesh(dp=2, pp=2))
    prints = {plan_fingerprint(plan)}
    for change in (
        {"mesh": Mesh(dp=2, pp=2, tp=2)},
        {"recompute": "selective"},
        {"recompute_share": 0.5},
        {"splits_backward": not plan.splits_backward},
    ):
        prints.add(plan_fingerprint(replace(plan, **change)))
    tasks = plan.tasks.copy()
    tasks[0] += 1
    prints.add(plan_fingerprint(replace(plan, tasks=tasks)))

    assert len(prints) == 6
    assert plan_fingerprint(replace(plan, answered_by="someone")) == plan_fingerprint(plan)


def test_a_plan_with_broken_arrays_is_refused_before_it_is_written():
    plan = random_plan(4)

    with pytest.raises(PlanError, match="lengths is int64"):
        plan_to_bytes(replace(plan, lengths=plan.lengths.astype(np.int64)))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    plan, path = random_plan(3), tmp_path / "plans" / "step-3.plan"
    save_plan(plan, path)
    assert same(load_plan(path), plan)

    with pytest.raises(PlanError, match="lengths is int64"):
        save_plan(replace(plan, lengths=plan.lengths.astype(np.int64)), path)

    assert same(load_plan(str(path)), plan)
    assert [found.name for found in path.parent.iterdir()] == ["step-3.plan"]


def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path):
    (tmp_path / "notes.txt").write_text("no plan")

    with pytest.raises(PlanError, match=r"notes\.txt: these bytes are no plan of varlen"):
        load_plan(tmp_path / "notes.txt")
    with pytest.raises(SourceError, match=r"absent\.plan can't be read: No such file"):
        load_plan(tmp_path / "absent.plan")
    with pytest.raises(SettingError, match="can't be written"):
        save_plan(random_plan(3), tmp_path / "notes.txt" / "step.plan")


def test_a_plan_reaches_the_other_ranks_through_the_job_s_store(tmp_path):
    from torch.distributed import HashStore

    store, plan, found = HashStore(), random_plan(5), []
    waiting = threading.Thread(target=lambda: found.append(broadcast_plan(None, store, 7)))
    waiting.start()

    assert broadcast_plan(plan, store, 7) is plan
    waiting.join(30)

    assert same(found[0], plan)
    broadcast_plan(plan, store, 7 + 64)
    assert store.num_keys() == 1


def test_a_store_where_no_plan_comes_is_told_of():
    from datetime import timedelta

    from torch.distributed import HashStore

    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(StalledError, match="no plan of step 3 came through the job's store"):
        broadcast_plan(None, store, 3)
    with pytest.raises(StalledError, match="no plan of step 3"):
        broadcast_plan(None, _Mapping(), 3)


class _Mapping:
    """The least that a store can be."""

    def set(self, key: str, value: bytes) -> None:
        setattr(self, key, value)

    def get(self, key: str) -> bytes:
        return vars(self)[key]  # type: ignore[no-any-return]


def test_settings_come_out_as_they_were():
    settings = {
        "mesh": Mesh(dp=4, pp=2),
        "few": (1, 2.5, None, True),
        3: ["word", float("inf")],
        "one": np.int64(7),
    }

    assert from_json(to_json(settings)) == settings


def test_arrays_keep_their_dtypes_and_shapes():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    back = from_json(to_json({"rates": array}))["rates"]

    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_equal_settings_are_equal_text():
    assert to_json(Mesh(dp=2)) == to_json(Mesh(dp=2)) != to_json(Mesh(dp=3))


def test_a_cost_model_comes_out_with_the_same_figures():
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"), recompute="full")

    assert from_json(to_json(cost)).fingerprint == cost.fingerprint
    other = cost.replace(adapter_share=0.01, adapter_width=8, optimizer_bytes=4, precision="fp32")
    assert from_json(to_json(other)).fingerprint == other.fingerprint != cost.fingerprint


def test_fields_that_were_added_are_stored_only_where_they_say_something():
    cost = CostModel(model=ModelShape.named("llama-3-8b"), hardware=Hardware.named("h100"))
    told = {"adapter_share": 0.01, "adapter_width": 8, "optimizer_bytes": 4, "end_optimizer_bytes": 8}

    assert not any(name in to_json(cost) for name in (*told, "precision"))
    assert all(name in to_json(cost.replace(**told)) for name in told)


def test_a_function_is_found_by_its_name():
    assert named("varlen.plan.assign:assign") is assign
