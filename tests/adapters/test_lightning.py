"""Lightning trains what a loader gives, each batch once, from any checkpoint, and is refused where it would not."""

import dataclasses
import json

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from varlen.adapters.lightning import PackedDataModule
from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other
MODES = {
    "indexed": {"mode": "indexed", "epochs": 2},
    "streaming": {"mode": "streaming", "window": 4},
    "endless": {"mode": "indexed", "epochs": None},
}


class Recording(lightning.LightningModule):
    """One weight, and a note of every batch that is trained."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.taken, self.validated = [], []

    def training_step(self, batch, _):
        assert isinstance(batch, PackedBatch)
        assert torch.is_tensor(batch.input_ids)
        self.taken.append((batch.pack_ids.tolist(), batch.document_ids.tolist()))
        return self.weight.float().sum() * batch.loss_scale()

    def validation_step(self, batch, _):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    lengths = np.random.default_rng(1).integers(1, 60, 200)
    rows = [json.dumps({"text": "word" * int(n)}) for n in lengths]
    (folder / "texts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def data_of(texts, **changes):
    usual = {"capacity": 256, "global_batch_size": 4, "micro_batch_size": 2, "worker": "thread"}
    if changes.get("mode", "indexed") == "indexed":
        usual |= {"mode": "indexed", "cache": texts / "cache"}
    return PackedDataModule(texts / "texts.jsonl", "bytes", **usual | changes)


def trainer_of(folder=None, **changes):
    usual = {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": 2}
    quiet = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")
    saving = [ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)] if folder else []
    switches = dict.fromkeys(quiet, False) | {"enable_checkpointing": bool(folder)}
    return lightning.Trainer(**usual | switches | {"callbacks": saving} | changes)


def taken_by(data, checkpoint=None, **changes):
    module = Recording()
    trainer_of(**changes).fit(module, datamodule=data, ckpt_path=checkpoint)
    return module.taken


@pytest.mark.parametrize("mode", MODES)
def test_every_checkpoint_goes_on_behind_the_last_batch_that_was_trained(mode, texts, tmp_path):
    limits = {"max_steps": 24} if mode == "endless" else {}
    whole = taken_by(data_of(texts, **MODES[mode]), folder=tmp_path, **limits)

    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    assert len(checkpoints) >= 4
    for checkpoint in (checkpoints[0], checkpoints[-1]):
        step = int(checkpoint.stem.removeprefix("step="))
        assert taken_by(data_of(texts, **MODES[mode]), checkpoint, **limits) == whole[2 * step :]
    assert len({str(batch) for batch in whole}) == len(whole) > 24


def test_an_epoch_is_all_that_the_loader_gives_each_document_once_an_epoch(texts):
    taken = taken_by(data_of(texts, epochs=2))

    numbers = [n for _, documents in taken for n in documents]
    assert sorted(numbers) == sorted([*range(200), *range(200)])


def test_parts_of_the_data_may_be_epochs_of_lightning(texts):
    whole = taken_by(data_of(texts, epochs=2))

    parts = taken_by(data_of(texts, epochs=None), max_epochs=3, limit_train_batches=6)

    assert parts == whole[:18]


def test_batches_reach_the_model_whole_whatever_the_precision(texts):
    assert len(taken_by(data_of(texts), precision="bf16-true", max_steps=2)) == 4


def test_other_loaders_beside_it_are_left_to_lightning(texts):
    class WithValidation(PackedDataModule):
        def val_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(6.0), batch_size=3)

    module, data = Recording(), data_of(texts)
    data.__class__ = WithValidation
    trainer_of(max_steps=2, val_check_interval=4, num_sanity_val_steps=0).fit(module, datamodule=data)

    assert [batch.tolist() for batch in module.validated] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_second_fit_begins_anew_and_the_first_loader_is_closed(texts):
    data = data_of(texts)

    first = taken_by(data, max_steps=3)

    with pytest.raises(SettingError, match="there is no loader outside"):
        _ = data.loader
    assert taken_by(data, max_steps=3) == first


def test_a_loader_is_closed_where_training_fails(texts):
    class Failing(Recording):
        def training_step(self, batch, index):
            loaders.append(self.trainer.datamodule.loader)
            raise RuntimeError("no memory")

    loaders = []
    with pytest.raises(RuntimeError, match="no memory"):
        trainer_of().fit(Failing(), datamodule=data_of(texts))

    with pytest.raises(SettingError, match="the loader is closed"):
        loaders[0].start_prefetch()


@pytest.mark.parametrize(
    ("settings", "trainer", "words"),
    [
        ({}, {"accumulate_grad_batches": 1}, r"pass Trainer\(accumulate_grad_batches=2\)"),
        ({}, {"max_epochs": 3}, r"pass Trainer\(max_epochs=1\)"),
        (
            {"epochs": 1},
            {"max_epochs": -1, "max_steps": 100},
            r"over after \d+ steps, and the trainer wants more",
        ),
        ({"mode": "streaming"}, {"max_epochs": -1, "max_steps": 99}, "epochs=None"),
    ],
)
def test_a_trainer_that_would_train_something_else_is_refused(settings, trainer, words, texts):
    with pytest.raises(SettingError, match=words):
        taken_by(data_of(texts, **settings), **trainer)


def test_ranks_are_lightnings(texts):
    with pytest.raises(SettingError, match="leave dp_rank out of the settings"):
        data_of(texts, dp_rank=0)


def test_processes_that_lightning_does_not_know_of_are_refused(texts, monkeypatch):
    # As torchrun sets it; on CPUs Lightning takes one device unless told.
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(SettingError, match=r"one of 2 processes \(WORLD_SIZE\), and Lightning knows of 1"):
        taken_by(data_of(texts))


class Given:
    """A data loader, of which Lightning knows the length or doesn't; `taken` counts what it was asked for."""

    def __init__(self, batches, length):
        self.batches, self.taken = batches, 0
        if length:
            self.__class__ = type("Sized", (Given,), {"__len__": lambda self: len(self.batches)})

    def __iter__(self):
        for batch in self.batches:
            self.taken += 1
            yield batch


class Ahead(lightning.Callback):
    def __init__(self, loader):
        self.loader, self.ahead = loader, []

    def on_train_batch_end(self, *args):
        self.ahead.append(self.loader.taken - args[-1] - 1)


class Plain(Recording):
    def training_step(self, batch, _):
        return self.weight.sum() * 1.0


@pytest.mark.parametrize(("length", "ahead"), [(True, [0, 0, 0, 0]), (False, [1, 1, 1, 0])])
def test_lightning_takes_one_batch_ahead_where_nobody_knows_the_length(length, ahead, tmp_path):
    loader = Given([torch.ones(1)] * 4, length)
    told = Ahead(loader)
    bare_trainer(tmp_path, callbacks=[told]).fit(Plain(), loader)

    assert told.ahead == ahead


def test_lightning_itself_refuses_frozen_dataclasses(tmp_path):
    frozen = dataclasses.make_dataclass("Frozen", [("ids", torch.Tensor)], frozen=True)

    with pytest.raises(ValueError, match="frozen dataclass"):
        bare_trainer(tmp_path).fit(Plain(), Given([frozen(torch.ones(1))], False))


def bare_trainer(folder, **settings):
    return lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **settings,
    )  # fmt: skip
