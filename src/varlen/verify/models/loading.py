"""load_model: what a user names, a family, a folder, a configuration or a model, as a model to be verified.

Nothing is downloaded, and no code of a checkpoint is run.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from varlen.adapters import hf
from varlen.errors import ModelError, VarlenError
from varlen.parsed import parse_json
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.tokenizer import FastTokenizer
from varlen.verify.models.tiny_models import tiny_model
from varlen.verify.models.trial import named

_LARGEST_RANDOM = 500_000_000
"""Weights; a configuration without weights is made into a model of random ones up to this size."""
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model to be verified, and what a reader should know of how it was come by."""

    model: Any
    notes: tuple[str, ...] = ()
    remade: Callable[[str], Any] | None = None
    """Makes it again with another attention, which some families choose once for all; None where it is too large."""


def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LoadedModel:
    """Return the model that was named.

    Args:
        dtype: of the weights that are made or loaded; None for float32, and for a folder's own. Of no effect on a
            live model.
    """
    from transformers import PreTrainedConfig

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(
            f"dtype must be a torch dtype of floating point, such as torch.bfloat16; got {dtype!r}"
        )
    if isinstance(model, (str, Path)):
        loaded = _named(str(model), dtype)
        tokenizer = tokenizer if tokenizer is not None else _own_tokenizer(Path(model))
    elif isinstance(model, PreTrainedConfig):
        loaded = _from_config(model, dtype, "random weights, made from the configuration")
    else:
        hf.implementation(model)  # says what it takes where it's no transformers model
        _check_live(hf.unwrap(model))
        loaded = LoadedModel(model=model, notes=tuple(_about(model)), remade=_copies(model))
    if device is not None and loaded.model is not model:
        loaded = _moved(loaded, device)
    if tokenizer is not None:
        _check_tokenizer(loaded.model, tokenizer)
    return loaded


def _check_live(base: Any) -> None:
    """Refuse a live model of which nothing can be asked."""
    name = type(base).__name__
    lacking = [each for each in ("device", "dtype", "set_attn_implementation") if not hasattr(base, each)]
    if lacking:
        raise ModelError(
            f"{name} has a transformers config and no {', '.join(lacking)}; pass a PreTrainedModel, bare or wrapped"
        )
    weights = [*base.parameters()]
    absent = sum(weight.is_meta for weight in weights)
    if absent:
        raise ModelError(
            f"{absent:,} of {len(weights):,} weights of {name} are on the meta device: not loaded, or fetched by "
            "accelerate as they are needed; load them, or name the family"
        )


def _moved(loaded: LoadedModel, device: torch.device | str) -> LoadedModel:
    """Return the model on a device, and made there whenever it is made again."""
    if str(device) == "meta":
        raise ModelError("on the meta device nothing is computed; name cpu, or a device of this machine")
    try:
        model = loaded.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"the model can't be moved to {device}: {named(error)}") from None
    again = loaded.remade
    return replace(
        loaded, model=model, remade=None if again is None else lambda attention: again(attention).to(device)
    )


