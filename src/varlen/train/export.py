"""The trained model as transformers saves it: a folder that `from_pretrained` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from varlen import __version__
from varlen.errors import SettingError, VarlenError
from varlen.files.ours import is_there, mark_of_folder, refuse_link, remove_marked
from varlen.files.token_tables import sync, unfinished
from varlen.offline.places import free_words, write_json
from varlen.parsed import parse_json
from varlen.regular import read_regular
from varlen.train.ranks import Ranks

_MARK = ".varlen.json"
"""In the folder of a model: that a run wrote it, and each of its files, by size and content."""


def whole_weights(model: Any, tied: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
    """Return a model's weights on the first rank, each once; all ranks call it together.

    Args:
        model: bare, sharded or not, and no stage.
        tied: other names of tied weights, which whole shards have too.
    """
    every: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: weight for name, weight in every.items() if name not in tied}


def export_model(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a model to a folder, which appears whole; all ranks call it together.

    Args:
        weights: of the model by name; those of the first rank are written.
        config: of the model.
        folder: what is in it is replaced.
        ranks: of the run.
        dtype: that it is saved in; weights that the model keeps in float32 stay so.
        beside: writes what else belongs into the folder, such as the tokenizer.

    Raises:
        VarlenError: it can't be written, or another rank failed.
    """
    fault: VarlenError | None = None
    if ranks.is_first:
        partial = unfinished(folder)
        try:
            check_model(folder)  # again: somebody may have written there meanwhile
            partial.mkdir()
            _write_mark(partial, {})
            with torch.device("meta"):
                bare: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # in the midst of what a run shows
            bare.save_pretrained(partial, state_dict=_as_saved(weights, bare, dtype))
            if beside is not None:
                beside(partial)
            files = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.name != _MARK]
            _write_mark(partial, {str(path.relative_to(partial)): _told(path) for path in files})
            for path in sorted(partial.rglob("*")):
                sync(path)
            remove_marked(folder, _MARK)
            partial.replace(folder)
            sync(folder.parent)
        except VarlenError as error:
            fault = error
        except OSError as error:
            said = f"{error.strerror or error}{free_words(error, folder)}"
            fault = VarlenError(f"the trained model can't be written to {folder}: {said}")
        finally:
            remove_marked(partial, _MARK)
    ranks.check_all(fault)


def clear_models(folder: Path) -> None:
    """Remove what runs that were killed have left of a model, and refuse somebody else's folder of its name.

    Args:
        folder: where the model is to be; nothing need be there.

    Raises:
        SettingError: as `check_model`.
    """
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        if not left.is_symlink() and left.is_dir() and mark_of_folder(left, _MARK, _is_mark):
            remove_marked(left, _MARK)
    check_model(folder)


def check_model(folder: Path) -> None:
    """Refuse to replace a folder that doesn't hold a model as a run wrote it.

    Args:
        folder: where the model is to be; nothing need be there.

    Raises:
        SettingError: it is a link or a file, it carries no mark, or a file in it isn't as it was written.
    """
    out = "move it away and run the same command again, or choose another run.output"
    refuse_link(folder, out)
    if not is_there(folder):
        return
    if not folder.is_dir():
        raise SettingError(f"{folder} is a file, and the trained model is to be a folder of that name; {out}")
    if not mark_of_folder(folder, _MARK, _is_mark):
        raise SettingError(
            f"{folder} has no mark of a model that varlen train wrote ({_MARK}; 0.1.0 wrote none), and "
            f"would be replaced; {out}"
        )
    try:
        written: Mapping[str, Any] = parse_json(read_regular(folder / _MARK))["files"]
    except (OSError, ValueError, KeyError):
        written = {}  # it has just been made
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_same = (path.is_dir() and not path.is_symlink()) or name == _MARK
        if not is_same and (path.is_symlink() or not path.is_file() or written.get(name) != _told(path)):
            what = "was changed since varlen wrote it" if name in written else "isn't varlen's"
            raise SettingError(f"{path} {what}, and would be lost with the model that is replaced; {out}")


def _is_mark(found: Mapping[str, Any]) -> bool:
    return found.get("kind") == "model" and isinstance(found.get("files"), Mapping)


def _write_mark(folder: Path, files: Mapping[str, Any]) -> None:
    write_json(folder / _MARK, {"varlen": __version__, "kind": "model", "files": files})


def _told(path: Path) -> dict[str, Any]:
    """Return what tells a file's content."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _as_saved(weights: Mapping[str, torch.Tensor], model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights in a dtype, but for whole numbers and what the model keeps in float32."""
    kept = [
        part
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(model, name, None) or ()
    ]
    return {
        name: weight
        if not weight.is_floating_point() or any(f".{part}." in f".{name}." for part in kept)
        else weight.to(dtype)
        for name, weight in weights.items()
    }
