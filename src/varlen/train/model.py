"""The model of a run: from a type and settings or from a folder, and what tells it from another."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from varlen.adapters import hf
from varlen.errors import ModelError, SettingError, SourceError, VarlenError
from varlen.parsed import parse_json
from varlen.regular import read_regular
from varlen.train.data import smallest_batch
from varlen.train.settings import ModelSettings

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_config(settings: ModelSettings, vocabulary: int | None) -> Any:
    """Return the configuration of the model, without building it.

    Args:
        settings: of the model.
        vocabulary: token ids that the data may hold; what random weights embed unless they say otherwise.

    Raises:
        SettingError: no such type, a setting that the type doesn't have, or a vocabulary that nobody knows.
        SourceError: the folder holds no model.
    """
    if settings.path is not None:
        return _saved_config(settings.path)
    assert settings.type is not None, "settings name one of the two"
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # asking for the classes would import hundreds of files
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
        said = " ".join(str(error).split())
        raise SettingError(f"model.settings are refused by {settings.type}: {said}") from None


def _place(path: str) -> tuple[str, bool]:
    """Return what `from_pretrained` is given, and whether it is a folder of this machine."""
    folder = Path(path).expanduser()
    return (str(folder), True) if folder.is_dir() else (path, False)


def _saved_config(path: str) -> Any:
    """Return the configuration that a folder, or a name on the hub, holds.

    Raises:
        SourceError: it holds none.
    """
    place, is_here = _place(path)
    if not (Path(place) / "config.json").is_file() if is_here else not _HUB_NAME.fullmatch(path):
        raise SourceError(
            f"model.path {path} holds no config.json; name a folder that transformers saved a model in, or a model "
            "on the hub (org/name)"
        )
    try:
        return AutoConfig.from_pretrained(place, local_files_only=is_here, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise SourceError(f"model.path {path} can't be read: {said}") from None


def saved_dtype(config: Any, settings: ModelSettings) -> torch.dtype:
    """Return the dtype that the trained model is saved in: the one that is asked for, else the checkpoint's own.

    Args:
        config: of `model_config`, before a model is built from it.
        settings: of the model.

    Raises:
        SourceError: the checkpoint's weights can't be read.
    """
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    own = getattr(config, "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    return torch.float32 if settings.path is None else _stored_dtype(settings.path)


def _stored_dtype(path: str) -> torch.dtype:
    """Return the dtype of a checkpoint's first floating weight, as transformers takes it where no file says.

    Raises:
        SourceError: the weights can't be read.
    """
    place, is_here = _place(path)
    found: str | None = None
    try:
        for name in ("model.safetensors", "model.safetensors.index.json"):
            given = {"local_files_only": is_here, "_raise_exceptions_for_missing_entries": False}
            found = found or cached_file(place, name, **given)
        if found is not None and found.endswith(".json"):
            parts = parse_json(read_regular(found))["weight_map"]
            found = cached_file(place, next(iter(parts.values())), local_files_only=is_here)
        if found is None:
            return torch.float32  # reading the weights will say
        with safe_open(found, framework="pt") as file:
            kinds = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, StopIteration, SafetensorError) as error:
        raise SourceError(f"the weights in model.path {path} can't be read: {error}") from None
    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return next((known[kind] for kind in kinds if kind in known), torch.float32)


def build_model(config: Any, settings: ModelSettings, seed: int, *, weights: bool = True) -> Any:
    """Build the model in float32 on the CPU, equal on every rank, with the attention that keeps documents apart.

    Args:
        config: of `model_config`.
        settings: of the model.
        seed: of random weights.
        weights: whether a folder's weights are read; False where a checkpoint's follow.

    Raises:
        ModelError: no argument keeps this model's documents apart, or it has no such attention.
        SourceError: the folder's weights can't be read.
    """
    torch.manual_seed(seed)
    if settings.path is None or not weights:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    else:
        model = _read_model(settings.path, config)
    model.train()
    _set_attention(model, settings.attention)
    hf.model_inputs(smallest_batch(), model)  # which refuses what no argument keeps apart
    return model


def _read_model(path: str, config: Any) -> Any:
    """Return the model whose weights a folder, or a name on the hub, holds: safetensors alone, which run no code.

    Raises:
        SourceError: it holds none.
    """
    place, is_here = _place(path)
    try:
        return AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=is_here
        )
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:300]
        raise SourceError(f"the weights in model.path {path} can't be read: {said}") from None


def _set_attention(model: Any, attention: str) -> None:
    """Set the attention: per document where the model computes it through transformers' registry.

    Raises:
        ModelError: the model refuses all, or the one that is named.
    """
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
    """Return the other names of parameters that stand in several places, with the name that checkpoints have.

    A stage may hold a tied weight in a place that isn't its first.

    Args:
        model: whole.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def copy_generation(settings: ModelSettings, folder: Path) -> None:
    """Copy what a model's folder says of generating, its stop tokens among it, beside the trained model.

    Args:
        settings: of the model.
        folder: of the trained model.
    """
    place, is_here = _place(settings.path or "")
    said = Path(place) / "generation_config.json"
    if settings.path is not None and is_here and said.is_file():
        shutil.copyfile(said, folder / said.name)


def described(config: Any) -> Mapping[str, Any]:
    """Return what tells one model from another, as JSON has it: a checkpoint's weights fit no other.

    Args:
        config: of `model_config`.
    """
    told = json.loads(json.dumps(config.to_diff_dict(), default=str))
    return {key: value for key, value in told.items() if not key.startswith("_") and key not in _CHANGEABLE}


_CHANGEABLE = {"transformers_version", "dtype", "architectures", "use_cache"}
