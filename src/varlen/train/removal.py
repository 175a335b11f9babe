"""Which checkpoints are removed: those that a run wrote, with nothing of anybody else in them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from varlen import __version__
from varlen.errors import SettingError
from varlen.files.ours import is_there, mark_of_folder, refuse_link, remove_marked
from varlen.regular import read_regular
from varlen.train.manifest import MANIFEST, checkpoints_in

KIND = "checkpoint"
_log = logging.getLogger(__name__)


def begin(partial: Path) -> None:
    """Make the folder of a checkpoint in the making, and mark it before anything else is in it.

    Args:
        partial: its name, which nothing else has.

    Raises:
        OSError: it can't be written.
    """
    partial.mkdir()
    (partial / MANIFEST).write_text(json.dumps({"varlen": __version__, "kind": KIND}), encoding="utf-8")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints.

    Args:
        folder: of checkpoints.
        keep: how many stay; those in which somebody keeps files of their own stay too, and don't count.

    Raises:
        SettingError: as `remove_partial`.
    """
    for old in [path for path in checkpoints_in(folder) if _is_ours(path)][:-keep]:
        partial = old.with_name(f".{old.name}.part")  # so that no half of it is ever found under its name
        _remove_partial(partial)
        old.replace(partial)
        _remove_partial(partial)


def _is_ours(checkpoint: Path) -> bool:
    """Return whether a folder is a checkpoint that a run wrote, and holds nothing that somebody has laid there."""
    if checkpoint.is_symlink():
        return False
    try:
        manifest = json.loads(read_regular(checkpoint / MANIFEST))
        names = {MANIFEST, *manifest["files"]}
        is_ours = manifest["kind"] == KIND and all(path.name in names for path in checkpoint.iterdir())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if not is_ours:
        _log.warning(
            "%s holds files that aren't varlen's, so it is kept; run.keep doesn't count it", checkpoint
        )
    return is_ours


def remove_partial(folder: Path) -> None:
    """Remove what runs that were killed have left.

    Args:
        folder: of checkpoints.

    Raises:
        SettingError: somebody else's folder has the name of a checkpoint in the making.
    """
    for path in folder.glob(".step-*.part"):
        _remove_partial(path)


def _remove_partial(partial: Path) -> None:
    """Remove a checkpoint in the making, which carries our mark.

    Raises:
        SettingError: it doesn't.
    """
    if not is_there(partial):
        return
    out = "move it away, or choose another run.output"
    refuse_link(partial, out)
    if not partial.is_dir() or not mark_of_folder(partial, MANIFEST, lambda found: found.get("kind") == KIND):
        raise SettingError(
            f"{partial} isn't varlen's: it has the name of a checkpoint in the making, and no mark of one "
            f"({MANIFEST}; versions up to 0.1.0 wrote none before it was whole); {out}"
        )
    remove_marked(partial, MANIFEST)
