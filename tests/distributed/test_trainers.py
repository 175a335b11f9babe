"""A PackedTrainer on two ranks: documents once, before and after a checkpoint, and one rank's losses and weights."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from tests.support.ranks import as_ranks
from tests.support.trainers import (
    CountingTrainer,
    arguments,
    logged,
    packed_loader,
    pieces,
    pieces_of,
    store_in,
    tiny_llama,
)
from torch.utils.data import DataLoader, IterableDataset

from varlen.batch.packed import PackedBatch
from varlen.feed.loader import PackedLoader

# TRL asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

JOB = Path(__file__).parent / "trainer_job.py"
LIBRARIES = "tests.support.trainers"


def taken_by(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def counted(ranks: list[Any], steps: range) -> Counter[tuple[int, ...]]:
    """How often each piece was taken in some steps, over all ranks."""
    return Counter(
        tuple(piece) for rank in ranks for step, held in rank["taken"] if step in steps for piece in held
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that ended one step behind its checkpoint, and one that went on from there."""
    out = tmp_path_factory.mktemp("job")
    store_in(out, documents=80)
    as_ranks(JOB, out / "store", out, folder=out, libraries=LIBRARIES)
    as_ranks(JOB, out / "store", out, out / "run" / "checkpoint-3", folder=out, libraries=LIBRARIES)
    return out


def alone(out: Path, folder: Path, loss_weighting: Any = "token", **changes: Any) -> Any:
    """The same run on one rank."""
    args = arguments(folder, num_train_epochs=1, **changes)
    loader = packed_loader(args, out / "store", global_batch_size=24)
    return CountingTrainer(model=tiny_llama(), args=args, train_loader=loader, loss_weighting=loss_weighting)


def test_two_ranks_take_every_document_once_before_and_after_a_checkpoint(job):
    begun, resumed = taken_by(job, "begun"), taken_by(job, "resumed")
    steps = begun[0]["steps"]

    assert steps > 4
    assert {len(rank["taken"]) for rank in begun} == {16}
    assert {len(rank["taken"]) for rank in resumed} == {4 * (steps - 3)}
    took = counted(begun, range(3)) + counted(resumed, range(3, steps))
    expected = pieces_of(job / "store", arguments("nowhere", num_train_epochs=1), global_batch_size=24)
    assert took == expected
    assert set(took.values()) == {1}
    # The step that had been made after the checkpoint is made again, with the same documents.
    for rank in (0, 1):
        assert [entry for entry in begun[rank]["taken"] if entry[0] == 3] == resumed[rank]["taken"][:4]


def test_two_ranks_have_the_losses_and_weights_of_one(job, tmp_path):
    single = alone(job, tmp_path)
    single.train()

    two = [entry["loss"] for entry in taken_by(job, "resumed")[0]["log"] if "loss" in entry]
    assert two == pytest.approx(logged(single), rel=1e-6)
    for name, weight in torch.load(job / "weights.pt").items():
        assert torch.allclose(weight, single.model.state_dict()[name], atol=1e-5), name


def test_two_ranks_have_the_losses_and_weights_of_one_where_documents_weigh_the_same(job, tmp_path):
    single = alone(job, tmp_path, "document", max_steps=2)
    single.train()

    two = [entry["loss"] for entry in json.loads((job / "weighted.json").read_text()) if "loss" in entry]
    assert two == pytest.approx(logged(single), rel=1e-6)
    for name, weight in torch.load(job / "weighted.pt").items():
        assert torch.allclose(weight, single.model.state_dict()[name], atol=1e-5), name


def test_one_rank_goes_on_where_two_were(job, tmp_path):
    single = alone(job, tmp_path)
    single.train(resume_from_checkpoint=str(job / "run" / "checkpoint-3"))

    resumed = taken_by(job, "resumed")
    ours = Counter(piece for _, held in single.taken for piece in held)
    assert ours == counted(resumed, range(3, 1000))
    assert logged(single) == pytest.approx(
        [entry["loss"] for entry in resumed[0]["log"] if "loss" in entry], rel=1e-6
    )


def test_two_ranks_with_packs_of_pairs_take_each_once_and_have_the_loss_of_one(job, tmp_path):
    from tests.support.trainers import trained
    from trl import DPOTrainer

    ranks = taken_by(job, "pairs")
    theirs = trained(DPOTrainer, tmp_path)

    batches = [[tuple(chosen) for chosen in batch] for rank in ranks for batch in rank["taken"]]
    assert len({len(batch) for batch in batches}) > 1
    took = Counter(chosen for batch in batches for chosen in batch)
    rows = theirs.train_dataset
    assert took == Counter(tuple(row["prompt_ids"] + row["chosen_ids"]) for row in rows)
    assert len(ranks[0]["taken"]) == len(ranks[1]["taken"])
    assert ranks[0]["log"][0]["loss"] == pytest.approx(logged(theirs)[0], rel=1e-5)


class Bare(IterableDataset[PackedBatch]):
    """A loader as a data set, without regard to what is done with it."""

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.loader)


def test_a_loader_that_accelerate_prepares_loses_half_of_its_documents(job):
    args = arguments("nowhere", num_train_epochs=1, per_device_train_batch_size=3)
    took: Counter[tuple[int, ...]] = Counter()
    for rank in (0, 1):
        with packed_loader(
            args, job / "store", dp_rank=rank, dp_world_size=2, global_batch_size=24
        ) as loader:
            made = DataLoader(
                Bare(loader), batch_size=1, collate_fn=lambda rows: {"pieces": torch.tensor(pieces(*rows))}
            )
            shared = prepare_data_loader(
                made, num_processes=2, process_index=rank, dispatch_batches=False, put_on_device=False
            )
            for batch in shared:
                took.update(map(tuple, batch["pieces"].tolist()))

    assert 0.4 < len(took) / len(pieces_of(job / "store", args, global_batch_size=24)) < 0.6
