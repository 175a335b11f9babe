"""What torchtitan asks of a data loader: its own base class where it is installed, else one of the same shape."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

_HOMES = ("torchtitan.components.dataloader", "torchtitan.components.data.loader")
"""Of releases up to 0.3, and of those after it."""


class StandInDataLoader:
    """The shape of torchtitan's `BaseDataLoader` (0.3.0), for where torchtitan isn't installed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings that make the loader they belong to."""

        _owner: ClassVar[type | None] = None

        def build(self, **runtime: Any) -> Any:
            """Return the loader of these settings."""
            assert self._owner is not None
            return self._owner(config=dataclasses.replace(self), **runtime)

    def __init_subclass__(cls, **rest: Any) -> None:
        """Let a class's settings make that class."""
        super().__init_subclass__(**rest)
        if "Config" in cls.__dict__:
            cls.__dict__["Config"]._owner = cls


def base_data_loader() -> type | None:
    """Return torchtitan's `BaseDataLoader`, or None where torchtitan isn't installed."""
    for home in _HOMES:
        try:
            found = getattr(importlib.import_module(home), "BaseDataLoader", None)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torchtitan":
                raise
            continue
        if isinstance(found, type):
            return found
    return None


if TYPE_CHECKING:
    BaseDataLoader = StandInDataLoader
else:
    BaseDataLoader = base_data_loader() or StandInDataLoader
