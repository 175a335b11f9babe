"""What differs between the run that saved a checkpoint and the run that resumes from it.

Changes that only affect coming steps are allowed and reported: the learning rate, the schedule, the number of steps,
how ranks share the work, what is logged. Changes that make it another run are refused, unless `--allow-changed` is
given: the model or its weights, the tokenizer, the data, the size of packs and batches, the seed, the precision.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from varlen.errors import SettingError, StateError
from varlen.feed.loader import PackedLoader
from varlen.regular import open_regular
from varlen.train.checkpoint import Checkpoint, newest
from varlen.train.configuration import flat
from varlen.train.model import described
from varlen.train.parallel import Ranks
from varlen.train.settings import RunSettings, TrainSettings

ALLOW = "--allow-changed"
WEIGHTS, BEGUN = "weights", "data_begun_at"
"""Keys of a manifest: the weights that a run began with, and the step at which its data was restarted."""
_REFUSED = (
    *("data.capacity", "data.global_batch_size", "run.seed", "run.precision"),
    "optimizer.name",
)
_OF_ADAPTER = ("method", "rank", "alpha", "targets")
_OF_THE_LOADER = _REFUSED[:3]
_SAID = ("optimizer", "run", "log", "plan", "eval", "adapter.dropout", "model.dtype", "model.attention")
_PLACES = ("run.output", "run.resume")


def checkpoint_of(run: RunSettings, folder: Path, ranks: Ranks) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from, None for a new run; all ranks call it together."""
    found = newest(folder, ranks)
    if found is not None and run.resume == "never":
        raise SettingError(
            f'{run.folder} holds the checkpoint of step {found.step:,}, and run.resume is "never"; set it to '
            '"auto" to go on, or choose another run.output'
        )
    return found


def check_unchanged(
    found: Checkpoint, settings: TrainSettings, config: Any, loader: PackedLoader, *, allow_changed: bool
) -> tuple[list[str], bool]:
    """Move a loader to a checkpoint's place in the data, and require that the checkpoint is of the same run.

    Returns sentences about what has changed, and whether the data is read from its beginning.
    """
    was, now = found.manifest.get("settings"), json.loads(json.dumps(asdict(settings)))
    words = [*([] if found.words is None else [found.words]), *_unknown(found, settings)]
    before: dict[str, Any] = dict(flat(was)) if isinstance(was, Mapping) else {}
    after = dict(flat(now))
    before.setdefault("run.seed", found.manifest.get("seed"))
    before.setdefault("optimizer.name", optimizer_of(found))
    changed = {
        name: _was(name, before[name], after[name]) for name in _REFUSED if _differ(name, before, after)
    }
    _check_adapter(found, settings, before)
    changes = [*changed.values(), *_other_model(found, settings, config, before)]
    begins_anew = False
    try:
        loader.load_state_dict(_loader_state(found))
    except StateError as error:
        begins_anew = True
        if _differ("data.source", before, after):
            changes.append(_was("data.source", before["data.source"], after["data.source"]))
        if not changed.keys() & set(_OF_THE_LOADER):  # else the error repeats them
            changes.append(f"its place in the data isn't this run's: {error}")
    if changes and not allow_changed:
        raise StateError(
            f"{found.folder} was trained with other settings: {'; '.join(changes)}. Set it back, choose another "
            f"run.output, or pass {ALLOW} to go on with its weights all the same"
        )
    words += changes
    if begins_anew:
        words.append(
            "the data is read from its beginning, since the checkpoint's place in it is another run's"
        )
    names = [name for name in {**before, **after} if name.startswith(_SAID) and name not in _PLACES]
    words += [
        _was(name, before.get(name), after.get(name))
        for name in names
        # A setting that is new since then, with its default, is no change.
        if isinstance(was, Mapping)
        and name not in _REFUSED
        and before.get(name, after.get(name)) != after.get(name)
    ]
    return words, begins_anew


