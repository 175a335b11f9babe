"""load_model: a family, folder, configuration or model, as a model to be verified; and families as tiny models.

Nothing is downloaded, and no code of a checkpoint is run.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from varlen.adapters import hf
from varlen.errors import ModelError, VarlenError, described
from varlen.parsed import parse_json
from varlen.text.load_tokenizer import load_tokenizer
from varlen.text.tokenizer import FastTokenizer

_LARGEST_RANDOM = 500_000_000  # weights; the largest model that is made with random ones
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model to be verified, and notes on its origin for the report."""

    model: Any
    notes: tuple[str, ...] = ()
    remade: Callable[[str], Any] | None = None
    """Makes the model again with another attention, as some families choose it only once; None if it is too large."""


def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LoadedModel:
    """Return the model that was named.

    `dtype`: of the weights that are made or loaded; None for float32, and for a folder's own. Of no effect on a live
    model.
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
        hf.implementation(model)  # refuses anything but a transformers model, with a message
        _check_live(hf.unwrap(model))
        loaded = LoadedModel(model=model, notes=tuple(_about(model)), remade=copies_of(model))
    if device is not None and loaded.model is not model:
        loaded = _moved(loaded, device)
    if tokenizer is not None:
        _check_tokenizer(loaded.model, tokenizer)
    return loaded


def _check_live(base: Any) -> None:
    """Refuse a live model that lacks what the checks need."""
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
    """Return the model on a device; later copies are created there too."""
    if str(device) == "meta":
        raise ModelError("on the meta device nothing is computed; name cpu, or a device of this machine")
    try:
        model = loaded.model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"the model can't be moved to {device}: {described(error, kind=True)}") from None
    again = loaded.remade
    return replace(
        loaded, model=model, remade=None if again is None else lambda attention: again(attention).to(device)
    )


def _named(name: str, dtype: torch.dtype | None) -> LoadedModel:
    from transformers import CONFIG_MAPPING

    path = Path(name)
    if name and path.is_dir() and not (name in CONFIG_MAPPING and not (path / "config.json").is_file()):
        return _from_folder(path, dtype)
    if name in CONFIG_MAPPING:
        _auto_model(name)
        note = f"a tiny {name} with random weights"

        def tiny(attention: str = "eager") -> Any:
            return tiny_model(name, dtype=dtype or torch.float32, attention=attention)

        return LoadedModel(model=tiny(), notes=(note,), remade=tiny)
    if name and path.exists():
        raise ModelError(f"{name} is a file; name the folder that holds config.json and the weights")
    is_path = "/" in name or "\\" in name
    near = [] if is_path else difflib.get_close_matches(name.lower(), list(CONFIG_MAPPING), n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise ModelError(
        f"{name!r} is neither a folder nor a model type of the installed transformers (config.model_type, such as "
        f"llama or qwen3){hint or '; models are not downloaded: name a folder with config.json'}"
    )


def _auto_model(family: str) -> Any:
    """Return the class of transformers that makes a family's language model: of next tokens, else of masked ones."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto import modeling_auto as auto

    if family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return AutoModelForMaskedLM
    text = f"{family}_text"
    other = f"; name {text}, its text part" if text in CONFIG_MAPPING else ""
    raise ModelError(
        f"{family} is no language model (transformers has neither AutoModelForCausalLM nor AutoModelForMaskedLM of "
        f"it){other}; a live model can be passed to vl.verify(model)"
    )


def _from_folder(path: Path, dtype: torch.dtype | None) -> LoadedModel:
    """Load a checkpoint; without weights, make a model from its configuration."""
    from transformers import AutoConfig

    _check_code(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        kind = _auto_model(config.model_type)
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

        model, info = load()
        lacking = sorted(info.get("missing_keys", ()))
    except ModelError:
        raise
    except Exception as error:  # libraries raise errors of any type for a broken folder
        raise ModelError(f"{path} can't be loaded: {described(error, kind=True)}") from error
    notes = _about(model)
    if lacking:
        notes.append(
            f"{len(lacking):,} weights aren't in the folder and are random, the first {lacking[0]}; is it whole?"
        )
    return LoadedModel(
        model=model.eval(), notes=tuple(notes), remade=lambda attention: load(attention)[0].eval()
    )


def _check_code(path: Path) -> None:
    """Refuse a folder whose model needs code of its own."""
    from transformers import CONFIG_MAPPING

    file = path / "config.json"
    if (path / "adapter_config.json").is_file() and not file.is_file():
        raise ModelError(
            f"{path} holds an adapter and no model; load the model that it belongs to with peft, and pass it to "
            "vl.verify(model)"
        )
    if not file.is_file():
        raise ModelError(f"{path} holds no config.json; name the folder of a checkpoint, which does")
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} can't be read as JSON: {error}") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    code = config.get("auto_map") if isinstance(config, dict) else None
    if isinstance(family, str) and family in CONFIG_MAPPING:
        _auto_model(family)
        return
    if code:
        named = ", ".join(sorted(map(str, code.values()))) if isinstance(code, dict) else str(code)
        raise ModelError(
            f"{path} needs code of its own ({named}), and varlen runs none from checkpoints; load the model yourself "
            "with trust_remote_code=True and pass it to vl.verify(model)"
        )
    raise ModelError(
        f"{file} names model type {family!r}, which the installed transformers doesn't have; "
        "update transformers, or load a model of your own code yourself and pass it to vl.verify(model)"
    )


