"""A PackedLoader as Megatron's external data loader: batches in its dialect, state in its checkpoints.

Read in Megatron-Bridge 0.3.1 to 0.6.0 and Megatron-LM (core 0.20): `dataloader_type="external"` passes the iterator
through as it is; `maybe_save_dataloader_state` calls its `save_state` and writes what that returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from varlen.adapters.megatron.batches.collate import megatron_batch
from varlen.adapters.megatron.packing.alignment import alignment
from varlen.adapters.megatron.rows import NEWEST, Dialect, as_dialect
from varlen.arguments import as_count
from varlen.documents.source import Mixture
from varlen.errors import SettingError, StateError, UnknownLengthError, described
from varlen.feed.loader import PackedLoader
from varlen.feed.state import MOST, merge_states
from varlen.files.paths import Data

_FILES = "train_dataloader_dprank*.pt"
_KEY = "dataloader_state_dict"
_TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
"""Of Megatron-Bridge, and of Megatron-LM."""


class MegatronLoader:
    """What Megatron's training loop takes micro-batches from, with `dataloader_type="external"`.

    Every call of `next` returns the next micro-batch of this data-parallel rank as a mapping of tensors. Nothing is
    read, and no worker started, before the first: a rank whose stage takes no data costs nothing.

    Megatron writes what `save_state` returns where `dataset.dataloader_save` (`--dataloader-save`) names a folder.
    The state is the same on all ranks, so any of its files will do, also for another number of data-parallel ranks:
    `restore_state(saved_state(folder, iteration))`.
    """

    def __init__(
        self,
        loader: PackedLoader,
        *,
        dialect: str = NEWEST,
        restart_after: int | None = None,
        **batch_settings: Any,
    ) -> None:
        """Take a loader.

        Args:
            loader: of numpy arrays in rows, with batches of one pack; the ranks that share a replica (tensor,
                pipeline and context parallel) have the same `dp_rank`.
            dialect: of Megatron-Bridge that the training loop reads: "0.4", "0.5" or "0.6", or a release.
            restart_after: batches after which it begins at the beginning again, for evaluations that are to see the
                same data each time: `eval_iters` x the micro-batches of an evaluation step.
            batch_settings: of `megatron_batch`.

        Raises:
            SettingError: an unknown dialect, or a loader whose batches Megatron can't read.
        """
        self._dialect: Dialect = as_dialect(dialect)
        _check(loader)
        self._restart_after = None if restart_after is None else as_count(restart_after, "restart_after")
        self._loader, self._batch_settings = loader, batch_settings
        self._begin, self._taken = loader.state_dict(), 0

    @property
    def loader(self) -> PackedLoader:
        """The loader behind it: `documents(step)`, `stats()`."""
        return self._loader

    def __iter__(self) -> MegatronLoader:
        """Return itself: Megatron's loop goes on where it stopped."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next micro-batch of this rank."""
        if self._taken == self._restart_after:
            self._loader.load_state_dict(self._begin)
            self._taken = 0
        try:
            batch = next(self._loader)
        except StopIteration:
            samples = self._loader.step * self._loader.settings.global_batch_size
            raise SettingError(
                f"all epochs of the data are over after {samples:,} packs, and Megatron asks for more; train for so "
                "many samples at most (train_iters x global_batch_size), or pass more epochs (epochs=None: no end)"
            ) from None
        self._taken += 1
        return megatron_batch(batch, dialect=self._dialect, **self._batch_settings)

    def save_state(self) -> dict[str, Any]:
        """Return what was taken, the same on every rank; Megatron's checkpoints call this.

        Numbers, texts, lists and mappings, so that it can be read with `torch.load(..., weights_only=True)`.
        """
        return self._loader.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go on after a state, of any data-parallel rank; their number may be another one.

        Args:
            state: of `save_state`.

        Raises:
            StateError: of other data or settings, which are named; nothing has changed then.
        """
        self._loader.load_state_dict(state)

    save_state_rank, restore_state_rank = save_state, restore_state
    """As Megatron-Energon's loaders call them."""

    def seek(self, consumed_samples: int) -> None:
        """Go to where so many packs were taken, for a checkpoint that holds no state of its loader.

        It counts steps as the loader does. Steps without any target, which the loader leaves out, Megatron never
        counted: where there are such, only a state is exact.

        Args:
            consumed_samples: Megatron's `consumed_train_samples`.

        Raises:
            SettingError: it stands within a step, or behind the last.

        Cost: as `PackedLoader.seek`.
        """
        consumed = as_count(consumed_samples, "consumed_samples", 0, MOST)
        each = self._loader.settings.global_batch_size
        if consumed % each:
            raise SettingError(
                f"{consumed:,} consumed samples aren't whole steps of {each:,} packs; they were counted with another "
                "global_batch_size. Restore the state of the loader, or pass a multiple: "
                f"{consumed // each * each:,} or {-(-consumed // each) * each:,}"
            )
        self._loader.seek(consumed // each)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        """Be true, without counting anything."""
        return True

    def close(self) -> None:
        """Leave no process, thread or memory behind."""
        self._loader.close()


def saved_state(folder: str | Path, iteration: int) -> dict[str, Any] | None:
    """Return the state that Megatron saved of a loader, or None where there is none of this iteration.

    Args:
        folder: `dataset.dataloader_save` (`--dataloader-save`).
        iteration: of the checkpoint.

    Raises:
        StateError: what is there can't be read, or its files say different things.
    """
    location = Path(folder) / f"iter_{as_count(iteration, 'iteration', 0):07d}"
    states = []
    for file in sorted(location.rglob(_FILES)):  # Megatron-LM puts a folder mp_rank_00 between
        try:
            states.append(torch.load(file, map_location="cpu", weights_only=True)[_KEY])
        except Exception as error:  # whatever it raises, this is none of ours
            raise StateError(
                f"{file} is no state of a MegatronLoader: {described(error, kind=True)}; remove it, and "
                "seek(consumed_samples) instead"
            ) from error
    if not states:
        return None
    try:
        return merge_states(states)
    except (StateError, RuntimeError) as error:  # another loader's tensors can't be compared: RuntimeError
        raise StateError(f"{location} holds states of different loaders, or of others: {error}") from None


def last_checkpoint(load: str | Path) -> tuple[int, int]:
    """Return the iteration of the newest checkpoint of a folder, and the samples consumed until then.

    Megatron doesn't pass them to providers of data sets, so they are read from the tracker in the folder.

    Args:
        load: `checkpoint.load` (`--load`).

    Returns:
        Both 0 where there is no checkpoint, or one without iterations (a release). Megatron-LM's tracker doesn't say
        how many samples there were: 0; its `args.consumed_train_samples` does.

    Raises:
        StateError: the tracker can't be read.
    """
    bridge, core = (Path(load) / name for name in _TRACKERS)
    file = bridge if bridge.exists() else core
    if not file.exists():
        return 0, 0
    try:
        if file == bridge:
            state = torch.load(file, map_location="cpu", weights_only=True)
            return int(state["step"]), int(state["consumed_train_samples"])
        content = file.read_text().strip()
        return (0 if content == "release" else int(content)), 0
    except Exception as error:  # whatever it raises, the iteration is unknown
        raise StateError(
            f"{file} doesn't say which checkpoint is the newest: {described(error, kind=True)}; pass "
            "iteration and consumed_train_samples"
        ) from error


def _check(loader: PackedLoader) -> None:
    settings = loader.settings
    if settings.batch_sizes[1] != 1:
        raise SettingError(
            f"micro_batch_size is {settings.batch_sizes[1]:,}: Megatron takes packed rows one per micro-batch; pass "
            "micro_batch_size=1, and a larger capacity for more tokens"
        )
    if loader.has_weights:
        raise SettingError(
            "the rows are read with their weights (row_weights), and Megatron divides a loss by the sum of its loss "
            "mask as a whole number, so that the mean would be off by its fraction; read them without"
        )
    if settings.layout != "rows" or settings.device is not None:
        raise SettingError(
            'MegatronLoader takes a PackedLoader with layout="rows" and device=None: Megatron copies batches itself'
        )


# The loaders of a Megatron run, as its functions that provide data sets return them, for train, valid and test.

Loaders = tuple[MegatronLoader | None, MegatronLoader | None, MegatronLoader | None]


def external_loaders(
    train: Data | Mixture | None,
    valid: Data | None = None,
    test: Data | None = None,
    *,
    seq_length: int,
    global_batch_size: int,
    dp_rank: int,
    dp_world_size: int,
    num_samples: Sequence[int] | None = None,
    consumed_train_samples: int = 0,
    rampup_batch_size: Sequence[int] | None = None,
    eval_iters: int = 0,
    eval_global_batch_size: int | None = None,
    context_parallel_size: int = 1,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    dataloader_save: str | Path | None = None,
    load: str | Path | None = None,
    iteration: int | None = None,
    dialect: str = NEWEST,
    batch_settings: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Loaders:
    """Return a run's loaders, for `dataloader_type="external"`: what Megatron's providers of data sets return.

    A run that goes on finds its place: by the state that Megatron saved, else by `consumed_train_samples`.

    Args:
        train: a token store, or documents, of `PackedLoader`; None for a run that only evaluates.
        valid: for evaluations: each sees the same data, from the beginning, as much as `eval_iters` asks for.
        test: likewise.
        seq_length: tokens of a pack; `model.seq_length`.
        global_batch_size: packs of an optimizer step, over all ranks.
        dp_rank: `mpu.get_data_parallel_rank()`: tensor, pipeline and context parallel peers have the same.
        dp_world_size: `mpu.get_data_parallel_world_size()`.
        num_samples: three numbers, `train_val_test_num_samples`; where the data is known to be shorter, that is said
            at once.
        consumed_train_samples: `train_state.consumed_train_samples` (`args.consumed_train_samples`).
        rampup_batch_size: start, increment and samples, as Megatron takes it. The loader's step is then the largest
            that divides every batch size, so that each of Megatron's steps is a whole number of the loader's.
        eval_iters: steps of an evaluation.
        eval_global_batch_size: packs of a step of an evaluation (`validation.eval_global_batch_size`); None:
            `global_batch_size`.
        context_parallel_size: above 1, documents take multiples of twice as many tokens, so that its ranks can
            share each.
        tensor_model_parallel_size: with `sequence_parallel`, documents take multiples of this times
            `context_parallel_size` too.
        sequence_parallel: see above.
        dataloader_save: where Megatron saves the state (`dataset.dataloader_save`, `--dataloader-save`).
        load: where checkpoints are loaded from (`checkpoint.load`, `--load`); the newest there says the iteration,
            and for Megatron-Bridge the samples. None for a run that starts over, from pretrained weights too.
        iteration: of the checkpoint, where it isn't the newest (`checkpoint.ckpt_step`).
        dialect: of Megatron-Bridge that the training loop reads.
        batch_settings: of `megatron_batch`.
        tokenizer: of documents, as `PackedLoader` has it.
        settings: any other arguments of `PackedLoader`: `overlong`, `seed`, `mode` and so on; `epochs` is for
            training, evaluations go round.

    Returns:
        The loaders of train, valid and test data; None where there is none.

    Raises:
        SettingError: sizes that don't go together, or training data that is shorter than the training.
        SourceError: no such data, or it can't be read.
        StateError: the state that was saved belongs to other data or settings.
    """
    step_packs = loader_batch_size(global_batch_size, rampup_batch_size)
    if rampup_batch_size is not None and step_packs % as_count(dp_world_size, "dp_world_size"):
        raise SettingError(
            f"rampup_batch_size {list(rampup_batch_size)} leads to global_batch_size {global_batch_size:,} in steps "
            f"whose sizes are multiples of {step_packs:,}, which {dp_world_size:,} data-parallel ranks can't share; "
            f"pass a start and an increment that are multiples of {dp_world_size:,}"
        )
    evaluated = global_batch_size if eval_global_batch_size is None else eval_global_batch_size
    each_evaluation = as_count(eval_iters, "eval_iters", 0) * as_count(evaluated, "eval_global_batch_size")
    multiple = alignment(context_parallel_size, tensor_model_parallel_size, sequence_parallel)
    shared: dict[str, Any] = {
        "capacity": seq_length,
        "micro_batch_size": 1,
        "dp_rank": dp_rank,
        "dp_world_size": dp_world_size,
        "document_multiple_of": multiple,
    }
    given = [name for name in (*shared, "layout", "device") if name in settings]
    if given:
        raise SettingError(f"{given[0]} follows from Megatron's own settings here; leave it out")
    made: list[MegatronLoader | None] = []

    def make(data: Data | Mixture | None, packs: int, restart_after: int | None = None, **more: Any) -> None:
        loader = None
        if data is not None:
            packed = PackedLoader(data, tokenizer, global_batch_size=packs, **{**shared, **settings, **more})
            batches = batch_settings or {}
            loader = MegatronLoader(packed, dialect=dialect, restart_after=restart_after, **batches)
        made.append(loader)

    try:
        make(train, step_packs)
        if made[0] is not None:
            newest = (0, 0) if load is None else last_checkpoint(load)
            at = newest[0] if iteration is None else iteration
            consumed = consumed_train_samples or (newest[1] if at == newest[0] else 0)
            _go_on(made[0], consumed, dataloader_save, at)
            _check_length(made[0], num_samples, global_batch_size)
        for data in (valid, test):
            make(data, evaluated, each_evaluation // dp_world_size or None, epochs=None)
    except BaseException:
        for loader in made:
            if loader is not None:
                loader.close()
        raise
    return made[0], made[1], made[2]


def loader_batch_size(global_batch_size: int, rampup_batch_size: Sequence[int] | None = None) -> int:
    """Return the packs of a loader's step: Megatron's, or the largest number that divides all of a ramp-up's.

    Args:
        global_batch_size: packs of a step, at last.
        rampup_batch_size: start, increment and samples; None for the same from the beginning.

    Raises:
        SettingError: the increments don't lead from the start to the end.

    >>> loader_batch_size(64), loader_batch_size(64, [16, 24, 30_000])
    (64, 8)
    """
    whole = as_count(global_batch_size, "global_batch_size")
    if rampup_batch_size is None:
        return whole
    if len(rampup_batch_size) != 3:
        raise SettingError(
            f"rampup_batch_size has three numbers, start, increment and samples, got {list(rampup_batch_size)}"
        )
    start, increment = (as_count(number, "rampup_batch_size") for number in rampup_batch_size[:2])
    if start > whole or (whole - start) % increment:
        raise SettingError(
            f"rampup_batch_size begins at {start:,}, and steps of {increment:,} don't lead to global_batch_size "
            f"{whole:,}; pass a start that is smaller than that by a multiple of {increment:,}"
        )
    return math.gcd(start, increment, whole)


def _go_on(loader: MegatronLoader, consumed: int, dataloader_save: str | Path | None, iteration: int) -> None:
    found = saved_state(dataloader_save, iteration) if dataloader_save and iteration else None
    if found is not None:
        loader.restore_state(found)
    elif consumed:
        loader.seek(consumed)
    elif iteration:
        why = "no dataloader_save was given"
        if dataloader_save:
            why = f"{dataloader_save} holds no state of the loader"
        raise SettingError(
            f"the run goes on after iteration {iteration:,}, but {why} and consumed_train_samples is 0, so the "
            "data would start over; pass consumed_train_samples, or iteration=0 if that is meant"
        )


def _check_length(loader: MegatronLoader, num_samples: Sequence[int] | None, global_batch_size: int) -> None:
    """Refuse training for longer than there is data, before hours of it, where its length is known."""
    if num_samples is None:
        return
    try:
        wanted = as_count(num_samples[0], "num_samples[0]", 0, MOST)
    except (TypeError, IndexError):
        raise SettingError(
            f"num_samples holds the samples of training, validation and test, got {num_samples!r}; pass "
            "train_val_test_num_samples, or (context.train_samples, 0, 0)"
        ) from None
    each = loader.loader.settings.global_batch_size
    try:
        packs = len(loader) // loader.loader.micro_batches * each
    except UnknownLengthError:
        return
    if wanted > packs:
        raise SettingError(
            f"training asks for {wanted:,} samples, and {loader.loader.settings.epochs or 1:,} epochs of the "
            f"data are {packs:,} packs; set train_iters to {packs // global_batch_size:,} at most, or give the "
            "loader more epochs (epochs=None is without end)"
        )
