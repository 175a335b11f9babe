"""Reading: what a configuration says of packing, one value a setting, whichever form and dialect it is written in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from varlen.adapters.megatron.config.settings import (
    ARGUMENTS,
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    SETTINGS,
)
from varlen.adapters.megatron.dialects import Dialect

PRETRAINING = (
    "GPTDatasetConfig",
    "MockGPTDatasetConfig",
    "GPTFIMDatasetConfig",
    "BlendedMegatronDatasetConfig",
)
FINE_TUNING = (
    "FinetuningDatasetConfig",
    "HFDatasetConfig",
    "GPTSFTDatasetConfig",
    "DirectHFSFTDatasetConfig",
    "EnergonDatasetConfig",
    "MockVLMSFTDatasetConfig",
)
"""Data sets whose targets may all be masked on a rank; NVIDIA checks them so."""
CONVERSATIONS = (
    "HFDatasetConversationProvider",
    "PreloadedVLMConversationProvider",
    "MockVLMConversationProvider",
    "EnergonProvider",
)
"""The same before release 0.6, where NVIDIA doesn't check them."""
COLLATED = ("DirectHFSFTDatasetConfig", "EnergonDatasetConfig", "MockVLMSFTDatasetConfig")
"""Data sets whose collator pads to the multiple that context parallelism needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A configuration as the rules see it; `reading["model.seq_length"]` is a value, or the release's default."""

    values: Mapping[str, Any]
    """Settings that were given, by their names in `SETTINGS`; None where null was given."""
    spelled: Mapping[str, str]
    """How the configuration itself writes a name, where otherwise."""
    dialect: Dialect
    is_certain: bool
    """Whether the dialect was named, or told by names that only it has."""
    release: tuple[int, ...] | None = None
    """The release, where one was named to the patch: (0, 5, 1)."""
    is_arguments: bool = False
    """Whether these are Megatron-LM's own arguments."""
    classes: Mapping[str, tuple[str, ...]]
    """Names of the classes of `model`, `dataset` and `peft`."""
    held: frozenset[str] = frozenset()
    """Containers that are there, empty ones too."""
    mistyped: tuple[tuple[str, str], ...] = ()
    """Names that nobody asks for, and the near one that somebody does."""
    world_size: int | None = None
    origin: str = "the configuration"

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting, the release's default where it isn't given."""
        value = self.values.get(name)
        return SETTINGS[name].default if value is None else value

    def says(self, name: str) -> bool:
        """Return whether a setting is given, and not null."""
        return self.values.get(name) is not None

    def spell(self, name: str) -> str:
        """Return a setting's name as the configuration writes it, or would."""
        if self.is_arguments and name not in self.spelled:
            return next((plain for plain, names in ARGUMENTS.items() if name in names), name)
        return self.spelled.get(name, name)

    def shown(self, name: str) -> str:
        """Return a setting and its value in words, and whether that is the release's default."""
        if name not in SETTINGS:
            return self.spell(name)
        if self.says(name):
            return f"{self.spell(name)} = {as_written(self[name])}"
        default = SETTINGS[name].default
        return f"{self.spell(name)} {'is not given' if default is None else f'= {as_written(default)}, the default'}"

    def changed(self, changes: Mapping[str, Any]) -> Reading:
        """Return what would be read with other values; None takes a setting, or all that it holds, away."""
        values, held = dict(self.values), set(self.held)
        for name, value in changes.items():
            if value is None:
                values = {other: v for other, v in values.items() if not f"{other}.".startswith(f"{name}.")}
                held.discard(name)
            elif isinstance(value, Mapping):
                values |= {f"{name}.{last}": inner for last, inner in value.items()}
                held.add(name)
            else:
                values[name] = value
                held |= {name.rpartition(".")[0]} - {""}
        return replace(self, values=values, held=frozenset(held))

    def is_before(self, *release: int) -> bool:
        """Return whether the release is, or may be, one before another."""
        if self.release is not None:
            return self.release < release
        return (0, int(self.dialect[2:]) - (not self.is_certain and self.dialect == "0.5")) < release

    @property
    def dialect_words(self) -> str:
        """The dialect, and what is known of it."""
        if self.is_arguments:
            return "Megatron-LM's arguments"
        if self.release is not None:
            return f"Megatron-Bridge {'.'.join(map(str, self.release))}"
        if not self.is_certain and self.dialect == "0.5":
            return "Megatron-Bridge 0.4 or 0.5"
        return f"Megatron-Bridge {self.dialect}{'' if self.is_certain else ', as nothing says which'}"

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return int(self["model.context_parallel_size"])

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return int(self["model.tensor_model_parallel_size"])

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return int(self["model.pipeline_model_parallel_size"])

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks; None where the number of processes isn't known, or doesn't divide."""
        group = self.tp * self.pp * self.cp
        return self.world_size // group if self.world_size and self.world_size % group == 0 else None

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch; None where nothing is said."""
        value: int | None = self["train.micro_batch_size"]
        return value

    @property
    def specs(self) -> str:
        """Where this dialect has the specs of offline packing."""
        return OFFLINE_NEW if self.dialect == "0.6" else OFFLINE_OLD

    def spec(self, name: str) -> Any:
        """Return one of the specs of offline packing."""
        return self[f"{self.specs}.{name}"]

    @property
    def in_batch_name(self) -> str:
        """What this dialect calls packing within a micro-batch."""
        return IN_BATCH_NEW if self.dialect == "0.6" else IN_BATCH_OLD

    @property
    def is_offline(self) -> bool:
        """Whether rows are packed before training, or are meant to be."""
        if self.dialect == "0.6":
            return bool(self[OFFLINE_FLAG]) or OFFLINE_NEW in self.held
        return OFFLINE_OLD in self.held and self.spec("packed_sequence_size") > 0 and not self.is_pretraining

    @property
    def is_in_batch(self) -> bool:
        """Whether the rows of a micro-batch are packed into one as it is made."""
        return bool(self[self.in_batch_name])

    @property
    def is_energon(self) -> bool:
        """Whether Energon packs as it reads."""
        return self.says("dataset.packing_buffer_size")

    @property
    def packing(self) -> str:
        """How this run packs, in words; empty if it doesn't."""
        ways = [
            (self.is_offline, f"offline packing to {self.spec('packed_sequence_size'):,}"),
            (self.is_in_batch, "in-batch packing"),
            (self.is_energon, "Energon's packing"),
            (bool(self["dataset.sft"]), "SFT packing"),
        ]
        return " and ".join(words for is_so, words in ways if is_so)

    @property
    def width(self) -> str:
        """Where this data set has the switch for rows of one width."""
        name = "dataset.pad_to_max_length"
        return name if self[name] else "dataset.dataset_kwargs.pad_to_max_length"

    def is_of(self, names: tuple[str, ...]) -> bool:
        """Return whether the data set is of one of these classes."""
        return bool(set(names) & set(self.classes.get("dataset", ())))

    @property
    def is_pretraining(self) -> bool:
        """Whether the data set is one of pre-training, where every token is a target."""
        return self.is_of(PRETRAINING)

    @property
    def is_fine_tuning(self) -> bool:
        """Whether a rank may meet a part of a row that has no target at all."""
        if self.is_of((*FINE_TUNING, *CONVERSATIONS)) or bool(self.packing):
            return not self.is_pretraining
        return False

    @property
    def alignment(self) -> int:
        """The multiple that every document's slot, and a row, must have: `lcm(2·CP, CP·TP)`, for evaluation too."""
        sizes = {self.cp, self["dist.eval_context_parallel_size"] or self.cp}
        split = [2 * size if size > 1 else 1 for size in sizes]
        scattered = [
            size * self.tp if self["model.sequence_parallel"] and self.tp > 1 else 1 for size in sizes
        ]
        return math.lcm(*split, *scattered)

    @property
    def alignment_words(self) -> str:
        """How that multiple comes about."""
        parts = [f"context parallelism over {self.cp}"] if self.cp > 1 else []
        evaluation = self["dist.eval_context_parallel_size"]
        parts += [f"over {evaluation} in evaluation"] if evaluation not in (None, self.cp) else []
        is_scattered = self["model.sequence_parallel"] and self.tp > 1
        parts += [f"sequence parallelism over {self.tp}"] if is_scattered else []
        return " and ".join(parts) or "no parallelism along the sequence"


def as_written(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_written(inner)}' for name, inner in value.items())}}}"
    return str(value)


def multiples(number: int, of: int) -> tuple[int, int]:
    """Return the nearest multiples of a number: the one below, at least once it, and the one above.

    >>> multiples(510, 4), multiples(3, 8), multiples(16, 8)
    ((508, 512), (8, 8), (16, 16))
    """
    below = max(number // of, 1) * of
    return below, -(-number // of) * of