def _from_config(config: Any, dtype: torch.dtype | None, note: str) -> LoadedModel:
    kind = _auto_model(config.model_type)
    try:
        if (size := _num_weights(config)) > _LARGEST_RANDOM:
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
        raise ModelError(
            f"no model can be made of this configuration: {described(error, kind=True)}"
        ) from error


def _num_weights(config: Any) -> int:
    """Return the number of weights that a configuration's model has, without making one."""
    with torch.device("meta"):
        model = _auto_model(config.model_type).from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def copies_of(model: Any) -> Callable[[str], Any] | None:
    """Return a function that copies a live model with its weights; None for a large one."""
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
    """Return notes on whether a model is compiled or quantised."""
    base = hf.unwrap(model)
    notes = []
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules):
        notes.append("compiled: its modules were checked uncompiled")
    method = getattr(getattr(base.config, "quantization_config", None), "quant_method", None)
    if method is not None or any("quantized" in type(m).__module__ for m in modules):
        notes.append(f"quantised ({getattr(method, 'value', method) or 'by PyTorch'})")
    return notes


def _own_tokenizer(path: Path) -> Any:
    file = path / "tokenizer.json"
    if not file.is_file():
        return _listed(path)
    try:
        made = load_tokenizer(path)
    except VarlenError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    return made.backend if isinstance(made, FastTokenizer) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Vocabulary:
    ids: dict[str, int]

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def _listed(path: Path) -> _Vocabulary | None:
    """Return the vocabulary in vocab.json, vocab.txt and added_tokens.json; None without any."""
    ids: dict[str, int] = {}
    try:
        for name in ("vocab.json", "added_tokens.json"):
            if (path / name).is_file():
                entries = parse_json((path / name).read_text(encoding="utf-8"))
                ids |= {str(token): index for token, index in entries.items() if isinstance(index, int)}
        if (path / "vocab.txt").is_file():
            lines = (path / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
            # Tokens may be other line separators, at which `splitlines` would split.
            ids |= {token: index for index, token in enumerate(lines)}
    except (ValueError, OSError, AttributeError) as error:
        raise ModelError(
            f"the tokenizer's files in {path} can't be read: {described(error, kind=True)}"
        ) from error
    return _Vocabulary(ids=ids) if ids else None


def _check_tokenizer(model: Any, tokenizer: Any) -> None:
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


# Every family of the installed transformers as a tiny model: the same layers, a few thousand weights.
#
# Windows, chunks and selections are narrower than a check's documents, so that they have an effect.

VOCABULARY = 97
POSITIONS = 256
WINDOW = 6
_LARGEST = 3_000_000  # weights; a model with more wasn't made small, and would dominate the time

_SIZES: dict[str, Any] = {
    name: size
    for names, size in {
        "vocab_size vocab_size_per_layer_input": VOCABULARY,
        "hidden_size n_embd d_model emb_dim embedding_size out_hidden_size": 32,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth": 2,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": 4,
        "swa_num_attention_heads linear_num_value_heads": 4,
        "num_key_value_heads swa_num_key_value_heads linear_num_key_heads": 2,
        "head_dim swa_head_dim dim_head qk_rope_head_dim qk_nope_head_dim": 8,
        "v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim": 8,
        "intermediate_size n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff": 64,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size": 32,
        "num_experts num_local_experts n_routed_experts": 4,
        "num_experts_per_tok moe_topk zero_expert_num": 2,
        "num_shared_experts n_shared_experts n_group topk_group first_k_dense_replace": 1,
        "kv_lora_rank q_lora_rank": 16,
        "mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim mamba_d_state": 8,
        "mamba_n_groups mamba_ngroups": 1,
        "sliding_window sliding_window_size attention_chunk_size window_size": WINDOW,
        "max_position_embeddings n_positions n_ctx max_seq_len": POSITIONS,
        "hidden_size_per_layer_input index_topk": 8,
        "index_n_heads": 32,  # with fewer, many tokens have equal scores, and the selection is arbitrary
        "mamba_chunk_size": 16,
        "rotary_dim": 4,
        "image_size": 28,
        "is_decoder": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }.items()
    for name in names.split()
}
"""Sizes by the names that configurations have for them."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")  # kinds by layer
_BOTH = ["linear_attention", "linear_attention", "hybrid"]
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "vocab_size": 260},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 16, "per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 16, "state_size": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2, "index_head_dim": 8},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 20},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": _BOTH * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": _BOTH * 2,
        "num_key_value_heads": 4,
        "mamba_headdim": 8,
        "chunk_size": 16,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
"""What single families need besides, mostly because their layers must fit together."""


def families() -> tuple[str, ...]:
    """Return the names of all causal families of the installed transformers, in their order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """Return the configuration of a family's smallest model with layers of all its kinds."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"the installed transformers knows no model type {family!r}; name one that it has, such as llama or qwen3"
        )
    kind = CONFIG_MAPPING[family]
    try:
        return kind(**_arguments(kind))
    except Exception as error:
        raise ModelError(f"no tiny configuration of {family}: {described(error, kind=True)}") from error


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager", seed: int = 0
) -> Any:
    """Return a family's tiny model, its random weights large enough that every visible token matters."""
    config = tiny_config(family)
    with torch.random.fork_rng(devices=[]):
        try:
            if (size := _num_weights(config)) > _LARGEST:
                raise ModelError(
                    f"the smallest model of {family} that was found has {size:,} weights, above {_LARGEST:,}"
                )
            torch.manual_seed(seed)
            # Experts run one by one: grouped kernels lack float64, and their rounding depends on the other tokens.
            model = _auto_model(family).from_config(
                config, attn_implementation=attention, experts_implementation="eager"
            )
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"no tiny model of {family}: {described(error, kind=True)}") from error
        _enlarge(model)
    return model.to(dtype).eval()


