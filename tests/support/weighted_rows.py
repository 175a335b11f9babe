"""Chats whose messages weigh, and a readable oracle for what each of their tokens weighs."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import varlen as vl
from varlen.documents.source import open_source

Messages = list[dict[str, Any]]
Weighed = tuple[tuple[int, ...], tuple[float, ...]]
"""A document: its tokens, and what each weighs."""
WEIGHTS = (0, 0.25, 0.5, 1, 1, 1.5, 2)


def chats(count: int, seed: int = 0, *, weights: Sequence[Any] = WEIGHTS) -> list[Messages]:
    """Chats of one to three turns that all differ; at least one turn of each is trained on."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        messages: Messages = [{"role": "system", "content": f"chat {seed} {number}"}] if number % 3 else []
        for turn in range(draw.randint(1, 3)):
            asked = f"q{seed}.{number}.{turn} " * draw.randint(1, 3)
            answer: dict[str, Any] = {"role": "assistant", "content": f"a{turn} " * draw.randint(1, 9)}
            if number % 5:
                answer["weight"] = draw.choice(weights)
            messages += [{"role": "user", "content": asked}, answer]
        if all(message.get("weight") == 0 for message in messages if message["role"] == "assistant"):
            messages[-1]["weight"] = max(weights)
        found.append(messages)
    return found


def write(path: Path, rows: Sequence[Messages]) -> Path:
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def read(data: Any, tokenizer: Any = None, **options: Any) -> list[Weighed]:
    source = open_source(data, tokenizer, **options)
    found: list[Weighed] = []
    for part in source.parts():
        for documents in source.read(part):
            mask = documents.loss_mask
            whole = np.ones(len(documents.tokens)) if mask is None else mask
            bounds = documents.offsets.tolist()
            for a, b in zip(bounds, bounds[1:]):
                found.append((tuple(documents.tokens[a:b].tolist()), tuple(map(float, whole[a:b]))))
    return found


def expected(rows: Sequence[Messages], tokenizer: Any = None, **options: Any) -> list[Weighed]:
    """What the rows' tokens weigh: turn by turn, each with all others switched off, times the turn's weight.

    Weights of other than 0 and 1 are read nowhere here.
    """
    found = []
    for row in rows:
        tokens: tuple[int, ...] = ()
        total = np.zeros(0)
        for number, message in enumerate(row):
            weight = message.get("weight", 1)
            if message["role"] != "assistant" or weight == 0:
                continue
            alone = [{k: v for k, v in other.items() if k != "weight"} for other in row]
            for other in (n for n, one in enumerate(row) if one["role"] == "assistant" and n != number):
                alone[other]["weight"] = 0
            made, marks = read([{"messages": alone}], tokenizer, **options)[0]
            # An EOS is appended where the last turn is trained alone, so that the texts differ by its token.
            sums = np.zeros(max(len(total), len(marks)))
            sums[: len(total)] += total
            sums[: len(marks)] += weight * np.array(marks)
            total, tokens = sums, max(tokens, made, key=len)
        found.append((tokens, tuple(total.tolist())))
    return found


def segments(batch: vl.PackedBatch) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The tokens of each segment of a batch, and what each of its targets weighs."""
    weights = batch.loss_weights()
    own = batch.target_weights
    assert own is None or (np.asarray(own) == np.asarray(weights)).all()
    found = []
    for row, owners in enumerate(np.asarray(batch.segment_ids)):
        for segment in range(int(owners.max(initial=-1)) + 1):
            at = owners == segment
            tokens = np.asarray(batch.input_ids)[row, at].tolist()
            found.append((tuple(tokens), tuple(np.asarray(weights)[row, at].tolist())))
    return found


def targets(document: Weighed) -> Weighed:
    """A document whose first token is no target."""
    tokens, weights = document
    return tokens, (0.0, *weights[1:])
