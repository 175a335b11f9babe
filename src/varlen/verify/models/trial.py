"""Trial runs of one model on one batch: change a document, run the model, and measure which other outputs change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from varlen.adapters import hf
from varlen.adapters.hf.model import model_inside
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, Layout, PackedBatch
from varlen.errors import ModelError, described
from varlen.pack.api import pack

Inputs = Callable[[PackedBatch, Any], dict[str, Any]]
BoolArray = npt.NDArray[np.bool_]


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Run a model in eval mode and without gradients, and restore modes and random states afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    device = hf.unwrap(model_inside(model)).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Return the logits of a model's outputs: a tensor, a named output or an item of a tuple; None without any."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if named is None and type(outputs) in (tuple, list):  # the first item may be a loss
        named = next((each for each in outputs if torch.is_tensor(each) and each.ndim == 3), None)
    return named


class Trial:
    """A batch whose documents can be changed, and the model's outputs for it.

    Every real token belongs to the segment `owner[row, column]`, numbered over the whole batch in the order
    of `batch.document_ids`; `owner` is -1 for padding.
    """

    def __init__(self, model: Any, batch: PackedBatch, inputs: Inputs, seed: int) -> None:
        self.called = model
        self.model = model_inside(model)
        self.batch = batch
        self.inputs = inputs
        self.vocabulary = min(hf.vocabulary_size(self.model), hf.logits_size(self.model))
        self.rng = np.random.default_rng(seed)
        self.tokens = np.asarray(torch.as_tensor(batch.input_ids).cpu()).astype(np.int64)
        segments = np.asarray(torch.as_tensor(batch.segment_ids).cpu())
        starts = (segments >= 0) & (np.diff(segments, axis=1, prepend=-2) != 0)
        self.owner = np.where(segments >= 0, starts.ravel().cumsum().reshape(segments.shape) - 1, -1)

    def choose(self, most: int) -> list[int]:
        """Return at most `most` documents to change, spread evenly, including the first and the last."""
        count = int(self.owner.max()) + 1
        return sorted({int(i) for i in np.linspace(0, count - 1, min(most, count)).round()})

    def followed(self) -> int | None:
        """Return the first document of the first row with several documents; None if there is no such row."""
        for row in self.owner:
            # Slots are rounded up, so there may be padding between documents.
            documents = np.unique(row[row >= 0])
            if len(documents) > 1:
                return int(documents[0])
        return None

    def changed(self, document: int) -> PackedBatch:
        """Return the batch with every token of one document replaced by another token."""
        tokens = self.tokens.copy()
        chosen = self.owner == document
        shifts = self.rng.integers(1, max(2, self.vocabulary), int(chosen.sum()))
        tokens[chosen] = (tokens[chosen] + shifts) % self.vocabulary
        ids: Any = tokens.astype(np.int32)
        return self.batch.replace(
            input_ids=torch.as_tensor(tokens) if torch.is_tensor(self.batch.input_ids) else ids
        )

    def logits(self, batch: PackedBatch, inputs: Inputs | None = None) -> torch.Tensor:
        """Run the model; `[rows, width, vocabulary]`."""
        logits = self.predict((inputs or self.inputs)(batch, self.model))
        if logits.shape[:2] != self.owner.shape:
            raise ModelError(
                f"the batch has {list(self.owner.shape)} tokens, and the model returned logits "
                f"{list(logits.shape)}; the check needs the logits of every token of the batch, padding included: "
                "inputs= must pass input_ids of the batch's shape (vl.pack with the capacity of your own rows)"
            )
        if not bool(logits[self.where(self.owner >= 0)].isfinite().all()):
            raise ModelError(
                "the model's logits aren't finite, so nothing can be compared; check its weights and dtype"
            )
        return logits

    def predict(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Call the model, and return its logits; `[rows, width, vocabulary]`.

        Of models that predict no tokens, these are made of classes or hidden states, by a fixed random matrix.
        """
        outputs = self.call(arguments)
        logits = logits_of(outputs)
        if logits is None:
            logits = getattr(outputs, "last_hidden_state", None)
        if logits is None or logits.ndim != 3:
            raise ModelError(
                f"{type(hf.unwrap(self.model)).__name__} returns neither logits nor hidden states for each token; "
                "pass the model with a head of tokens, such as AutoModelForCausalLM makes it, or without one"
            )
        if (size := logits.shape[-1]) >= self.vocabulary:
            return logits
        spread = torch.randn(size, self.vocabulary, generator=torch.Generator().manual_seed(0)) * size**-0.5
        wide: torch.Tensor = logits @ spread.to(logits)
        return wide

    def call(self, arguments: dict[str, Any], **more: Any) -> Any:
        """Call the model without labels: its own loss is computed in float32, and isn't needed."""
        inputs = {name: value for name, value in arguments.items() if name not in ("labels", "shift_labels")}
        if self.called is not self.model and not hf.accepts(self.called, "use_cache"):
            inputs.pop("use_cache", None)  # no module of one's own turns a cache on for that
        try:
            return self.called(**inputs, **more)
        except ModelError:
            raise
        except Exception as error:
            # PyTorch raises NotImplementedError if a kernel has no backward.
            if str(error) and isinstance(error, NotImplementedError):
                raise
            if str(error) and isinstance(error, ValueError):  # the model's own refusal, with a message
                raise ModelError(described(error, whole=True)) from error
            raise ModelError(
                f"{type(hf.unwrap(self.called)).__name__} fails in its own forward: {described(error, kind=True)}"
            ) from error

    def where(self, chosen: BoolArray) -> torch.Tensor:
        """Return a selection of tokens as a torch mask on the model's device.

        `chosen`: `[rows, width]`, or any other shape.
        """
        return torch.as_tensor(chosen, device=hf.unwrap(self.model).device)

    def moved(self, before: torch.Tensor, after: torch.Tensor, chosen: BoolArray) -> float:
        """Return the largest change over the chosen tokens, relative to the largest logit before.

        Args:
            before: `[rows, width, vocabulary]`.
            chosen: `[rows, width]`.
        """
        mask = self.where(chosen)
        if not bool(mask.any()):
            return 0.0
        real = before[self.where(self.owner >= 0)].abs().max().double()
        return float((after[mask].double() - before[mask].double()).abs().max() / real.clamp(min=1e-300))

    def others(self, document: int) -> BoolArray:
        """Return the tokens of all other documents, padding left out."""
        others: BoolArray = (self.owner >= 0) & (self.owner != document)
        return others

    def attention_across(self) -> float | None:
        """Return the largest attention weight from a document to another or to padding; None if none is returned."""
        owner, weights = self.owner, self.attentions(self.inputs)
        if not weights:
            return None
        across = (owner[:, :, None] != owner[:, None, :]) & (owner >= 0)[:, :, None]
        outside = self.where(across)[:, None]
        return max(float(w.abs().masked_fill(~outside, 0).max()) for w in weights)

    def attentions(self, inputs: Inputs) -> list[torch.Tensor]:
        """Return the attention weights of all layers that return them, `[rows, heads, width, width]` each."""
        if not hf.accepts(self.called, "output_attentions"):
            return []
        outputs = self.call(inputs(self.batch, self.model), output_attentions=True)
        given = [w for w in getattr(outputs, "attentions", None) or () if w is not None]
        # If keys are compressed, or others are added, columns don't correspond to tokens.
        return [w for w in given if w.ndim == 4 and w.shape[-2:] == (self.owner.shape[1],) * 2]

    def waver(self, before: torch.Tensor) -> float:
        """Return the change of the logits if the same batch runs again (`before`: `[rows, width, vocabulary]`)."""
        return self.moved(before, self.logits(self.batch), self.owner >= 0)

    def moved_by_padding(self, before: torch.Tensor) -> float:
        """Return the change of documents' logits if padding is changed; 0.0 without (`before` as in `waver`)."""
        if not (self.owner < 0).any():
            return 0.0
        return self.moved(before, self.logits(self.changed(-1)), self.owner >= 0)

    def solo(self, document: int) -> torch.Tensor:
        """Return the logits of one document in a call without other documents; `[length, vocabulary]`."""
        ids = torch.as_tensor(self.tokens[self.owner == document])[None]
        return self._plain(ids)[0]

    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows with one document each."""
        return self.predict(hf.plain_inputs(ids.to(hf.unwrap(self.model).device), self.model))

    def row_coupling(self, tolerance: float) -> float:
        """Return the change of a document's logits if all others, of equal length in separate rows, are changed.

        If rows affect each other without packing, packing isn't the cause. Compares the first and the last row, as
        full experts drop the last tokens; and the last row with a run without the others, as their number may matter.
        """
        rows, width = max(2, len(self.owner)), int(np.bincount(self.owner[self.owner >= 0]).max())
        tokens = torch.as_tensor(self.rng.integers(0, self.vocabulary, (rows, width)))
        before = self._plain(tokens).double()
        largest = before.abs().max().clamp(min=1e-300)

        def moved(row: int, after: torch.Tensor) -> float:
            return float((after.double() - before[row]).abs().max() / largest)

        changes = []
        for row, others in ((0, slice(1, None)), (rows - 1, slice(0, -1))):
            # A mean over a row hardly changes with other random tokens, but does with a row of one repeated token.
            shifted, alike = tokens.clone(), tokens.clone()
            shifted[others] = (shifted[others] + 1) % self.vocabulary
            alike[others] = alike[others, :1]
            changes += [moved(row, self._plain(ids)[row]) for ids in (shifted, alike)]
        without_others = moved(rows - 1, self._plain(tokens[-1:])[0])
        return max(*changes, without_others if without_others > tolerance else 0.0)

    def loss(self, logits: torch.Tensor, document: int) -> tuple[float, int]:
        """Return the summed loss of one document's targets, in float64, and its number of targets.

        `logits`: `[length, vocabulary]`, of this document's tokens.
        """
        labels = torch.as_tensor(self.batch.labels).cpu().long()[torch.as_tensor(self.owner == document)][1:]
        total = cross_entropy(logits[:-1].double().cpu(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return float(total), int((labels != IGNORE_INDEX).sum())


# A small packed batch of random tokens, for checks that need any documents rather than real ones.

LENGTHS = (9, 21, 1, 13, 30, 6, 2, 64, 17)
"""Includes documents of one token and of two, one that is split, and rows that end in padding."""
_SPLIT = 7  # this document is made longer than a row at any capacity; its rest shares a row
CAPACITY = 52


def sample_batch(
    vocabulary_size: int, seed: int = 0, *, layout: Layout = "rows", capacity: int = CAPACITY
) -> PackedBatch:
    """Return documents in a few rows, their tokens drawn from the whole vocabulary."""
    rng = np.random.default_rng(seed)
    lengths = [max(n, capacity + 12) if i == _SPLIT else n for i, n in enumerate(LENGTHS)]
    documents = [rng.integers(0, vocabulary_size, length).astype(np.int32) for length in lengths]
    return collate(
        documents, pack(lengths, capacity=capacity, method="next_fit", overlong="split"), layout=layout
    )
