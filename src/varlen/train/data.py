"""The run's loader, and how many steps it gives."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from varlen.batch.collate import collate
from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError
from varlen.feed.loader import PackedLoader
from varlen.feed.plans import GivenPlans
from varlen.pack.api import pack
from varlen.train.parallel import Ranks
from varlen.train.settings import TrainSettings
from varlen.train.tokens import RunTokenizer, as_data


def open_loader(
    settings: TrainSettings,
    config: Any,
    tokenizer: RunTokenizer,
    ranks: Ranks,
    plan: GivenPlans | None = None,
) -> PackedLoader:
    """Return the loader of this rank, with plans where steps are planned; nothing is read ahead yet."""
    data, run = settings.data, settings.run
    given: dict[str, Any] = {field.name: getattr(data, field.name) for field in fields(data)}
    given = {name: value for name, value in given.items() if value is not None}
    rank, world_size = ranks.rank, ranks.world_size
    if settings.plan is not None:  # the stages of a data-parallel rank have the same documents
        world_size //= settings.plan.pp
        rank %= world_size
        given.pop("micro_batch_size", None)
        given["mode"] = "indexed" if data.mode in (None, "auto") else data.mode
    source, _ = given.pop("source"), given.pop("tokenizer", None)
    cache = given.pop("cache", None)
    return PackedLoader(
        as_data(source),
        tokenizer.for_loader,
        **{"seed": run.seed} | given,
        epochs=run.epochs if run.epochs is not None or run.steps is not None else 1,
        cache=None if cache is None else Path(cache),
        dp_rank=rank,
        dp_world_size=world_size,
        device=None if ranks.device.type == "cpu" else ranks.device,
        model=config,
        plan=plan,
    )


def steps_of(loader: PackedLoader, settings: TrainSettings, begun_at: int = 0) -> int | None:
    """Return the optimizer steps of the whole run, or None where only the end of the data will say."""
    if settings.run.steps is not None:
        return settings.run.steps
    try:
        return begun_at + len(loader) // loader.micro_batches
    except TypeError:
        schedule = settings.optimizer.schedule
        if schedule == "constant":
            return None
        raise SettingError(
            f'optimizer.schedule = "{schedule}" needs the number of steps, which this data doesn\'t say; set '
            'run.steps, or optimizer.schedule = "constant"'
        ) from None


def smallest_batch(pad_id: int = 0) -> PackedBatch:
    """Return one document of two tokens, to ask a model what it makes of batches."""
    tokens = np.full(2, pad_id, dtype=np.int32)
    return collate((tokens, np.array([0, 2])), pack([2], capacity=2))
