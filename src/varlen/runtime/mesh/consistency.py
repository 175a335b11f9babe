"""Check that all ranks have the same model, once, and the same plan and batch, before each step's first message."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from varlen.errors import PlanError, VarlenError
from varlen.runtime.chunk import StepData
from varlen.runtime.mesh.process_groups import Group

_DIGITS = 12  # hexadecimal digits of a fingerprint in messages


def model_fingerprint(model: Any) -> str:
    """Return 64 hexadecimal digits that models share whose parameters have the same names, shapes and dtypes."""
    parameters = sorted(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters())
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest()


def batch_fingerprint(data: StepData) -> str:
    """Return 64 hexadecimal digits that batches share with the same documents, labels and weights.

    Cost: a copy to the host and some 25 ms for a million tokens.
    """
    digest = hashlib.sha256(np.ascontiguousarray(data.offsets, np.int64).tobytes())
    for tensor in (data.input_ids, data.labels):
        digest.update(tensor.to(torch.int32).cpu().numpy().tobytes())
    digest.update(data.weights.to(torch.float64).cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_of(value: object) -> str:
    """Return 64 hexadecimal digits that values of equal `repr` share."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def agree(
    group: Group,
    what: str,
    facts: Mapping[str, str],
    fault: VarlenError | None = None,
    *,
    name_of: Callable[[int], str] = str,
    distinct: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Require that all ranks have the same fingerprints, and that none has failed; else raise the same error on all.

    Args:
        what: that ranks have and may refuse, for the message: "model", "step".
        distinct: by fact of which ranks may have different ones: a number for each rank, equal where it is the same.
    """
    mine = bytes.fromhex("".join(facts.values()))
    sent = torch.tensor([fault is not None, *mine], dtype=torch.uint8, device=group.device)
    gathered = group.on_host(group.gathered(sent))
    if fault is not None:
        raise fault
    failed = gathered[:, 0].nonzero().flatten().tolist()
    if failed:
        raise VarlenError(
            f"{name_of(failed[0])} refused the {what} ({len(failed)} of {group.size} did); its own error says why"
        )
    for number, name in enumerate(facts):
        rows = gathered[:, 1 + 32 * number : 33 + 32 * number].tolist()
        seen = [bytes(row).hex()[:_DIGITS] for row in rows]
        numbers = (distinct or {}).get(name, [0] * group.size)
        for one in sorted(set(numbers)):
            ranks = [rank for rank, its in enumerate(numbers) if its == one]
            usual, count = Counter(seen[rank] for rank in ranks).most_common(1)[0]
            others = [rank for rank in ranks if seen[rank] != usual]
            if others:
                raise PlanError(
                    f"{name_of(others[0])} has the {name} {seen[others[0]]}…, and {count} of {len(ranks)} ranks have "
                    f"{usual}… ({len(others)} differ: {', '.join(map(str, others[:8]))}); give all ranks the same "
                    f"{name}"
                )