def _check_adapter(found: Checkpoint, settings: TrainSettings, before: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another adapter, or of none: it lacks the weights that would be trained."""
    now = {} if settings.adapter is None else asdict(settings.adapter)
    had, has = any(name.startswith("adapter.") for name in before), settings.adapter is not None
    words = [_was("[adapter]", "there" if had else "not there", "there" if has else "not there")] * (
        had != has
    )
    if had and has:
        names = [
            name for name in _OF_ADAPTER if before.get(f"adapter.{name}") != json.loads(json.dumps(now[name]))
        ]
        words = [_was(f"adapter.{name}", before.get(f"adapter.{name}"), now[name]) for name in names]
    if words:
        raise StateError(
            f"{found.folder} was trained with another adapter: {'; '.join(words)}. Set it back, or choose another "
            "run.output"
        )


def is_same_evaluation(found: Checkpoint, settings: TrainSettings) -> bool:
    """Return whether the losses of a checkpoint's evaluations may be compared with those of a run."""
    was = found.manifest.get("settings")
    had = was.get("eval") if isinstance(was, Mapping) else None
    now = None if settings.eval is None else json.loads(json.dumps(asdict(settings.eval)))
    if not isinstance(had, Mapping) or now is None:
        return False
    return all(had.get(name) == now[name] for name in ("sets", "monitor", "tokens"))


def optimizer_of(found: Checkpoint) -> str:
    """Return the name of the optimizer whose state a checkpoint holds."""
    settings = found.manifest.get("settings")
    named = settings.get("optimizer") if isinstance(settings, Mapping) else None
    return str(named.get("name", "adamw")) if isinstance(named, Mapping) else "adamw"


def _loader_state(found: Checkpoint) -> Mapping[str, Any]:
    """Return the loader's state in a checkpoint."""
    state = found.manifest.get("loader")
    if not isinstance(state, Mapping):
        raise StateError(f"{found.folder} doesn't say where it stands in the data")
    return state


def _unknown(found: Checkpoint, settings: TrainSettings) -> Iterator[str]:
    """Yield sentences about what a checkpoint of an earlier version lacks."""
    version = found.manifest.get("varlen", "an unknown version")
    if not isinstance(found.manifest.get("settings"), Mapping):
        yield f"{found.folder} is of varlen {version}, which didn't note its settings; they are taken to be these"
    if settings.model.path is not None and found.manifest.get(WEIGHTS) is None:
        yield (
            f"{found.folder} doesn't say which weights its run began with; they are taken to be those of "
            f"{settings.model.path}"
        )


def _differ(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.get(name) is not None and before[name] != after.get(name)


def _was(name: str, before: Any, after: Any) -> str:
    return f"{name} was {before!r} and is {after!r}"


def _other_model(
    found: Checkpoint, settings: TrainSettings, config: Any, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences between a run's model and a checkpoint's."""
    was, now = found.manifest.get("model"), described(config)
    if isinstance(was, Mapping):
        for key in {**was, **now}:
            if was.get(key) != now.get(key):
                yield _was(f"model.{key}", was.get(key), now.get(key))
    mark = found.manifest.get(WEIGHTS)
    path, new = before.get("model.path"), settings.model.path
    if new is None or not isinstance(mark, Mapping):
        if "model.path" in before and path != new:
            yield _was("model.path", path, new)
        return
    why = _other_weights(mark, new, config)
    if why is None and path is not None and path != new and "files" not in mark:
        yield _was("model.path", path, new)
    if why is not None:
        yield f"{_was('model.path', path, new)}, and {why}" if path != new else f"model.path {new}: {why}"


def _other_weights(mark: Mapping[str, Any], path: str, config: Any) -> str | None:
    """Return how weights differ from those that a run began with; None if they don't.

    Files of equal size and modification time count as equal; the contents of others are compared.
    """
    files = mark.get("files")
    if not isinstance(files, Mapping):
        commit = getattr(config, "_commit_hash", None)
        was_commit = mark.get("commit")
        is_other = None not in (was_commit, commit) and was_commit != commit
        return f"its commit was {was_commit} and is {commit}" if is_other else None
    weights = {file.name: file for file in _weight_files(path)}
    if weights.keys() != files.keys():
        return f"its weights were {', '.join(sorted(files))} and are {', '.join(sorted(weights)) or 'none'}"
    for name, file in weights.items():
        was, found = files[name], file.stat()
        if found.st_size != was["size"]:
            return f"{name} had {was['size']:,} bytes and has {found.st_size:,}"
        if found.st_mtime_ns != was["time_ns"]:
            now = _sha256(file)
            if now != was["sha256"]:
                return f"{name} had the SHA-256 {was['sha256'][:12]} and has {now[:12]}"
    return None


def _weight_files(path: str) -> list[Path]:
    return sorted(Path(path).expanduser().glob("*.safetensors"))


def _sha256(path: Path) -> str:
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WeightsMark:
    """The mark of the weights that a run begins with; a thread hashes the files, at about a second a GB."""

    def __init__(self, path: str | None, config: Any, known: Mapping[str, Any] | None) -> None:
        self._future: Future[dict[str, Any]] = Future()
        if known is not None or path is None:
            self._future.set_result(dict(known or {}))
        elif not Path(path).expanduser().is_dir():
            self._future.set_result({"commit": getattr(config, "_commit_hash", None)})
        else:
            # A daemon thread, since Python waits for the threads of a pool before it exits, which may take minutes.
            given = (self._future, _weight_files(path))
            threading.Thread(target=_mark, args=given, name="varlen weights", daemon=True).start()

    def get(self) -> dict[str, Any] | None:
        """Return the mark, for a checkpoint; None where it isn't known yet, or can't be."""
        is_known = self._future.done() and self._future.exception() is None
        return (self._future.result() or None) if is_known else None


def _mark(future: Future[dict[str, Any]], paths: list[Path]) -> None:
    try:
        future.set_result(_marked(paths))
    except Exception as error:
        future.set_exception(error)


def _marked(paths: list[Path]) -> dict[str, Any]:
    stats = {path: path.stat() for path in paths}
    return {
        "files": {
            path.name: {"size": stat.st_size, "time_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
            for path, stat in stats.items()
        }
    }
