"""Checkpoints: weights, optimizer, place in the data and step, which appear whole under one name or not at all.

::

    OUTPUT/checkpoints/
      step-00000500/              appears by a rename, when all of it is on the disk
        shard-00001-….safetensors   tensors of rank 0, as PyTorch's distributed checkpoints lay them out
        shard-00002-….safetensors   of rank 1; any number of ranks reads them
        checkpoint.json             step, place in the data, seed, settings, sizes and SHA-256 of the files, and of
                                    all this itself
      .step-00001000.part/        being written, or left by a run that was killed: never read, and removed, if it
                                  carries our mark: a checkpoint.json that is written first

Tensors are safetensors and all else is JSON: reading a checkpoint runs no code. Checksums are taken while files are
written, and held against the files before anything is read: so step, place and tensors are those of one moment.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from varlen.errors import SettingError, StateError, VarlenError
from varlen.files.token_tables import sync
from varlen.offline.places import free_words
from varlen.train.checksums import HashingFiles, check_files, gathered, shard_number
from varlen.train.manifest import (
    FORMAT,
    MANIFEST,
    WITHOUT_CHECKSUMS,
    Checkpoint,
    checkpoints_in,
    checksum_of,
    opened,
)
from varlen.train.ranks import Ranks
from varlen.train.removal import begin, prune, remove_partial

WEIGHT, STEP = "model.", "optimizer.step."
Tensors = dict[str, torch.Tensor]


def newest(folder: Path, ranks: Ranks) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, or None; all ranks call it together.

    Args:
        folder: of checkpoints.
        ranks: of the run, each of which reads its share of the files.

    Raises:
        StateError: the newest isn't whole, so somebody else has touched it, or the disk has; an older one that is
            whole is named.
        VarlenError: another rank found that, or other checkpoints.

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
    """Say what to do about the newest of some checkpoints, which can't be used."""
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
        "no other checkpoint here is whole: put back a copy of it, or choose another run.output to begin anew"
    )


def _check(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Hold this rank's share of a checkpoint's files against their checksums.

    Raises:
        StateError: one isn't what was written, or can't be read.
    """
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
    """Require, where there are no checksums, that the optimizer has taken as many steps as the run.

    Raises:
        StateError: it hasn't.
    """
    with _reading(checkpoint.folder):
        found = read_tensors(checkpoint.folder, STEP)
        steps = [float(one) for one in found.values()]
    if steps and max(steps) != checkpoint.step:
        raise StateError(
            f"{checkpoint.folder} is put together of several steps: its tensors are of step {max(steps):,.0f}, and "
            f"{MANIFEST} is of step {checkpoint.step:,}"
        )


def save(
    folder: Path, step: int, tensors: Tensors, notes: Mapping[str, Any], ranks: Ranks, keep: int
) -> Path:
    """Write a checkpoint; all ranks call it together.

    Args:
        folder: of checkpoints.
        step: of the checkpoint.
        tensors: by name; sharded ones are written by the ranks that hold them.
        notes: numbers, texts, lists and mappings, of the first rank.
        ranks: of the run.
        keep: newest checkpoints that are kept, this one among them.

    Returns:
        Its folder.

    Raises:
        VarlenError: it can't be written, or another rank couldn't; the one before is as it was.
    """
    final, partial = folder / f"step-{step:08d}", folder / f".step-{step:08d}.part"
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder):
        if ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder)
            begin(partial)
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder), _quiet():
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        writer.fs = hashing = HashingFiles()
        save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    checksums = gathered(hashing.digests, ranks)
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}", folder):
        if ranks.is_first:
            numbers = {"format": FORMAT, "step": step, "world_size": ranks.world_size}
            _finish(partial, final, {**notes, **numbers}, checksums)
            prune(folder, keep)
    return final


def _finish(partial: Path, final: Path, notes: Mapping[str, Any], checksums: Mapping[int, str]) -> None:
    """Note what is there, bring it to the disk, and give it its name."""
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
    """Fill tensors with what a checkpoint holds; all ranks call it together.

    Args:
        checkpoint: of any number of ranks.
        tensors: by name, of the shapes that were saved; filled in place.
        ranks: of the run.

    Raises:
        StateError: the checkpoint holds other tensors.
        VarlenError: another rank couldn't read it.
    """
    fault: VarlenError | None = None
    try:
        with _reading(checkpoint.folder):
            reader = HuggingFaceStorageReader(str(checkpoint.folder))
            _check_same(reader.read_metadata().state_dict_metadata, tensors, checkpoint.folder)
    except StateError as error:
        fault = error
    ranks.check_all(fault)  # before all of them take part in reading
    try:
        with _reading(checkpoint.folder):
            load_tensors(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except StateError as error:
        fault = error
    ranks.check_all(fault)


def _check_same(saved: Mapping[str, Any], tensors: Tensors, folder: Path) -> None:
    """Require that a checkpoint holds these tensors.

    Raises:
        StateError: it doesn't.
    """
    for name, tensor in tensors.items():
        if name not in saved or saved[name].size != tensor.shape:
            shape = list(saved[name].size) if name in saved else "absent"
            raise StateError(
                f"{folder} belongs to another model: {name} is {shape} there and {list(tensor.shape)} here"
            )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its readers raise into a sentence.

    Raises:
        StateError: the checkpoint can't be read.
    """
    try:
        with _quiet():
            yield
    except VarlenError:
        raise
    except Exception as error:  # parsers of safetensors and PyTorch's planners raise what comes to hand
        said = _first_line(error) or type(error).__name__
        raise StateError(f"{folder} can't be read: {said}") from None


@contextmanager
def _for_all(ranks: Ranks, what: str, folder: Path) -> Iterator[None]:
    """Fail on every rank where the disk failed one.

    Raises:
        VarlenError: it did.
    """
    fault: VarlenError | None = None
    try:
        yield
    except SettingError as error:
        fault = error
    except OSError as error:
        said = f"{error.strerror or error}{free_words(error, folder)}"
        fault = VarlenError(f"{what}: {said}; the checkpoint before it is as it was")
    except CheckpointException as error:
        inner = next((one for one, _ in error.failures.values() if isinstance(one, OSError)), None)
        said = f"{_first_line(error)}{'' if inner is None else free_words(inner, folder)}"
        fault = VarlenError(f"{what}: {said}; the checkpoint before it is as it was")
    ranks.check_all(fault)


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {inner}"
    return str(error).split("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what PyTorch says of saving alone, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield


def read_weights(checkpoint: Path) -> Tensors:
    """Return the weights that a checkpoint holds, whole, by their names in the model; one process does so alone.

    Args:
        checkpoint: its folder.

    Raises:
        StateError: it can't be read.
    """
    found = read_tensors(checkpoint, WEIGHT)
    return {name.removeprefix(WEIGHT): tensor for name, tensor in found.items()}


def read_tensors(checkpoint: Path, prefix: str) -> Tensors:
    """Return the tensors that a checkpoint holds under names that begin so; one process does so alone.

    Args:
        checkpoint: its folder.
        prefix: of the names.

    Raises:
        StateError: it can't be read.
    """
    with _reading(checkpoint):
        reader = HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(said.size, dtype=said.properties.dtype)
            for name, said in saved.items()
            if name.startswith(prefix) and isinstance(said, TensorStorageMetadata)
        }
        load_tensors(tensors, storage_reader=reader, no_dist=True)
    return tensors
