"""The loaders of a run: of the documents that it trains, and of those that it evaluates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from varlen.errors import SettingError
from varlen.feed.loader import PackedLoader
from varlen.feed.opening import OpenTokens
from varlen.feed.plans import GivenPlans
from varlen.store.growing import PartialStore
from varlen.train.parallel import Ranks
from varlen.train.settings import TrainSettings
from varlen.train.tokens import RunTokenizer, as_data


def open_loader(
    settings: TrainSettings,
    config: Any,
    tokenizer: RunTokenizer,
    ranks: Ranks,
    plan: GivenPlans | None = None,
    *,
    epochs: int | None = None,
) -> PackedLoader:
    """Return the loader of this rank, with plans where steps are planned; nothing is read ahead yet.

    Args:
        settings: of the run.
        config: of the model.
        tokenizer: of the data.
        ranks: the run's processes.
        plan: what gives plans.
        epochs: passes over the data; None for those of the run.
    """
    data, run = settings.data, settings.run
    given: dict[str, Any] = {field.name: getattr(data, field.name) for field in fields(data)}
    given = {name: value for name, value in given.items() if value is not None}
    epochs = run.epochs if epochs is None else epochs
    rank, world_size = ranks.rank, ranks.world_size
    if settings.plan is not None:
        # The stages, cp and tp ranks of a data-parallel rank have the same documents.
        sharing = settings.plan.cp * settings.plan.tp
        world_size //= settings.plan.pp * sharing
        rank = rank // sharing % world_size
        given.pop("micro_batch_size", None)
        given["mode"] = "indexed" if data.mode in (None, "auto") else data.mode
    for name in ("source", "mixture", "unit", "until", "tokenizer"):
        given.pop(name, None)
    found: Any = as_data(data, is_endless=run.steps is not None and epochs is None)
    if tokenizer.tokens is not None and not isinstance(tokenizer.tokens, PartialStore):
        found = OpenTokens(data=found, tokens=tokenizer.tokens)
    return PackedLoader(
        found,
        tokenizer.for_loader,
        **{"seed": run.seed} | given,
        epochs=epochs if epochs is not None or run.steps is not None else 1,
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
        schedule, warmup = settings.optimizer.schedule, settings.optimizer.warmup_share
        if schedule == "constant" and not warmup:
            return None
        named = f"optimizer.warmup_share = {warmup:g}" if warmup else f'optimizer.schedule = "{schedule}"'
        raise SettingError(
            f"{named} needs the number of steps, which this data doesn't say; set "
            'run.steps, or optimizer.schedule = "constant" and optimizer.warmup_steps'
        ) from None


def num_documents(loader: PackedLoader) -> int | None:
    """Return the number of documents of the data; None in streaming, where it isn't known before they are read."""
    return None if loader.mode == "streaming" else sum(len(lengths) for lengths in loader.all_lengths())
