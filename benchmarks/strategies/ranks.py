"""Bin-packed sampling on several ranks over gloo: who trains what, how evenly, and with which loss.

A step has as many tokens on any number of ranks: each rank's share shrinks as ranks grow. Processes share the cores
of one machine, so nothing is timed.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from benchmarks.strategies.feeds import Fed, flattened, loaded, write_arrow
from benchmarks.strategies.figures import Told
from benchmarks.strategies.models import make_optimizer
from benchmarks.strategies.sets import Shape, TextSet
from benchmarks.strategies.train import (
    LEARNING_RATE,
    base_of,
    gradients,
    one_thread,
    processes,
    started,
    update,
    validate,
)
from varlen.adapters.multipack import MultipackDistributedBatchSampler
from varlen.train.demo.corpus import Documents

PEERS = ("axolotl's sampler",)
OURS = ("our multipack sampler", "`vl.PackedLoader`")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a job train; plain data."""

    sampler: str
    weights: str
    documents: Documents
    validation: Documents
    shape: Shape
    """Of a step, over all ranks."""
    seed: int
    folder: Path
    """Where the ranks meet, and where the documents lie for the loader."""


def _shares(job: Job, model: Any, rank: int, world: int) -> Iterator[Fed]:
    tokens = job.shape.capacity * job.shape.packs // world
    if job.sampler == OURS[0]:
        batches: Any = MultipackDistributedBatchSampler(
            tokens, job.documents.lengths, num_replicas=world, rank=rank, seed=job.seed
        )
        return (flattened(job.documents, np.asarray(ids)) for ids in batches)
    if job.sampler == OURS[1]:
        data, ranks = job.folder / "documents.arrow", {"dp_rank": rank, "dp_world_size": world}
        return loaded(data, job.shape, job.seed, model, **ranks)
    batches = _by_axolotl(job.documents.lengths, tokens, rank, world, job.seed)
    return (flattened(job.documents, np.asarray(ids)) for ids in batches)


def _by_axolotl(lengths: np.ndarray, tokens: int, rank: int, world: int, seed: int) -> list[list[int]]:
    """Return a rank's batches as axolotl's trainer makes them and accelerate deals them.

    It is asked before ranks know of each other; all draw the same order, so that all find the same batches.
    """
    from accelerate.data_loader import BatchSamplerShard
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from torch.utils.data import RandomSampler

    order = RandomSampler(range(len(lengths)), generator=torch.Generator().manual_seed(seed))
    sampler = MultipackBatchSampler(
        order,
        batch_size=1,
        batch_max_len=tokens,
        lengths=lengths,
        bin_size=200,
        drop_last=True,
        num_processes=1,
    )
    len(sampler)  # as the trainer does: it settles how many batches there will be
    shard = BatchSamplerShard(sampler, num_processes=world, process_index=rank)
    return [[int(index) for pack in batch for index in pack] for batch in shard]


def _train(job: Job, rank: int, world: int) -> dict[str, Any]:
    model = started("llama", "varlen", job.weights)
    shares = list(_shares(job, model, rank, world))
    place = f"file://{job.folder / f'meet-{world}'}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    optimizer = make_optimizer(model, LEARNING_RATE)
    losses = []
    for fed in shares:
        targets = torch.tensor(fed.inputs.num_targets)
        distributed.all_reduce(targets)
        loss = torch.tensor(gradients(model, fed, int(targets)), dtype=torch.float64)
        distributed.all_reduce(loss)
        held = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        joined = torch.cat([gradient.reshape(-1) for gradient in held])
        distributed.all_reduce(joined)
        for parameter, part in zip(model.parameters(), joined.split([g.numel() for g in held])):
            parameter.grad = part.view_as(parameter)
        update(model, optimizer)
        losses.append(float(loss))
    distributed.barrier()
    distributed.destroy_process_group()
    return {
        "losses": losses,
        "validation_loss": validate(model, job.validation) if rank == 0 else None,
        "document_ids": np.concatenate([fed.document_ids for fed in shares]),
        "tokens": [fed.inputs.num_tokens for fed in shares],
        "work": [float((fed.lengths.astype(np.float64) ** 2).sum()) for fed in shares],
    }


def _serve(connection: Connection, jobs: list[Job], rank: int, world: int) -> None:
    one_thread()
    try:
        for job in jobs:
            connection.send(_train(job, rank, world))
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def on_ranks(
    of_set: TextSet,
    told: Told,
    known: Container[str],
    *,
    steps: int,
    seeds: int,
    worlds: tuple[int, ...],
    peers: bool = True,
) -> Iterator[dict[str, Any]]:
    """Train every sampler on every number of ranks.

    Unless `peers`, axolotl's sampler, which has to be installed, takes no part.
    """
    samplers = (*(PEERS if peers else ()), *OURS)
    for count, (world, seed) in enumerate(itertools.product(worlds, range(seeds)), start=1):
        told(count, len(worlds) * seeds, f"{world} ranks, seed {seed}")
        keys = {sampler: f"{sampler}, {world} ranks, seed {seed}" for sampler in samplers}
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                _job(of_set, sampler, steps, seed, Path(folder, str(number)))
                for number, (sampler, key) in enumerate(keys.items())
                if key not in known
            ]
            for job, ranks in zip(jobs, _run(jobs, world) if jobs else ()):
                yield {
                    "key": keys[job.sampler],
                    "sampler": job.sampler,
                    "ranks": world,
                    "seed": seed,
                    **_summed(job, ranks),
                }


def _job(of_set: TextSet, sampler: str, steps: int, seed: int, folder: Path) -> Job:
    folder.mkdir()
    documents = of_set.draw(steps, seed)
    write_arrow(documents, folder)
    return Job(
        sampler=sampler,
        weights=base_of("llama", of_set),
        documents=documents,
        validation=of_set.validation,
        shape=of_set.shape,
        seed=seed,
        folder=folder,
    )


def _run(jobs: list[Job], world: int) -> list[list[dict[str, Any]]]:
    """Run jobs one after the other on as many processes; returns for each what its ranks tell."""
    context = processes()
    links, ranks = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, jobs, rank, world), daemon=True)
        process.start()
        theirs.close()
        links.append(ours)
        ranks.append(process)
    found = []
    try:
        for _ in jobs:
            answers = [link.recv() for link in links]
            failed = [answer for answer in answers if isinstance(answer, RuntimeError)]
            if failed:
                raise failed[0]
            found.append(answers)
    finally:
        for process in ranks:
            process.terminate()
            process.join()
    return found


def _summed(job: Job, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a job did, over its ranks; the last step, which takes what is left, isn't asked for balance."""
    num_documents = len(job.documents.lengths)
    times = np.bincount(np.concatenate([rank["document_ids"] for rank in ranks]), minlength=num_documents)
    tokens, work = (np.array([rank[name] for rank in ranks], float) for name in ("tokens", "work"))
    return {
        "steps": len(ranks[0]["losses"]),
        "losses": ranks[0]["losses"],
        "validation_loss": ranks[0]["validation_loss"],
        "documents": num_documents,
        "dropped": int((times == 0).sum()),
        "repeated": int(np.maximum(times - 1, 0).sum()),
        "tokens_imbalance": float(np.mean(tokens[:, :-1].max(0) / tokens[:, :-1].mean(0))),
        "work_imbalance": float(np.mean(work[:, :-1].max(0) / work[:, :-1].mean(0))),
    }
