"""Refuse settings of a Trainer and a loader that contradict each other; scale NEFTune's noise by document."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, get_args

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from varlen.adapters.hf.mixing import is_bidirectional
from varlen.adapters.hf.model import shifts_labels, text_config, unwrap
from varlen.adapters.peers import check_processes
from varlen.batch.packed import LossWeighting, PackedBatch
from varlen.errors import ModelError, SettingError
from varlen.feed.loader import PackedLoader

BEFORE_DATASET = 3  # positional arguments of a Trainer before `train_dataset`


def checked_loader(loader: object, trainer: str) -> PackedLoader:
    """Return the loader; raise if there is none, or it is no PackedLoader."""
    if loader is None:
        raise SettingError(
            f"{trainer} trains on train_loader, and none was given; make one of the same data: "
            "train_loader=varlen.adapters.hf.loader_for(args, data, tokenizer, capacity=4096)"
        )
    if not isinstance(loader, PackedLoader):
        raise SettingError(f"train_loader must be a PackedLoader, got {type(loader).__name__}")
    return loader


def check_train_dataset(args: Sequence[Any], rest: Mapping[str, Any]) -> None:
    """Refuse a data set to train on beside the loader, of which nothing would be read."""
    given = args[BEFORE_DATASET] if len(args) > BEFORE_DATASET else rest.get("train_dataset")
    if given is not None and rest.get("train_loader") is not None:
        raise SettingError(
            f"a train_dataset ({type(given).__name__}) was given beside train_loader, and nothing of it would be "
            "trained on; leave it out, or make it the source of the loader"
        )


def check_evaluation(data: Any) -> None:
    """Refuse a loader to evaluate on."""
    if any(isinstance(one, PackedLoader) for one in (data.values() if isinstance(data, Mapping) else [data])):
        raise SettingError(
            "eval_dataset is a PackedLoader, and a Trainer evaluates on data sets; pass one, and "
            "hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True) as data_collator"
        )


def check_weighting(weighting: Any) -> LossWeighting:
    """Return a weighting that a loader's batches can have: "pair" needs groups."""
    accepted = [name for name in get_args(LossWeighting) if name != "pair"]
    if weighting not in accepted:
        why = ", which needs groups of documents, and the loader gives none" if weighting == "pair" else ""
        raise SettingError(f"loss_weighting must be one of {', '.join(accepted)}; got {weighting!r}{why}")
    checked: LossWeighting = weighting
    return checked


def check_settings(trainer: Any) -> None:
    """Refuse a Trainer and a loader whose settings contradict each other."""
    args, loader = trainer.args, trainer.train_loader
    check_weighting(trainer.loss_weighting)
    _check_ranks(trainer, loader)
    if args.gradient_accumulation_steps != loader.micro_batches:
        raise SettingError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps:,}, but the loader gives each rank "
            f"{loader.micro_batches:,} batches per step; pass gradient_accumulation_steps={loader.micro_batches}, or "
            "another micro_batch_size to the loader"
        )
    epochs = loader.settings.epochs
    if args.max_steps <= 0 and epochs is not None and args.num_train_epochs > epochs:
        raise SettingError(
            f"num_train_epochs={args.num_train_epochs:g}, but the loader ends after epochs={epochs:,}; pass "
            f"num_train_epochs={epochs}, or epochs={math.ceil(args.num_train_epochs)} to the loader"
        )
    if (
        trainer.label_smoother is not None
        and "num_items_in_batch" not in signature(LabelSmoother.__call__).parameters
    ):
        raise SettingError(
            "label_smoothing_factor takes the mean over each batch in this transformers, not over the targets of a "
            "step; install a later one, or leave it out"
        )
    if args.auto_find_batch_size:
        raise SettingError(
            "auto_find_batch_size=True makes batches smaller where memory ends, but the loader's are made already; "
            "leave it out, and pass a smaller capacity to the loader"
        )


