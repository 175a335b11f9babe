"""The loaders of a Megatron run, as its functions that provide data sets return them, for train, valid and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varlen.adapters.megatron.dialects import NEWEST
from varlen.adapters.megatron.loader import MegatronLoader, last_checkpoint, saved_state
from varlen.adapters.megatron.packing.alignment import alignment
from varlen.arguments import as_count
from varlen.documents.mixture import Mixture
from varlen.errors import SettingError, UnknownLengthError
from varlen.feed.loader import PackedLoader
from varlen.feed.state import MOST
from varlen.files.paths import Data

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
        rampup_batch_size: start, increment and samples, as Megatron takes it. The loader's steps are then as small as
            divides all sizes of a batch, so that each of Megatron's steps is whole ones of the loader.
        eval_iters: steps of an evaluation.
        eval_global_batch_size: packs of a step of an evaluation (`validation.eval_global_batch_size`); None:
            `global_batch_size`.
        context_parallel_size: documents take multiples of twice as many tokens, so that its ranks can share each.
        tensor_model_parallel_size: with `sequence_parallel`, of so many for each context-parallel rank too.
        sequence_parallel: see above.
        dataloader_save: where Megatron saves the state (`dataset.dataloader_save`, `--dataloader-save`).
        load: where checkpoints are loaded from (`checkpoint.load`, `--load`); the newest there says the iteration,
            and for Megatron-Bridge the samples. None for a run that begins anew, from pretrained weights too.
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
    shared: dict[str, Any] = {
        "capacity": seq_length,
        "micro_batch_size": 1,
        "dp_rank": dp_rank,
        "dp_world_size": dp_world_size,
        "document_multiple_of": alignment(
            context_parallel_size, tensor_model_parallel_size, sequence_parallel
        ),
    }
    given = [name for name in (*shared, "layout", "device") if name in settings]
    if given:
        raise SettingError(f"{given[0]} follows from Megatron's own settings here; leave it out")
    made: list[MegatronLoader | None] = []
    try:
        made.append(
            None
            if train is None
            else MegatronLoader(
                PackedLoader(train, tokenizer, global_batch_size=step_packs, **{**shared, **settings}),
                dialect=dialect,
                **(batch_settings or {}),
            )
        )
        if made[0] is not None:
            newest = (0, 0) if load is None else last_checkpoint(load)
            at = newest[0] if iteration is None else iteration
            consumed = consumed_train_samples or (newest[1] if at == newest[0] else 0)
            _go_on(made[0], consumed, dataloader_save, at)
            _check_length(made[0], num_samples, global_batch_size)
        for data in (valid, test):
            made.append(
                None
                if data is None
                else MegatronLoader(
                    PackedLoader(
                        data,
                        tokenizer,
                        global_batch_size=evaluated,
                        **{**shared, **settings, "epochs": None},
                    ),
                    dialect=dialect,
                    restart_after=each_evaluation // dp_world_size or None,
                    **(batch_settings or {}),
                )
            )
    except BaseException:
        for loader in made:
            if loader is not None:
                loader.close()
        raise
    return made[0], made[1], made[2]


def loader_batch_size(global_batch_size: int, rampup_batch_size: Sequence[int] | None = None) -> int:
    """Return the packs of a loader's step: those of Megatron's, or what divides all of its steps while they grow.

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
            "rampup_batch_size has three numbers, the size to start with, the increment and the samples, got "
            f"{list(rampup_batch_size)}"
        )
    start, increment = (as_count(number, "rampup_batch_size") for number in rampup_batch_size[:2])
    if start > whole or (whole - start) % increment:
        raise SettingError(
            f"rampup_batch_size begins at {start:,}, and steps of {increment:,} don't lead to global_batch_size "
            f"{whole:,}; pass a start that is a multiple of {increment:,} below it"
        )
    return math.gcd(start, increment, whole)


def _go_on(loader: MegatronLoader, consumed: int, dataloader_save: str | Path | None, iteration: int) -> None:
    """Go to where a run stopped."""
    found = saved_state(dataloader_save, iteration) if dataloader_save and iteration else None
    if found is not None:
        loader.restore_state(found)
    elif consumed:
        loader.seek(consumed)
    elif iteration:
        where = (
            f"{dataloader_save} holds no state of the loader"
            if dataloader_save
            else "no dataloader_save was given"
        )
        raise SettingError(
            f"the run goes on after iteration {iteration:,}, but {where} and consumed_train_samples is 0, so the "
            "data would begin anew; pass consumed_train_samples, or iteration=0 if that is meant"
        )


def _check_length(loader: MegatronLoader, num_samples: Sequence[int] | None, global_batch_size: int) -> None:
    """Refuse training for longer than there is data, before hours of it, where anybody knows."""
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
