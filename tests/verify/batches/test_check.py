"""check_batch against real runs: over the whole truth table, it finds an error exactly where a model leaks."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from tests.support.hf_models import VOCABULARY, make, tiny
from tests.support.rarely import mostly
from transformers import AutoConfig

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError
from varlen.verify.models import backends

LENGTHS = (4, 5, 3)
PADDING = 3
POSITIONS = ("restart", "absent", "continue", "run on", "mid-document", "padded")
MASKS = ("none", "ones", "padding", "segments", "padded segments", "finished", "finished and open")
CACHES = (False, True, None)
BOUNDARIES = ("none", "all four", "incomplete")
ISOLATION = {
    "attention_mask",
    "use_cache",
    "packed_rows",
    "positions_missing",
    "positions_run_on",
    "positions_continue",
    "row_starts_mid_document",
    "incomplete_boundaries",
    "boundaries_missing",
    "mrope_positions",
    "open_mask",
    "model_family",
    "boundaries_disagree",
}
FLASH = "flash_attention_2"


@pytest.fixture
def flash() -> Iterator[None]:
    with backends.flash_attention():
        yield


def model_with(attention: str, config: Any = None) -> Any:
    """Return a tiny Llama, or a model of a config, with this attention."""
    plain = "eager" if attention == FLASH else attention
    model = tiny("llama", plain) if config is None else make(config, plain)
    if attention == FLASH:
        model.config._attn_implementation_internal = FLASH
    return model.eval()


def positions_of(kind: str) -> list[int] | None:
    starts = {"continue": (0, 7, 0), "run on": (0, 4, 9), "mid-document": (7, 0, 0)}.get(kind, (0, 0, 0))
    if kind == "absent":
        return None
    return [start + i for start, length in zip(starts, LENGTHS, strict=True) for i in range(length)]


def owners(mask: str, positions: str) -> np.ndarray[Any, Any]:
    tail = [-1] * PADDING if positions == "padded" or mask in ("padding", "padded segments") else []
    return np.array([i for i, length in enumerate(LENGTHS) for _ in range(length)] + tail)


def batch_of(mask: str, use_cache: bool | None, rows: int, positions: str, ends: str) -> dict[str, Any]:
    """Return a batch of one case of the table; every row is cut alike."""
    owner = owners(mask, positions)
    width, padding = len(owner), int((owner < 0).sum())
    batch: dict[str, Any] = {"input_ids": torch.randint(1, VOCABULARY, (rows, width))}
    if (row := positions_of(positions)) is not None:
        batch["position_ids"] = torch.tensor([row + [0] * padding] * rows)
    lengths = [*LENGTHS, *([1] * padding)] * rows
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if ends != "none":
        batch |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    if ends == "all four":
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    if use_cache is not None:
        batch["use_cache"] = use_cache
    numbers = torch.as_tensor(owner + 1).expand(rows, width)
    same = (numbers[:, None, :, None] == numbers[:, None, None, :]) & torch.ones(width, width).tril().bool()
    masks = {
        "ones": torch.ones(rows, width, dtype=torch.long),
        "padding": (numbers > 0).long(),
        "segments": numbers,
        "padded segments": numbers,
        "finished": same,
        "finished and open": torch.ones(width, width).tril().bool().expand(rows, 1, width, width),
    }
    if mask in masks:
        batch["attention_mask"] = masks[mask]
    return batch


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def leaks(model: Any, batch: dict[str, Any], owner: np.ndarray[Any, Any], *, gradients: bool = False) -> bool:
    """Return whether any document's logits move when another, or padding, changes; or whether the call fails."""
    documents = range(-1 if (owner < 0).any() else 0, int(owner.max()) + 1)
    try:
        with torch.set_grad_enabled(gradients):
            before = model(**batch).logits
            for row, document in itertools.product(range(len(batch["input_ids"])), documents):
                chosen = np.zeros(batch["input_ids"].shape, dtype=bool)
                chosen[row] = owner == document
                ids = batch["input_ids"].clone()
                ids[torch.as_tensor(chosen)] = (ids[torch.as_tensor(chosen)] + 7) % VOCABULARY
                moved = (model(**batch | {"input_ids": ids}).logits != before).any(-1).numpy()
                if (moved & ~chosen & (owner >= 0)).any():
                    return True
    except (ModelError, RuntimeError, IndexError, ValueError):
        return True
    return False


def is_told(mask: str, positions: str, ends: str) -> bool:
    """Return whether the batch says anywhere that its rows hold several documents."""
    return ends != "none" or "segments" in mask or positions not in ("absent", "run on")


