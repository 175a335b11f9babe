"""Checkpoints: weights, optimizer, position in the data and step, written atomically under one name.

::

    OUTPUT/checkpoints/
      step-00000500/              appears by a rename, when all of it is on the disk
        shard-00001-….safetensors   tensors of rank 0, as PyTorch's distributed checkpoints lay them out
        shard-00002-….safetensors   of rank 1; any number of ranks reads them
        checkpoint.json             step, position in the data, seed, settings, sizes and SHA-256 of the files, and
                                    its own SHA-256
      .step-00001000.part/        being written, or left by a killed run: never read, and removed if it has our
                                  mark, a checkpoint.json that is written first

Tensors are safetensors and all else is JSON, so reading a checkpoint runs no code. Checksums are computed while files
are written, and compared before anything is read, so step, position and tensors belong together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from varlen import __version__
from varlen.errors import SettingError, StateError, VarlenError, described
from varlen.files.ours import free_words, is_there, may_be_used, refuse_link, remove_marked, sync
from varlen.regular import open_regular, read_regular, require_regular
from varlen.train.optimizers import Optimizer, named_tensors, put_step
from varlen.train.parallel import Ranks
from varlen.train.settings import RunSettings

WEIGHT, STEP = "model.", "optimizer.step."
Tensors = dict[str, torch.Tensor]


def newest(folder: Path, ranks: Ranks) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, or None; all ranks call it together.

    Cost: reads all its files once, shared among ranks, at the speed of SHA-256 or of the disk.
    """
    paths: list[Path] = []
    checkpoint: Checkpoint | None = None
    fault: VarlenError | None = None
    try:
        paths = checkpoints_in(folder)
        if paths:
            checkpoint = opened(paths[-1])
            _check(checkpoint, ranks)
    except StateError as error:
        fault = StateError(f"{error}; {_way_out(paths)}") if paths else error
    ranks.check_all(fault)
    steps = ranks.gather([-1 if checkpoint is None else checkpoint.step])[:, 0].long().tolist()
    if len(set(steps)) > 1:
        seen = {rank: f"step {step:,}" if step >= 0 else "none" for rank, step in enumerate(steps)}
        other = next(rank for rank, step in enumerate(steps) if step != steps[0])
        raise StateError(
            f"ranks find other newest checkpoints in {folder}: rank 0 {seen[0]}, rank {other} {seen[other]}; "
            "run.output must be one folder that all of them share"
        )
    return checkpoint


def _way_out(paths: Sequence[Path]) -> str:
    """Return a sentence that says what to do when the newest checkpoint is damaged."""
    for path in reversed(paths[:-1]):
        try:
            older = opened(path)
            _check(older, Ranks())
        except StateError:
            continue
        between = [one.name for one in paths[paths.index(path) + 1 : -1]]
        removed = " and ".join([str(paths[-1]), *between])
        return f"remove {removed} to go on from the checkpoint before, {path.name}, which is whole"
    return (
        "no other checkpoint here is whole: put back a copy of it, or choose another run.output to start over"
    )


def _check(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Compare this rank's share of a checkpoint's files with their checksums."""
    folder, manifest = checkpoint.folder, checkpoint.manifest
    try:
        if manifest["format"] == WITHOUT_CHECKSUMS:
            _check_steps(checkpoint)
            return
        mine = sorted(manifest["sha256"])[ranks.rank :: ranks.world_size]
        check_files(folder, manifest["sha256"], mine)
    except OSError as error:
        raise StateError(f"{folder} can't be read ({error})") from None


def _check_steps(checkpoint: Checkpoint) -> None:
    """Require, without checksums, that the optimizer has taken as many steps as the run."""
    with _reading(checkpoint.folder):
        steps = [float(step) for step in read_tensors(checkpoint.folder, STEP).values()]
    if steps and max(steps) != checkpoint.step:
        raise StateError(
            f"{checkpoint.folder} is put together of several steps: its tensors are of step {max(steps):,.0f}, and "
            f"{MANIFEST} is of step {checkpoint.step:,}"
        )


def save(
    folder: Path,
    step: int,
    tensors: Tensors,
    notes: Mapping[str, Any],
    ranks: Ranks,
    keep: int,
    best: int | None = None,
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep` and that of `best`; all ranks call it together."""
    final, partial = folder / name_of(step), folder / f".{name_of(step)}.part"
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder):
        if ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder)
            begin(partial)
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder), _quiet():
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        writer.fs = hashing = HashingFiles()
        no_dist = not dist.is_initialized()
        save_tensors(dict(tensors), storage_writer=writer, no_dist=no_dist, process_group=ranks.group)
    checksums = gathered(hashing.digests, ranks)
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder):
        if ranks.is_first:
            numbers = {"format": FORMAT, "step": step, "world_size": ranks.world_size}
            _finish(partial, final, {**notes, **numbers}, checksums)
            prune(folder, keep, best)
    return final


