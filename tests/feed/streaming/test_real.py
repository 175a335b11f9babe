"""The streaming feed on real documents: what is masked at the end, how full packs are, files in one piece."""

import gzip
import json

import numpy as np
import pytest
from tests.support.listed_files import REAL_TEXTS
from tests.support.streaming import documents, feed_of, pieces, run, side_by_side, some_texts, tokens_of

from varlen.documents import blocks
from varlen.documents.source import open_source
from varlen.feed.state import FeedState


@pytest.mark.parametrize("name", REAL_TEXTS)
def test_masked_packs_fill_only_the_end_within_the_bound_and_packs_before_it_are_full(data, name):
    source = open_source(data / "text" / name)
    lanes, capacity = 4, 4096
    feed = feed_of(source, lanes=lanes, size=lanes, micro=lanes, capacity=capacity, window_packs=32)
    used: dict[int, list[int]] = {}
    longest, tokens, last_round = 0, 0, 0
    for one in run(feed):
        for number, row in zip(one.batch.pack_ids.tolist(), one.batch.segment_ids):
            used.setdefault(number // lanes, [0] * lanes)[number % lanes] = int((row >= 0).sum())
        longest = max(longest, int(one.batch.document_starts.max(initial=0)) + capacity)
        last_round = int(one.state.at["step"]) if one.state.at["step"] <= one.state.step - 1 else last_round
    steps = np.array([used.get(step, [capacity] * lanes) for step in range(max(used) + 1)])  # [step, lane]
    tokens = int(steps.sum())

    masked = (steps == 0).sum(axis=0)
    assert masked.max() <= 1 + (feed.block_bytes + longest) / capacity
    for lane, count in enumerate(masked):
        assert (steps[len(steps) - count :, lane] == 0).all()
    if len(steps) >= 200 and longest < 0.01 * tokens / lanes:
        assert masked.sum() < 0.01 * steps.size
    if last_round >= 32:
        assert steps[:last_round].mean() / capacity >= 0.995


@pytest.mark.parametrize("meets", [True, False])
def test_files_that_can_not_be_cut_give_every_rank_the_same_set(tmp_path, monkeypatch, meets):
    monkeypatch.setattr(blocks, "FEWEST_BLOCK_BYTES", 200)
    texts = some_texts(1, 240)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines[:100]).encode()))
    (tmp_path / "b.csv").write_text("text\n" + "\n".join(texts[100:200]) + "\n")
    (tmp_path / "c.jsonl").write_text("".join(lines[200:]))
    source = open_source(tmp_path)

    alone = run(feed_of(source, epochs=2))
    made = side_by_side(source, 4, FeedState(), meets, epochs=2)

    assert [path.rpartition("/")[2] for path in feed_of(source).read_by_all] == ["a.jsonl.gz", "b.csv"]
    assert documents(run(feed_of(source))) == tokens_of(texts)
    flat = [one for of_rank in made for one in of_rank]
    assert sorted(pieces(flat)) == sorted(pieces(alone))
    assert len({len(of_rank) for of_rank in made}) == 1
    middle = made[0][len(made[0]) // 2].state
    again = side_by_side(source, 2, FeedState(step=middle.step, at=middle.at), meets, epochs=2)
    later = [one for one in alone if one.batch.pack_ids[0] // 4 >= middle.step]
    assert sorted(pieces([one for of_rank in again for one in of_rank])) == sorted(pieces(later))


def test_loss_masks_of_chats_travel_with_their_tokens(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": f"{n}" * 5}]}
        for n in range(1, 60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    source = open_source(tmp_path / "a.jsonl")
    supervised = sum(
        int(some.loss_mask.sum())
        for part in source.parts()
        for some in source.read(part)
        if some.loss_mask is not None
    )

    made = run(feed_of(source, capacity=256))

    labels = sum(int((one.batch.labels != -100).sum()) for one in made)
    assert 0 < labels == supervised < sum(one.batch.num_tokens for one in made)