OFTEN = [("sdpa", mask) for mask in MASKS] + [
    *((FLASH, mask) for mask in ("none", "padding", "segments", "finished and open")),
    *(("eager", mask) for mask in ("ones", "padded segments", "finished")),
]


@pytest.mark.parametrize(
    ("attention", "mask"), mostly(OFTEN, itertools.product(("eager", "sdpa", FLASH), MASKS))
)
def test_an_error_is_found_exactly_where_the_model_leaks(attention, mask, flash):
    model = model_with(attention)
    model.config.use_cache = True
    wrong, seen = [], set()
    for use_cache, rows, positions, ends in itertools.product(CACHES, (1, 2), POSITIONS, BOUNDARIES):
        if positions == "padded" and mask in ("finished", "finished and open"):
            continue
        case, owner = batch_of(mask, use_cache, rows, positions, ends), owners(mask, positions)
        if attention == "eager" and mask.startswith("finished"):
            case["attention_mask"] = additive(case["attention_mask"])
        report = vl.check_batch(case, model)
        found = {finding.kind for finding in report.errors} & ISOLATION
        expected = is_told(mask, positions, ends) and leaks(model, case, owner)
        if mask.startswith("finished") and attention == FLASH:
            expected = True  # FlashAttention takes no such mask, whether or not documents are told
        seen.add(expected)
        if bool(found) is not expected:
            wrong.append((use_cache, rows, positions, ends, expected, report.kinds))

    assert wrong == []
    assert True in seen or mask == "finished"


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = SMALL | {"max_position_embeddings": 64, "intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": SMALL,
    "opt": PLACES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gpt_oss": PLACES
    | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "biogpt": PLACES,
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": PLACES,
    "stablelm": PLACES | {"num_key_value_heads": 4},
    "phi": PLACES,
    "olmo2": PLACES | {"num_key_value_heads": 4},
    "gemma2": PLACES | {"num_key_value_heads": 2, "head_dim": 8},
}
LEAKING = ["opt", "bloom", "mpt", "gpt_oss", "biogpt", "mamba"]
if Version(transformers.__version__) < Version("5.24"):
    LEAKING.append("falcon")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_never_look_at_positions_are_found_and_no_other(family):
    model = model_with("eager", AutoConfig.for_model(family, **FAMILIES[family]))
    batch, owner = batch_of("none", False, 1, "restart", "none"), owners("none", "restart")
    report = vl.check_batch(batch, model)

    arguments = dict(batch)
    if not hf.model.accepts(model, "position_ids"):
        del arguments["position_ids"]
    assert leaks(model, arguments, owner) is (family in LEAKING)
    assert report.kinds == (("model_family",) if family in LEAKING else ())


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_family_is_no_trouble_where_rows_hold_one_document_each(family):
    model = model_with("eager", AutoConfig.for_model(family, **FAMILIES[family]))
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
    }

    assert vl.check_batch(batch, model).kinds == ()


def test_gradient_checkpointing_turns_the_cache_off_in_training_alone():
    model = model_with("sdpa")
    model.config.use_cache = True
    batch = batch_of("none", None, 1, "restart", "none")
    assert vl.check_batch(batch, model).kinds == ("use_cache",)

    model.activation_checkpointing_enable()
    assert vl.check_batch(batch, model.eval()).kinds == ("use_cache",)
    assert vl.check_batch(batch, model.train()).kinds == ()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "falcon", "gpt2"])
@pytest.mark.filterwarnings("ignore")
def test_what_checkpointing_does_to_the_cache_is_what_a_run_shows(family, checkpointing, gradients):
    settings = None if family == "llama" else AutoConfig.for_model(family, **FAMILIES[family])
    model = model_with("sdpa", settings)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train().config.use_cache = True
    if checkpointing:
        model.activation_checkpointing_enable()
    batch, owner = batch_of("none", None, 1, "restart", "none"), owners("none", "restart")
    with torch.set_grad_enabled(gradients):
        report = vl.check_batch(batch, model)

    assert leaks(model, batch, owner, gradients=gradients) is not report.ok
    if family == "llama":
        drops = checkpointing and (gradients or Version(transformers.__version__) < Version("5.24"))
        assert report.ok is drops


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.filterwarnings("ignore")
def test_positions_of_m_rope_keep_documents_apart_with_text_positions_in_front(rows):
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=PLACES
        | {
            "num_key_value_heads": 2,
            "use_cache": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 32,
        },
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    batch = batch_of("none", False, 1, "restart", "none")
    batch["position_ids"] = batch["position_ids"].expand(rows, 1, -1)

    assert leaks(model, batch, owners("none", "restart")) is (rows == 3)
    assert vl.check_batch(batch, model).kinds == (("mrope_positions",) if rows == 3 else ())
    assert vl.check_batch(batch).kinds == (("mrope_positions",) if rows == 3 else ())
    plain = batch | {"position_ids": batch["position_ids"][0]}
    assert leaks(model, plain, owners("none", "restart"))
    assert vl.check_batch(plain, model).kinds == ("mrope_positions",)


