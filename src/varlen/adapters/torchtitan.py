"""torchtitan: a loader behind its data protocol, whose packs are planned over all ranks."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from varlen.arguments import as_count, options_of
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.documents.memory import spooled
from varlen.documents.source import Mixture
from varlen.errors import SettingError, StateError
from varlen.feed.loader import PackedLoader
from varlen.feed.settings import LoaderSettings, Scope, WorkerKind
from varlen.feed.state import Mode
from varlen.parsed import parse_json
from varlen.store.open import open_tokens
from varlen.text.identity import check_same, made_by, mark_of
from varlen.text.load_tokenizer import load_tokenizer, put_before
from varlen.text.tokenizer import FastTokenizer
from varlen.types import IntArray, Method, Overlong

__all__ = ["PackedDataLoader", "check_trainer", "trainer_batch"]


# PackedDataLoader: a PackedLoader behind torchtitan's data protocol.

_KEY = "varlen"
_OTHERS = ("dataset", "dataset_path")
"""Of torchtitan's base class (0.3.0), for its own data sets."""
_OWN = ("capacity", "micro_batch_size", "dp_rank", "dp_world_size", "tokenizer", "layout", "device")
"""Arguments of PackedLoader that torchtitan decides."""
_FIELDS = ("overlong", "shuffle", "seed", "mode", "scope", "method", "worker")
"""Those that are fields of `PackedDataLoader.Config`; others are in its `settings`."""


_HOMES = ("torchtitan.components.dataloader", "torchtitan.components.data.loader")
"""Of releases up to 0.3, and of those after it."""


class StandInDataLoader:
    """The shape of torchtitan's `BaseDataLoader` (0.3.0), for where torchtitan isn't installed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings that make the loader they belong to."""

        _owner: ClassVar[type | None] = None

        def build(self, **runtime: Any) -> Any:
            """Return the loader of these settings."""
            assert self._owner is not None
            return self._owner(config=dataclasses.replace(self), **runtime)

    def __init_subclass__(cls, **rest: Any) -> None:
        """Let a class's settings make that class."""
        super().__init_subclass__(**rest)
        if "Config" in cls.__dict__:
            cls.__dict__["Config"]._owner = cls


def base_data_loader() -> type | None:
    """Return torchtitan's `BaseDataLoader`, or None where torchtitan isn't installed."""
    for home in _HOMES:
        try:
            found = getattr(importlib.import_module(home), "BaseDataLoader", None)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torchtitan":
                raise
            continue
        if isinstance(found, type):
            return found
    return None


if TYPE_CHECKING:
    BaseDataLoader = StandInDataLoader
else:
    BaseDataLoader = base_data_loader() or StandInDataLoader


