"""How a set is packed for Megatron-Bridge ahead of training; all of it decides the bytes that are written."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from varlen.adapters.megatron.packing.alignment import check_size, longest_aligned
from varlen.arguments import as_choice, as_count
from varlen.errors import SettingError
from varlen.types import Method, Overlong

OfflineAlgorithm: TypeAlias = Literal[
    "best_fit", "best_fit_decreasing", "balanced", "next_fit", "first_fit_shuffle", "first_fit_decreasing"
]
"""varlen's, by windows of shuffled documents, and the two of the releases, whose very packs they give."""
RELEASES = ("first_fit_shuffle", "first_fit_decreasing")
WINDOWED: dict[str, Method] = {
    "best_fit": "best_fit",
    "best_fit_decreasing": "best_fit_decreasing",
    "balanced": "balanced",
    "next_fit": "next_fit",
}
SetFormat: TypeAlias = Literal["parquet", "index"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronPackSettings:
    """How documents become packed rows of Megatron-Bridge."""

    pack_size: int
    """Positions of a row: `packed_sequence_size`. A row stores one token more for each of its documents."""
    format: SetFormat = "parquet"
    """"parquet", which releases from 0.4 on read, or "index": which tokens stand where, and no token again."""
    algorithm: OfflineAlgorithm = "best_fit"
    """"first_fit_shuffle" and "first_fit_decreasing" give the packs of Megatron-Bridge 0.6 at this seed; "best_fit"
    is fuller, and its rows are random samples too; "balanced" evens out the work of rows."""
    multiple: int = 1
    """`pad_seq_to_mult`: documents are padded to it; `alignment` computes it."""
    longest: int | None = None
    """Most positions of a document (`max_single_sequence_length`); None for a whole row."""
    overlong: Overlong = "error"
    """What becomes of longer documents."""
    max_documents: int | None = None
    """Most documents of a row, so that boundaries have a size that CUDA graphs can take; None for no limit."""
    shuffle: bool = True
    """Permute documents before packing, as the releases do; else they are packed as they come."""
    seed: int = 0
    """Of the shuffle."""
    split: str = "training"
    """What the name of the file begins with: "training" or "validation"."""
    pad_id: int | None = None
    """Token of the padding; None for the one that ends documents, as in the releases."""
    window: int = 1 << 16
    """Documents that varlen's algorithms pack at a time."""
    part_tokens: int | None = None
    """Stored tokens of one file, about, so that processes write side by side; None for one file in all."""
    row_group_tokens: int = 1 << 15
    """Stored tokens that are decoded to read a row."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        as_choice(self.algorithm, "algorithm", get_args(OfflineAlgorithm))
        as_choice(self.overlong, "overlong", get_args(Overlong))
        as_choice(self.format, "format", get_args(SetFormat))
        for name in ("pack_size", "multiple", "window", "row_group_tokens"):
            object.__setattr__(self, name, as_count(getattr(self, name), name))
        for name in ("longest", "max_documents", "part_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_count(getattr(self, name), name))
        object.__setattr__(self, "seed", as_count(self.seed, "seed", 0, 2**32 - 1))
        if self.pad_id is not None:
            object.__setattr__(self, "pad_id", as_count(self.pad_id, "pad_id", 0))
        check_size(self.pack_size, self.multiple, "pack_size")
        longest_aligned(self.pack_size, self.multiple, self.longest)
        if self.longest is not None and self.longest > self.pack_size:
            raise SettingError(
                f"longest is {self.longest:,}, but a row holds {self.pack_size:,} positions; pass at most that, or a "
                "larger pack_size"
            )
        if self.algorithm in RELEASES and (self.max_documents is not None or not self.shuffle):
            given = "documents in order" if self.max_documents is None else "max_documents"
            raise SettingError(
                f'algorithm="{self.algorithm}" packs as the releases do, which know no {given}; choose "best_fit", '
                "or leave that out"
            )
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.split):
            raise SettingError(f'split begins the names of files, such as "training"; got {self.split!r}')

    def to_json(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)
