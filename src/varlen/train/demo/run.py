"""One training run in one process: one model, optimizer and loss for all methods, measured by the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.report.demo import IsolationFigures
from varlen.train.demo.corpus import Documents
from varlen.train.demo.job import Job, StepRecord, current_bytes, now, peak_bytes, reset_peak
from varlen.train.demo.orders import Order, batches_as_packing, most_crowded_pack
from varlen.train.demo.settings import DemoSettings, LayoutName
from varlen.train.optimizers import make_optimizer
from varlen.train.parallel import Ranks
from varlen.train.settings import OptimizerSettings
from varlen.train.step import Gradients, Part, Stepper
from varlen.verify.models.isolation import IsolationReport, check_isolation

_FEW_DOCUMENTS = 4
_WARM_UP_LENGTH = 32
_CHANGED_DOCUMENTS = 4


# How a step's documents become the arrays of a model call: padded with or without a mask, flat, or in rows.
#
# All layouts hold the same documents and the same targets (every token but each document's first), so on the
# same batch they differ in speed and memory, and in the loss only by rounding. The one exception is the
# control, `rows_without_boundaries`, which packs documents as if they were one.

ATTENTION: dict[LayoutName, str] = {
    "padded_with_mask": "sdpa",
    "padded": "sdpa",
    "flat": "varlen",
    "rows": "varlen",
    "rows_without_boundaries": "sdpa",
}
"""The attention that each layout runs through, by transformers' names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInputs:
    """One step's arrays."""

    arguments: dict[str, Any]
    """Keyword arguments of the model, labels not among them."""
    labels: torch.Tensor
    """int64 `[rows, width]`, not shifted; -100 where nothing is to be learned."""
    num_tokens: int
    """Tokens of documents."""
    num_targets: int
    """Labels other than -100."""

    @property
    def num_slots(self) -> int:
        """Positions that the model computes, padding included."""
        return self.labels.numel()


def step_inputs(layout: LayoutName, model: Any, documents: Documents, order: Order, step: int) -> StepInputs:
    """Lay out the documents of one step.

    Args:
        model: a transformers model whose attention is `ATTENTION[layout]`.
    """
    if layout in ("padded_with_mask", "padded"):
        return padded_inputs(documents, order, step, with_mask=layout == "padded_with_mask")
    batch = collate(
        (documents.tokens, documents.offsets),
        order.packing,
        pack_ids=order.pack_ids(step),
        layout="flat" if layout == "flat" else "rows",
    ).to_torch()
    if layout == "rows_without_boundaries":
        # Neither positions nor a mask: every row is one causal sequence, whatever stands in it.
        return _packed(batch, {"input_ids": batch.input_ids, "use_cache": False})
    arguments = hf.model_inputs(batch, model)
    arguments.pop("labels")
    return _packed(batch, arguments)