class PackedDataLoader(BaseDataLoader):
    """torchtitan's data loader, packed: `config.dataloader = PackedDataLoader.Config(source="store", ...)`.

    - Finite data may be shared over any number of data-parallel ranks: all of them get the same number of batches.
    - The packs of a step are planned over all ranks, so they are the same for every world size; they are dealt to
      ranks by their work.
    - `overlong` says what becomes of documents longer than `training.seq_len`.
    - Its state is one text, the same on every rank. It counts what the trainer took, and lets a run go on with
      another number of data-parallel ranks, where `global_batch_size` stays the same.

    Written for torchtitan 0.3.0 (`BaseDataLoader`, `Trainer.batch_generator`); without torchtitan the class has the
    same shape and stands by itself. Batches are `trainer_batch`'s.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings; ranks, lengths and batch sizes are torchtitan's own."""

        source: Any = ""
        """A token store (`varlen index`), or documents: a file, folder, glob, URL, a list of them, or a
        `vl.Mixture`."""
        text_tokenizer: str | None = None
        """Of documents: "bytes", a file or a folder; None for the trainer's own. A token store needs none."""
        global_batch_size: int = -1
        """The same as `training.global_batch_size`, which torchtitan doesn't pass on; -1, as there, for one batch of
        each rank per step. Give it where the number of ranks is to change, or gradients are accumulated."""
        overlong: Overlong = LoaderSettings.overlong
        shuffle: bool = LoaderSettings.shuffle
        seed: int = LoaderSettings.seed
        mode: Literal["auto"] | Mode = LoaderSettings.mode
        scope: Scope = LoaderSettings.scope
        method: Method = LoaderSettings.method
        worker: WorkerKind = LoaderSettings.worker
        """As `vl.PackedLoader` has these."""
        epochs: int = 1
        """Passes over the data, unless `infinite`."""
        infinite: bool = False
        """Go round without end. torchtitan's validator sets it by its own number of steps."""
        settings: dict[str, Any] = field(default_factory=dict)
        """Any other arguments of `vl.PackedLoader` by name."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        snapshot_every_n_steps: int | None = None,
        **_others: Any,
    ) -> None:
        """Open the data; `Config.build` calls this with what the trainer knows.

        Args:
            config: what to read, and how.
            dp_world_size: ranks that get different data.
            dp_rank: this one; tensor, pipeline and context parallel peers have the same.
            tokenizer: the trainer's.
            seq_len: tokens of a pack (0.3.0).
            local_batch_size: packs of a batch (0.3.0); with pipeline parallelism those of a micro-batch.
            max_context_length: tokens of a pack, where batches are counted in tokens (after 0.3.0).
            num_tokens_per_batch: tokens of a batch, a multiple of them (after 0.3.0).
            snapshot_every_n_steps: batches of a rank from one checkpoint to the next (0.3.0).
            _others: what other releases pass, which isn't needed.

        Raises:
            SettingError: a setting out of its range, or that doesn't go with the others or with the trainer's.
            SourceError: no such data, or it can't be read.
            OverlongDocumentError: `overlong="error"` and a document of a token store is longer than a pack.
        """
        capacity, rows = _sizes(seq_len, local_batch_size, max_context_length, num_tokens_per_batch)
        self._is_flat = seq_len is None
        _check_settings(config)
        whole = rows * dp_world_size if config.global_batch_size < 0 else config.global_batch_size
        source = _as_files(config)
        self._loader = PackedLoader(
            source,
            _tokenizer_for(config, source, tokenizer),
            capacity=capacity,
            global_batch_size=whole,
            micro_batch_size=rows,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            epochs=None if config.infinite else config.epochs,
            **{name: getattr(config, name) for name in _FIELDS},
            **config.settings,
        )
        try:
            _check_snapshots(snapshot_every_n_steps, self._loader)
            _check_weights(self._loader)
        except BaseException:
            self.close()
            raise

    @property
    def loader(self) -> PackedLoader:
        """The loader behind it: `documents(step)`, `stats()`, `seek(step)`."""
        return self._loader

    def __iter__(self) -> PackedDataLoader:
        """Return itself: a loop goes on where the last one stopped."""
        return self

    def __next__(self) -> TrainerBatch:
        """Return the next batch of this rank, as `trainer_batch` has it."""
        return trainer_batch(next(self._loader), flat=self._is_flat)

    def __len__(self) -> int:
        """Count this rank's batches of all epochs; divided by `loader.micro_batches`, they are torchtitan's steps."""
        return len(self._loader)

    def __bool__(self) -> bool:
        """Be true, without counting anything."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what the trainer took: one text of JSON, the same on every rank.

        A checkpointer asks a new loader for the names in its state before it reads them (torch's distributed
        checkpoints do), so there is only this one name.
        """
        return {_KEY: json.dumps(self._loader.state_dict(), sort_keys=True)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after a state, of any rank, also with another number of ranks; an empty one changes nothing.

        Args:
            state_dict: of `state_dict`.

        Raises:
            StateError: of another loader, or of other data or settings, which are named; nothing has changed then.
        """
        if not state_dict:
            return
        text = state_dict.get(_KEY)
        if not isinstance(text, str):
            raise StateError(
                f"the checkpoint holds the state of another data loader ({', '.join(map(str, state_dict))}), which "
                "says nothing of the place in packed data; to begin the data anew, put dataloader into "
                "checkpoint.exclude_from_loading"
            )
        try:
            state = parse_json(text)
        except ValueError as error:
            raise StateError(
                f"the state of the data loader is no JSON: {error}; load it as it was saved"
            ) from None
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """Leave no process, thread or memory behind."""
        self._loader.close()


