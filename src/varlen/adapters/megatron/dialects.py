"""The three ways in which Megatron-Bridge's releases spell packed batches and settings."""

from __future__ import annotations

from typing import Literal, TypeAlias

from varlen.errors import SettingError

Dialect: TypeAlias = Literal["0.4", "0.5", "0.6"]
"""`"0.4"`: releases 0.3 to 0.4.2; `"0.5"`: 0.5.0 and 0.5.1; `"0.6"`: 0.6.0 and later."""

DIALECTS: tuple[Dialect, ...] = ("0.4", "0.5", "0.6")
NEWEST: Dialect = "0.6"


def as_dialect(dialect: str) -> Dialect:
    """Return a dialect by its name, or by the release that speaks it.

    Args:
        dialect: `"0.4"`, `"0.5"` or `"0.6"`, or a release such as `"0.3.1"` or `"v0.5.1"`.

    Raises:
        SettingError: no release of Megatron-Bridge that packs has this number.

    >>> as_dialect("v0.3.1"), as_dialect("0.5.0"), as_dialect("0.7")
    ('0.4', '0.5', '0.6')
    """
    parts = str(dialect).removeprefix("v").split(".")
    if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal():
        release = (int(parts[0]), int(parts[1]))
        if release >= (0, 6):
            return "0.6"
        if release >= (0, 3):
            return "0.5" if release == (0, 5) else "0.4"
    raise SettingError(
        f"{dialect!r} names no dialect of Megatron-Bridge; pass one of {', '.join(map(repr, DIALECTS))}, or a "
        "release from 0.3 on"
    )
