"""A loader as the data set of a Trainer's run, and its place, kept in the Trainer's own checkpoints.

A Trainer that goes on from a checkpoint draws from its data again what it had drawn before, and throws it away. A
loader goes to its place instead, and hands out nothing in the place of each batch that is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState

from varlen.batch.packed import PackedBatch
from varlen.errors import StateError, UnknownLengthError
from varlen.feed.loader import PackedLoader


class LoaderBatches(IterableDataset[PackedBatch | None]):
    """What is left in a loader, as a data set whose items are batches.

    Iterating again goes on where the last loop stopped, as the loader does.

    Args:
        loader: at the beginning of a step.
        length: batches of an epoch, as the Trainer counts them; None where nobody knows.
        drawn: batches that a resumed Trainer is going to throw away, of its epoch.
    """

    def __init__(self, loader: PackedLoader, length: int | None, drawn: int = 0) -> None:
        self.loader = loader
        self._length, self._drawn = length, drawn
        self._before: tuple[int, dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Return the batches of an epoch.

        Raises:
            UnknownLengthError: nobody knows.
        """
        if self._length is None:
            raise UnknownLengthError("nobody knows how many batches the loader has")
        return self._length

    def __iter__(self) -> Iterator[PackedBatch | None]:
        """Give None for every batch that is to be thrown away, then batches."""
        while self._drawn:
            self._drawn -= 1
            yield None
        for batch in self.loader:  # noqa: UP028 (`yield from` would close the loader with this iterator)
            yield batch

    def begin_step(self, global_step: int) -> None:
        """Remember the place before the batches of a step are drawn.

        Args:
            global_step: updates that the Trainer has made.
        """
        self._before = global_step, self.loader.state_dict()

    def place(self, global_step: int) -> dict[str, Any]:
        """Return the loader's state after the last update, whether or not batches of the next are drawn already.

        Args:
            global_step: updates that the Trainer has made.
        """
        if self._before is not None and self._before[0] == global_step:
            return self._before[1]
        return self.loader.state_dict()


class LoaderPlace(TrainerCallback, ExportableState):
    """Keeps the loader's place in `trainer_state.json`, which the Trainer writes into each checkpoint."""

    def __init__(self) -> None:
        self.batches: LoaderBatches | None = None
        self.trainer_state: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Learn which data set it is, since the Trainer may have made this object anew from a checkpoint.

        Args:
            args: of the Trainer; not looked at.
            state: of the Trainer.
            control: of the Trainer; not looked at.
            rest: with the loader of the data set.
        """
        del args, control
        self.batches, self.trainer_state = rest["train_dataloader"].dataset, state
        state.stateful_callbacks.setdefault(
            type(self).__name__, {}
        )  # missing in another Trainer's checkpoint

    def state(self) -> dict[str, Any]:
        """Return the place, in the form that transformers keeps."""
        if self.batches is None:
            return {"args": {}, "attributes": {}}
        return {"args": {}, "attributes": {"place": self.batches.place(self.trainer_state.global_step)}}


def go_to_checkpoint(loader: PackedLoader, folder: str | Path, *, with_data: bool) -> int:
    """Take a loader to where a checkpoint was saved.

    Args:
        loader: made with the settings of the run that was saved; the number of ranks may be another.
        folder: the checkpoint.
        with_data: False leaves the loader where it is.

    Returns:
        The updates that had been made.

    Raises:
        StateError: the checkpoint has no place, or that of other data or settings; nothing has changed then.
    """
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
    if with_data:
        place = _saved_place(state, folder)
        if place != loader.state_dict():  # else it would throw away what it has made ahead
            loader.load_state_dict(place)
    return int(state.global_step)


def _saved_place(state: Any, folder: str | Path) -> Mapping[str, Any]:
    kept = state.stateful_callbacks.get(LoaderPlace.__name__, {})
    place = (kept[-1] if isinstance(kept, list) else kept).get("attributes", {}).get("place")
    if place is None:
        raise StateError(
            f"{folder} holds no place of a loader, since another Trainer saved it; to go on after its "
            f"{state.global_step:,} steps call loader.seek({state.global_step}), and pass ignore_data_skip=True"
        )
    found: Mapping[str, Any] = place
    return found