def _named(name: str, dtype: torch.dtype | None) -> LoadedModel:
    """Return the model of a folder, or of a family."""
    from transformers import CONFIG_MAPPING

    path = Path(name)
    if name and path.is_dir() and not (name in CONFIG_MAPPING and not (path / "config.json").is_file()):
        return _from_folder(path, dtype)
    if name in CONFIG_MAPPING:
        _check_causal(name)
        note = f"a tiny {name} with random weights"

        def tiny(attention: str = "eager") -> Any:
            return tiny_model(name, dtype=dtype or torch.float32, attention=attention)

        return LoadedModel(model=tiny(), notes=(note,), remade=tiny)
    if name and path.exists():
        raise ModelError(f"{name} is a file; name the folder that holds config.json and the weights")
    is_place = "/" in name or "\\" in name
    near = [] if is_place else difflib.get_close_matches(name.lower(), list(CONFIG_MAPPING), n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise ModelError(
        f"{name!r} is neither a folder nor a model type of the installed transformers (config.model_type, such as "
        f"llama or qwen3){hint or '; models are not downloaded: name a folder with config.json'}"
    )


def _check_causal(family: str) -> None:
    """Refuse a family that is no causal language model."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    text = f"{family}_text"
    other = f"; name {text}, its text part" if text in CONFIG_MAPPING else ""
    raise ModelError(
        f"{family} is no causal language model (transformers has no AutoModelForCausalLM of it){other}; a live model "
        "can be passed to vl.verify(model)"
    )


def _from_folder(path: Path, dtype: torch.dtype | None) -> LoadedModel:
    """Load a checkpoint; without weights, make a model from its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    _check_code(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
            note = f"{path} holds no weights (safetensors or bin): random ones, made from its configuration"
            return _from_config(config, dtype, note)

        def load(attention: str | None = None) -> Any:
            return kind.from_pretrained(
                path,
                dtype=dtype or "auto",
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )

        model, told = load()
        lacking = sorted(told.get("missing_keys", ()))
    except ModelError:
        raise
    except Exception as error:  # whatever a library makes of a folder that isn't what it seems
        raise ModelError(f"{path} can't be loaded: {named(error)}") from error
    notes = _about(model)
    if lacking:
        notes.append(
            f"{len(lacking):,} weights aren't in the folder and are random, the first {lacking[0]}; is it whole?"
        )
    return LoadedModel(
        model=model.eval(), notes=tuple(notes), remade=lambda attention: load(attention)[0].eval()
    )


def _check_code(path: Path) -> None:
    """Refuse a folder whose model is code of its own."""
    from transformers import CONFIG_MAPPING

    place = path / "config.json"
    if (path / "adapter_config.json").is_file() and not place.is_file():
        raise ModelError(
            f"{path} holds an adapter and no model; load the model that it belongs to with peft, and pass it to "
            "vl.verify(model)"
        )
    if not place.is_file():
        raise ModelError(f"{path} holds no config.json, so it is no checkpoint folder")
    try:
        config = parse_json(place.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{place} can't be read as JSON: {error}") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    code = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(family, str) and family in CONFIG_MAPPING:
        _check_causal(family)
        return
    if code:
        named = ", ".join(sorted(map(str, code.values()))) if isinstance(code, dict) else str(code)
        raise ModelError(
            f"{path} needs code of its own ({named}), and varlen runs none from checkpoints; load the model yourself "
            "with trust_remote_code=True and pass it to vl.verify(model)"
        )
    raise ModelError(
        f"{place} names model type {family!r}, which the installed transformers doesn't have; update transformers"
    )


def _from_config(config: Any, dtype: torch.dtype | None, note: str) -> LoadedModel:
    """Return a model with random weights."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind.from_config(config).parameters())
        if size > _LARGEST_RANDOM:
            raise ModelError(
                f"a {config.model_type} of this configuration has {size:,} weights, and varlen makes models of "
                f"random ones up to {_LARGEST_RANDOM:,}; pass {config.model_type!r} for a tiny one of the family, "
                "or the folder with the weights"
            )

        def make(attention: str | None = None) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return kind.from_config(
                    copy.deepcopy(config), dtype=dtype or torch.float32, attn_implementation=attention
                ).eval()

        return LoadedModel(model=make(), notes=(note,), remade=make)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"no model can be made of this configuration: {named(error)}") from error


def _copies(model: Any) -> Callable[[str], Any] | None:
    """Return what makes a copy of a live model, with its weights; None for a large one."""
    base = hf.unwrap(model)
    if sum(weight.numel() for weight in base.parameters()) > _LARGEST_RANDOM:
        return None

    def copied(attention: str) -> Any:
        with torch.random.fork_rng(devices=[]):
            made = type(base)._from_config(
                copy.deepcopy(base.config), dtype=base.dtype, attn_implementation=attention
            )
        made.load_state_dict(base.state_dict())
        return made.to(base.device).eval()

    return copied


def _about(model: Any) -> list[str]:
    """Return what a reader should know of a model: how it is compiled and quantised."""
    base = hf.unwrap(model)
    notes = []
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules):
        notes.append("compiled: checked without compiling, as its modules say")
    method = getattr(getattr(base.config, "quantization_config", None), "quant_method", None)
    if method is not None or any("quantized" in type(m).__module__ for m in modules):
        notes.append(f"quantised ({getattr(method, 'value', method) or 'by PyTorch'})")
    return notes


def _own_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a folder; None where it has none."""
    place = path / "tokenizer.json"
    if not place.is_file():
        return _listed(path)
    try:
        made = load_tokenizer(path)
    except VarlenError as error:
        raise ModelError(f"{place} can't be read: {error}") from error
    return made.backend if isinstance(made, FastTokenizer) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    """Tokens and their ids, as the files of older tokenizers list them."""

    ids: dict[str, int]

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def _listed(path: Path) -> _Vocabulary | None:
    """Return what vocab.json, vocab.txt and added_tokens.json list; None where there is none of them."""
    ids: dict[str, int] = {}
    try:
        for name in ("vocab.json", "added_tokens.json"):
            if (path / name).is_file():
                told = parse_json((path / name).read_text(encoding="utf-8"))
                ids |= {str(token): index for token, index in told.items() if isinstance(index, int)}
        if (path / "vocab.txt").is_file():
            lines = (path / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
            ids |= {
                token: index for index, token in enumerate(lines)
            }  # a token may be a line's end of another kind
    except (ValueError, OSError, AttributeError) as error:
        raise ModelError(f"the tokenizer's files in {path} can't be read: {named(error)}") from error
    return _Vocabulary(ids=ids) if ids else None


def _check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer with ids that the model doesn't embed."""
    if not hasattr(tokenizer, "get_vocab"):
        raise ModelError(f"a tokenizer must have get_vocab, as those of transformers have; got {tokenizer!r}")
    vocabulary = tokenizer.get_vocab()
    size = hf.vocabulary_size(model)
    beyond = sorted((index, token) for token, index in vocabulary.items() if index >= size)
    if beyond:
        index, token = beyond[0]
        raise ModelError(
            f"the tokenizer has {len(beyond):,} ids that the model doesn't embed, the first {index:,} ({token!r}): "
            f"the model embeds {size:,}; use the model's own tokenizer, or model.resize_token_embeddings"
            f"({max(beyond)[0] + 1})"
        )
