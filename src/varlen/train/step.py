"""One optimizer step: batches in, gradients accumulated over micro-batches and ranks, weights updated.

    batch ──► Gradients.add ──► Part ─┐
    batch ──► Gradients.add ──► Part ─┴─► Gradients.finish, clip ──► AdamW ──► StepDone

`PackGradients` runs whole packs, `plans.SliceGradients` the MicroPacks of a plan, and `demo/run.py` its six layouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch._dynamo
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch, on_host
from varlen.errors import SettingError
from varlen.pack.api import pack
from varlen.step_plan import StepPlan
from varlen.train.optimizers import Optimizer
from varlen.train.parallel import Ranks, accumulating, computing, distributed, reshard, settle
from varlen.train.settings import TrainSettings
from varlen.types import FloatArray, IntArray

Batch = TypeVar("Batch")
Take = Callable[[], Batch | None]
"""Returns the next batch, or None at the end of the data."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What this rank has computed of a step, in one batch or in several; on a GPU, tensors may not be ready."""

    loss_sum: torch.Tensor
    """float64: over this rank's targets, each loss multiplied by its weight."""
    tokens: Any
    """Of this rank's documents: a number, or a tensor of one."""
    packs: int
    step_targets: int
    """Of all ranks."""
    weight: Any = 0
    """Sum of the weights of this rank's targets, where rows have weights."""
    plan: StepPlan | None = None
    lengths: tuple[Any, ...] = ()
    """Arrays or tensors of the lengths of this rank's documents."""

    def __add__(self, other: Part) -> Part:
        return replace(
            other,
            loss_sum=self.loss_sum + other.loss_sum,
            tokens=self.tokens + other.tokens,
            packs=self.packs + other.packs,
            weight=self.weight + other.weight,
            lengths=(*self.lengths, *other.lengths),
        )


class DocumentLosses(NamedTuple):
    """Losses of the documents that a rank counts, without gradients; float64 `[num_documents]` each."""

    lengths: FloatArray
    """Tokens."""
    sums: FloatArray
    """Sums of the losses of their targets, each multiplied by its weight."""
    weights: FloatArray
    """Sums of these weights: the number of targets, where rows have no weights."""


class Gradients(Generic[Batch]):
    """Computes the gradients of a step, batch by batch: the only thing in which packs and slices differ.

    A batch is one or more MicroPacks. Packs are MicroPacks of their own; a batch with a plan is cut into the
    MicroPacks of the plan.
    """

    model: Any
    notes: Sequence[str] = ()
    """Sentences to show at the start of the run."""
    cross_entropy: str | None = None
    """What computes losses of whole packs; None for slices."""

    def add(self, batch: Batch, *, is_last: bool) -> Part:
        """Run a batch forward and backward, and add to the gradients of the mean loss over the step's targets."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> DocumentLosses:
        """Run a batch forward without dropout, and leave gradients as they are; all ranks call it at once."""
        raise NotImplementedError

    def finish(self, whole: Part) -> float:
        """Return the number by which the step's loss is divided, once all batches are added."""
        return float(whole.step_targets)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to a norm, unless it is 0, and return the norm that they had."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters])
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if max_norm > 0:
            clip_grads_with_norm_(parameters, max_norm, norm)
        return norm.detach()

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What the optimizer updates, by the names of the model's parameters."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def publish(self) -> None:
        """Write what the optimizer has updated into the model."""

    def close(self) -> None:
        """Release what the computation holds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDone:
    """A step that was launched; on a GPU, tensors may not be ready."""

    number: int
    learning_rate: float
    part: Part
    """Of this rank."""
    step_weight: float
    """The number by which the loss is divided: the step's targets, or the sum of their weights."""
    grad_norm: torch.Tensor
    """Over all ranks, before clipping."""
    waited_s: float
    """Seconds for which the host waited for batches."""
    watch: Stopwatch
    peak_bytes: int = 0
    """Most memory that tensors took on this rank's GPU."""
    plan_wait_s: float = 0.0
    """Seconds for which the host waited for the plan."""


