"""The model of a run: built from a type and settings or from a folder, compared with a checkpoint's, and exported."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from varlen import __version__
from varlen.adapters import hf
from varlen.errors import ModelError, SettingError, SourceError, VarlenError
from varlen.files.ours import (
    free_words,
    is_folder,
    may_be_used,
    remove_marked,
    sync,
    unfinished,
    write_json,
)
from varlen.parsed import parse_json
from varlen.regular import read_regular
from varlen.train.parallel import Ranks
from varlen.train.settings import ModelSettings
from varlen.train.step import smallest_batch

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_config(settings: ModelSettings, vocabulary: int | None) -> Any:
    """Return the configuration of the model."""
    if settings.path is not None:
        return _saved_config(settings.path)
    assert settings.type is not None, "settings name one of the two"
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # the mapping of classes would import hundreds of files
    if settings.type not in types:
        near = difflib.get_close_matches(settings.type, types, n=1, cutoff=0.0)[0]
        raise SettingError(
            f"model.type {settings.type!r} is no causal language model of transformers; the nearest of its "
            f"{len(types):,}: {near}"
        )
    given = dict(settings.settings)
    blank = AutoConfig.for_model(settings.type)
    known = {field.name for field in fields(blank)} | set(blank.attribute_map)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
            raise SettingError(
                f"model.settings.{key} is no setting of {settings.type}; the nearest is model.settings.{near}"
            )
    if "vocab_size" in known and "vocab_size" not in given:
        if vocabulary is None:
            raise SettingError(
                "the data holds tokens and doesn't say of how large a vocabulary; set model.settings.vocab_size"
            )
        given["vocab_size"] = vocabulary
    try:
        return AutoConfig.for_model(settings.type, **given | {"use_cache": False})
    except Exception as error:  # each type checks its settings in its own way
        reason = " ".join(str(error).split())
        raise SettingError(f"model.settings are refused by {settings.type}: {reason}") from None


def _source(path: str) -> tuple[str, bool]:
    """Return the argument for `from_pretrained`, and whether it is a local folder."""
    folder = Path(path).expanduser()
    return (str(folder), True) if folder.is_dir() else (path, False)


def _saved_config(path: str) -> Any:
    """Return the configuration in a folder, or of a name on the hub."""
    source, is_here = _source(path)
    if not (Path(source) / "config.json").is_file() if is_here else not _HUB_NAME.fullmatch(path):
        raise SourceError(
            f"model.path {path} holds no config.json; name a folder that transformers saved a model in, or a model "
            "on the hub (org/name)"
        )
    try:
        return AutoConfig.from_pretrained(source, local_files_only=is_here, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceError(f"model.path {path} can't be read: {reason}") from None


def saved_dtype(config: Any, settings: ModelSettings) -> torch.dtype:
    """Return the dtype that the trained model is saved in: the one in settings, else that of `model.path`."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    own = getattr(config, "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    return torch.float32 if settings.path is None else _stored_dtype(settings.path)


def _stored_dtype(path: str) -> torch.dtype:
    """Return the dtype of the first floating-point weight, which transformers takes if no configuration has one."""
    source, is_here = _source(path)
    found: str | None = None
    try:
        for name in ("model.safetensors", "model.safetensors.index.json"):
            given = {"local_files_only": is_here, "_raise_exceptions_for_missing_entries": False}
            found = found or cached_file(source, name, **given)
        if found is not None and found.endswith(".json"):
            parts = parse_json(read_regular(found))["weight_map"]
            found = cached_file(source, next(iter(parts.values())), local_files_only=is_here)
        if found is None:
            return torch.float32  # reading the weights raises the error
        with safe_open(found, framework="pt") as file:
            kinds = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, StopIteration, SafetensorError) as error:
        raise SourceError(f"the weights in model.path {path} can't be read: {error}") from None
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return next((known[kind] for kind in kinds if kind in known), torch.float32)


