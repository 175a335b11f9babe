"""One data-parallel rank of two steps whose documents ranks share: `torchrun merged_job.py`; the first says how far
the sums over ranks are from the uncut model."""

import json
import warnings
from functools import cache

import torch
import torch.distributed as dist
from tests.runtime.side_by_side import QueueTransport, run_place
from tests.support.random_plans import random_plan
from tests.support.sliced import take_gradients, tiny, tokens_of, uncut
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from varlen.runtime.mesh.process_groups import Group
from varlen.runtime.mesh.shared_documents import ProcessPeers, peers_of, shared_documents
from varlen.step_plan import Mesh


def plans_of(dp):
    """Two plans with documents shared by all ranks, by two, and by none."""
    found = []
    for seed in range(1000):
        plan = random_plan(seed, mesh=Mesh(dp=dp))
        packs = plan.backward
        pairs = list(zip(packs.micropack_of_slice.tolist(), packs.document_ids.tolist()))
        if {1, 2, dp} <= set(plan.num_ranks.tolist()) and len(set(pairs)) == len(pairs):
            found.append(plan)
        if len(found) == 2:
            return found
    raise AssertionError(found)


def wrong(group, size):
    """Count what peers tell each other that is not what each gave, or its sum; shapes and dtypes differ."""
    peers, of = ProcessPeers(group), [torch.Generator().manual_seed(rank) for rank in range(size)]
    count = 0
    for shape, dtype in (((0, 3), torch.float32), ((7, 3), torch.bfloat16), ((5, 2, 3), torch.float64)):
        given = [torch.randn(size, *shape, generator=one, dtype=torch.float64) for one in of]
        mine = given[dist.get_rank()].to(dtype)
        everyone = torch.stack([one[0].to(dtype) for one in given])
        count += (peers.all_gather(mine[0].transpose(0, 1)).transpose(1, 2) != everyone).sum().item()
        total = torch.stack([one[dist.get_rank()].to(dtype) for one in given]).sum(0)
        ahead, overtaking = peers.begin_all_gather(mine[0]), peers.begin_all_gather(2 * mine[0])
        found = peers.reduce_scatter(mine.clone())
        count += (ahead() != everyone).sum().item() + (overtaking() != 2 * everyone).sum().item()
        assert found.shape == total.shape
        count += ((found - total).abs() > 16 * torch.finfo(dtype).eps).sum().item()
    return count


def main():
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    rank, dp = dist.get_rank(), dist.get_world_size()

    store, device = PrefixStore("merged job", _get_default_store()), torch.device("cpu")

    @cache
    def group_of(first, size):
        members = range(first, first + size)
        return Group(store, f"{first} {size}", members, rank, device, 60.0, settle=lambda _: None)

    assert wrong(group_of(0, dp), dp) == 0
    model, told = tiny("llama"), []
    for plan in plans_of(dp):
        lengths = [length for length in plan.lengths.tolist() if length]
        tokens = tokens_of(lengths)
        shared = shared_documents(plan, rank, peers_of(plan, rank, group_of), tokens.device)
        mine, *_ = run_place(model, tokens, plan, rank, 0, QueueTransport(), shared)
        loss, gradients = torch.tensor(mine, dtype=torch.float64), take_gradients(model)
        dist.all_reduce(loss)
        for name, parameter in model.named_parameters():
            gradients.setdefault(name, torch.zeros_like(parameter))
            dist.all_reduce(gradients[name])
        true_loss, wanted = uncut(model, tokens, lengths)
        apart = [(gradients[name] - x).norm().item() / x.norm().item() for name, x in wanted.items()]
        told.append(
            {
                "sizes": sorted(set(plan.num_ranks.tolist())),
                "loss": abs(loss.item() / true_loss - 1),
                "gradients": max(apart),
            }
        )
    if rank == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