FIXED = [
    ("sdpa", ("ones", False, 2, "restart", "none"), {"attention_mask": None}),
    ("eager", ("padded segments", False, 1, "padded", "none"), {"attention_mask": None}),
    ("sdpa", ("none", True, 1, "restart", "none"), {"use_cache": False}),
    ("sdpa", ("none", False, 1, "absent", "all four"), {"position_ids": "restart"}),
    ("sdpa", ("none", False, 1, "run on", "all four"), {"position_ids": "restart"}),
    (FLASH, ("padding", False, 1, "padded", "all four"), {"attention_mask": None}),
    (FLASH, ("none", False, 2, "restart", "none"), {"cu_seq_lens_q": "all four"}),
    (FLASH, ("none", False, 1, "continue", "none"), {"position_ids": "restart"}),
    (FLASH, ("none", False, 1, "mid-document", "none"), {"position_ids": "restart"}),
    (FLASH, ("none", False, 1, "absent", "incomplete"), {"cu_seq_lens_q": "all four"}),
]


@pytest.mark.parametrize(("attention", "case", "fix"), FIXED)
def test_the_fix_of_a_finding_ends_the_leak(attention, case, fix, flash):
    model, batch, owner = model_with(attention), batch_of(*case), owners(case[0], case[3])
    assert not vl.check_batch(batch, model).ok
    assert leaks(model, batch, owner)

    right = batch_of(
        case[0], case[1], case[2], "restart" if len(owner) == sum(LENGTHS) else "padded", "all four"
    )
    names = [*fix] if "cu_seq_lens_q" not in fix else [name for name in right if "_q" in name or "_k" in name]
    batch |= {name: right[name] for name in names if fix.get(name, "") is not None and name != "use_cache"}
    batch |= {name: value for name, value in fix.items() if value is False}
    batch = {name: value for name, value in batch.items() if fix.get(name, "") is not None}
    assert vl.check_batch(batch, model).ok
    assert not leaks(model, batch, owner)


def test_a_longest_segment_told_too_short_fails_in_the_kernel(flash):
    model, batch = model_with(FLASH), batch_of("none", False, 1, "restart", "all four")
    assert vl.check_batch(batch, model).kinds == ()
    batch |= {"max_length_q": 4, "max_length_k": 4}

    assert vl.check_batch(batch, model).kinds == ("max_length", "max_length")
    with pytest.raises(ModelError):
        model(**batch)


def test_a_crossing_target_changes_the_loss_of_documents_that_are_kept_apart():
    model, batch = model_with("sdpa"), batch_of("none", False, 1, "restart", "none")
    batch["labels"] = batch["input_ids"].clone()

    def summed(**arguments: Any) -> tuple[float, int]:
        count = int((arguments["labels"][:, 1:] != -100).sum())
        return model(**arguments).loss.item() * count, count

    documents = batch["input_ids"].split(LENGTHS, dim=1)
    alone = [summed(input_ids=document, labels=document) for document in documents]
    total, count = sum(loss for loss, _ in alone), sum(number for _, number in alone)
    assert vl.check_batch(batch, model).kinds == ("crossing_targets",)
    assert summed(**batch)[1] == count + 2

    batch["labels"][batch["position_ids"] == 0] = -100
    assert vl.check_batch(batch, model).kinds == ()
    assert summed(**batch) == (pytest.approx(total, rel=1e-6), count)


def test_a_segment_that_runs_from_one_row_into_the_next_leaks(flash):
    model, batch = model_with(FLASH), batch_of("none", False, 2, "restart", "all four")
    ends = batch["cu_seq_lens_q"]
    joined = ends[ends != sum(LENGTHS)]
    batch |= {"cu_seq_lens_q": joined, "cu_seq_lens_k": joined, "max_length_q": 7, "max_length_k": 7}

    report = vl.check_batch(batch, model)
    assert [(found.kind, found.row, found.column) for found in report] == [("boundaries_disagree", 1, 0)]
    assert leaks(model, batch, owners("none", "restart"))