def _enlarge(model: Any) -> None:
    """Initialize matrices with a larger spread than usual, so that tokens affect each other measurably."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(0, 0.2)


def _arguments(kind: Any) -> dict[str, Any]:
    """Return arguments for a configuration class, and for the configurations within it."""
    named = _setting_names(kind)
    found = {name: size for name, size in _SIZES.items() if name in named}
    if "kv_lora_rank" in named and "num_key_value_heads" in named:
        found["num_key_value_heads"] = found["num_attention_heads"]  # latent attention shares no heads
    found |= _kinds(kind, named)
    found |= _OF_FAMILY.get(kind.model_type, {})
    parts = {name: part for name, part in (getattr(kind, "sub_configs", None) or {}).items() if name in named}
    for name, part in parts.items():
        found[name] = _part(kind, name, part)
    if "text_config" in parts:
        found = {name: value for name, value in found.items() if name in parts or name in _OF_FAMILY}
    return {name: value for name, value in found.items() if value is not None}


def _kinds(kind: Any, named: set[str]) -> dict[str, Any]:
    """Return lists with a layer of each kind of the family's default model, and the number of layers."""
    try:
        usual = kind()
    except Exception:  # some have no usual model
        return {}
    lists = {name: getattr(usual, name, None) for name in _LAYER_LISTS if name in named}
    each = {
        name: list(dict.fromkeys(kinds)) for name, kinds in lists.items() if isinstance(kinds, list) and kinds
    }
    if not each:
        return {}
    count = max(2, *map(len, each.values()))
    counts = {name: count for name in _LAYER_COUNTS if name in named}
    return counts | {name: (kinds * count)[:count] for name, kinds in each.items()}


def _part(kind: Any, name: str, part: Any) -> dict[str, Any] | None:
    """Return a nested configuration as a mapping; None if there is none."""
    if part.__name__ == "AutoConfig":
        usual = getattr(kind(), name, None)
        if usual is None:
            return None
        return {"model_type": usual.model_type, **_arguments(type(usual))}
    return _arguments(part)


def _setting_names(kind: Any) -> set[str]:
    """Return the names of the settings that a configuration class takes."""
    found: set[str] = set()
    for each in kind.__mro__[:-1]:
        found |= set(vars(each).get("__annotations__", {}))
        if "__init__" in vars(each):
            found |= set(inspect.signature(each.__init__).parameters)
    return found
