"""One model and one batch under trial: change a document, run the model, and see what else moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, Layout, PackedBatch
from varlen.errors import ModelError, described
from varlen.pack.api import pack

Inputs = Callable[[PackedBatch, Any], dict[str, Any]]
BoolArray = npt.NDArray[np.bool_]


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Run a model in eval mode and without gradients, and leave modes and random states as they were."""
    modes = [(module, module.training) for module in model.modules()]
    device = hf.unwrap(model).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Return the logits among a model's outputs, by name, in a tuple or alone; None where there are none."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if named is None and type(outputs) in (tuple, list):  # a loss may stand in front
        named = next((each for each in outputs if torch.is_tensor(each) and each.ndim == 3), None)
    return named


class Trial:
    """A batch whose documents can be changed, and the model's answers to it.

    Every real token belongs to the segment `owner[row, column]`, numbered over the whole batch in the order
    of `batch.document_ids`; padding to -1.
    """

    def __init__(self, model: Any, batch: PackedBatch, inputs: Inputs, seed: int) -> None:
        self.model = model
        self.batch = batch
        self.inputs = inputs
        self.vocabulary = min(hf.vocabulary_size(model), hf.logits_size(model))
        self.rng = np.random.default_rng(seed)
        self.tokens = np.asarray(torch.as_tensor(batch.input_ids).cpu()).astype(np.int64)
        segments = np.asarray(torch.as_tensor(batch.segment_ids).cpu())
        starts = (segments >= 0) & (np.diff(segments, axis=1, prepend=-2) != 0)
        self.owner = np.where(segments >= 0, starts.ravel().cumsum().reshape(segments.shape) - 1, -1)

    def choose(self, most: int) -> list[int]:
        """Return the documents to change, spread evenly, first and last among them."""
        count = int(self.owner.max()) + 1
        return sorted({int(i) for i in np.linspace(0, count - 1, min(most, count)).round()})

    def followed(self) -> int | None:
        """Return the first document that another follows in its row; None where no row holds two."""
        for row in self.owner:
            documents = np.unique(row[row >= 0])  # padding may stand between them: slots are rounded up
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
                f"the model was given {list(self.owner.shape)} tokens and returned logits "
                f"{list(logits.shape)}; the check needs one row of logits for every token"
            )
        if not bool(logits[self.where(self.owner >= 0)].isfinite().all()):
            raise ModelError(
                "the model's logits aren't finite, so nothing can be compared; check its weights and dtype"
            )
        return logits

    def predict(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Call the model, and return its logits; `[rows, width, vocabulary]`."""
        logits = logits_of(self.call(arguments))
        name = type(hf.unwrap(self.model)).__name__
        if logits is None:
            raise ModelError(
                f"{name} returns no logits; pass the model with its head, such as AutoModelForCausalLM makes it"
            )
        if logits.shape[-1] < self.vocabulary:
            raise ModelError(
                f"{name} returns {logits.shape[-1]:,} logits for each token, and embeds {self.vocabulary:,} ids: it "
                "predicts no tokens; pass the model with the head of a language model"
            )
        return logits

    def call(self, arguments: dict[str, Any], **more: Any) -> Any:
        """Call the model without labels: its own loss is computed in float32, and isn't needed."""
        kept = {name: value for name, value in arguments.items() if name not in ("labels", "shift_labels")}
        try:
            return self.model(**kept, **more)
        except ModelError:
            raise
        except Exception as error:
            if str(error) and isinstance(
                error, NotImplementedError
            ):  # PyTorch's, where a kernel has no backward
                raise
            if str(error) and isinstance(error, ValueError):  # it refuses by a sentence of its own
                raise ModelError(described(error, whole=True)) from error
            raise ModelError(
                f"{type(hf.unwrap(self.model)).__name__} fails in its own forward: {described(error, kind=True)}"
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
        """Return the largest attention weight from a document to another or to padding; None where none is shown."""
        owner, weights = self.owner, self.attentions(self.inputs)
        if not weights:
            return None
        across = (owner[:, :, None] != owner[:, None, :]) & (owner >= 0)[:, :, None]
        outside = self.where(across)[:, None]
        return max(float(w.abs().masked_fill(~outside, 0).max()) for w in weights)

    def attentions(self, inputs: Inputs) -> list[torch.Tensor]:
        """Return the attention weights of all layers that show some, `[rows, heads, width, width]` each."""
        if not hf.accepts(self.model, "output_attentions"):
            return []
        outputs = self.call(inputs(self.batch, self.model), output_attentions=True)
        given = [w for w in getattr(outputs, "attentions", None) or () if w is not None]
        # Where keys are compressed or joined by others, columns are no tokens.
        return [w for w in given if w.ndim == 4 and w.shape[-2:] == (self.owner.shape[1],) * 2]

    def waver(self, before: torch.Tensor) -> float:
        """Return how far logits move when the same batch runs once more (`before`: `[rows, width, vocabulary]`)."""
        return self.moved(before, self.logits(self.batch), self.owner >= 0)

    def moved_by_padding(self, before: torch.Tensor) -> float:
        """Return how far documents move when padding is changed; 0.0 without (`before`: as of `waver`)."""
        if not (self.owner < 0).any():
            return 0.0
        return self.moved(before, self.logits(self.changed(-1)), self.owner >= 0)

    def alone(self, document: int) -> torch.Tensor:
        """Run one document by itself, in an ordinary causal call; `[length, vocabulary]`."""
        ids = torch.as_tensor(self.tokens[self.owner == document])[None]
        return self._plain(ids)[0]

    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows with one document each."""
        return self.predict(hf.plain_inputs(ids.to(hf.unwrap(self.model).device), self.model))

    def row_coupling(self, tolerance: float) -> float:
        """Return how far a document moves when all others, each just as long and in a row of its own, are changed.

        Where rows move each other without any packing, packing isn't to blame. The first row is looked at and the
        last, since experts that are full turn away whoever comes last; and the last without the others, whose number
        may be what matters.
        """
        rows, width = max(2, len(self.owner)), int(np.bincount(self.owner[self.owner >= 0]).max())
        tokens = torch.as_tensor(self.rng.integers(0, self.vocabulary, (rows, width)))
        before = self._plain(tokens).double()
        largest = before.abs().max().clamp(min=1e-300)

        def moved(row: int, after: torch.Tensor) -> float:
            return float((after.double() - before[row]).abs().max() / largest)

        found = []
        for row, others in ((0, slice(1, None)), (rows - 1, slice(0, -1))):
            # A mean hardly sees other random tokens; it does see rows of one token each.
            shifted, alike = tokens.clone(), tokens.clone()
            shifted[others] = (shifted[others] + 1) % self.vocabulary
            alike[others] = alike[others, :1]
            found += [moved(row, self._plain(ids)[row]) for ids in (shifted, alike)]
        alone = moved(rows - 1, self._plain(tokens[-1:])[0])
        return max(*found, alone if alone > tolerance else 0.0)

    def loss(self, logits: torch.Tensor, document: int) -> tuple[float, int]:
        """Return the summed loss of one document's targets, in float64, and how many targets it has.

        `logits`: `[length, vocabulary]`, of this document's tokens.
        """
        labels = torch.as_tensor(self.batch.labels).cpu().long()[torch.as_tensor(self.owner == document)][1:]
        total = cross_entropy(logits[:-1].double().cpu(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return float(total), int((labels != IGNORE_INDEX).sum())


# A small packed batch of random tokens, for checks that need any documents rather than real ones.

LENGTHS = (9, 21, 1, 13, 30, 6, 2, 64, 17)
"""Documents of one token and of two among them, one that is split, and rows that end in padding."""
_SPLIT = 7  # the document that is longer than a row, whatever the capacity; its rest shares a row
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
