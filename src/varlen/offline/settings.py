"""What a packed data set is to be like; all of it decides the bytes that are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from varlen.errors import SettingError
from varlen.pack.lengths import as_count
from varlen.types import Method, Overlong

OutputFormat = Literal["parquet", "arrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """How documents are packed and written."""

    capacity: int
    """Tokens a row can hold."""
    method: Method = "best_fit"
    """Of `vl.pack`. Best fit keeps rows nearly random samples of the documents."""
    overlong: Overlong = "split"
    """What becomes of documents longer than `capacity`: split, they lose no token."""
    max_documents: int | None = None
    """Most documents of a row; None for no limit."""
    shuffle: bool = True
    """Permute documents before packing; else they are packed as they come."""
    seed: int = 0
    """Of the shuffle."""
    window: int = 1 << 16
    """Documents packed at a time; memory grows with it."""
    format: OutputFormat = "parquet"
    position_ids: bool = False
    """Write `position_ids` too: 0, 1, ... in each document."""
    trace: bool = False
    """Write `document_ids` and `document_starts` too: which document of the data each piece is, and from where."""
    part_tokens: int = 1 << 23
    """Tokens of one written file, about; memory grows with it."""

    def __post_init__(self) -> None:
        """Refuse what can't be.

        Raises:
            SettingError: a setting out of its range.
        """
        choices: dict[str, Sequence[Any]] = {
            "method": get_args(Method),
            "overlong": get_args(Overlong),
            "format": get_args(OutputFormat),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name, least in {"capacity": 1, "window": 1, "part_tokens": 1, "seed": 0}.items():
            object.__setattr__(self, name, as_count(getattr(self, name), name, least, 2**63 - 1))
        if self.max_documents is not None:
            object.__setattr__(self, "max_documents", as_count(self.max_documents, "max_documents"))
        if self.capacity + self.part_tokens >= 2**31:  # a part ends with the row that fills it
            raise SettingError(
                f"capacity and part_tokens must be below 2^31 together, got {self.capacity:,} and "
                f"{self.part_tokens:,}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)
