"""varlen's settings in an axolotl configuration, what in it contradicts them, and its prepared data for a loader."""

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
"""Arguments of PackedLoader that follow from axolotl's own settings."""


def _in_configuration(option: Declared) -> tuple[Any, Any]:
    """Return the pydantic field of a loader argument; an argument without a default gets None."""
    default = None if option.default is MISSING else option.default
    return option.type, Field(default, description=option.text)


_OPTIONS: dict[str, Any] = {
    name: _in_configuration(one) for name, one in options_of(LoaderSettings).items() if name not in _DECIDED
}
_OfLoader: Any = create_model("_OfLoader", **_OPTIONS)


class VarlenSettings(_OfLoader):  # type: ignore[misc]
    """The mapping `varlen:` of a configuration: arguments of PackedLoader without an axolotl setting."""

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
            names = "; ".join(f"`{name}` ({_CONTRADICT[name]})" for name in wrong)
            raise SettingError(f"varlen packs this run, so leave out {names}")
        return given


# axolotl's prepared data set as data for a PackedLoader: saved once, and its number of steps.

_COLUMNS = ("input_ids", "labels")
_ROWS_AT_ONCE = 10_000


def saved(dataset: Any, folder: str | Path) -> Path:
    """Return a folder that holds the ids and labels of a data set; writes it if it doesn't exist.

    All ranks may call it concurrently, as the folder is created atomically.

    Cost: reading all tokens once, and writing them if the folder doesn't exist.
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
    path = Path(folder) / f"varlen-{_digest(chosen)}"
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        chosen.save_to_disk(str(partial), num_shards=1)
        try:
            partial.rename(path)
        except OSError:  # another rank was faster
            shutil.rmtree(partial)
    return path


def _digest(dataset: Any) -> str:
    """Return a hash of a data set's rows, the same on every rank and in every run."""
    digest = hashlib.blake2b(digest_size=8)
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for column in table.columns:
            whole = column.combine_chunks()
            for part in (whole.value_lengths(), whole.flatten()):
                digest.update(np.ascontiguousarray(part.to_numpy(zero_copy_only=False), np.int64).data)
    return digest.hexdigest()


def loader_settings(cfg: Any) -> dict[str, Any]:
    """Return the arguments of PackedLoader that a configuration gives."""
    given = {name: value for name, value in dict(cfg.varlen).items() if value is not None}
    for name in ("attention", "loss_weighting"):
        given.pop(name, None)
    capacity = given.pop("capacity", None) or cfg.sequence_len
    return {"capacity": capacity, "shuffle": not cfg.curriculum_sampling, "mode": "indexed", **given}


def folder_of(cfg: Any) -> Path:
    """Return axolotl's folder of prepared data."""
    return Path(cfg.dataset_prepared_path or Path(cfg.output_dir) / "prepared")


def count_steps(cfg: Any, dataset: Any) -> int:
    """Return the number of updates of a whole run."""
    settings = loader_settings(cfg)
    settings |= {"global_batch_size": settings.get("global_batch_size", cfg.batch_size), "worker": "thread"}
    settings |= {"dp_rank": 0, "dp_world_size": 1, "epochs": math.ceil(cfg.num_epochs), "seed": cfg.seed or 0}
    with PackedLoader(saved(dataset, folder_of(cfg)), **settings) as loader:
        steps: int = math.ceil(len(loader) * cfg.num_epochs / math.ceil(cfg.num_epochs))
    return min(steps, int(cfg.max_steps or steps))