class Saver:
    """Writes checkpoints: at once, or in a thread from a copy in host memory while training goes on.

    The next checkpoint waits for the one before it; both ways write the same files.
    """

    def __init__(self, folder: Path, ranks: Ranks, run: RunSettings) -> None:
        self._folder, self._keep, self._in_background = folder, run.keep, run.save_in_background
        self._ranks = ranks.apart(run.timeout_s) if run.save_in_background else ranks
        self._timeout_s = run.timeout_s
        self.saved = 0
        """Step of the newest checkpoint that was written; 0 for none."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Tensors, notes: Mapping[str, Any], best: int | None) -> None:
        """Write a checkpoint, or begin to; all ranks call it together."""
        self.wait()
        if not self._in_background:
            self._write(self._folder, step, tensors, notes, self._ranks, self._keep, best)
            self.wait()
            return
        of_gpu = {name: each for name, each in tensors.items() if each.device.type != "cpu"}
        copies = {name: each.clone() for name, each in tensors.items() if name not in of_gpu}
        with _quiet():
            copies |= BlockingAsyncStager().stage(of_gpu) if of_gpu else {}
        given = (self._folder, step, copies, notes, self._ranks, self._keep, best)
        self._thread = threading.Thread(target=self._write, args=given, name="varlen checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until what has begun is written; raises if that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for what has begun, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _write(self, folder: Path, step: int, *given: Any) -> None:
        try:
            save(folder, step, *given)
            self.saved = step
        except BaseException as error:
            self._error = error


def _finish(partial: Path, final: Path, notes: Mapping[str, Any], checksums: Mapping[int, str]) -> None:
    """Write the manifest, sync everything to the disk, and rename the folder."""
    written = [path for path in sorted(partial.iterdir()) if path.name != MANIFEST]
    files = {path.name: path.stat().st_size for path in written}
    sha256 = {name: checksums[shard_number(name)] for name in files}
    plain = json.loads(json.dumps({**notes, "files": files, "sha256": sha256}))  # as it is read back
    text = json.dumps({**plain, "checksum": checksum_of(plain)}, indent=1)
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.replace(final)
    sync(final.parent)


def load(checkpoint: Checkpoint, tensors: Tensors, ranks: Ranks) -> None:
    """Fill tensors from a checkpoint; all ranks call it together."""
    folder = checkpoint.folder
    with _for_all(ranks, "", folder), _reading(folder):  # all ranks, before reading becomes collective
        reader = HuggingFaceStorageReader(str(folder))
        _check_same(reader.read_metadata().state_dict_metadata, tensors, folder)
    with _for_all(ranks, "", folder), _reading(folder):
        load_tensors(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def _check_same(saved: Mapping[str, Any], tensors: Tensors, folder: Path) -> None:
    """Require that a checkpoint holds these tensors."""
    for name, tensor in tensors.items():
        if name not in saved or saved[name].size != tensor.shape:
            shape = list(saved[name].size) if name in saved else "absent"
            raise StateError(
                f"{folder} belongs to another model: {name} is {shape} there and {list(tensor.shape)} here"
            )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn any error of reading a damaged file into a StateError."""
    try:
        with _quiet():
            yield
    except VarlenError:
        raise
    except Exception as error:  # safetensors and PyTorch raise errors of many types
        raise StateError(f"{folder} can't be read: {_of_first_rank(error)}") from None


@contextmanager
def _for_all(ranks: Ranks, what: str, folder: Path) -> Iterator[None]:
    """Raise an error on every rank if the block failed on one."""
    fault: VarlenError | None = None
    try:
        yield
    except (SettingError, StateError) as error:
        fault = error
    except OSError as error:
        reason = f"{error.strerror or error}{free_words(error, folder)}"
        fault = VarlenError(f"{what}: {reason}; the checkpoint before it is as it was")
    except CheckpointException as error:
        inner = next((one for one, _ in error.failures.values() if isinstance(one, OSError)), None)
        reason = f"{_of_first_rank(error)}{'' if inner is None else free_words(inner, folder)}"
        fault = VarlenError(f"{what}: {reason}; the checkpoint before it is as it was")
    ranks.check_all(fault)


