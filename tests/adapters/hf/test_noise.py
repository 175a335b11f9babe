"""NEFTune's noise is the document's: as much as it has alone, whatever shares its row."""

from typing import Any

import pytest
import torch
from tests.support.hf_models import documents
from tests.support.trainers import CAPACITY, arguments, packed_loader, store_in, tiny_llama, trained
from transformers.integrations.neftune import neftune_post_forward_hook

import varlen as vl
from varlen.adapters.hf.trainer import PackedTrainer
from varlen.adapters.hf.trainer_checks import _add_noise, shares
from varlen.adapters.trl.dpo import PackedDPOTrainer
from varlen.errors import ModelError

ALPHA, WIDTH = 7.0, 32


def noise_in(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What a hook adds to embedded tokens, from the same random state each time."""
    torch.manual_seed(3)
    noisy: torch.Tensor = module.train()(ids)
    return (noisy - module.eval()(ids)).detach()


def test_the_share_of_a_token_is_that_of_its_document_in_both_layouts():
    lengths = (3, 1, 5, 2)
    for layout in ("rows", "flat"):
        batch = vl.collate(documents(lengths), vl.pack(lengths, 6, "next_fit"), layout=layout)  # type: ignore[arg-type]
        found, segments = shares(batch), batch.to_torch().segment_ids
        wanted = torch.tensor([length**-0.5 for length in lengths for _ in range(length)])

        assert torch.allclose(found[segments >= 0], wanted)
        assert not found[segments < 0].any()


def test_a_document_alone_has_transformers_noise_and_no_less_in_a_row():
    theirs, ours = torch.nn.Embedding(97, WIDTH), torch.nn.Embedding(97, WIDTH)
    ours.weight = theirs.weight
    for module, hook in ((theirs, neftune_post_forward_hook), (ours, _add_noise)):
        module.neftune_noise_alpha = ALPHA  # type: ignore[assignment]
        module.register_forward_hook(hook)
    lengths = (4, 16, 1)
    batch = vl.collate(documents(lengths), vl.pack(lengths, 32, "next_fit"), layout="flat")
    ids = batch.to_torch().input_ids

    row = noise_in(theirs, ids)
    assert torch.allclose(noise_in(ours, ids), row, atol=1e-6)  # evaluation steps of others: as transformers
    ours.varlen_neftune_shares = shares(batch)  # type: ignore[assignment]
    packed = noise_in(ours, ids)

    start = 0
    for length in lengths:
        most = ALPHA / (length * WIDTH) ** 0.5
        here = packed[0, start : start + length].abs()
        assert 0.8 * most < float(here.max()) <= most * (1 + 1e-5)
        assert torch.allclose(
            packed[0, start : start + length],
            row[0, start : start + length] * (21 / length) ** 0.5,
            atol=1e-5,
        )
        start += length
    ours.varlen_neftune_shares = torch.ones(1, 3)  # type: ignore[assignment]
    with pytest.raises(ModelError, match="noise is for"):
        noise_in(ours, ids)


class Seen:
    """Writes down how large the noise is, for each token of a document's length."""

    def __init__(self, module: Any) -> None:
        self.scales: list[torch.Tensor] = []
        module.register_forward_pre_hook(self.look)

    def look(self, module: Any, _: Any) -> None:
        self.scales.append(getattr(module, "varlen_neftune_shares", None))


def test_a_trainer_with_a_loader_gives_every_step_the_noise_of_its_documents(tmp_path):
    model = tiny_llama()
    args = arguments(tmp_path, neftune_noise_alpha=ALPHA, max_steps=2)
    with packed_loader(args, store_in(tmp_path)) as loader:
        trainer = PackedTrainer(model=model, args=args, train_loader=loader)
        seen = Seen(model.get_input_embeddings())
        trainer.train()

    assert len(seen.scales) == 2 * args.gradient_accumulation_steps
    for scale in seen.scales:
        assert scale.shape[1] == CAPACITY
        assert float(scale[scale > 0].min()) >= CAPACITY**-0.5 * (1 - 1e-6)
        assert len(scale[scale > 0].unique()) > 1
    embedding = model.get_input_embeddings()
    assert not hasattr(embedding, "neftune_noise_alpha")
    assert not hasattr(embedding, "varlen_neftune_shares")
    assert not embedding._forward_hooks


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_dpo_has_the_noise_of_each_answer(tmp_path, monkeypatch):
    scales: list[torch.Tensor] = []

    def recorded(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        if module.training:
            scales.append(module.varlen_neftune_shares)
        return output

    monkeypatch.setattr("varlen.adapters.hf.trainer_checks._add_noise", recorded)
    trained(PackedDPOTrainer, tmp_path, attention="varlen", neftune_noise_alpha=ALPHA)

    assert scales
    assert all(len(scale.unique()) > 1 for scale in scales)