def _sizes(
    seq_len: int | None,
    local_batch_size: int | None,
    max_context_length: int | None,
    num_tokens_per_batch: int | None,
) -> tuple[int, int]:
    """Return tokens of a pack, and packs of a batch."""
    if seq_len is not None and local_batch_size is not None:
        return seq_len, local_batch_size
    if max_context_length is None or num_tokens_per_batch is None:
        raise SettingError(
            f"a trainer passes seq_len and local_batch_size to its loader (got {seq_len} and {local_batch_size}), or "
            f"max_context_length and num_tokens_per_batch (got {max_context_length} and {num_tokens_per_batch}); "
            "pass both of one pair"
        )
    capacity = as_count(max_context_length, "max_context_length")
    tokens = as_count(num_tokens_per_batch, "num_tokens_per_batch")
    if tokens % capacity:
        below, above = tokens // capacity * capacity, -(-tokens // capacity) * capacity
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"a batch of {tokens:,} tokens isn't whole packs of max_context_length {capacity:,}; pass "
            f"num_tokens_per_batch {nearest}"
        )
    return capacity, tokens // capacity


def _check_settings(config: PackedDataLoader.Config) -> None:
    """Refuse settings that would change nothing, or that stand elsewhere."""
    if config.source is None or (isinstance(config.source, str) and not config.source):
        raise SettingError(
            "dataloader.source is empty; pass a token store, or documents: a file, folder or glob"
        )
    theirs = [name for name in _OTHERS if getattr(config, name, None)]
    if theirs:
        raise SettingError(
            f"dataloader.{theirs[0]} names one of torchtitan's own data sets, which aren't read here; put the "
            "path of the data into dataloader.source"
        )
    for name in config.settings:
        if name in _OWN:
            raise SettingError(f"dataloader.settings holds {name}, which torchtitan decides; leave it out")
        if name in {one.name for one in fields(config)}:
            raise SettingError(
                f"dataloader.settings holds {name}, which has a field of its own; set dataloader.{name}"
            )
        if name not in options_of(LoaderSettings):
            raise SettingError(
                f"dataloader.settings holds {name}, which is no argument of vl.PackedLoader; the nearest is "
                f"{difflib.get_close_matches(name, options_of(LoaderSettings), n=1, cutoff=0.0)[0]}"
            )


def _check_snapshots(batches: int | None, loader: PackedLoader) -> None:
    """Refuse a trainer whose steps are others than the loader's, as far as its checkpoints show."""
    if batches is not None and batches % loader.micro_batches:
        raise SettingError(
            f"torchtitan saves after every {batches:,} batches of a rank, and dataloader.global_batch_size "
            f"{loader.settings.global_batch_size:,} makes a step of {loader.micro_batches:,}, so "
            "torchtitan's steps are others; set dataloader.global_batch_size to training.global_batch_size"
        )


def _as_files(config: PackedDataLoader.Config) -> Any:
    """Return the data with rows in memory as files, so that looking at it takes no row away."""
    if isinstance(config.source, Mixture):
        return config.source
    others = config.settings
    is_streamed = config.mode != "indexed" and config.scope != "all"
    return spooled(config.source, others.get("columns"), others.get("cache"), is_streamed=is_streamed)


def _tokenizer_for(config: PackedDataLoader.Config, source: Any, trainers: Any) -> Any:
    """Return what tokenizes documents, None for a token store."""
    if config.text_tokenizer is not None:
        return config.text_tokenizer
    if trainers is None:
        return None
    tokens = None if isinstance(source, Mixture) else open_tokens(source, check_tokens=False)
    if tokens is None:
        return _as_tokenizer(trainers)
    mark = made_by(tokens)
    if mark is not None and hasattr(getattr(trainers, "tokenizer", trainers), "encode_batch_fast"):
        out = "index the documents with the trainer's, or set model.hf_assets_path to those of that tokenizer"
        check_same(str(source), mark, mark_of(_as_tokenizer(trainers)), out)
    return None


def _as_tokenizer(trainers: Any) -> Any:
    """Return torchtitan's tokenizer as varlen's, with the marks that torchtitan puts around a document."""
    backend = getattr(trainers, "tokenizer", trainers)
    if not hasattr(backend, "encode_batch_fast"):
        raise SettingError(
            f"the trainer's tokenizer, {type(trainers).__name__}, isn't one that varlen can send to its worker; set "
            'dataloader.text_tokenizer to its file or folder, or to "bytes"'
        )
    made = load_tokenizer(backend, eos=getattr(trainers, "eos_id", None))
    begin = getattr(trainers, "bos_id", None)
    if begin is None or made.specials.prefix_ids or not isinstance(made, FastTokenizer):
        return made
    return put_before(made, [int(begin)])


def _check_weights(loader: PackedLoader) -> None:
    """Refuse weights that torchtitan's loss doesn't know."""
    if loader.has_weights:
        raise SettingError(
            "the rows are read with their weights (row_weights), and torchtitan's loss knows none, so that all would "
            "be trained alike; read them without row_weights"
        )