def build_model(
    config: Any, settings: ModelSettings, seed: int, *, weights: bool = True, is_sliced: bool = False
) -> Any:
    """Build the model in float32 on the CPU, equal on every rank, with an attention that keeps documents apart.

    Args:
        weights: whether those of `settings.path` are read; a checkpoint has others.
        is_sliced: whether slices of it are run, which bring their own attention.
    """
    torch.manual_seed(seed)
    if settings.path is None or not weights:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    else:
        model = _read_model(settings.path, config)
    model.train()
    if not is_sliced:
        _set_attention(model, settings.attention)
        # Refuses a model whose documents no argument keeps apart.
        hf.model_inputs(smallest_batch(), model)
    return model


def bare_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model without weights, on "meta"."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]
    return model


def _read_model(path: str, config: Any) -> Any:
    """Return the model with the weights of a folder or hub name; reads only safetensors, which run no code."""
    source, is_here = _source(path)
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=is_here
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceError(f"the weights in model.path {path} can't be read: {reason}") from None


def checkpoint_activations(model: Any) -> None:
    """Let each layer keep only its input, and compute the rest again in the backward pass."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"run.checkpoint_activations: {type(model).__name__} can't compute its layers again; leave it out"
        )
    if hasattr(model, "activation_checkpointing_enable"):  # from transformers 5.23 on
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _set_attention(model: Any, attention: str) -> None:
    """Set the attention: "varlen" where the model calls transformers' registry, else the first that it accepts."""
    hf.register()
    names = ["varlen", "sdpa", "eager"] if attention == "auto" else [attention]
    refused = ""
    for name in names:
        try:
            if name == "varlen":
                hf.use_varlen_attention(model)
            else:
                model.set_attn_implementation(name)
        except (ValueError, ImportError, VarlenError) as error:
            refused = " ".join(str(error).split())[:300]
            continue
        if hf.implementation(model) == name:
            return
    raise ModelError(f'model.attention = "{attention}" can\'t be had: {refused or "the model keeps its own"}')


def tied_names(model: Any) -> Mapping[str, str]:
    """Return the other names of tied parameters, each with the name that checkpoints use.

    A pipeline stage may hold a tied weight under another name than the first.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def embedding_names(model: Any) -> set[str]:
    """Return the names of the weights of embeddings and of the output head."""
    held = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    held += [head for head in [model.get_output_embeddings()] if head is not None]
    ids = {id(parameter) for module in held for parameter in module.parameters(recurse=False)}
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}


def write_generation(settings: ModelSettings, folder: Path, stop_ids: Sequence[int]) -> None:
    """Write the generation settings beside a trained model: those of its origin, and where a chat's turn ends.

    Args:
        settings: of the model.
        folder: of the trained model, as transformers saved it.
        stop_ids: of the tokens that end a text or a turn; () to leave them as they are.
    """
    path = folder / "generation_config.json"
    if settings.path is not None:
        _copy_generation(settings, path)
    held: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    ids = held.get("eos_token_id") if settings.path is not None else None  # random weights have a default's
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not set(stop_ids) <= set(ids):
        ends = list(dict.fromkeys([*ids, *stop_ids]))
        path.write_text(json.dumps({**held, "eos_token_id": ends}, indent=2), encoding="utf-8")


def _copy_generation(settings: ModelSettings, path: Path) -> None:
    """Copy a model's generation settings, such as stop tokens."""
    assert settings.path is not None, "it is a saved model"
    source, is_here = _source(settings.path)
    # A run of days doesn't fail at its end because the hub can't be reached.
    lenient: dict[str, Any] = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")
    }
    stored = cached_file(source, path.name, local_files_only=is_here, **lenient)
    if stored is not None:
        shutil.copyfile(stored, path)


def described(config: Any) -> Mapping[str, Any]:
    """Return the configuration by which models are compared, as JSON: without what may differ for equal weights."""
    values = json.loads(json.dumps(config.to_diff_dict(), default=str))
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _CHANGEABLE}


_CHANGEABLE = {"transformers_version", "dtype", "architectures", "use_cache"}


