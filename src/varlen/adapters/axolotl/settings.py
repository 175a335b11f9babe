"""What an axolotl configuration says to varlen, what in it contradicts that, and its prepared data for a loader."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from varlen.adapters.features import WEIGHTS
from varlen.adapters.hf.trainer_checks import check_weighting
from varlen.arguments import Declared, as_tokens, options_of
from varlen.batch.packed import LossWeighting
from varlen.documents.source import Reading
from varlen.errors import SettingError
from varlen.feed.loader import PackedLoader
from varlen.feed.settings import LoaderSettings

_CONTRADICT = {
    "sample_packing": "axolotl would pack too",
    "batch_flattening": "axolotl would flatten batches too",
    "rl": "preference and rollout trainers have batches of their own",
    "reward_model": "reward models have batches of their own",
    "process_reward_model": "reward models have batches of their own",
    "pretraining_dataset": "axolotl streams it without lengths; list it under `datasets`",
    "streaming": "axolotl streams without lengths; leave it out",
    "trainer_cls": "the plugin has a trainer class of its own",
}
"""Settings that must be off, and why."""


def _as_capacity(given: Any) -> int | None:
    return None if given is None else as_tokens(given, "varlen.capacity")


_DECIDED = {"micro_batch_size", "dp_rank", "dp_world_size", "mode", "shuffle", "seed", "epochs"}
_DECIDED |= {"device", "model", "plan", *options_of(Reading)}
"""Arguments of PackedLoader that axolotl's own settings say."""


def _in_configuration(option: Declared) -> tuple[Any, Any]:
    """Return a field for an argument of the loader; None for one that the configuration need not have."""
    default = None if option.default is MISSING else option.default
    return option.type, Field(default, description=option.text)


_OPTIONS: dict[str, Any] = {
    name: _in_configuration(one) for name, one in options_of(LoaderSettings).items() if name not in _DECIDED
}
_OfLoader: Any = create_model("_OfLoader", **_OPTIONS)


class VarlenSettings(_OfLoader):  # type: ignore[misc]
    """The mapping `varlen:` of a configuration: arguments of PackedLoader that axolotl's settings don't say."""

    model_config = ConfigDict(extra="forbid")

    capacity: Annotated[int | None, BeforeValidator(_as_capacity)] = None
    """Tokens of a pack, such as 8192 or 8k; None for `sequence_len`."""
    global_batch_size: int | None = None
    """Packs of a step; None for `micro_batch_size` on every rank, `gradient_accumulation_steps` times. Say it where a
    run is to go on with another number of ranks."""
    attention: Literal["model", "varlen"] = "model"
    """The attention that the model is set to, or varlen's own, which computes each document by itself."""
    loss_weighting: Annotated[LossWeighting, AfterValidator(check_weighting)] = "token"
    """As `PackedTraining` takes it."""


class VarlenArguments(BaseModel):
    """What the plugin adds to axolotl's own settings."""

    varlen: VarlenSettings = Field(default_factory=VarlenSettings)

    @model_validator(mode="before")
    @classmethod
    def refuse_other_packers(cls, given: Any) -> Any:
        """Refuse settings under which axolotl makes batches too."""
        wrong = [name for name in _CONTRADICT if given.get(name)]
        if (given.get("context_parallel_size") or 1) > 1:
            raise SettingError(
                f"context_parallel_size={given['context_parallel_size']} cuts rows without regard to documents; "
                "leave it out"
            )
        if wrong:
            told = "; ".join(f"`{name}` ({_CONTRADICT[name]})" for name in wrong)
            raise SettingError(f"varlen packs this run, so leave out {told}")
        return given


# What axolotl has prepared, as data for a PackedLoader: saved once, by one process, and counted in steps.

_COLUMNS = ("input_ids", "labels")
_ROWS_AT_ONCE = 10_000


def saved(dataset: Any, folder: str | Path) -> Path:
    """Return a folder that holds the ids and labels of a data set; it is written where it isn't there yet.

    Every rank may call it at once: a copy is made beside it, and takes its place whole.

    Cost: reading all tokens once, and where they aren't there yet, writing them.
    """
    missing = [name for name in _COLUMNS if name not in (getattr(dataset, "column_names", None) or ())]
    if missing or not hasattr(dataset, "save_to_disk"):
        raise SettingError(
            f"varlen packs data sets of {' and '.join(_COLUMNS)} whose lengths are known, and axolotl has prepared a "
            f"{type(dataset).__name__} without {' and '.join(missing) or 'a length'}"
        )
    if WEIGHTS in dataset.column_names:
        raise SettingError(
            f"the data set that axolotl has prepared has `{WEIGHTS}`, by which its trainer doesn't weigh labels; "
            "leave the column out, or train on the rows by varlen train (data.row_weights)"
        )
    chosen = dataset.select_columns(list(_COLUMNS))
    place = Path(folder) / f"varlen-{_digest(chosen)}"
    if not place.exists():
        made = place.with_name(f"{place.name}.{os.getpid()}")
        chosen.save_to_disk(str(made), num_shards=1)
        try:
            made.rename(place)
        except OSError:  # another rank was faster
            shutil.rmtree(made)
    return place


def _digest(dataset: Any) -> str:
    """Name what a data set holds, row by row, in the same way on every rank and in every run."""
    found = hashlib.blake2b(digest_size=8)
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for column in table.columns:
            whole = column.combine_chunks()
            for part in (whole.value_lengths(), whole.flatten()):
                found.update(np.ascontiguousarray(part.to_numpy(zero_copy_only=False), np.int64).data)
    return found.hexdigest()


def loader_settings(cfg: Any) -> dict[str, Any]:
    """Return what a configuration says to a PackedLoader, in the loader's own words."""
    told = {name: value for name, value in dict(cfg.varlen).items() if value is not None}
    for name in ("attention", "loss_weighting"):
        told.pop(name, None)
    capacity = told.pop("capacity", None) or cfg.sequence_len
    return {"capacity": capacity, "shuffle": not cfg.curriculum_sampling, "mode": "indexed", **told}


def folder_of(cfg: Any) -> Path:
    """Return the folder that axolotl keeps prepared data in."""
    return Path(cfg.dataset_prepared_path or Path(cfg.output_dir) / "prepared")


def count_steps(cfg: Any, dataset: Any) -> int:
    """Return the updates of a whole run."""
    settings = loader_settings(cfg)
    settings |= {"global_batch_size": settings.get("global_batch_size", cfg.batch_size), "worker": "thread"}
    settings |= {"dp_rank": 0, "dp_world_size": 1, "epochs": math.ceil(cfg.num_epochs), "seed": cfg.seed or 0}
    with PackedLoader(saved(dataset, folder_of(cfg)), **settings) as loader:
        steps: int = math.ceil(len(loader) * cfg.num_epochs / math.ceil(cfg.num_epochs))
    return min(steps, int(cfg.max_steps or steps))
