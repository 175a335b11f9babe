"""Start a function of this package on several processes of one thread each, and return what they say."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 1800


def side_by_side(run: Callable[..., Any], count: int, *words: Any) -> list[Any]:
    """Return what `run(rank, *words)` returns on each process of a torch.distributed job over gloo.

    Args:
        run: a function of a module.
        count: of processes.
        words: what it is given, pickled.

    Raises:
        RuntimeError: a process failed; its traceback was printed.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.get_context("spawn")
        given = pickle.dumps((run, words))
        processes = [
            context.Process(target=_rank, args=(given, rank, count, port, folder)) for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_S)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]


def _rank(given: bytes, rank: int, count: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=600))
    run, words = pickle.loads(given)
    found = run(rank, *words)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