# What torchtitan's trainer reads of a packed batch: inputs, positions, and labels that are shifted already.

TrainerBatch = tuple[dict[str, torch.Tensor], torch.Tensor]

_BLOCK = 128
"""Positions of padding restart here at the latest: the block of FlexAttention's masks."""


def trainer_batch(batch: PackedBatch, *, flat: bool = False) -> TrainerBatch:
    """Return a batch as torchtitan's trainer takes it (0.3.0: `Trainer.post_dataloading_process`).

    torchtitan makes its attention masks from positions: a document begins wherever they are 0. So positions count
    within each document, and padding is documents of its own, none longer than 128 or across a multiple of 128: it
    is never joined to a document, costs a block mask nothing but its diagonal, and a varlen kernel a few segments.

    Args:
        batch: of numpy arrays in rows.
        flat: without rows, as torchtitan's trainer of August 2026 has batches.

    Returns:
        `{"input": int64 [rows, width], "positions": int64 [rows, width]}` and labels int64 `[rows, width]`: the label
        at t is the token at t + 1, and -100 at the last token of each document and at padding. With `flat` each is
        `[rows * width]`. Nothing of it shares memory with the batch.

    Raises:
        SettingError: targets weigh as their rows say.
    """
    if batch.target_weights is not None:
        raise SettingError(
            "targets of this batch weigh as their rows say (row_weights), and torchtitan's loss knows no weights; "
            "read the rows without row_weights"
        )
    labels = np.full(batch.labels.shape, IGNORE_INDEX, dtype=np.int64)
    # A document's first token is no target, so none is moved into the document before it.
    labels[:, :-1] = batch.labels[:, 1:]
    arrays = [batch.input_ids.astype(np.int64), positions(batch), labels]
    inputs, position_ids, targets = (torch.from_numpy(one.reshape(-1) if flat else one) for one in arrays)
    return {"input": inputs, "positions": position_ids}, targets


def positions(batch: PackedBatch) -> IntArray:
    """Return int64 `[rows, width]` positions that are 0 where a document begins, or a piece of padding."""
    is_padding = batch.segment_ids < 0
    here = np.arange(is_padding.shape[1], dtype=np.int64)
    run_begins = np.maximum.accumulate(np.where(is_padding, 0, here + 1), axis=1)
    in_padding = here - np.maximum(run_begins, here // _BLOCK * _BLOCK)
    found: IntArray = np.where(is_padding, in_padding, batch.position_ids).astype(np.int64, copy=False)
    return found


# Settings of torchtitan that would train something else than the packs.

_MASKED = ("FlexAttention", "VarlenAttention")
"""Attention of torchtitan (0.3.0) that gets a mask made from positions; what it has beside them sees whole rows."""


def check_trainer(config: Any) -> None:
    """Refuse a `Trainer.Config` of torchtitan under which documents would leak, or steps be others than the loader's.

    Args:
        config: of torchtitan 0.3.0, or any object with `dataloader`, `training` and perhaps `model_spec`.

    Raises:
        SettingError: says which setting, and what it has to be.
    """
    loader, training = config.dataloader, config.training
    if not isinstance(loader, PackedDataLoader.Config):
        raise SettingError(
            f"dataloader is a {type(loader).__qualname__}; set it to PackedDataLoader.Config(source=...)"
        )
    if loader.global_batch_size != training.global_batch_size:
        ours, theirs = (
            "one batch of each rank (-1)" if size < 0 else f"{size:,} packs"
            for size in (loader.global_batch_size, training.global_batch_size)
        )
        raise SettingError(
            f"a step of the loader is {ours}, and one of the trainer {theirs}; set dataloader.global_batch_size to "
            f"{training.global_batch_size}, which is training.global_batch_size"
        )
    model = getattr(getattr(config, "model_spec", None), "model", None)
    for number, layer in _layers(model):
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        kind = type(inner).__qualname__.partition(".")[0]
        if inner is not None and kind not in _MASKED:
            raise SettingError(
                f"layer {number} of the model attends by {kind}, which gets no mask: its documents would see each "
                'other; make the model with attn_backend="flex" or "varlen"'
            )


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers of a model's configuration with their numbers or names."""
    layers = getattr(model, "layers", None) or ()
    return list(layers.items()) if isinstance(layers, Mapping) else list(enumerate(layers))
