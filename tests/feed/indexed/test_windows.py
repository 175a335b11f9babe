"""Windows, groups and packs of a store: every token once, dealt evenly to ranks, and found again in any epoch."""

import os
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.windows import SHARDS, Store, packs_of, pieces_of, windows_of
from tests.support.offline_packs import write_texts
from tests.support.rarely import mostly
from tests.support.stores import index_until, write_pair, write_store

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import OverlongDocumentError, SettingError, SourceError
from varlen.feed.batches import deal
from varlen.feed.indexed import table as table_module
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.table import WindowTable
from varlen.feed.indexed.windows import GroupMinimum, Groups, Windows, WindowSettings, minimum_for
from varlen.feed.spec import grouped
from varlen.offline import index as index_module
from varlen.offline.index import index_source
from varlen.store.growing import PartialStore
from varlen.store.open import open_tokens


def places_of(windows):
    num_parts = windows.store.num_parts
    groups = range(windows.num_groups(num_parts))
    return [(group, n) for group in groups for n in range(windows.num_windows(group, num_parts))]


def window_of(windows, epoch, place):
    return windows.window(epoch, *place, windows.store.num_parts)


@st.composite
def groupings(draw):
    """Shards, and where groups of them end."""
    shards = draw(SHARDS)
    ends = draw(st.sets(st.integers(1, len(shards)), max_size=3)) | {len(shards)}
    return shards, sorted(ends)


@given(
    groupings(),
    st.integers(1, 50),
    st.integers(1, 40),
    st.none() | st.integers(0, 2**40),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["best_fit", "next_fit", "best_fit_decreasing", "wrapped"]),
    st.integers(0, 3),
)
def test_every_token_stands_in_one_pack_of_one_window(
    grouping, capacity, size, seed, overlong, method, epoch
):
    shards, groups = grouping
    settings = WindowSettings(capacity=capacity, window=size, seed=seed, overlong=overlong, method=method)
    windows = windows_of(shards, groups, settings)
    made = [window_of(windows, epoch, place) for place in places_of(windows)]

    kept = {}
    for window in made:
        window.ledger.check()
        packs = window.packs
        sums = np.add.reduceat(packs.stops - packs.starts, packs.offsets[:-1]) if packs.num_packs else []
        assert all(0 < total <= capacity for total in sums)
        for shard, document, start, stop in pieces_of(packs):
            kept.setdefault((shard, document), []).append((start, stop))
    wanted = {}
    for shard, lengths in enumerate(shards):
        for document, length in enumerate(lengths):
            if length > capacity and overlong == "drop":
                continue
            length = min(length, capacity) if overlong == "truncate" else length
            if length:
                wanted[shard, document] = length
    assert {name: sorted(pieces)[-1][1] for name, pieces in kept.items()} == wanted
    for pieces in kept.values():  # end to end, none twice
        assert [0, *(stop for _, stop in sorted(pieces))][:-1] == [start for start, _ in sorted(pieces)]


@given(groupings(), st.integers(1, 40), st.integers(0, 9))
def test_a_window_does_not_depend_on_what_was_made_before_nor_on_later_shards(grouping, window, seed):
    shards, groups = grouping
    settings = WindowSettings(capacity=50, window=window, seed=seed)
    grown = windows_of([*shards, [5, 6, 7]], [*groups, len(shards) + 1], settings)
    whole = windows_of(shards, groups, settings)
    alone = {
        place: window_of(windows_of(shards, groups, settings), 1, place).packs for place in places_of(whole)
    }

    for place in reversed(places_of(whole)):
        assert (
            pieces_of(window_of(whole, 1, place).packs)
            == pieces_of(alone[place])
            == pieces_of(window_of(grown, 1, place).packs)
        )
        assert window_of(whole, 1, place).packs.offsets.tolist() == alone[place].offsets.tolist()


