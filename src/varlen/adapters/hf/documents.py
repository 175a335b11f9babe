"""One answer a document: pooled hidden states, and the outputs of heads and poolers as if each document were a row.

    hidden states [rows, width, …] ──► pool: a vector a document ──► the model's own head, rows of one token

A head's own code runs unchanged: of a row of one token, it pools that token, whatever its way of pooling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch

from varlen.adapters.hf.head_trial import EVEN_ROWS, LAST_REAL, head_pooling, pools_first_token
from varlen.adapters.hf.inputs import hidden_inputs
from varlen.adapters.hf.mixing import check_family, check_trunk
from varlen.adapters.hf.model import accepts, text_config, text_decoder, unwrap
from varlen.arguments import as_choice
from varlen.batch.packed import IGNORE_INDEX, PackedBatch, as_tensor, on_host
from varlen.errors import DocumentsError, ModelError
from varlen.types import IntArray

How = Literal["mean", "first", "last", "max", "weighted_mean"]
_REDUCED = {"mean": "mean", "max": "max", "weighted_mean": "sum"}


def pool(hidden: torch.Tensor, batch: PackedBatch, how: How = "mean") -> torch.Tensor:
    """Return a vector for each document of a batch, of the values of its own tokens alone.

    Sums are formed in float32, or float64, and rounded once. Differentiable, without padding; with a batch in host
    memory nothing waits for a GPU.

    Args:
        hidden: `[rows, width, ...]`, of any floating-point dtype and device: what a model computes of the batch.
        batch: the batch, in either layout; best in host memory, where boundaries are read.
        how: "mean" of all tokens; "first" ([CLS], <s>) or "last" of them; "max", for each number apart;
            "weighted_mean" with weights 1, 2, 3 … from the first token on (SGPT, Muennighoff 2022).

    Returns:
        `[num_segments, ...]`, in the dtype of `hidden`, in the order of `batch.document_ids`: pieces of a document
        that was cut are pooled apart.

    Raises:
        DocumentsError: not a PackedBatch, or hidden states of another shape.
        SettingError: an unknown way to pool.

    Cost: one pass over the hidden states, of which all ways but "first" and "last" make a copy in float32.

    >>> import torch, varlen as vl
    >>> batch = vl.collate([[11, 12, 13], [21, 22]], vl.pack([3, 2], capacity=6))
    >>> hidden = torch.arange(6.0).view(1, 6, 1)
    >>> pool(hidden, batch).flatten().tolist(), pool(hidden, batch, "last").flatten().tolist()
    ([1.0, 3.5], [2.0, 4.0])
    """
    as_choice(how, "how", get_args(How))
    if not isinstance(batch, PackedBatch):
        raise DocumentsError(
            f"pool takes the PackedBatch that hidden states were computed of, and was given {type(batch).__name__}"
        )
    if not torch.is_tensor(hidden) or tuple(hidden.shape[:2]) != tuple(batch.input_ids.shape):
        seen = list(hidden.shape) if torch.is_tensor(hidden) else type(hidden).__name__
        raise DocumentsError(
            f"hidden states must be a tensor {[*map(int, batch.input_ids.shape), '...']} for this batch, got {seen}"
        )
    flat, begins = hidden.flatten(0, 1), batch.segment_begins
    lengths = on_host(batch.document_lengths).astype(np.int64)
    if how in ("first", "last"):
        return _rows(flat, begins if how == "first" else begins + lengths - 1)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    edges = np.zeros(2 * begins.size + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2], edges[-1] = begins, begins + lengths, len(flat)
    spans = _on_device(np.diff(edges), hidden.device)  # padding, document, padding, document, ..., padding
    sizes = [-1] + [1] * (wide.ndim - 1)
    if how == "weighted_mean":
        weights = as_tensor(batch.position_ids, hidden.device, widen=True).flatten() + 1
        wide = wide * weights.view(sizes)
    found = torch.segment_reduce(wide, _REDUCED[how], lengths=spans, unsafe=True)[1::2]
    if how == "weighted_mean":
        found = found / _on_device(lengths * (lengths + 1) / 2, hidden.device).view(sizes)
    return found.to(hidden.dtype)


def document_outputs(model: Any, batch: PackedBatch) -> Any:
    """Call a model for one answer a document, where it would give one a row: as if each document were a row alone.

    The packed batch runs through the model's layers; then each document's hidden states are pooled as the model's
    head pools a row's (in transformers: the first token, the last that isn't `config.pad_token_id`, or the mean), and
    the head's own code runs on the result, dropout and loss included. A compiled model runs uncompiled.

    Args:
        model: a transformers model with a head that pools (sequence classification, regression, reward), or without
            one; bare or in DDP, FSDP or PEFT.
        batch: in either layout, best in host memory; with `document_labels` the head returns its own loss of them.

    Returns:
        What the model returns. Of a head, `logits` `[num_segments, labels]` in the order of `batch.document_ids`, and
        `loss`, which is 0, with gradients of 0, where no document has a label; of a model without one,
        `last_hidden_state` `[rows, width, hidden]`, as the batch is, for `pool`, and `pooler_output`
        `[num_segments, hidden]` where it has a pooler.

    Raises:
        DocumentsError: not a PackedBatch, or labels that are no classes of this head.
        ModelError: no arguments would keep this model's documents apart, or its head pools in a way of its own.

    Cost: one call of the model without padding.
    """
    if not isinstance(batch, PackedBatch):
        raise DocumentsError(
            f"document_outputs takes a PackedBatch, as vl.collate returns it, and was given {type(batch).__name__}"
        )
    model = getattr(model, "_orig_mod", model)  # compiled, each batch would be a graph of its own
    base = unwrap(model)
    text_config(base)  # refuses what isn't transformers'
    trunk = base.base_model
    if trunk is base:
        return _without_head(model, base, batch)
    check_trunk(model, trunk)
    how, inputs = head_pooling(base, trunk), _inputs(batch, trunk)
    labels, has_label = _labels(batch, base)
    if getattr(text_config(base), "pad_token_id", None) is None and how == "last" and batch.num_segments > 1:
        raise ModelError(
            f"{type(base).__name__} takes several documents only if its configuration has a token of padding: set "
            "model.config.pad_token_id, to the tokenizer's"
        )
    device = inputs["input_ids"].device
    one = torch.zeros((batch.num_segments, 1), dtype=torch.long, device=device)

    def pooled(*_: Any, **__: Any) -> Any:
        found = plain(**inputs)
        hidden = found.last_hidden_state
        row = _last_real(hidden, batch, base) if how == LAST_REAL else pool(hidden, batch, how)  # type: ignore[arg-type]
        fields = {"last_hidden_state": row[:, None], "pooler_output": _pooler_output(trunk, hidden, batch)}
        return type(found)(**{name: value for name, value in fields.items() if value is not None})

    with _forward_of(trunk, pooled) as plain:
        outputs = model(input_ids=one, **labels)
    if labels and not has_label and getattr(outputs, "loss", None) is not None:
        outputs["loss"] = (outputs.logits.sum() * 0).to(outputs.loss.dtype)  # the head's mean is 0/0
    return outputs


def _without_head(model: Any, base: Any, batch: PackedBatch) -> Any:
    """Return the outputs of a model without a head, with its pooler's for each document."""
    if getattr(base, "pooler", None) is None or text_decoder(base) is not base:
        check_family(model)
    else:
        check_trunk(model, base)

    inputs = _inputs(batch, base)

    def with_pooler(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named)
        if getattr(base, "pooler", None) is not None:
            found["pooler_output"] = _pooler_output(base, found.last_hidden_state, batch)
        return found

    with _forward_of(base, with_pooler) as plain:
        return model(**inputs)