class Stepper(Generic[Batch]):
    """Updates a model step by step; a step depends on weights, the optimizer's state, its number and its batches."""

    def __init__(
        self,
        gradients: Gradients[Batch],
        optimizer: Optimizer,
        *,
        ranks: Ranks,
        seed: int,
        max_grad_norm: float = 0.0,
        micro_batches: int = 1,
    ) -> None:
        self.gradients, self.optimizer = gradients, optimizer
        self._ranks, self._seed, self._max_grad_norm = ranks, seed, max_grad_norm
        self._micro_batches = micro_batches

    @property
    def model(self) -> Any:
        """The model whose parameters are updated."""
        return self.gradients.model

    def step(self, number: int, learning_rate: float, take: Take[Batch]) -> StepDone | None:
        """Train one step; None where the data is at its end, and nothing has changed."""
        watch = Stopwatch(self._ranks.device)
        torch.manual_seed(self._seed_of(number))
        whole: Part | None = None
        waited_s = 0.0
        for micro_batch in range(self._micro_batches):
            begun = time.perf_counter()
            batch = take()
            waited_s += time.perf_counter() - begun
            if batch is None:
                return None
            part = self.gradients.add(batch, is_last=micro_batch + 1 == self._micro_batches)
            whole = part if whole is None else whole + part
        assert whole is not None, "a step has a batch"
        step_weight = self.gradients.finish(whole)
        grad_norm = self.gradients.clip(self._max_grad_norm)
        self.optimizer.step(learning_rate)
        self.gradients.publish()
        self.optimizer.zero_grad()
        watch.stop()
        is_gpu = self._ranks.device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(self._ranks.device) if is_gpu else 0
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self._ranks.device)
        return StepDone(
            number=number,
            learning_rate=learning_rate,
            part=whole,
            step_weight=step_weight,
            grad_norm=grad_norm,
            waited_s=waited_s,
            watch=watch,
            peak_bytes=peak_bytes,
        )

    def _seed_of(self, number: int) -> int:
        """Return the seed of dropout: a function of the step, so that a resumed run draws the same."""
        mixed = np.random.SeedSequence([self._seed, number, self._ranks.rank])
        return int(mixed.generate_state(1, np.uint64)[0] >> 1)