def test_groups_stay_apart_and_epochs_and_seeds_differ():
    shards, groups = [[1] * 40, [1] * 40, [1] * 40], [1, 3]

    def documents(seed, epoch):
        windows = windows_of(shards, groups, WindowSettings(capacity=10, window=20, seed=seed))
        made = [window_of(windows, epoch, place).packs for place in places_of(windows)]
        assert [set(packs.shards.tolist()) <= {0} for packs in made] == [True] * 2 + [False] * 4
        return tuple((shard, number) for packs in made for shard, number, _, _ in pieces_of(packs))

    orders = {documents(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert documents(None, 0) == documents(None, 1) == tuple((s, d) for s in range(3) for d in range(40))


def test_packs_stand_in_the_order_of_their_first_document():
    lengths = np.random.default_rng(0).integers(1, 90, 500).tolist()
    windows = windows_of([lengths], [1], WindowSettings(capacity=100, window=500, seed=None))
    packs = window_of(windows, 0, (0, 0)).packs

    firsts = packs.documents[packs.offsets[:-1]]
    assert (np.diff(firsts) > 0).all()
    part = packs.slice(3, 7)
    assert part.num_packs == 4
    assert pieces_of(part) == pieces_of(packs)[packs.offsets[3] : packs.offsets[7]]


def test_overlong_documents_are_refused_where_they_are_errors():
    windows = windows_of([[5, 50]], [1], WindowSettings(capacity=10, overlong="error"))
    with pytest.raises(OverlongDocumentError, match="50"):
        window_of(windows, 0, (0, 0))


def intraclass_correlation(packs):
    """How much alike the logarithms of lengths in one pack are: 0 at random, 1 if packs hold equal lengths."""
    sizes = np.log(packs.stops - packs.starts)
    count = np.diff(packs.offsets)
    owner = np.repeat(np.arange(packs.num_packs), count)
    mean = np.bincount(owner, sizes) / count
    between = (count * (mean - sizes.mean()) ** 2).sum() / (packs.num_packs - 1)
    within = ((sizes - mean[owner]) ** 2).sum() / (len(sizes) - packs.num_packs)
    typical = (len(sizes) - (count**2).sum() / len(sizes)) / (packs.num_packs - 1)
    return (between - within) / (between + (typical - 1) * within)


@pytest.mark.parametrize(("mean", "spread"), [(6, 1.0), (6, 1.2), (7, 1.6)])
def test_windows_are_full_and_lengths_in_a_pack_are_no_more_alike_than_at_random(mean, spread):
    lengths = np.clip(np.random.default_rng(1).lognormal(mean, spread, 30_000), 1, 8192).astype(int)

    def packed(method):
        settings = WindowSettings(capacity=8192, window=len(lengths), method=method)
        return window_of(windows_of([lengths], [1], settings), 0, (0, 0)).packs

    packs, at_random, by_length = map(packed, ("best_fit", "next_fit", "best_fit_decreasing"))

    assert lengths.sum() / (packs.num_packs * 8192) >= 0.995
    assert intraclass_correlation(packs) < intraclass_correlation(at_random) + 0.02
    assert intraclass_correlation(by_length) > 0.5  # what it would see if lengths were sorted


def stream(shards, epochs, window=7):
    settings = WindowSettings(capacity=30, window=window, overlong="split")
    return PackStream(windows_of(shards, [len(shards)], settings), epochs)


@given(SHARDS, st.integers(0, 3), st.integers(1, 9), st.integers(1, 9))
def test_steps_of_any_size_take_the_same_packs_in_the_same_order(shards, epochs, window, count):
    whole = stream(shards, epochs, window).take(Position(), 10**6)[0]
    position, found, positions, steps = Position(), [], [], stream(shards, epochs, window)
    while True:
        positions.append((position, len(found)))
        taken, position, _ = steps.take(position, count)
        found += packs_of(taken)
        if taken.num_packs < count:
            break

    assert found == packs_of(whole)
    # Whoever begins there, with whatever step.
    for position, before in positions[:: max(len(positions) // 4, 1)]:
        assert packs_of(stream(shards, epochs, window).take(position, 10**6)[0]) == found[before:]


def test_every_epoch_holds_every_document_and_an_endless_stream_goes_on():
    shards = [[3, 4, 5] * 10, [29] * 4]
    finite, endless = stream(shards, 3), stream(shards, None)

    documents = sorted(piece[:2] for pack in packs_of(finite.take(Position(), 10**6)[0]) for piece in pack)
    assert documents == sorted([(s, d) for s, lengths in enumerate(shards) for d in range(len(lengths))] * 3)
    assert endless.take(Position(), 500)[0].num_packs == 500
    assert endless.take(Position(epoch=10**6), 5)[0].num_packs == 5
    assert stream([[]], None).take(Position(), 5)[0].num_packs == 0


def test_an_epoch_holds_the_parts_that_it_began_with_and_the_next_one_those_that_came():
    store = Store([[3] * 9, [4] * 8])
    windows = Windows(store, Groups(store), WindowSettings(capacity=5, window=4))
    first = PackStream(windows, 2, num_parts=lambda epoch: 1 + (epoch > 0))
    packs, end, _ = first.take(Position(), 10**6)
    _, middle, _ = first.take(Position(), 5)

    shards = [{shard for shard, *_ in pack} for pack in packs_of(packs)]
    assert shards[:9] == [{0}] * 9
    assert set().union(*shards[9:]) == {0, 1}
    assert packs.num_packs == 9 + 17
    assert middle.grown == ((0, 1),)
    assert end.grown == ((0, 1), (1, 2))
    for parts_now in (2, 1):  # what the store has by now doesn't change an epoch that has begun
        later = PackStream(windows, 1, num_parts=lambda epoch, now=parts_now: now)
        assert packs_of(later.take(middle, 100)[0]) == packs_of(packs)[5:9]
    assert packs_of(PackStream(windows, 2).take(middle, 100)[0]) == packs_of(packs)[5:]


@pytest.mark.parametrize("epochs", [None, 3])
def test_documents_that_are_all_dropped_give_no_packs_and_no_endless_search(epochs):
    settings = WindowSettings(capacity=5, window=2, overlong="drop")

    assert PackStream(windows_of([[9] * 7, [8]], [2], settings), epochs).take(Position(), 4)[0].num_packs == 0


WORK = st.lists(st.floats(0, 1e6), max_size=48)


@given(WORK, st.integers(1, 4), st.integers(1, 3))
def test_every_pack_is_dealt_once_and_all_ranks_get_as_many(work, ranks, micro_batch_size):
    count = len(work) // (ranks * micro_batch_size) * ranks * micro_batch_size
    hands = deal(np.array(work[:count], dtype=np.float64), ranks, micro_batch_size)

    assert hands.shape == (ranks, count // ranks)
    assert sorted(hands.ravel().tolist()) == list(range(count))


@given(st.lists(st.floats(0, 1e6), min_size=24, max_size=24), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_no_rank_has_more_work_than_the_rest_by_more_than_one_pack(work, ranks):
    work = np.array(work)
    totals = work[deal(work, ranks, 24 // ranks)].sum(axis=1)

    assert totals.max() - totals.min() <= work.max() + 1e-6


@given(st.lists(st.floats(0, 1e6), min_size=24, max_size=24), st.sampled_from([2, 3, 4, 6, 8, 12]))
def test_over_all_micro_batches_too_no_rank_has_more_work_by_more_than_one_pack(work, ranks):
    work = np.array(work)
    totals = work[deal(work, ranks, 1)].sum(axis=1)

    assert totals.max() - totals.min() <= work.max() + 1e-6


@given(st.lists(st.floats(1, 1e6), min_size=24, max_size=24))
def test_ranks_meet_in_every_micro_batch_with_packs_of_neighbouring_work(work):
    work = np.array(work)
    hands = deal(work, 4, 1)

    ranked = np.argsort(np.argsort(-work, kind="stable"))
    assert (ranked[hands] // 4 == np.arange(6)).all()


FILES, EACH, CAPACITY = 300, 50, 512
KINDS = ("arrow", "saved", "megatron", "store")


def write_files(folder: Path, kind: str) -> int:
    """Write 300 files of 50 documents as tokens; returns how many tokens there are."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.2, 0.9, (FILES, EACH)), 1, CAPACITY).astype(np.int64)
    files = [[np.full(n, 7, dtype=np.int32) for n in row] for row in lengths.tolist()]
    folder.mkdir()
    if kind == "arrow":
        for number, rows in enumerate(files):
            table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
            with pa.ipc.new_file(str(folder / f"{number:03d}.arrow"), table.schema) as out:
                out.write_table(table)
    elif kind == "saved":
        rows = {"input_ids": [row for rows in files for row in rows]}
        kinds = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
        datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(folder, num_shards=FILES)
    elif kind == "megatron":
        for number, rows in enumerate(files):
            write_pair(folder / f"{number:03d}", [[row] for row in rows])
    else:
        write_store(folder, [[[(row.tolist(), None) for row in rows]] for rows in files])
    return int(lengths.sum())


@pytest.mark.parametrize("kind", mostly(["arrow", "megatron"], KINDS))
def test_many_small_files_give_packs_as_full_as_one_large_one(tmp_path, kind):
    tokens = write_files(tmp_path / "data", kind)
    settings = {"capacity": CAPACITY, "global_batch_size": 1, "worker": "thread"}
    with vl.PackedLoader(tmp_path / "data", **settings) as loader:
        assert tokens / (len(loader) * CAPACITY) >= 0.995
        held = [next(loader).document_ids for _ in range(40)]
    # They are shuffled over all files of a group, which were 16.
    assert len(np.unique(np.concatenate(held) // EACH)) > 50


PARTS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=12)
ENOUGH = st.builds(
    GroupMinimum,
    parts=st.integers(1, 4),
    documents=st.integers(1, 12),
    tokens=st.integers(1, 60),
    longest=st.none() | st.integers(1, 5),
)


def ends_of(lengths: list[list[int]], num_parts: int, enough: GroupMinimum) -> list[tuple[int, int]]:
    """The groups of the first parts, by the sentence that says where they end."""
    found, first = [], 0
    for part in range(num_parts):
        held = lengths[first : part + 1]
        documents = sum(map(len, held))
        each = [
            sum(one) if enough.longest is None else min(sum(one), enough.longest * len(one)) for one in held
        ]
        is_enough = documents >= enough.documents or sum(each) >= enough.tokens
        if len(held) >= enough.parts and is_enough:
            found.append((first, part + 1))
            first = part + 1
    return [*found, (first, num_parts)] if any(lengths[first:num_parts]) else found


class Coming(Store):
    """A store of which one part after the other is finished, when it is waited for."""

    def __init__(self, lengths: list[list[int]]) -> None:
        super().__init__(lengths)
        self.whole = lengths
        self.finish(0)

    def finish(self, count: int) -> None:
        super().__init__(self.whole[:count])
        self.num_parts = len(self.whole)

    def wait_for(self, num_parts: int) -> None:
        self.finish(max(len(self.documents), num_parts))


@given(PARTS, ENOUGH, st.data())
def test_groups_are_those_of_the_parts_however_these_come(lengths, enough, data):
    whole = Groups(Store(lengths), enough)
    for num_parts in data.draw(st.permutations(range(1, len(lengths) + 1))):
        wanted = ends_of(lengths, num_parts, enough)
        assert whole.num_groups(num_parts) == len(wanted)
        assert [whole.shards(group, num_parts) for group in range(len(wanted))] == wanted
        assert whole.is_known(len(wanted) + 3, num_parts)
        for more in (0, 3):
            first, stop = whole.shards(len(wanted) + more, num_parts)
            assert not any(lengths[first:stop])

        coming = Coming(lengths)
        groups = Groups(coming, enough)
        for group, (first, stop) in enumerate(wanted):
            coming.finish(data.draw(st.integers(len(coming.documents), len(lengths))))
            finished = len(coming.documents)
            is_sealed = groups.is_known(group, num_parts)
            assert len(coming.documents) == finished  # nobody waited
            assert groups.shards(group, num_parts) == (first, stop)
            assert len(coming.documents) <= max(stop, min(first + enough.parts, num_parts), finished)
            assert is_sealed == (finished >= stop)
            assert groups.is_known(group, num_parts)


def test_a_group_waits_for_no_more_than_enough_packs_where_documents_are_long():
    store = Store([[10_000] * 2] * 2000)
    ends = {}
    for overlong in ("split", "truncate"):
        groups = Groups(store, minimum_for(1 << 16, 1000, overlong))
        ends[overlong] = groups.shards(0, 2000)
    assert ends == {"split": (0, 52), "truncate": (0, 512)}


def test_groups_are_the_same_where_the_tokens_of_a_pair_were_cut(tmp_path):
    write_pair(tmp_path / "a", [[[1, 2], [3]], [[4] * 9], [[]], [[5] * 4]])
    whole = open_tokens(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", 6)
    cut = open_tokens(tmp_path / "a", check_tokens=False)
    assert whole.tokens.tolist() == cut.tokens.tolist() == [16]
    write_pair(tmp_path / "b", [[]] * 3)
    assert open_tokens([tmp_path / "b", tmp_path / "a"], check_tokens=False).tokens.tolist() == [0, 16]


def test_a_store_of_small_parts_gives_the_same_windows_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PART_BYTES", 400)
    write_texts(tmp_path / "a.jsonl", count=300)
    folder = tmp_path / "store"
    index_until(tmp_path / "a.jsonl", folder, 24, monkeypatch)
    settings = WindowSettings(capacity=128, window=30, seed=3)
    early = open_tokens(folder)
    assert isinstance(early, PartialStore)
    windows = grouped(early, settings)
    some = early.num_parts
    assert windows.is_known(0, some)
    assert not windows.is_known(1, some)
    first = [windows.documents(0, 0, n, some) for n in range(windows.num_windows(0, some))]

    store, _ = index_source(open_source(tmp_path / "a.jsonl"), folder)
    whole = grouped(store, settings)
    for number, (shards, documents) in enumerate(first):
        wanted = whole.documents(0, 0, number, store.num_parts)
        assert np.array_equal(wanted, (shards, documents))
    assert windows.num_groups(some) == whole.num_groups(store.num_parts) > 1


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "varlen" / "tables"


def stream_of(shards, epochs=2, seed=0, ends=None, **more):
    settings = WindowSettings(capacity=30, window=7, overlong="split", seed=seed, **more)
    return PackStream(windows_of(shards, ends or [len(shards)], settings), epochs)


@given(SHARDS, st.integers(1, 3), st.none() | st.integers(0, 9), st.data())
def test_every_pack_is_found_where_the_stream_has_it(shards, epochs, seed, data):
    ends = sorted(data.draw(st.sets(st.integers(1, len(shards)), max_size=2)) | {len(shards)})
    stream = stream_of(shards, epochs, seed, ends)
    table = WindowTable(stream)
    every = packs_of(stream.take(Position(), 10**6)[0])
    first = data.draw(st.integers(0, len(every)))
    count = data.draw(st.integers(0, len(every) - first + 2))

    assert table.num_packs() == len(every)
    at = table.find(first)[0]
    assert packs_of(stream.take(at, 10**6)[0]) == every[first:]
    further = table.skip(stream.take(Position(), first)[1], count)
    assert packs_of(stream.take(further, 10**6)[0]) == every[first + count :]


def test_epochs_of_a_store_that_grew_are_counted_with_the_parts_that_they_had():
    store = Store([[3] * 50, [4] * 80])
    windows = Windows(store, Groups(store), WindowSettings(capacity=30, window=7))
    stream = PackStream(windows, 3, num_parts=lambda epoch: 1 + (epoch > 0))
    every = packs_of(stream.take(Position(), 10**6)[0])
    grown = stream.take(Position(), len(every))[1].grown
    later = WindowTable(PackStream(windows, 3))  # opened when all was there

    assert later.num_packs(grown) == len(every) < later.num_packs()
    for number in range(0, len(every), 7):
        found = later.find(number, grown)[0]
        assert found.grown == grown
        assert packs_of(later._stream.take(found, 10**6)[0]) == every[number:]


def test_without_an_end_a_position_is_found_and_a_number_is_not():
    table = WindowTable(stream_of([[3] * 50], epochs=None))
    once = table.epoch(0, 1).num_packs

    assert table.find(300 * once)[0].epoch == 300
    with pytest.raises(SettingError, match="epochs without end"):
        table.num_packs()
    settings = WindowSettings(capacity=5, window=7, overlong="drop")
    barren = PackStream(windows_of([[9] * 20], [1], settings), None)
    assert barren.take(WindowTable(barren).find(3)[0], 1)[0].num_packs == 0


def test_a_table_is_kept_and_one_that_is_damaged_is_made_anew(home, monkeypatch):
    counted = []
    real = table_module.count_packs
    monkeypatch.setattr(table_module, "count_packs", lambda *a, **k: counted.append(1) or real(*a, **k))

    def packs(**more):
        counted.clear()
        stream = stream_of([[3] * 50, [8] * 9], **more)
        table = WindowTable(stream).epoch(0, stream.windows.store.num_parts)
        return table.packs.tolist(), len(counted)

    first, windows = packs()
    kept = list(home.iterdir())
    assert (len(kept), windows) == (1, len(first) - 1)
    assert packs() == (first, 0)
    whole = kept[0].read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for damage in (b"", b"\x93NUMPY", whole[:-8], whole + bytes(8), flipped):
        kept[0].write_bytes(damage)
        assert packs() == (first, windows)
    kept[0].unlink()
    os.mkfifo(kept[0])
    assert packs() == (first, windows)
    kept[0].unlink(missing_ok=True)
    packs()
    for other in ({"seed": 1}, {"max_documents": 2}, {"ends": [1, 2]}):
        assert packs(**other)[1] >= windows
    assert len(list(home.iterdir())) == 4
    assert not list(home.glob("*.part"))


def test_where_nothing_can_be_kept_a_table_stays_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    stream = stream_of([[3] * 50])
    stream.windows.store.tables = tmp_path / "file" / "tables"
    table = WindowTable(stream)

    assert table.epoch(0, 1) is table.epoch(0, 1)


def test_a_table_lies_beside_its_store_and_is_shared_by_epochs_in_order(tmp_path, home):
    stream = stream_of([[3] * 50], seed=None)
    stream.windows.store.tables = tmp_path / ".tables"
    table = WindowTable(stream)

    assert table.epoch(0, 1) is table.epoch(1, 1)
    assert len(list((tmp_path / ".tables").iterdir())) == 1
    assert not home.exists()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_side_by_side_make_the_table_that_one_makes_and_none_is_left(threads, monkeypatch):
    shards, running = [[n % 29 for n in range(300)], [9] * 5, [8] * 400], set(threading.enumerate())
    one = WindowTable(stream_of(shards, ends=[1, 2, 3]), threads=1).epoch(1, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # nothing is kept
    monkeypatch.setattr(table_module, "_MIN_PARALLEL", 1)
    counting, real = set(), table_module.count_packs

    def count(*arguments, **settings):
        counting.add(threading.current_thread().name)
        return real(*arguments, **settings)

    monkeypatch.setattr(table_module, "count_packs", count)
    many = WindowTable(stream_of(shards, ends=[1, 2, 3]), threads=threads).epoch(1, 3)
    assert many.packs.tolist() == one.packs.tolist()
    assert all(name.startswith("varlen-table") for name in counting)
    assert set(threading.enumerate()) <= running


@pytest.mark.parametrize("error", [SourceError, KeyboardInterrupt])
def test_what_goes_wrong_while_threads_count_is_said_and_no_thread_is_left(error, monkeypatch):
    running, counted = set(threading.enumerate()), []
    monkeypatch.setattr(table_module, "_MIN_PARALLEL", 1)

    def count(*_, **__):
        counted.append(1)
        time.sleep(0.02)
        raise error("damaged")

    monkeypatch.setattr(table_module, "count_packs", count)
    with pytest.raises(error, match="damaged"):
        WindowTable(stream_of([[3] * 5000]), threads=2).epoch(0, 1)
    assert len(counted) < 20
    assert set(threading.enumerate()) <= running


def test_a_store_that_is_renamed_while_threads_read_it_is_read_once_more(monkeypatch):
    expected = WindowTable(stream_of([[3] * 500]), threads=1).epoch(0, 1).packs.tolist()
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(table_module, "_MIN_PARALLEL", 1)
    real = table_module.count_packs

    def count(*arguments, **settings):
        if threading.current_thread() is not threading.main_thread():
            raise SourceError("it isn't there any more")
        return real(*arguments, **settings)

    monkeypatch.setattr(table_module, "count_packs", count)
    assert WindowTable(stream_of([[3] * 500]), threads=2).epoch(0, 1).packs.tolist() == expected
