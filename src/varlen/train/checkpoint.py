"""Checkpoints: weights, optimizer, place in the data and step, which appear whole under one name or not at all.

::

    OUTPUT/checkpoints/
      step-00000500/              appears by a rename, when all of it is on the disk
        shard-00001-….safetensors   tensors of rank 0, as PyTorch's distributed checkpoints lay them out
        shard-00002-….safetensors   of rank 1; any number of ranks reads them
        checkpoint.json             step, place in the data, seed, settings, sizes of the files
      .step-00001000.part/        being written, or left by a run that was killed: never read, and removed

Tensors are safetensors and all else is JSON: reading a checkpoint runs no code.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from varlen.errors import StateError, VarlenError
from varlen.source.writing import sync
from varlen.train.ranks import Ranks

FORMAT = 2
_WEIGHT = "model."
_MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, or None.

    Args:
        folder: of checkpoints.

    Raises:
        StateError: the newest isn't whole, so somebody else has touched it.
    """
    found = _found(folder)
    return _opened(found[-1]) if found else None


def _found(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest last."""
    try:
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(names, key=lambda path: int(path.name.removeprefix("step-")))


def _opened(folder: Path) -> Checkpoint:
    """Return a checkpoint whose files are all there.

    Raises:
        StateError: they aren't.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        step, files = int(manifest["step"]), dict(manifest["files"])
        sizes = {name: (folder / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{folder} can't be read ({error}); remove it to go on from the one before"
        ) from None
    if manifest.get("format") != FORMAT:
        raise StateError(f"{folder} has format {manifest.get('format')!r}, and this version reads {FORMAT}")
    if sizes != files:
        wrong = next(name for name in files if sizes[name] != files[name])
        raise StateError(
            f"{folder / wrong} has {sizes[wrong]:,} bytes, and {files[wrong]:,} were written; remove {folder} to "
            "go on from the checkpoint before"
        )
    return Checkpoint(folder=folder, step=step, manifest=manifest)


def save(
    folder: Path, step: int, tensors: _Tensors, notes: Mapping[str, Any], ranks: Ranks, keep: int
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
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}"):
        if ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder)
            partial.mkdir()
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}"), _quiet():
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    with _for_all(ranks, f"the checkpoint of step {step:,} can't be written to {folder}"):
        if ranks.is_first:
            _finish(partial, final, {**notes, "format": FORMAT, "step": step, "world_size": ranks.world_size})
            for old in _found(folder)[:-keep]:
                _remove(old)
    return final


def _finish(partial: Path, final: Path, notes: Mapping[str, Any]) -> None:
    """Note what is there, bring it to the disk, and give it its name."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    (partial / _MANIFEST).write_text(json.dumps({**notes, "files": files}, indent=1), encoding="utf-8")
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.replace(final)
    sync(final.parent)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that no half of it is ever found under its name."""
    partial = checkpoint.with_name(f".{checkpoint.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint.replace(partial)
    shutil.rmtree(partial, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what runs that were killed have left.

    Args:
        folder: of checkpoints.
    """
    for path in folder.glob(".step-*.part"):
        shutil.rmtree(path, ignore_errors=True)


def load(checkpoint: Checkpoint, tensors: _Tensors, ranks: Ranks) -> None:
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
        with _quiet():
            reader = HuggingFaceStorageReader(str(checkpoint.folder))
            _check_same(reader.read_metadata().state_dict_metadata, tensors, checkpoint.folder)
            load_tensors(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except StateError as error:
        fault = error
    except (CheckpointException, OSError, ValueError) as error:
        fault = StateError(f"{checkpoint.folder} can't be read: {_first_line(error)}")
    ranks.check_all(fault)


def _check_same(saved: Mapping[str, Any], tensors: _Tensors, folder: Path) -> None:
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
def _for_all(ranks: Ranks, what: str) -> Iterator[None]:
    """Fail on every rank where the disk failed one.

    Raises:
        VarlenError: it did.
    """
    fault: VarlenError | None = None
    try:
        yield
    except OSError as error:
        fault = VarlenError(f"{what}: {error.strerror or error}; the checkpoint before it is as it was")
    except CheckpointException as error:
        fault = VarlenError(f"{what}: {_first_line(error)}; the checkpoint before it is as it was")
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


def read_weights(checkpoint: Path) -> _Tensors:
    """Return the weights that a checkpoint holds, whole, by their names in the model; one process does so alone.

    Args:
        checkpoint: its folder.

    Raises:
        StateError: it can't be read.
    """
    try:
        with _quiet():
            reader = HuggingFaceStorageReader(str(checkpoint))
            saved = reader.read_metadata().state_dict_metadata
            tensors = {
                name: torch.empty(said.size, dtype=said.properties.dtype)
                for name, said in saved.items()
                if name.startswith(_WEIGHT) and isinstance(said, TensorStorageMetadata)
            }
            load_tensors(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, ValueError) as error:
        raise StateError(f"{checkpoint} can't be read: {_first_line(error)}") from None
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in tensors.items()}


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tied: Mapping[str, str]
) -> _Tensors:
    """Return everything that a run's next step depends on and that is a tensor: weights and AdamW's state.

    A parameter without state yet, since nothing has trained it, gets one of zeros, which AdamW takes for none.

    Args:
        model: bare, sharded or not, whole or a stage.
        optimizer: AdamW over its parameters.
        tied: other names of tied weights, with those under which they are kept.
    """
    names = {tied.get(name, name): parameter for name, parameter in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {f"{_WEIGHT}{name}": parameter.detach() for name, parameter in names.items()}
    tensors |= {
        f"{_WEIGHT}{name}": value
        for name, value in model.state_dict().items()
        if name not in aliases and _is_kept(value)
    }
    trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        for part in ("exp_avg", "exp_avg_sq"):
            if part not in state:
                state[part] = torch.zeros_like(parameter)
            tensors[f"optimizer.{part}.{name}"] = state[part]
        state.setdefault("step", torch.zeros((), device=parameter.device if _is_fused(optimizer) else "cpu"))
        # By name, as a stage of a pipeline has only some of them.
        tensors[f"optimizer.step.{name}"] = torch.tensor(float(state["step"]), dtype=torch.float64)
    return tensors


def put_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tied: Mapping[str, str], tensors: _Tensors
) -> None:
    """Give every parameter's state the number of its steps, which isn't filled in place.

    Args:
        model: bare, sharded or not, whole or a stage.
        optimizer: AdamW over its parameters.
        tied: as for `state_tensors`.
        tensors: of `state_tensors`, filled.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            optimizer.state[parameter]["step"].fill_(float(tensors[f"optimizer.step.{tied.get(name, name)}"]))


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


def _is_kept(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
