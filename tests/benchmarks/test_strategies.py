"""The comparison of strategies compares what it says: the same documents, each once, with the losses of padding."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.checks import WrongResultError
from benchmarks.strategies import figures as figures_of
from benchmarks.strategies import page
from benchmarks.strategies.compare import density
from benchmarks.strategies.feeds import STRATEGIES, Fed, Feed
from benchmarks.strategies.models import FAMILIES, build
from benchmarks.strategies.race import extreme
from benchmarks.strategies.ranks import OURS, on_ranks
from benchmarks.strategies.sets import Shape, extremes, text_sets
from benchmarks.strategies.train import Ledger, train

# TRL's trainer module defines a class that transformers 5 will rename, and datasets closes a pool late.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS = 4


def nobody(done, total, what):
    """Is told of progress and doesn't care."""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sets():
    return text_sets(quick=True)


def feed_of(sets, strategy, name="short"):
    of_set = sets[name]
    return Feed(strategy=strategy, documents=of_set.draw(STEPS, 1), shape=of_set.shape, seed=1)


def curve_of(sets, strategy, family="llama", name="short"):
    feed = feed_of(sets, strategy, name)
    return train(build(family, 0, feed.attention), feed, sets[name].validation, points=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_every_token_once_an_epoch(sets, strategy):
    feed = feed_of(sets, strategy)
    model = build("llama", 0, feed.attention)
    seen = np.zeros(len(feed.documents.lengths), np.int64)
    pieces = np.zeros_like(seen)
    for fed in feed.steps(model):
        np.add.at(seen, fed.document_ids, fed.lengths)
        np.add.at(pieces, fed.document_ids, 1)
        labels, ids = fed.inputs.labels, fed.inputs.arguments["input_ids"]
        held = np.isin(labels.numpy(), [-100]) | (labels.numpy() == ids.numpy())
        assert held.all(), "a label is the token that stands there"
        documents = len(fed.document_ids)
        if strategy != "wrapped":
            assert fed.inputs.num_targets == fed.inputs.num_tokens - documents

    assert np.array_equal(seen, feed.documents.lengths)
    if strategy != "wrapped":
        assert (pieces == 1).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_tokens_of_a_step_are_those_of_the_documents_that_it_names(sets, strategy):
    feed = feed_of(sets, strategy)
    model = build("llama", 0, feed.attention)
    for fed in feed.steps(model):
        ids = fed.inputs.arguments["input_ids"].numpy()
        whole = [
            feed.documents.tokens[feed.documents.offsets[i] : feed.documents.offsets[i + 1]]
            for i in fed.document_ids.tolist()
        ]
        if strategy != "wrapped":  # there they are pieces
            expected = np.bincount(np.concatenate(whole), minlength=ids.max() + 1)
            found = np.bincount(ids.ravel(), minlength=len(expected))
            found[0] -= ids.size - fed.inputs.num_tokens  # padding

            assert np.array_equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_flattened_minibatches_have_the_losses_of_padded_ones_in_every_family(sets, family):
    padded, masked, flat = (
        curve_of(sets, strategy, family) for strategy in ("padding", "padding_mask", "online")
    )

    assert len(flat.losses) == STEPS
    for other in (padded, masked):
        assert flat.tokens == other.tokens
        assert flat.losses == pytest.approx(other.losses, abs=2e-5)
        assert flat.last_loss == pytest.approx(other.last_loss, abs=2e-5)


def test_wrapped_rows_have_other_losses_since_documents_see_each_other(sets):
    flat, wrapped = curve_of(sets, "offline"), curve_of(sets, "wrapped")

    assert abs(flat.last_loss - wrapped.last_loss) > 1e-4


def test_packs_and_minibatches_hold_as_many_tokens_a_step(sets):
    for of_set in sets.values():
        mean = of_set.train.lengths.mean()
        tokens = of_set.shape.packs * of_set.shape.capacity

        assert abs(of_set.shape.documents * mean / tokens - 1) < 0.15


def test_a_ledger_notices_a_document_that_is_missing_or_comes_twice():
    ledger = Ledger(lengths=np.array([3, 4]))
    first, second = (
        Fed(inputs=None, document_ids=np.array([i]), lengths=np.array([n])) for i, n in ((0, 3), (1, 4))
    )
    ledger.count(first)
    with pytest.raises(WrongResultError, match="1 of 2 documents"):
        ledger.check(whole=True)
    ledger.count(second)
    ledger.check(whole=True)
    ledger.count(second)
    with pytest.raises(WrongResultError):
        ledger.check(whole=True)


def test_validation_documents_are_trained_by_nobody(sets):
    for of_set in sets.values():
        held_back = {
            of_set.validation.take(np.array([i])).tokens.tobytes()
            for i in range(len(of_set.validation.lengths))
        }
        drawn = of_set.draw(STEPS, 0)
        trained = {drawn.take(np.array([i])).tokens.tobytes() for i in range(len(drawn.lengths))}

        # Sources hold a few functions twice; those apart, nothing is in both.
        assert len(held_back & trained) <= 1


@pytest.mark.soak
def test_the_loader_trains_the_same_steps_on_one_rank_and_on_two(sets):
    found = list(on_ranks(sets["short"], nobody, (), steps=STEPS, seeds=1, worlds=(1, 2), peers=False))

    by_key = {(record["sampler"], record["ranks"]): record for record in found}
    alone, together = by_key[OURS[1], 1], by_key[OURS[1], 2]
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert together["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-5)
    assert {(record["dropped"], record["repeated"]) for record in found} == {(0, 0)}
    assert all(record["tokens_imbalance"] < 1.2 for record in found)


@pytest.mark.soak
def test_contestants_are_timed_and_padding_computes_the_padding():
    (found,) = extreme(nobody, (), factors={10: 2})

    by_name = {contestant["strategy"]: contestant for contestant in found["contestants"]}
    tokens = {name: sum(step["tokens"] for step in one["steps"]) for name, one in by_name.items()}
    slots = {name: sum(step["slots"] for step in one["steps"]) for name, one in by_name.items()}
    assert set(tokens.values()) == {2 * found["base"] * (found["minibatch"] - 1 + 10)}
    assert slots["padding"] > 2 * tokens["padding"]
    assert slots["online"] == tokens["online"]
    assert all(one["memory_bytes"] > 0 for one in by_name.values())
    assert [step["loss"] for step in by_name["online"]["steps"]] == pytest.approx(
        [step["loss"] for step in by_name["padding"]["steps"]], abs=2e-5
    )


def test_the_sweep_tells_fill_and_losses_of_every_setting(sets):
    known = {"llama, long, next_fit, seed 0"}
    found = list(
        density(sets["long"], nobody, known, steps=STEPS, seeds=1, factors=(1,), windows=(8,), processes=0)
    )

    assert found[0]["label"] == "online"
    assert len(found) == 5, "what is known isn't trained again"
    assert {record["seed"] for record in found} == {0}
    fills = {record["label"]: record["fill"] for record in found}
    assert fills["best_fit_decreasing, window None, 1"] >= fills["best_fit, window 8, 1"]
    assert all(0 < fill <= 1 for label, fill in fills.items() if label != "online")


def test_extreme_documents_are_one_in_a_minibatch_and_so_much_longer():
    documents = extremes(100, 5, Shape(documents=16, capacity=920, packs=1), 8)

    assert sorted(set(documents.lengths.tolist())) == [8, 800]
    assert (documents.lengths == 800).sum() == 5
    assert len(documents.lengths) == 80


def test_an_estimate_has_the_interval_of_student():
    found = figures_of.estimate([1.0, 2.0, 3.0])

    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert not figures_of.estimate([-0.1, 0.2]).is_clear
    assert figures_of.estimate([0.10, 0.11, 0.12]).is_clear
    assert figures_of.estimate([5.0]).half_width is None


def test_a_ratio_is_of_tokens_a_second_by_the_clock_that_says_less():
    def steps(tokens, wall_s, cpu_s):
        return [{"tokens": tokens, "slots": 2 * tokens, "wall_s": wall_s, "cpu_s": cpu_s, "loss": 1.0}] * 3

    contestants = [
        {"strategy": "padding", "steps": steps(100, 1.0, 1.0), "memory_bytes": 5_000_000},
        {"strategy": "online", "steps": steps(100, 0.2, 0.5), "memory_bytes": 2_000_000},
    ]

    found = figures_of.speed(contestants, "online")

    assert found.ratio == pytest.approx(2.0)
    assert (found.tokens_per_s, found.slots_per_token, found.memory_mb) == pytest.approx((500.0, 2.0, 2.0))


def test_differences_are_between_runs_of_the_same_seed():
    def run(label, seed, loss):
        return {
            "label": label, "seed": seed, "set": "short", "family": "llama", "at_step": 2,
            "validation": [[2, 50, loss + 1], [4, 100, loss]],
        }  # fmt: skip

    result = {
        "parts": {
            "comparison": {
                "figures": [
                    run("online", 0, 4.0), run("online", 1, 5.0), run("ours", 0, 4.1), run("ours", 1, 5.1),
                ]
            }
        }
    }  # fmt: skip

    found = figures_of.differences(result, "short", "llama", "ours", "tokens")

    assert found.mean == pytest.approx(0.1)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)
    assert figures_of.losses(result, "short", "llama", "online", "steps").mean == 5.5


def test_the_page_holds_the_tables_of_the_newest_result():
    assert page.main(["--check"]) == 0


def test_only_marked_parts_of_the_page_are_rewritten():
    text = (
        "before\n<!-- sets: written by `python -m benchmarks.strategies.page` -->\nold\n<!-- end -->\nafter\n"
    )

    once = page.written(text, {"sets": {}})

    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("<!-- end -->\nafter\n")
    assert page.written(once, {"sets": {}}) == once


def test_result_files_of_strategies_name_neither_folder_nor_host():
    for path in sorted(figures_of.FOLDER.glob("*.json")):
        text = path.read_text()

        assert re.findall(r"(?<![\w.<])/(?:[\w.+-]+/)+", text) == []
        assert set(json.loads(text)["machine"]) == {"cpu", "cores", "memory_gib", "system", "python"}


def test_a_shape_of_other_packs_keeps_the_tokens_of_a_step(sets):
    shape = sets["short"].shape
    doubled = replace(shape, capacity=2 * shape.capacity, packs=shape.packs // 2)

    assert doubled.capacity * doubled.packs == shape.capacity * shape.packs