class PackGradients(Gradients[PackedBatch]):
    """Runs whole packs through a model of transformers, which ranks share by DDP or FSDP2."""

    def __init__(
        self, model: Any, settings: TrainSettings, ranks: Ranks, *, has_weights: bool = False
    ) -> None:
        self.model, self._wrapped = model, distributed(model, settings.run, ranks)
        self._settings, self._ranks, self._has_weights = settings, ranks, has_weights
        self._is_compiled = False
        self._fused: FusedLoss | None = None
        self._fused, self.cross_entropy, self.notes = self._chosen_loss()
        settle(self._wrapped, lambda: self._loss(smallest_batch(settings.data.pad_id or 0))[0])
        if settings.run.compile:  # now, since that batch has another shape
            self._is_compiled = True
            compile_layers(model)

    def add(self, batch: PackedBatch, *, is_last: bool) -> Part:
        """See `Gradients`."""
        with accumulating(self._wrapped, is_last=is_last):
            loss, weight = self._loss(batch)
            # The divisor is the number of targets even where they have weights; `finish` corrects it.
            (loss * unweighted(batch).loss_scale("mean")).backward()  # type: ignore[no-untyped-call]
        return Part(
            loss_sum=loss.detach().double(),
            tokens=batch.document_lengths.sum(),  # on a GPU, without waiting for it
            packs=len(batch.pack_ids),
            step_targets=batch.step_num_targets,
            weight=weight,
            lengths=(deepcopy(batch.document_lengths),),  # not of the batch, whose memory is the loader's
        )

    def evaluate(self, batch: PackedBatch) -> DocumentLosses:
        """See `Gradients`."""
        documents, lengths = _documents_of(batch)
        self.model.eval()
        try:
            with torch.no_grad():
                losses, weights = target_losses(*self._forward(batch))
        finally:
            reshard(self.model)
            self.model.train()
        sums = [
            np.bincount(documents, values.double().cpu().numpy(), minlength=len(lengths) + 1)[1:]
            for values in (losses, weights)
        ]
        return DocumentLosses(*(each.astype(np.float64) for each in (lengths, *sums)))

    def finish(self, whole: Part) -> float:
        """Divide gradients by the sum of the targets' weights, which is known once all ranks have all batches."""
        if not self._has_weights:
            return float(whole.step_targets)
        weight = float(self._ranks.gather([float(whole.weight)]).sum())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(whole.step_targets / weight)
        return weight

    def _chosen_loss(self) -> tuple[FusedLoss | None, str, list[str]]:
        """Return what computes losses without logits, the name of what computes losses, and why it isn't another."""
        asked, device = self._settings.run.cross_entropy, self._ranks.device
        if asked == "torch" or (asked == "auto" and device.type != "cuda"):
            return None, "torch", []
        head, name = self.model.get_output_embeddings(), "torch"
        kernel: LossKernel | None = None
        why = ["rows have weights"] if self._has_weights else []
        if type(head) is not torch.nn.Linear:
            why.append(f"the model's head is a {type(head).__module__}.{type(head).__qualname__}")
        elif not why and not self._gives_logits_of(head):
            why.append("the model changes logits after its head")
        names = () if why else tuple(FUSED) if asked == "auto" else (asked,)
        for each in names:
            try:
                kernel, name = kernel_of(each, device), each
                break
            except ImportError:
                why.append(f"{FUSED[each]} isn't installed")
        if kernel is not None:
            return FusedLoss(head, kernel), name, []
        if asked != "auto":
            out = f"install it (pip install {FUSED[asked]}), or " if why[0].endswith("installed") else ""
            raise SettingError(
                f'run.cross_entropy = "{asked}" can\'t be had: {why[0]}; {out}set run.cross_entropy = "torch"'
            )
        return None, name, [f"losses are computed by PyTorch, from whole logits: {' and '.join(why)}"]

    def _gives_logits_of(self, head: torch.nn.Linear) -> bool:
        """Return whether the model returns what its head returns, without a cap or a factor; all ranks call it."""
        given = list[torch.Tensor]()

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            given.append(50 * torch.randn(*hidden.shape[:-1], 4, device=hidden.device))  # a cap would show
            return given[0]

        with torch.no_grad(), replaced_forward(head, forward):
            found, _, _ = self._forward(smallest_batch(self._settings.data.pad_id or 0))
        reshard(self.model)
        return len(given) == 1 and torch.equal(found, given[0])

    def _loss(self, batch: PackedBatch) -> tuple[torch.Tensor, Any]:
        """Return the sum of a batch's losses, and of the weights of its targets."""
        logits, labels, weights = self._forward(batch, self._fused)
        if self._fused is not None:
            return logits.sum(), 0
        if weights is None:
            return target_loss_sum(logits, labels), 0
        return target_loss_sum(logits, labels, weights), weights.sum(dtype=torch.float64)

    def _forward(
        self, batch: PackedBatch, fused: FusedLoss | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the logits and labels of a batch, and the weights of its targets where rows have weights.

        With a fused loss, the sum of losses stands in place of the logits.
        """
        weights = batch.to_torch(self._ranks.device).loss_weights() if self._has_weights else None
        arguments = hf.model_inputs(unweighted(batch), self.model)
        labels = arguments.pop("labels")
        if self._is_compiled:
            arguments = of_one_graph(arguments)
        in_head = nullcontext() if fused is None else fused.of(labels)
        with computing(self._wrapped, self._settings.run, self._ranks), in_head:
            # DDP's own forward pass would prepare a reduction of gradients, which an evaluation hasn't.
            model = self._wrapped if torch.is_grad_enabled() else self.model
            return model(**arguments).logits, labels, weights


def compile_layers(model: Any) -> None:
    """Compile each layer in place; layers of one kind share a graph."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives layers a class of its own, made of theirs.
    layers = [each for each in model.modules() if any(kind.__name__ in names for kind in type(each).__mro__)]
    if not layers:
        raise SettingError(
            f"run.compile compiles the layers of a model, and {type(model).__name__} doesn't name them "
            "(_no_split_modules); leave it out"
        )
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if dropout and hf.implementation(model) == "varlen":
        raise SettingError(
            f"run.compile and the model's attention_dropout = {dropout:g} don't go together: a backward pass would "
            "draw another mask; set attention_dropout to 0, or run.compile = false"
        )
    for layer in layers:
        layer.compile()


def of_one_graph(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments so that another number or length of documents needs no other graph."""
    width = arguments["input_ids"].shape[-1]
    found = dict(arguments)
    for side in ("q", "k"):
        if f"cu_seq_lens_{side}" in found:
            torch._dynamo.mark_dynamic(found[f"cu_seq_lens_{side}"], 0)
            found[f"max_length_{side}"] = width
    return found


def _documents_of(batch: PackedBatch) -> tuple[IntArray, IntArray]:
    """Return each position's document, from 1 on and 0 at padding, and the lengths of the documents."""
    segments = np.atleast_2d(on_host(batch.segment_ids)).astype(np.int64)
    before = np.cumsum(np.append(0, segments.max(axis=1) + 1))[:-1]
    return np.where(segments < 0, 0, segments + 1 + before[:, None]).ravel(), np.asarray(
        batch.document_lengths
    )


def unweighted(batch: PackedBatch) -> PackedBatch:
    """Return a batch without the weights of its targets."""
    return batch if batch.target_weights is None else batch.replace(columns={})


def smallest_batch(pad_id: int = 0) -> PackedBatch:
    """Return a batch of one document of two tokens, to try a model with."""
    tokens = np.full(2, pad_id, dtype=np.int32)
    return collate((tokens, np.array([0, 2])), pack([2], capacity=2))


# The sum of the target losses of a batch, in blocks, so that no second copy of all logits stands in memory.

BLOCK = 4096
"""Positions whose logits are widened to float32 at once: 512 MB at a vocabulary of 32,000."""


def target_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the losses of all targets, in nats, as float32; 0 where there is no target.

    Args:
        logits: `[rows, width, vocabulary]`.
        labels: int64 `[rows, width]`, not shifted: position t - 1 predicts the label of position t.
        weights: `[rows, width]`, by which each loss is multiplied, at the places of the labels; None for 1.
    """
    targets = _targets(labels)
    moved = None if weights is None else torch.nn.functional.pad(weights[:, 1:], (0, 1)).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) <= BLOCK:
        return _block_sum(flat, targets, moved)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for begin in range(0, len(flat), BLOCK):
        block = slice(begin, begin + BLOCK)
        here = None if moved is None else moved[block]
        total = total + checkpoint(_block_sum, flat[block], targets[block], here, use_reentrant=False)
    return total


def target_losses(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted losses of all targets, and their weights, float32 `[rows * width]`, without gradients.

    They stand at the positions that predict the targets, which are in the same documents; elsewhere is 0.
    """
    targets = _targets(labels)
    known = (targets != IGNORE_INDEX).float()
    if weights is not None:
        known *= torch.nn.functional.pad(weights[:, 1:], (0, 1)).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    blocks = zip(torch.split(flat, BLOCK), torch.split(targets, BLOCK))
    losses = [
        cross_entropy(block.float(), wanted, ignore_index=IGNORE_INDEX, reduction="none")
        for block, wanted in blocks
    ]
    return torch.cat(losses) * known, known


def _targets(labels: torch.Tensor) -> torch.Tensor:
    """Return what each position predicts, int64 `[rows * width]`; a row's last position predicts nothing."""
    # Labels move instead of logits, which are the large ones.
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)


def _block_sum(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return (
        cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none") * weights
    ).sum()


# Losses by kernels that take hidden states and the head's weight, so that no logits stand in memory.

FUSED = {"liger": "liger-kernel", "cut": "cut-cross-entropy"}
"""Packages of these kernels, by their names in settings, in the order in which "auto" tries them."""
LossKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Takes hidden states `[rows, hidden]`, weight, bias and targets `[rows]`; returns the sum of losses."""


def kernel_of(name: str, device: torch.device) -> LossKernel:
    """Return a kernel; raises ImportError where its package isn't installed."""
    if name == "liger":
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            LigerFusedLinearCrossEntropyLoss,
        )

        loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum")
        return lambda hidden, weight, bias, targets: loss(weight, hidden, targets, bias)
    from cut_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        linear_cross_entropy,
    )

    given: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "reduction": "sum", "impl": "cce"}
    given |= {} if device.type == "cuda" else {"impl": "torch_compile"}
    return lambda hidden, weight, bias, targets: linear_cross_entropy(
        hidden, weight, targets, bias=bias, **given
    )


