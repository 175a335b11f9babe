"""Packed preference pairs: TRL's losses, gradients and metrics, pair for pair, whatever shares a batch."""

from collections import Counter
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainers import PAIRS, furthest, logged, pairs, trained
from trl import DPOTrainer

from varlen.adapters.trl.dpo import PackedDPOTrainer, PairPacks, padded_rows, pair_lengths
from varlen.errors import DocumentsError, OverlongDocumentError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*padding_free.*"),
    # TRL asks transformers for what transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),  # of torch where there is no accelerator
]

LOSSES = [
    {"loss_type": "sigmoid"},
    {"loss_type": "ipo"},
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    {"loss_type": "apo_zero", "max_length": 20},
    {"loss_type": "sigmoid_norm", "ld_alpha": 0.5},
    {"loss_type": "robust", "label_smoothing": 0.1, "use_weighting": True},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss["loss_type"]))
def test_loss_gradients_and_metrics_are_trl_s_on_the_same_pairs(loss, tmp_path):
    theirs = trained(DPOTrainer, tmp_path / "theirs", **loss)
    ours = trained(PackedDPOTrainer, tmp_path / "ours", attention="varlen", **loss)

    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)
    assert furthest(ours.gradients[0], theirs.gradients[0]) < 1e-4
    for name, value in theirs.state.log_history[0].items():
        assert ours.state.log_history[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_step_of_packs_is_the_mean_over_its_pairs(tmp_path):
    theirs = trained(DPOTrainer, tmp_path / "theirs")
    packs = {"capacity": 160, "per_device_train_batch_size": 1}
    few = len(PairPacks(theirs.train_dataset, 160))
    ours = trained(PackedDPOTrainer, tmp_path / "ours", gradient_accumulation_steps=few, **packs)

    sizes = {len(ours.train_dataset[number]) for number in range(few)}
    assert len(sizes) > 1  # else any mean would do
    assert ours.state.global_step == 1
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)
    assert furthest(ours.gradients[0], theirs.gradients[0]) < 1e-4


class Counting(PackedDPOTrainer):
    """Writes down the answers that it trains on, by step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
        taken = self.__dict__.setdefault("taken", [])
        chosen, rejected = inputs["input_ids"].chunk(2)
        taken.append((self.state.global_step, list(zip(chosen.tolist(), rejected.tolist()))))
        return super().training_step(model, inputs, *args, **rest)


def test_packs_of_pairs_go_on_from_a_checkpoint_and_none_comes_twice(tmp_path):
    settings = {
        "attention": "varlen",
        "capacity": 160,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trained(Counting, tmp_path / "whole", **settings)
    resumed = trained(
        Counting, tmp_path / "on", checkpoint=str(tmp_path / "whole" / "checkpoint-2"), **settings
    )

    assert sum(len(held) for _, held in whole.taken) == PAIRS
    assert len({str(pair) for _, held in whole.taken for pair in held}) == PAIRS
    assert resumed.taken == [entry for entry in whole.taken if entry[0] >= 2] != []
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs)


def test_documents_of_a_batch_do_not_see_each_other(tmp_path):
    theirs = trained(DPOTrainer, tmp_path / "theirs", max_steps=1)
    ours = trained(PackedDPOTrainer, tmp_path / "ours", max_steps=1)
    ours.model.set_attn_implementation("sdpa")
    (batch,) = ours.get_train_dataloader()
    flat = batch["packed"]
    erased = {
        **batch,
        "packed": flat.replace(cu_seqlens=flat.cu_seqlens[[0, -1]], segment_ids=flat.segment_ids * 0),
    }

    with torch.no_grad():
        kept, lost = (float(ours.compute_loss(ours.model, dict(given_))) for given_ in (batch, erased))
        assert kept == pytest.approx(float(theirs.compute_loss(ours.model, _padded(batch))), rel=1e-5)
    assert abs(lost - kept) > 1e-4


def _padded(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "packed"}


def test_evaluation_and_references_computed_ahead_are_trl_s(tmp_path):
    settings = {"eval_dataset": pairs(6, seed=1), "precompute_ref_log_probs": True, "max_steps": 1}
    theirs = trained(DPOTrainer, tmp_path / "theirs", **settings)
    ours = trained(PackedDPOTrainer, tmp_path / "ours", capacity=320, **settings)

    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-4)


@given(
    st.lists(st.tuples(*[st.integers(1, 20)] * 3), min_size=1, max_size=40), st.integers(1, 4), st.booleans()
)
def test_every_pair_stands_in_one_pack_and_packs_divide_among_ranks(sizes, ranks, is_shuffled):
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = Dataset.from_list(
        [{name: [number] * size for name, size in zip(names, row)} for number, row in enumerate(sizes)]
    )
    packs = PairPacks(rows, 90, longest=25, at_once=ranks, seed=3 if is_shuffled else None)

    held = [packs[number] for number in range(len(packs))]
    took = Counter(pair["prompt_ids"][0] for pack in held for pair in pack)
    assert took == Counter(range(len(sizes)))
    assert len(packs) % ranks == 0 or len(packs) == len(sizes)
    for pack in held:
        tokens = [min(len(pair["prompt_ids"]) + len(pair[name]), 25) for pair in pack for name in names[1:]]
        assert sum(tokens) <= 90


def test_pairs_that_don_t_fit_or_aren_t_stored_are_refused(tmp_path):
    with pytest.raises(OverlongDocumentError):
        trained(PackedDPOTrainer, tmp_path, capacity=30)
    with pytest.raises(DocumentsError, match="leave capacity out where pairs are streamed"):
        pair_lengths(pairs().to_iterable_dataset())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_values_go_where_they_would_stand_in_padded_rows(lengths):
    values = torch.arange(1.0, sum(lengths))  # one for each token but the last

    rows = padded_rows(values, torch.tensor(lengths), max(lengths) + 1)

    first = 0
    for row, length in zip(rows.tolist(), lengths):
        own = [float(first + n + 1) for n in range(length - 1)]
        assert row == own + [0.0] * (max(lengths) + 2 - length)
        first += length
