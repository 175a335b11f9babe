"""A packed set trains in TRL's SFTTrainer as it is, with the loss of its documents one by one."""

import warnings
from importlib.util import find_spec

import pytest
from tests.adapters.trl.tiny_models import losses_of_training, tiny_model
from tests.support.offline_packs import documents_of, pack, write_chats, write_texts

MISSING = [name for name in ("trl", "datasets", "torch", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries about each other
]


def trained(folder, work, *, columns=("input_ids", "labels", "seq_lengths"), rows=2, **settings):
    """Train for as many rows as there are, `rows` a step, without moving a weight; returns the losses logged."""
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = datasets.load_dataset(
            "parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=str(work / "cache")
        )
        chosen = data.select_columns(list(columns))
        return losses_of_training(work, chosen, rows, len(data) // rows, **settings)


def loss_of_each_document(folder):
    """The mean over the trained tokens of all documents, each alone in the model."""
    import torch

    model = tiny_model().eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in documents_of(folder):
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            total += float(
                torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
            )
            count += sum(label != -100 for label in labels[1:])
    return total / count


@pytest.fixture
def packed(tmp_path):
    """Texts, of which all is trained on, and chats, of which the answers are; and the number of rows."""
    (tmp_path / "in").mkdir()
    write_texts(tmp_path / "in" / "a.jsonl", 12)
    write_chats(tmp_path / "in" / "b.jsonl", 12)
    done = pack(tmp_path / "in", tmp_path / "out", capacity=320)
    assert done.manifest["num_packs"] > 2
    return tmp_path / "out", done.manifest["num_packs"]


def test_the_loss_is_that_of_the_documents_one_by_one(tmp_path, packed):
    folder, rows = packed

    (loss,) = trained(folder, tmp_path, rows=rows)

    assert loss == pytest.approx(loss_of_each_document(folder), abs=1e-5)


@pytest.mark.parametrize(
    "broken", [{"padding_free": False}, {"columns": ("input_ids", "labels")}], ids=["padded", "unmarked"]
)
def test_without_the_boundaries_the_loss_is_another(tmp_path, packed, broken):
    folder, rows = packed

    (loss,) = trained(folder, tmp_path, rows=rows, **broken)

    assert abs(loss - loss_of_each_document(folder)) > 1e-3
