"""A trainer that takes its data, steps and saves as torchtitan's does, for where torchtitan isn't installed.

It asks the data loader for the same things in the same order (release 0.3.0): `build` with ranks and sizes, all
batches of a step before the first is computed, valid tokens counted over all ranks, `state_dict` within a distributed
checkpoint. Its model makes its attention mask and its rotations from positions, as torchtitan's models do.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

IGNORE_INDEX = -100


@dataclass(kw_only=True)
class Training:
    """Sizes, by torchtitan's names."""

    local_batch_size: int = 1
    global_batch_size: int = -1
    seq_len: int = 256
    steps: int = 1000
    lr: float = 1e-3


@dataclass(kw_only=True)
class Config:
    """What a run is: its data, its sizes, and where it is saved after how many steps."""

    dataloader: object
    training: Training
    folder: Path
    interval: int = 2


class Layer(nn.Module):
    """Attention over a document, then a feed-forward part."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, hidden, mask, angles):
        rows, length, width = hidden.shape
        parts = self.qkv(self.norms[0](hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for part in parts[:2]
        )
        seen = functional.scaled_dot_product_attention(query, key, parts[2], attn_mask=mask)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.down(functional.silu(self.up(self.norms[1](hidden))))


class Decoder(nn.Module):
    """A small language model that knows of documents by their positions alone."""

    def __init__(self, vocab_size=260, width=32, heads=4, layers=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(width, heads) for _ in range(layers)), nn.RMSNorm(width)
        self.pairs = width // heads // 2

    def forward(self, tokens, positions):
        document = (positions == 0).cumsum(1)  # one begins wherever positions are 0
        mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        speeds = 10_000.0 ** (-torch.arange(self.pairs) / self.pairs)
        angles = positions[..., None] * speeds
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, mask, angles)
        return self.head(self.norm(hidden))


class OutOfDataError(Exception):
    """The data ended within a step, which isn't trained then."""


class Trainer:
    """Builds its parts from a configuration, and trains."""

    def __init__(self, config):
        self.config, training = config, config.training
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.world > 1 else 0
        at_once = training.local_batch_size * self.world
        whole = at_once if training.global_batch_size < 0 else training.global_batch_size
        assert whole % at_once == 0
        self.accumulated = whole // at_once
        torch.manual_seed(0)
        self.model = Decoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr)
        self.step, self.losses = 0, {}
        self.dataloader = config.dataloader.build(
            dp_world_size=self.world,
            dp_rank=self.rank,
            tokenizer=None,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            snapshot_every_n_steps=config.interval * self.accumulated,
        )

    def train(self):
        self.load()
        batches = self.batches()
        while self.should_continue_training():
            self.step += 1
            try:
                self.train_step(batches)
            except OutOfDataError:
                self.step -= 1
                break
            if self.step % self.config.interval == 0:
                self.save()

    def should_continue_training(self):
        return self.step < self.config.training.steps

    def batches(self):
        given = iter(self.dataloader)
        while True:
            try:
                batch = next(given)
            except StopIteration:
                raise OutOfDataError from None
            yield batch

    def train_step(self, batches):
        self.optimizer.zero_grad()
        taken = [next(batches) for _ in range(self.accumulated)]
        valid = self.summed(
            torch.tensor(float(sum(int((labels != IGNORE_INDEX).sum()) for _, labels in taken)))
        )
        total = sum(self.forward_backward_step(*batch, valid) for batch in taken)
        for parameter in self.model.parameters():
            self.summed(parameter.grad)
        self.optimizer.step()
        self.losses[self.step] = float(self.summed(total))

    def forward_backward_step(self, input_dict, labels, global_valid_tokens):
        logits = self.model(input_dict["input"], input_dict["positions"])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )
        loss = loss / global_valid_tokens
        loss.backward()
        return loss.detach()

    def summed(self, value):
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def parts(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "dataloader": self.dataloader, "train_state": self}

    def save(self):
        folder = self.config.folder / f"step-{self.step}"
        dcp.save(self.parts(), checkpoint_id=folder, no_dist=self.world == 1)

    def load(self):
        found = sorted(self.config.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
        if found:
            parts = self.parts()
            dcp.load(parts, checkpoint_id=found[-1], no_dist=self.world == 1)
            model, optimizer = parts["model"], parts["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def close(self):
        self.dataloader.close()
        if self.world > 1:
            dist.destroy_process_group()
