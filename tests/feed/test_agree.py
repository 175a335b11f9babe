"""Ranks agree through the job's store: everyone gets everything, and who is missing is named."""

import threading
from functools import partial

import pytest
import torch

from varlen.errors import StalledError
from varlen.feed.agreement import Agreement, job_store, name_of


def ranks_of(count, deadline_s=20.0):
    store = torch.distributed.HashStore()
    return [Agreement(store, "here", rank, count, deadline_s) for rank in range(count)]


def side_by_side(works):
    found = [None] * len(works)

    def run(place):
        try:
            found[place] = works[place]()
        except StalledError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_gets_what_all_said_and_again_the_same():
    ranks = ranks_of(3)
    for key in ("round 0", "round 1", "round 0"):
        said = [{rank: [key, rank], rank + 3: {"a": [1, None]}} for rank in range(3)]
        found = side_by_side([partial(rank.all, key, one) for rank, one in zip(ranks, said)])
        expected = {lane: value for one in said for lane, value in one.items()}
        assert found == [expected] * 3


def test_a_rank_that_does_it_again_alone_finds_what_it_found():
    ranks = ranks_of(2)
    first = side_by_side([partial(ranks[r].all, "k", {r: r}) for r in range(2)])
    assert ranks[1].all("k", {1: 1}) == first[1] == {0: 0, 1: 1}
    assert ranks[1].all("k", {1: 7}) == first[1]  # what it said first stands


def test_who_is_missing_is_named():
    ranks = ranks_of(4, deadline_s=0.3)
    found = side_by_side([partial(ranks[r].all, "round 7", {r: r}) for r in (0, 2)])
    assert all("2 ranks of 4 (1, 3) at round 7" in str(error) for error in found)


def test_a_wait_can_be_given_up():
    rank = ranks_of(2)[0]
    threading.Timer(0.1, rank.close).start()
    with pytest.raises(StalledError, match="waited 0 s for 1 rank"):
        rank.all("k", {0: 0})


def test_old_keys_are_removed_from_the_store(monkeypatch):
    monkeypatch.setattr("varlen.feed.agreement._KEPT", 3)
    store = torch.distributed.HashStore()
    rank = Agreement(store, "here", 0, 1, 1.0)
    for number in range(10):
        rank.all(f"round {number}", {0: 0})
    assert [number for number in range(10) if store.check([f"here/round {number}/0"])] == [7, 8, 9]


def test_without_a_group_there_is_no_store_and_names_count_up():
    assert job_store() is None
    assert [name_of("a"), name_of("a"), name_of("b")] == ["varlen/a/0", "varlen/a/1", "varlen/b/0"]