def _of_first_rank(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {inner}"
    return described(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore PyTorch's warnings about saving in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield


def read_weights(checkpoint: Path) -> Tensors:
    """Return the whole weights of a checkpoint by their names in the model; not collective."""
    tensors = read_tensors(checkpoint, WEIGHT)
    return {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items()}


def read_tensors(checkpoint: Path, prefix: str) -> Tensors:
    """Return the tensors of a checkpoint whose names begin with a prefix; not collective."""
    with _reading(checkpoint):
        reader = HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
            for name, metadata in saved.items()
            if name.startswith(prefix) and isinstance(metadata, TensorStorageMetadata)
        }
        load_tensors(tensors, storage_reader=reader, no_dist=True)
    return tensors


# Checksums of a checkpoint: computed while each file is written, and compared before it is read.

DIGEST_BYTES = 32
_BLOCK_BYTES = 4 << 20


class _Hashed:
    """A file being written, with the SHA-256 of its contents."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write and hash in parallel: both release the GIL."""
        hashing = threading.Thread(target=self.digest.update, args=(content,))
        hashing.start()
        try:
            return int(self._stream.write(content))
        finally:
            hashing.join()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HashingFiles(FileSystem):
    """PyTorch's file system for checkpoints, which hashes files while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, bytes] = {}
        """Checksums of the files written, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open a file for writing."""
        with super().create_stream(path, mode) as stream:
            hashed = _Hashed(stream)
            yield cast(Any, hashed)
            self.digests[Path(path).name] = hashed.digest.digest()


def gathered(digests: Mapping[str, bytes], ranks: Ranks) -> dict[int, str]:
    """Return the checksums of all ranks' files, by shard number."""
    mine: list[float] = [0.0] * (1 + DIGEST_BYTES)
    for name, digest in digests.items():
        mine = [float(shard_number(name)), *map(float, digest)]
    return {
        int(number): bytes(map(int, digest)).hex()
        for number, *digest in ranks.gather(mine).tolist()
        if number
    }


def shard_number(name: str) -> int:
    """Return the shard number in a file's name."""
    return int(name.split("-")[1])


def check_files(folder: Path, checksums: Mapping[str, str], mine: Sequence[str]) -> None:
    """Compare files with their checksums."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    for name in mine:
        digest = hashlib.sha256()
        with open(folder / name, "rb", buffering=0, opener=open_regular) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
        if digest.hexdigest() != checksums[name]:
            raise StateError(
                f"{folder / name} isn't what was written: its SHA-256 is {digest.hexdigest()[:12]}…, and "
                f"{checksums[name][:12]}… was noted; it is damaged, or of another step or run"
            )


# Removing checkpoints: only those that a run wrote, and that hold no other files.

KIND = "checkpoint"
_log = logging.getLogger(__name__)


def begin(partial: Path) -> None:
    """Make the folder of a partial checkpoint, and mark it before anything else is written."""
    partial.mkdir()
    (partial / MANIFEST).write_text(json.dumps({"varlen": __version__, "kind": KIND}), encoding="utf-8")


def prune(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest checkpoints, and that of a step."""
    for old in [path for path in checkpoints_in(folder) if _is_ours(path)][:-keep]:
        if _step_of(old) == best:
            continue
        # Renamed first, so that a half-removed checkpoint never has the name of a complete one.
        partial = old.with_name(f".{old.name}.part")
        _remove_partial(partial)
        old.replace(partial)
        _remove_partial(partial)


def _is_ours(checkpoint: Path) -> bool:
    """Return whether a folder is a checkpoint that a run wrote, and holds no other files."""
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
    """Remove partial checkpoints of killed runs."""
    for path in folder.glob(".step-*.part"):
        _remove_partial(path)


def _remove_partial(partial: Path) -> None:
    """Remove a partial checkpoint; refuse one without our mark."""
    if not is_there(partial):
        return
    out = "move it away, or choose another run.output"
    refuse_link(partial, out)
    if not partial.is_dir() or not may_be_used(
        partial, MANIFEST, lambda manifest: manifest.get("kind") == KIND
    ):
        raise SettingError(
            f"{partial} isn't varlen's: it has the name of a checkpoint in the making, and no mark of one "
            f"({MANIFEST}; versions up to 0.1.0 wrote none before it was whole); {out}"
        )
    remove_marked(partial, MANIFEST)


# The tensors that a run's next step depends on, by their names in a checkpoint.


def state_tensors(
    model: torch.nn.Module,
    trained: Mapping[str, torch.nn.Parameter],
    optimizer: Optimizer,
    tied: Mapping[str, str],
    *,
    only_trained: bool = False,
) -> Tensors:
    """Return the tensors that a run's next step depends on: weights and the optimizer's state.

    Args:
        trained: what the optimizer updates, by the model's names; it is saved in place of the model's.
        tied: see `tied_names`.
        only_trained: whether the model's other weights are left out, since they never change.
    """
    names = {tied.get(name, name): trained.get(name, p) for name, p in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {f"{WEIGHT}{name}": parameter.detach() for name, parameter in names.items()}
    tensors |= {
        f"{WEIGHT}{name}": value
        for name, value in model.state_dict().items()
        if name not in aliases and _is_tensor(value)
    }
    if only_trained:
        kept = {f"{WEIGHT}{tied.get(name, name)}" for name in trained}
        tensors = {name: value for name, value in tensors.items() if name in kept}
    for name, parameter in trained.items():
        state, saved = optimizer.state_of(parameter), tied.get(name, name)
        tensors |= {f"optimizer.{part}.{saved}": value for part, value in named_tensors(state)}
        if "step" in state:  # by name, since a pipeline stage has only some parameters
            tensors[f"{STEP}{saved}"] = torch.tensor(float(state["step"]), dtype=torch.float64)
    return tensors


def put_steps(
    trained: Mapping[str, torch.nn.Parameter],
    optimizer: Optimizer,
    tied: Mapping[str, str],
    tensors: Tensors,
) -> None:
    """Set the step of each parameter's state, which `load` doesn't fill in place."""
    for name, parameter in trained.items():
        step = tensors.get(f"{STEP}{tied.get(name, name)}")
        if step is not None:
            put_step(optimizer.state_of(parameter), float(step))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# A checkpoint's manifest: step, position in the data, files and checksums, and its own checksum.

FORMAT = 3
WITHOUT_CHECKSUMS = 2
"""Format of version 0.1.0, which records only the sizes of files."""
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def words(self) -> str | None:
        """A sentence for the user if the checkpoint has no checksums, else None."""
        if self.manifest["format"] != WITHOUT_CHECKSUMS:
            return None
        return (
            f"{self.folder} has no checksums (it is of varlen {self.manifest.get('varlen')}), so only the sizes of "
            "its files were compared"
        )


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest last."""
    try:
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(
            f"{folder} can't be listed ({error.strerror or error}), so it isn't known whether it holds checkpoints"
        ) from None
    return sorted(names, key=_step_of)


def opened(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest; requires all of its files with the right sizes."""
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{folder / MANIFEST} can't be read ({error})") from None
    if not isinstance(manifest, dict):
        raise StateError(f"{folder / MANIFEST} is damaged: it holds no object")
    if manifest.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise StateError(
            f"{folder} has format {str(manifest.get('format'))[:20]}, and this version reads {WITHOUT_CHECKSUMS} and "
            f"{FORMAT}"
        )
    is_checked = manifest["format"] == FORMAT
    if is_checked and manifest.get("checksum") != checksum_of(manifest):
        raise StateError(f"{folder / MANIFEST} isn't what was written: its own checksum is another")
    wrong = _wrong_in(manifest, folder, is_checked=is_checked)
    if wrong is not None:
        raise StateError(f"{folder / MANIFEST} is damaged: {wrong}")
    for name, size in manifest["files"].items():
        _check_size(folder / name, size)
    others = {path.name for path in folder.glob("*.safetensors")} - set(manifest["files"])
    if others:
        raise StateError(
            f"{folder} holds {len(others):,} files that aren't of it, such as {min(others)}; they would be read too"
        )
    return Checkpoint(folder=folder, step=manifest["step"], manifest=manifest)


def _wrong_in(manifest: Mapping[str, Any], folder: Path, *, is_checked: bool) -> str | None:
    """Return what is missing or wrong in a manifest; None if nothing is."""
    kinds = {"step": int, "files": dict, "loader": dict, "model": dict, "total_tokens": int, "seed": int}
    for name, kind in (kinds | ({"sha256": dict} if is_checked else {})).items():
        if not isinstance(manifest.get(name), kind) or isinstance(manifest[name], bool):
            return f"`{name}` is absent" if name not in manifest else f"`{name}` is {manifest[name]!r:.40}"
    files = manifest["files"]
    if not files or not all(
        _is_name(name) and type(size) is int and size >= 0 for name, size in files.items()
    ):
        return "`files` doesn't list names with sizes"
    if is_checked and sorted(manifest["sha256"]) != sorted(files):
        return "`sha256` and `files` list other files"
    if is_checked and not all(isinstance(one, str) for one in manifest["sha256"].values()):
        return "`sha256` doesn't list checksums"
    if _step_of(folder) != manifest["step"]:
        return f"it is of step {manifest['step']}, and lies in {folder.name}"
    return None


def _is_name(name: str) -> bool:
    """Return whether a name is that of a file directly in the folder."""
    return name.endswith(".safetensors") and Path(name).name == name


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _check_size(path: Path, size: int) -> None:
    """Require a file of the given size."""
    try:
        now = path.stat()
        require_regular(now.st_mode)
    except OSError as error:
        raise StateError(f"{path} can't be read ({error.strerror or error})") from None
    if now.st_size != size:
        raise StateError(f"{path} has {now.st_size:,} bytes, and {size:,} were written")


def checksum_of(notes: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own checksum."""
    plain = {name: value for name, value in notes.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