def _inputs(batch: PackedBatch, trunk: Any) -> dict[str, Any]:
    """Return the arguments for a model's layers, without labels."""
    asked = {"return_dict": True} if accepts(trunk, "return_dict") else {}
    return hidden_inputs(batch, trunk) | asked


@contextlib.contextmanager
def _forward_of(module: Any, forward: Any) -> Iterator[Any]:
    """Within this context, a module's forward is another one; yields its own.

    So the call goes through all that wraps the model, as those wrappers expect.
    """
    before, own = vars(module).get("forward"), module.forward
    module.forward = forward
    try:
        yield own
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _pooler_output(trunk: Any, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor | None:
    """Return what a model's pooler makes of each document, `[num_segments, width]`; None without a pooler."""
    pooler = getattr(trunk, "pooler", None)
    if pooler is None:
        return None
    first = pool(hidden, batch, "first")
    if isinstance(pooler, torch.nn.Linear) and hasattr(trunk, "pooler_activation"):
        found: torch.Tensor = trunk.pooler_activation(pooler(first))  # ALBERT picks the token itself
        return found
    if not pools_first_token(pooler, hidden.shape[-1]):
        raise ModelError(
            f"the pooler of {type(trunk).__name__} ({type(pooler).__name__}) pools otherwise than by a row's first "
            f"token; {EVEN_ROWS}, or make the model with add_pooling_layer=False"
        )
    output: torch.Tensor = pooler(first[:, None])
    return output


def _last_real(hidden: torch.Tensor, batch: PackedBatch, base: Any) -> torch.Tensor:
    """Return the hidden state of each document's last token that isn't padding, as transformers looks for it.

    A document of such tokens alone has that of its first one.
    """
    begins, lengths = batch.segment_begins, on_host(batch.document_lengths).astype(np.int64)
    ids = on_host(batch.input_ids).reshape(-1)
    is_real = (ids != text_config(base).pad_token_id) & (on_host(batch.segment_ids).reshape(-1) >= 0)
    last = np.maximum.accumulate(np.where(is_real, np.arange(ids.size), -1))[begins + lengths - 1]
    return _rows(hidden.flatten(0, 1), np.maximum(last, begins))


def _rows(flat: torch.Tensor, at: IntArray) -> torch.Tensor:
    return flat.index_select(0, _on_device(at, flat.device))


def _on_device(values: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _labels(batch: PackedBatch, base: Any) -> tuple[dict[str, Any], bool]:
    """Return the labels of a batch's documents as a head takes them, and whether any counts, after a look at them."""
    labels = batch.document_labels
    if labels is None:
        return {}, False
    count, name = int(base.config.num_labels), type(base).__name__
    on_gpu = torch.is_tensor(labels) and labels.device.type != "cpu"
    found = as_tensor(labels, None, widen=False)
    if found.ndim == 2 and found.shape[1] != count:
        raise DocumentsError(
            f"document_labels have {found.shape[1]:,} numbers a document, and {name} answers with {count:,} "
            "(config.num_labels)"
        )
    if found.ndim == 1 and found.is_floating_point() and count > 1:
        raise DocumentsError(
            f"document_labels are {found.dtype}, and {name} tells {count:,} classes apart (config.num_labels); give "
            "classes as whole numbers, or a row of numbers for each document"
        )
    is_class = not found.is_floating_point() and count > 1
    if is_class and not on_gpu:  # there, looking would wait for the device
        wrong = (found != IGNORE_INDEX) & ((found < 0) | (found >= count))
        if bool(wrong.any()):
            at = int(wrong.long().argmax())
            raise DocumentsError(
                f"document {int(batch.document_ids[at]):,} has class {int(found[at]):,} ({int(wrong.sum()):,} of the "
                f"batch's {len(found):,} are out of range), and {name} has classes 0 to {count - 1:,}; -100 is "
                "for documents without one, and config.num_labels sets how many there are"
            )
    has_label = found.numel() > 0 and not (is_class and bool((found == IGNORE_INDEX).all()))
    if not is_class:
        found = found.to(base.dtype)
    return {"labels": found.to(base.device, non_blocking=True)}, has_label
