"""A pipeline of two stages, twice: four processes train one model on documents of very unequal lengths.

torchrun --nproc-per-node 4 examples/pipeline.py

Every process is given the whole step's batch and plan, and runs its stage's part; on GPUs it is the same with NCCL.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl

MESH = vl.Mesh(dp=2, pp=2)
NAMES = ("forward", "backward", "weight gradients")


def make_model():
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=4096, **sizes, **heads))


def make_batch():
    random = np.random.default_rng(0)
    lengths = [*random.integers(10, 100, 12), 700]
    documents = [(np.arange(n) * 7 + random.integers(256)).astype(np.int32) % 256 for n in lengths]
    return vl.collate(documents, vl.pack(lengths, capacity=1024))


def make_plan(model, batch):
    cost = vl.CostModel(
        model=vl.ModelShape.from_config(model.config), hardware=vl.Hardware.named("h100"), recompute="full"
    )
    search = vl.Search(merges=False, splits_backward=False, least_rows=64)
    return vl.plan_step(batch.document_lengths, cost=cost, mesh=MESH, search=search)


def main(steps=5):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model, batch = make_model(), make_batch()
    plan = make_plan(model, batch)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    engine = vl.SliceEngine(model, mesh=MESH, rank=rank, deadline_s=120)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        stats = engine.step(batch, plan)
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {stats.loss:.4f}, gradient norm {norm:.3f}")
    (place,) = stats.places
    took = zip(place.kinds, place.micropacks, place.seconds)
    mine = ", ".join(f"{NAMES[kind]} {number} {seconds * 1e3:.1f} ms" for kind, number, seconds in took)
    said = [None] * MESH.num_gpus
    dist.all_gather_object(said, f"stage {rank // MESH.dp} of pipeline {rank % MESH.dp}: {mine}")
    if rank == 0:
        print(*said, sep="\n")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
