"""How full and how even bins are, in NeMo-RL's words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bins = list[list[int]]
"""The sequences of each bin, by number."""
Stats = dict[str, float]


class PackingMetrics:
    """Figures of one packing, and of all since the last reset, with NeMo-RL's names.

    Where no bin holds a token, `bin_balance` is 1 here; there that divides by zero.
    """

    def __init__(self) -> None:
        """Begin without packings."""
        self.reset()

    def reset(self) -> None:
        """Forget all packings."""
        self._solutions: list[Stats] = []
        self._times: list[float] = []

    def update(
        self,
        sequence_lengths: npt.ArrayLike,
        bins: Bins,
        bin_capacity: int,
        packing_time: float | None = None,
    ) -> Stats:
        """Count a packing, and return its figures.

        Args:
            sequence_lengths: `[num_sequences]`.
            bins: the sequences of each bin.
            bin_capacity: tokens a bin can hold.
            packing_time: seconds that it took, where known.
        """
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        lengths = np.asarray(sequence_lengths)
        # Without bins the figures of one packing are all 0, but its sequences count in the sum, as there.
        tokens = {"_sequences": int(lengths.size), "_tokens": int(lengths.sum())}
        self._solutions.append(stats | tokens)
        if packing_time is not None:
            self._times.append(packing_time)
        return stats

    def calculate_stats_only(self, sequence_lengths: npt.ArrayLike, bins: Bins, bin_capacity: int) -> Stats:
        """Return the figures of a packing without counting it.

        Args:
            sequence_lengths: `[num_sequences]`.
            bins: the sequences of each bin.
            bin_capacity: tokens a bin can hold.

        >>> PackingMetrics().calculate_stats_only([6, 2, 8], [[0, 1], [2]], 8)["average_utilization"]
        1.0
        """
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        total, room = int(lengths.sum()) if bins else 0, len(bins) * bin_capacity
        least = -(-total // bin_capacity)
        return {
            "num_sequences": lengths.size if bins else 0,
            "num_bins": len(bins),
            "total_sequence_length": total,
            "total_bin_capacity": room,
            "total_waste": room - total,
            "average_utilization": total / room if bins else 0.0,
            "waste_ratio": (room - total) / room if bins else 0.0,
            "bin_balance": _balance(lengths, bins, bin_capacity) if bins else 0.0,
            "theoretical_min_bins": least,
            "bin_efficiency": least / len(bins) if bins else 0.0,
        }

    def get_aggregated_stats(self) -> Stats:
        """Return the figures of all packings together; empty before the first."""
        if not self._solutions:
            return {}

        def every(name: str) -> list[float]:
            return [stats[name] for stats in self._solutions]

        bins, room, tokens = sum(every("num_bins")), sum(every("total_bin_capacity")), sum(every("_tokens"))
        full, wasted = every("average_utilization"), every("waste_ratio")
        least = -(-tokens * bins // room) if room else 0
        stats = {
            "total_sequences": sum(every("_sequences")),
            "total_bins": bins,
            "average_utilization": tokens / room if room else 0.0,
            "min_utilization": min(1.0, *full),
            "max_utilization": max(0.0, *full),
            "average_waste_ratio": sum(every("total_waste")) / room if room else 0.0,
            "min_waste_ratio": min(1.0, *wasted),
            "max_waste_ratio": max(0.0, *wasted),
            "average_bin_count": bins / len(self._solutions),
            "bin_efficiency": least / bins if bins else 0.0,
        }
        if self._times:
            stats["average_packing_time"] = sum(self._times) / len(self._times)
        return stats

    def print_aggregated_stats(self) -> None:
        """Print the figures of all packings together."""
        stats = self.get_aggregated_stats()
        if not stats:
            print("Nothing has been packed yet.")
        for name, value in stats.items():
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:.4f}")


def _balance(lengths: npt.NDArray[np.int64], bins: Bins, bin_capacity: int) -> float:
    """Return 1 less the standard deviation of how full bins are, as a share of how full they are on average."""
    loads = np.array([lengths[numbers].sum() if numbers else 0 for numbers in bins]) / bin_capacity
    mean = float(lengths.sum()) / (len(bins) * bin_capacity)
    return 1.0 - float(loads.std(ddof=1)) / mean if len(bins) > 1 and mean else 1.0