def _check_ranks(trainer: Any, loader: PackedLoader) -> None:
    """Refuse a loader made for other ranks than these."""
    args, (rank, world) = trainer.args, loader.settings.ranks
    check_processes(trainer.accelerator.num_processes)
    if trainer.get_cp_size() * trainer.get_sp_size() > 1:
        raise SettingError(
            "context and sequence parallelism cut the rows of a batch, which transformers does without regard to "
            "documents; use data and tensor parallelism"
        )
    if args.n_gpu > 1:
        raise SettingError(
            f"one process drives {args.n_gpu} GPUs, which cuts batches without regard to documents; launch a "
            "process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    tensor_ranks = trainer.get_tp_size()
    replicas = trainer.accelerator.num_processes // tensor_ranks
    wrong_rank = tensor_ranks == 1 and rank != trainer.accelerator.process_index
    if world != replicas or wrong_rank:
        raise SettingError(
            f"the loader is that of rank {rank:,} of {world:,}, but this is process "
            f"{trainer.accelerator.process_index:,} of {trainer.accelerator.num_processes:,} ({replicas:,} with "
            "different data), so documents would be trained on twice or never; pass dp_rank and dp_world_size of "
            "this process to the loader"
        )
    if replicas > 1 and not args.average_tokens_across_devices:
        raise SettingError(
            "average_tokens_across_devices=False gives every rank's mean the same weight, however many targets it "
            "has; leave it True"
        )


def check_head(trainer: Any) -> None:
    """Refuse a model whose loss isn't that of the next token, or whose tokens see it."""
    if not shifts_labels(trainer.model) or is_bidirectional(trainer.model):
        raise SettingError(
            f"{type(unwrap(trainer.model)).__name__} has no loss of the next token, or its tokens see it, and next "
            "tokens are trained here; take a causal model with a language modelling head, or a loop of your own"
        )


def check_own_loss(trainer: Any) -> None:
    """Refuse what the weighted loss doesn't compute."""
    for name, asked in (
        ("label_smoothing_factor", trainer.label_smoother is not None),
        ("compute_loss_func", trainer.compute_loss_func is not None),
        ("output_router_logits", getattr(text_config(trainer.model), "output_router_logits", False)),
    ):
        if asked:
            raise SettingError(f"{name} changes the loss, and so does {_weighing(trainer)}; leave {name} out")
    if not trainer.model_accepts_loss_kwargs:
        check_scaling(f"{type(trainer.model).__name__} takes no num_items_in_batch")


def _weighing(trainer: Any) -> str:
    """Return why a trainer weighs targets itself."""
    if trainer.loss_weighting != "token":
        return f"loss_weighting={trainer.loss_weighting!r}"
    if trainer.train_loader.has_weights:
        return "row_weights=True of the loader's data"
    return "a model that takes no num_items_in_batch"


def check_scaling(reason: str) -> None:
    """Refuse a version of transformers that always divides the loss by the number of batches in a step."""
    if not hasattr(Trainer, "loss_is_scaled_for_ga"):
        raise SettingError(
            f"{reason}, and this transformers would divide its loss once more; install transformers 5.19 or later"
        )


# NEFTune's noise in packed rows, scaled by each document's own length.
#
# NEFTune adds uniform noise of at most `alpha / sqrt(length * width)` to embedded tokens. transformers takes
# the length of the row, so that in a row of many documents every one gets too little.

_SHARES = "varlen_neftune_shares"


@contextlib.contextmanager
def noise_of_documents(trainer: Any, batch: PackedBatch) -> Iterator[None]:
    """Within this context, scale a Trainer's NEFTune noise by the lengths of the batch's documents."""
    embedding = _noisy(trainer)
    if embedding is None:
        yield
        return
    setattr(embedding, _SHARES, shares(batch))
    try:
        yield
    finally:
        delattr(embedding, _SHARES)


def shares(batch: PackedBatch) -> torch.Tensor:
    """Return float32 `[rows, width]`: one over the root of the length of each token's document, 0 at padding."""
    tensors = batch.to_torch()
    positions, segments = tensors.position_ids, tensors.segment_ids
    found = torch.zeros(segments.shape, dtype=torch.float32, device=segments.device)
    is_real = segments >= 0
    begins = (positions == 0) & is_real
    lengths = tensors.document_lengths.to(segments.device, torch.int64)
    numbers = begins.flatten().cumsum(0).view(segments.shape) - 1
    found[is_real] = lengths.to(torch.float32)[numbers[is_real]].rsqrt()
    return found


def _noisy(trainer: Any) -> Any:
    """Return the embedding that has transformers' NEFTune hook, replaced by ours; None without noise."""
    if getattr(trainer, "neftune_noise_alpha", None) is None:
        return None
    handle = getattr(trainer, "neftune_hook_handle", None)
    if handle is None:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    embedding = next((each for each in model.modules() if hasattr(each, "neftune_noise_alpha")), None)
    if embedding is None:
        return None
    if not getattr(handle, "is_varlens", False):
        handle.remove()
        handle = embedding.register_forward_hook(_add_noise)
        handle.is_varlens = True
        trainer.neftune_hook_handle = handle
    return embedding


def _add_noise(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    """Add noise to embedded tokens; without a batch's shares, as transformers does."""
    if not module.training:
        return output
    shares = getattr(module, _SHARES, None)
    if shares is None:
        of_row = module.neftune_noise_alpha / (output.size(1) * output.size(2)) ** 0.5
        return output + torch.zeros_like(output).uniform_(-of_row, of_row)
    if shares.shape != output.shape[:2]:
        raise ModelError(
            f"NEFTune's noise is for {tuple(shares.shape)} tokens of a packed batch, and {tuple(output.shape[:2])} "
            "were embedded; leave neftune_noise_alpha out"
        )
    most: torch.Tensor = module.neftune_noise_alpha / output.size(2) ** 0.5 * shares.to(output.device)
    noise = torch.zeros_like(output).uniform_(-1, 1) * most[..., None].to(output.dtype)
    noisy: torch.Tensor = output + noise
    return noisy
