"""TRL's strategies of packing in varlen's words, and what is said where one loses tokens."""

from __future__ import annotations

import logging
from typing import Literal

from varlen.types import Ledger, Method, Overlong

_log = logging.getLogger(__name__)

Strategy = Literal["bfd", "bfd_split", "bfd-requeue", "wrapped"]
METHODS: dict[Strategy, tuple[Method, Overlong]] = {
    "bfd": ("best_fit_decreasing", "truncate"),
    "bfd_split": ("best_fit_decreasing", "split"),
    "bfd-requeue": ("best_fit_decreasing", "split"),
    "wrapped": ("wrapped", "split"),
}
"""varlen's method and policy for each of TRL's strategies."""


def say_what_was_lost(ledger: Ledger, capacity: int) -> None:
    """Log the tokens that were cut off, if any were.

    Args:
        ledger: of a finished packing.
        capacity: most tokens of a row.
    """
    if ledger.truncated:
        _log.warning(
            "%s of %s tokens (%.2f %%) were cut off the ends of %s documents longer than %s tokens and will not be "
            'trained on; strategy="bfd_split" keeps them, and so does a larger seq_length',
            f"{ledger.truncated:,}",
            f"{ledger.tokens_in:,}",
            100 * ledger.truncated / ledger.tokens_in,
            f"{ledger.truncated_documents:,}",
            f"{capacity:,}",
        )
