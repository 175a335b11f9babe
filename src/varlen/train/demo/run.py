"""One training run in one process: one model, optimizer and loss for all methods, measured by the step."""

from __future__ import annotations

import numpy as np
import torch

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.report.figures import IsolationFigures
from varlen.train.demo.corpus import Documents
from varlen.train.demo.job import Job, StepRecord
from varlen.train.demo.layouts import ATTENTION, step_inputs
from varlen.train.demo.measure import current_bytes, now, peak_bytes, reset_peak
from varlen.train.demo.model import add_gradients, make_optimizer, mean_loss, small_llama
from varlen.train.demo.orders import Order, batches_as_packing, most_crowded_pack
from varlen.train.demo.proof import isolation_figures
from varlen.verify.isolation import check_isolation

_FEW_DOCUMENTS = 4
_WARM_UP_LENGTH = 32
_CHANGED_DOCUMENTS = 4


class Run:
    """A model in training; its steps may be asked for one by one, so that methods can take turns."""

    def __init__(self, job: Job) -> None:
        """Build model and optimizer, and run a tiny step, so that nothing is loaded on the clock."""
        torch.set_num_threads(job.settings.threads)
        self.job = job
        self.model = small_llama(job.settings, job.vocab_size, job.seed, ATTENTION[job.layout])
        self.optimizer = make_optimizer(self.model, job.settings.learning_rate)
        self._warm_up()
        reset_peak()
        self._start_bytes = current_bytes()

    def step(self, step: int) -> StepRecord:
        """Train one step."""
        start = now()
        loss, tokens, targets, slots = self._accumulate(self.job.documents, self.job.order, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepRecord(
            loss=loss, num_tokens=tokens, num_targets=targets, num_slots=slots, seconds=now() - start
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

    def _accumulate(self, documents: Documents, order: Order, step: int) -> tuple[float, int, int, int]:
        """Lay out a step and add its gradients."""
        inputs = step_inputs(self.job.layout, self.model, documents, order, step)
        loss = add_gradients(self.model, inputs.arguments, inputs.labels, inputs.num_targets)
        return loss, inputs.num_tokens, inputs.num_targets, inputs.num_slots

    def _warm_up(self) -> None:
        """Compile kernels and start threads on a few tokens; the weights stay as they were drawn."""
        documents = self._few_documents()
        self._accumulate(documents, _one_batch(documents, _WARM_UP_LENGTH), 0)
        self.optimizer.zero_grad()

    def _few_documents(self) -> Documents:
        """Return the first documents of the run."""
        return self.job.documents.take(np.arange(min(_FEW_DOCUMENTS, len(self.job.documents.lengths))))


def _one_batch(documents: Documents, max_length: int) -> Order:
    lengths = documents.lengths
    packing = batches_as_packing(lengths, np.arange(len(lengths))[None], max_length)
    return Order(packing=packing, step_offsets=np.array([0, 1]))
