"""A batch without a fault, as transformers takes it, and every fault that check_batch finds without a model."""

from typing import Any

import torch

ENDS = [0, 3, 7, 9]


def good(**changes: Any) -> dict[str, Any]:
    """Return a batch of three documents without a fault, as transformers takes it, with some changes."""
    cu = torch.tensor(ENDS, dtype=torch.int32)
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]]),
        "labels": torch.tensor([[-100, 6, 7, -100, 9, 10, 11, -100, 13]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": 4,
        "max_length_k": 4,
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]], dtype=torch.int32),
        "use_cache": False,
    }
    return {name: value for name, value in (batch | changes).items() if value is not None}


def row(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def ends(*values: int, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(values, dtype=dtype))


FLASH_LESS = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))

FAULTS: list[tuple[dict[str, Any], str, str, tuple[int | None, int | None]]] = [
    (
        FLASH_LESS | {"attention_mask": torch.ones(1, 9)},
        "error attention_mask",
        "all ones; under such a mask no boundaries are looked for (eager, sdpa and",
        (0, 3),
    ),
    (FLASH_LESS | {"attention_mask": row(*[1] * 8, 0)}, "error attention_mask", "is 0 at 1 position", (0, 3)),
    (
        FLASH_LESS | {"attention_mask": row(1, 1, 1, 2, 2, 2, 2, 3, 0)},
        "error attention_mask",
        "numbers segments (1 to 3)",
        (0, 3),
    ),
    (FLASH_LESS | {"use_cache": True}, "error use_cache", "use_cache is on", (0, 3)),
    (FLASH_LESS | {"past_key_values": object()}, "error use_cache", "a cache is given", (0, 3)),
    (FLASH_LESS | {"cache": object()}, "error use_cache", "a cache is given", (0, 3)),
    (
        FLASH_LESS | {"position_ids": None, "seq_idx": good()["seq_idx"]},
        "error positions_missing",
        "and there are none, so 2 documents see",
        (0, 3),
    ),
    (
        FLASH_LESS | {"position_ids": row(0, 1, 2, 7, 8, 9, 10, 0, 1)},
        "warning positions_continue",
        "only at the smallest position (0)",
        (0, 3),
    ),
    (
        FLASH_LESS | {"position_ids": row(7, 8, 9, 0, 1, 2, 3, 0, 1)},
        "warning row_starts_mid_document",
        "1 row begins mid-document, 3 tokens",
        (0, 0),
    ),
    (
        FLASH_LESS | {"position_ids": None, "cu_seq_lens_q": torch.tensor(ENDS, dtype=torch.int32)},
        "warning incomplete_boundaries",
        "there is cu_seq_lens_q",
        (0, 3),
    ),
    (
        FLASH_LESS | {"position_ids": row(0, 1, 2, 0, 1, 2, 3, 0, 1).expand(3, 1, 9)},
        "error mrope_positions",
        "[3, 1, 9]",
        (0, 3),
    ),
    (
        {"position_ids": torch.arange(9)[None]},
        "warning positions_run_on",
        "run on where documents begin by cu",
        (0, 3),
    ),
    (
        FLASH_LESS | {"attention_mask": torch.ones(1, 1, 9, 9).tril().bool()},
        "error open_mask",
        "6 tokens see other documents",
        (0, 3),
    ),
    (
        {"labels": row(-100, *range(9))},
        "error shapes",
        "labels has the shape [1, 10] and input_ids [1, 9], 1 token more",
        (None, None),
    ),
    ({"seq_idx": row(0, 0)}, "error shapes", "seq_idx has the shape [1, 2]", (None, None)),
    ({"input_ids": good()["input_ids"].float()}, "error float_ids", "input_ids is float32", (None, None)),
    (ends(3, 7, 9), "error cu_seqlens", "starts at 3", (None, None)),
    (ends(0, 3, 7), "error cu_seqlens", "ends at 7, and the batch has 9 tokens", (None, None)),
    (ends(0, 7, 3, 9), "error cu_seqlens", "falls", (None, 2)),
    (ends(*ENDS, dtype=torch.int64), "error cu_seqlens", "is int64", (None, None)),
    (
        {"cu_seq_lens_q": torch.tensor([ENDS], dtype=torch.int32)},
        "error cu_seqlens",
        "has the shape [1, 4]",
        (None, None),
    ),
    (ends(0, 3, 3, 7, 9), "warning empty_documents", "1 empty document", (None, 2)),
    ({"max_length_q": 3}, "error max_length", "max_length_q is 3, and the longest segment has 4", (None, 1)),
    (
        {"seq_idx": row(0, 0, 0, 1, 1, 1, 1, 1, 1)},
        "error boundaries_disagree",
        "seq_idx begins no document at 1 place",
        (0, 7),
    ),
    (
        ends(0, 3, 9) | {"max_length_q": 6, "max_length_k": 6},
        "error boundaries_disagree",
        "cu_seq_lens_q begin no segment there",
        (0, 7),
    ),
    (
        {"cu_seq_lens_k": torch.tensor([0, 2, 7, 9], dtype=torch.int32), "max_length_k": 5},
        "error boundaries_disagree",
        "cu_seq_lens_q and cu_seq_lens_k differ",
        (None, None),
    ),
    (
        {"labels": row(5, 6, 7, 8, 9, 10, 11, -100, 13)},
        "error crossing_targets",
        "the first label of 1 document isn't -100",
        (0, 3),
    ),
    (
        {"labels": row(6, 7, -100, 9, 10, 11, -100, 13, -100)},
        "error shifted_labels",
        "6 labels are those of the next token already, and",
        (0, 0),
    ),
    (
        {"labels": None, "shift_labels": row(6, 7, 8, 9, 10, 11, -100, 13, -100)},
        "error crossing_targets",
        "the last shifted label of 1 document",
        (0, 2),
    ),
    (
        FLASH_LESS | {"position_ids": None, "attention_mask": row(*[1] * 8, 0)},
        "warning padding_targets",
        "1 padding position with a label",
        (0, 8),
    ),
    ({"labels": row(*[-100] * 9)}, "error no_targets", "loss is 0 or NaN", (None, None)),
    (
        {"labels": row(-100, 6, 7, *[-100] * 4, -100, 13)},
        "warning documents_without_targets",
        "1 document has no target",
        (0, 3),
    ),
    ({"input_ids": row(5, 6, 7, -200, 9, 10, 11, 12, 13)}, "error token_ids", "the first is -200", (0, 3)),
    ({"labels": row(-100, 6, -1, -100, 9, 10, 11, -100, 13)}, "error label_ids", "the first is -1", (0, 2)),
    (
        {"position_ids": row(0, 1, 2, -1, 0, 1, 2, 0, 1)},
        "error positions_range",
        "1 negative position",
        (0, 3),
    ),
]
"""Changes to the batch; level and kind of the finding, words of it, its row and column."""