def padded_inputs(documents: Documents, order: Order, step: int, *, with_mask: bool) -> StepInputs:
    """Lay out one document a row, padded to the longest of the step.

    Padding stands after the document, so a causal model never sees it from a real token: without the mask
    the loss is the same, and PyTorch's fast causal kernel can run.
    """
    packing = order.packing
    first, last = packing.offsets[order.step_offsets[[step, step + 1]]].tolist()
    lengths = packing.lengths[first:last]
    input_ids = np.zeros((last - first, int(lengths.max())), dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for row, piece in enumerate(range(first, last)):
        begin = documents.offsets[packing.document_ids[piece]]
        tokens = documents.tokens[begin + packing.starts[piece] : begin + packing.stops[piece]]
        input_ids[row, : len(tokens)] = tokens
        labels[row, 1 : len(tokens)] = tokens[1:]
    arguments: dict[str, Any] = {"input_ids": torch.from_numpy(input_ids), "use_cache": False}
    if with_mask:
        mask = np.arange(input_ids.shape[1]) < lengths[:, None]
        arguments["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    return StepInputs(
        arguments=arguments,
        labels=torch.from_numpy(labels),
        num_tokens=int(lengths.sum()),
        num_targets=int((labels != IGNORE_INDEX).sum()),
    )


def _packed(batch: PackedBatch, arguments: dict[str, Any]) -> StepInputs:
    return StepInputs(
        arguments=arguments, labels=batch.labels, num_tokens=batch.num_tokens, num_targets=batch.num_targets
    )


class LayoutGradients(Gradients[StepInputs]):
    """Runs a step in one of the six layouts, all of which share a loss whose logits are never whole in memory."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def add(self, batch: StepInputs, *, is_last: bool) -> Part:
        """See `Gradients`."""
        assert is_last, "a step is one batch"
        loss = add_gradients(self.model, batch.arguments, batch.labels, batch.num_targets)
        return Part(
            loss_sum=torch.tensor(loss * batch.num_targets, dtype=torch.float64),
            tokens=batch.num_tokens,
            packs=len(batch.labels),
            step_targets=batch.num_targets,
        )


class Run:
    """A model in training; its steps may be asked for one by one, so that methods can take turns."""

    def __init__(self, job: Job) -> None:
        """Build model and optimizer, and run a tiny step, so that nothing is loaded on the clock."""
        torch.set_num_threads(job.settings.threads)
        self.job = job
        self.model = small_llama(job.settings, job.vocab_size, job.seed, ATTENTION[job.layout])
        optimizer = OptimizerSettings(learning_rate=job.settings.learning_rate, weight_decay=0.0)
        self._stepper = Stepper(
            LayoutGradients(self.model),
            make_optimizer(dict(self.model.named_parameters()), optimizer, torch.device("cpu")),
            ranks=Ranks(),
            seed=job.seed,
        )
        self._warm_up()
        reset_peak()
        self._start_bytes = current_bytes()

    def step(self, step: int) -> StepRecord:
        """Train one step."""
        start = now()
        inputs = step_inputs(self.job.layout, self.model, self.job.documents, self.job.order, step)
        done = self._stepper.step(step + 1, self.job.settings.learning_rate, lambda: inputs)
        assert done is not None, "it was given a batch"
        return StepRecord(
            loss=float(done.part.loss_sum) / done.step_weight,
            num_tokens=inputs.num_tokens,
            num_targets=inputs.num_targets,
            num_slots=inputs.num_slots,
            seconds=now() - start,
        )

    def memory_bytes(self) -> int:
        """Return the most memory held during the steps so far, beyond what was held before the first."""
        return max(peak_bytes() - self._start_bytes, 0)

    def validate(self) -> float:
        """Return the mean loss over the validation documents, each alone in its context, for every method."""
        lengths = self.job.validation.lengths
        batch_documents = min(self.job.settings.batch_documents, len(lengths))
        total, num_targets = 0.0, 0
        attention = ATTENTION[self.job.layout]
        hf.use_varlen_attention(self.model)
        for first in range(0, len(lengths), batch_documents):
            ids = np.arange(first, min(first + batch_documents, len(lengths)))
            documents = self.job.validation.take(ids)
            order = _one_batch(documents, self.job.settings.max_length)
            inputs = step_inputs("flat", self.model, documents, order, 0)
            loss = mean_loss(self.model, inputs.arguments, inputs.labels, inputs.num_targets)
            total += loss * inputs.num_targets
            num_targets += inputs.num_targets
        self.model.set_attn_implementation(attention)
        return total / num_targets

    def num_parameters(self) -> int:
        """Return how many numbers the model learns."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def prove_isolation(self) -> IsolationFigures:
        """Change documents of the most crowded pack one at a time, and look whether others move.

        Where every pack holds a single document, a few of them, cut short, are packed for the purpose.
        """
        documents, packing = self.job.documents, self.job.order.packing
        if packing.num_pieces == packing.num_packs:
            documents = self._few_documents()
            packing = _one_batch(documents, self.job.settings.max_length // _FEW_DOCUMENTS).packing
        batch = collate((documents.tokens, documents.offsets), packing, pack_ids=[most_crowded_pack(packing)])
        return isolation_figures(
            check_isolation(self.model, batch.to_torch(), max_changed=_CHANGED_DOCUMENTS)
        )

    def _warm_up(self) -> None:
        """Compile kernels and start threads on a few tokens; the weights stay as they were drawn."""
        documents = self._few_documents()
        order = _one_batch(documents, _WARM_UP_LENGTH)
        inputs = step_inputs(self.job.layout, self.model, documents, order, 0)
        self._stepper.gradients.add(inputs, is_last=True)
        self._stepper.optimizer.zero_grad()

    def _few_documents(self) -> Documents:
        """Return the first documents of the run."""
        return self.job.documents.take(np.arange(min(_FEW_DOCUMENTS, len(self.job.documents.lengths))))


def _one_batch(documents: Documents, max_length: int) -> Order:
    lengths = documents.lengths
    packing = batches_as_packing(lengths, np.arange(len(lengths))[None], max_length)
    return Order(packing=packing, step_offsets=np.array([0, 1]))


# A small Llama, and a loss whose logits never stand in memory all at once; the same for every method.

HEAD_BLOCK = 1024
"""Positions whose logits are formed at once: 16 MB at a vocabulary of 4,096. All positions of a padded batch
at once would be 512 MB and more page faults than work, which would flatter packing."""


def small_llama(settings: DemoSettings, vocab_size: int, seed: int, attention: str) -> LlamaForCausalLM:
    """Build the model with weights drawn from a seed."""
    hf.register()
    shape = settings.model
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=settings.max_length,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    model.set_attn_implementation(attention)
    return model


def add_gradients(model: Any, arguments: dict[str, Any], labels: torch.Tensor, num_targets: int) -> float:
    """Add the gradient of the mean target loss to every parameter, and return that loss.

    The head and its loss run block by block, forward and backward at once, over every position, padding
    included, as transformers' own loss does.

    Args:
        labels: int64 `[rows, width]`, not shifted; position t is learned from position t - 1.
    """
    hidden = _positions_before_labels(model.model(**arguments).last_hidden_state)
    targets = _blocks(labels[:, 1:].reshape(-1))
    total = 0.0
    gradients = []
    for block, target in zip(_blocks(hidden.detach()), targets, strict=True):
        block.requires_grad_()
        loss = _sum_of_losses(model, block, target) / num_targets
        torch.autograd.backward(loss)
        gradients.append(_gradient(block))
        total += loss.item()
    torch.autograd.backward(hidden, torch.cat(gradients))
    return total


@torch.no_grad()
def mean_loss(model: Any, arguments: dict[str, Any], labels: torch.Tensor, num_targets: int) -> float:
    """Return the mean target loss without gradients; arguments as `add_gradients`."""
    hidden = _positions_before_labels(model.model(**arguments).last_hidden_state)
    targets = _blocks(labels[:, 1:].reshape(-1))
    blocks = zip(_blocks(hidden), targets, strict=True)
    return sum(_sum_of_losses(model, block, target).item() for block, target in blocks) / num_targets


def _positions_before_labels(hidden: torch.Tensor) -> torch.Tensor:
    """Return `[rows * (width - 1), hidden_size]`: all but each row's last, which predicts nothing."""
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def _blocks(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut positions into blocks of `HEAD_BLOCK`, the last one shorter."""
    return positions.tensor_split(list(range(HEAD_BLOCK, len(positions), HEAD_BLOCK)))


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None, "backward has just run"
    return leaf.grad


def _sum_of_losses(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.lm_head(hidden), targets, ignore_index=IGNORE_INDEX, reduction="sum")


# The isolation report in the words of the demo's table.


def isolation_figures(report: IsolationReport) -> IsolationFigures:
    """Put what was measured into rows of words and numbers."""
    moved = report.movements
    control = "not measured" if moved.control_difference is None else f"{moved.control_difference:.3g}"
    rows = [
        ("documents in the row that was tried", f"{report.documents:,} ({report.tokens:,} tokens)"),
        ("documents changed, one at a time", f"{moved.changed_documents:,}"),
        ("their own logits moved by, at least", f"{moved.own_difference:.3g}"),
        ("any other document's logits moved by", _exactly(moved.largest_difference)),
        ("any document's logits moved when padding changed", _exactly(moved.padding_difference)),
        ("control without boundaries: others moved by", control),
        ("logits packed against each document alone", _exactly(moved.alone_difference)),
        ("loss packed, and one by one", f"{moved.packed_loss:.6f}, {moved.alone_loss:.6f}"),
    ]
    if moved.attention_across is not None:
        rows.append(("largest attention weight across documents", _exactly(moved.attention_across)))
    verdict = report.verdict if not report.reason else f"{report.verdict}: {report.reason}"
    return IsolationFigures(verdict=verdict, is_proved=report.ok, rows=tuple(rows))


def _exactly(value: float) -> str:
    return "0 (to the bit)" if value == 0 else f"{value:.3g}"