# The trained model, as transformers saves it: a folder for `from_pretrained`.

_MARK = ".varlen.json"
"""File in a model's folder that marks it as a run's, and lists its files with sizes and checksums."""


def whole_weights(model: Any, tied: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
    """Return a model's weights on the first rank, tied ones once; all ranks call it together."""
    every: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: weight for name, weight in every.items() if name not in tied}


def export(folder: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Write a folder of the trained model, atomically; all ranks call it together.

    Args:
        folder: to be replaced.
        ranks: the first of them writes.
        write: writes all files into another folder.
    """
    fault: VarlenError | None = None
    if ranks.is_first:
        partial = unfinished(folder)
        try:
            check_model(folder)  # again: its contents may have changed meanwhile
            partial.mkdir()
            _write_mark(partial, {})
            write(partial)
            files = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.name != _MARK]
            _write_mark(partial, {str(path.relative_to(partial)): _digest(path) for path in files})
            for path in sorted(partial.rglob("*")):
                sync(path)
            remove_marked(folder, _MARK)
            partial.replace(folder)
            sync(folder.parent)
        except VarlenError as error:
            fault = error
        except OSError as error:
            reason = f"{error.strerror or error}{free_words(error, folder)}"
            fault = VarlenError(f"the trained model can't be written to {folder}: {reason}")
        finally:
            remove_marked(partial, _MARK)
    ranks.check_all(fault)


def write_model(
    folder: Path, weights: Mapping[str, torch.Tensor], config: Any, dtype: torch.dtype = torch.float32
) -> None:
    """Write a model as transformers does.

    Args:
        folder: that is there.
        weights: by the model's names.
        config: of the model.
        dtype: of the saved weights, except those that the model keeps in float32.
    """
    bare = bare_model(config, dtype)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # it would disturb the run's own
    bare.save_pretrained(folder, state_dict=as_saved(weights, bare, dtype))


def clear_models(folder: Path) -> None:
    """Remove partial models of killed runs, and refuse a folder of this name that no run wrote."""
    for left in folder.parent.glob(f".{folder.name}.*.part"):
        if not left.is_symlink() and left.is_dir() and may_be_used(left, _MARK, _is_mark):
            remove_marked(left, _MARK)
    check_model(folder)


def check_model(folder: Path) -> None:
    """Refuse to replace a folder unless it holds exactly what a run wrote."""
    out = "move it away and run the same command again, or choose another run.output"
    if not is_folder(folder, "the trained model is to be", out):
        return
    if not may_be_used(folder, _MARK, _is_mark):
        raise SettingError(
            f"{folder} has no mark of a model that varlen train wrote ({_MARK}; 0.1.0 wrote none), and "
            f"would be replaced; {out}"
        )
    try:
        written: Mapping[str, Any] = parse_json(read_regular(folder / _MARK))["files"]
    except (OSError, ValueError, KeyError):
        written = {}  # a run was killed before it listed its files
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_same = (path.is_dir() and not path.is_symlink()) or name == _MARK
        if not is_same and (path.is_symlink() or not path.is_file() or written.get(name) != _digest(path)):
            what = "was changed since varlen wrote it" if name in written else "isn't varlen's"
            raise SettingError(f"{path} {what}, and would be lost with the model that is replaced; {out}")


def _is_mark(found: Mapping[str, Any]) -> bool:
    return found.get("kind") == "model" and isinstance(found.get("files"), Mapping)


def _write_mark(folder: Path, files: Mapping[str, Any]) -> None:
    write_json(folder / _MARK, {"varlen": __version__, "kind": "model", "files": files})


def _digest(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def as_saved(weights: Mapping[str, torch.Tensor], model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights in a dtype, except integers and what the model keeps in float32."""
    in_float32 = [
        part
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(model, name, None) or ()
    ]
    return {
        name: weight
        if not weight.is_floating_point() or any(f".{part}." in f".{name}." for part in in_float32)
        else weight.to(dtype)
        for name, weight in weights.items()
    }