class FusedLoss:
    """Computes the sum of losses in the head of a model, which returns it in place of logits.

    In the head, FSDP2 has gathered its weight; and a loss that the model returns is one whose backward pass FSDP2 and
    DDP see.
    """

    def __init__(self, head: torch.nn.Linear, kernel: LossKernel) -> None:
        self._head, self._kernel = head, kernel

    def of(self, labels: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which the head returns the sum of the losses of labels, `[1, 1, 1]`."""
        targets = _targets(labels)

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            weight, kind = self._head.weight, hidden.device.type
            if torch.is_autocast_enabled(kind):
                hidden, weight = (each.to(torch.get_autocast_dtype(kind)) for each in (hidden, weight))
            rows = hidden.reshape(-1, hidden.shape[-1])
            return self._kernel(rows, weight, self._head.bias, targets).float().reshape(1, 1, 1)

        return replaced_forward(self._head, forward)


@contextmanager
def replaced_forward(
    module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Let a module compute something else for the time of a block."""
    module.__dict__["forward"] = forward  # of this module alone, before that of its class
    try:
        yield
    finally:
        del module.__dict__["forward"]


# Seconds of work: of the host, or of the GPU between two marks in its queue, which the host runs ahead of.


class Stopwatch:
    """Runs from when it is made until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._begin = self._mark()
        self._end: Any = None

    def stop(self) -> None:
        """End; on a GPU, where its queue gets to here."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return what passed; on a GPU, wait until its queue got there."""
        if self._is_gpu:
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1000
        return float(self._end - self._begin)

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
