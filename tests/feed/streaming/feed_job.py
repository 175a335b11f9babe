"""One rank of a job that streams: `torchrun feed_job.py TEXTS OUT`; writes down what it took."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from tests.feed.streaming import counting

import varlen as vl


def made(texts, worker="process", epochs=2):
    return vl.PackedLoader(
        texts,
        counting.encode,
        eos=0,
        capacity=256,
        global_batch_size=12,
        micro_batch_size=1,
        window=8,
        seed=3,
        epochs=epochs,
        dp_rank=dist.get_rank(),
        dp_world_size=dist.get_world_size(),
        worker=worker,
        deadline_s=60,
    )


def main():
    """Take everything, go on from a state of rank 0, and start over in the middle of runs."""
    texts, out = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["COUNTED"] = str(Path(out, f"{rank}.counted"))
    rows, targets, saved = [], [], None
    with made(texts) as loader:
        for number, batch in enumerate(loader):
            rows.append([int(batch.pack_ids[0]) // 12, [int(n) for n in batch.document_ids]])
            targets.append(batch.step_num_targets)
            if number == 29:
                saved = [len(rows), loader.state_dict() if rank == 0 else None]
            if number == 8 and rank == 1:
                os.kill(loader._worker.pid, signal.SIGKILL)
                time.sleep(0.2)
        end, stats = loader.state_dict(), loader.stats()
    encoded = Path(os.environ["COUNTED"]).stat().st_size

    kept = [saved[1]]
    dist.broadcast_object_list(kept, src=0)
    with made(texts) as loader:
        loader.load_state_dict(kept[0])
        again = [[int(batch.pack_ids[0]) // 12, [int(n) for n in batch.document_ids]] for batch in loader]

    with made(texts, epochs=3) as loader:
        loader.load_state_dict(kept[0])
        further = [[int(batch.pack_ids[0]) // 12, [int(n) for n in batch.document_ids]] for batch in loader]

    jumps = {}
    for worker in ("process", "thread"):
        with made(texts, worker) as loader:
            found = []
            loader.start_prefetch()
            for _ in range(2):  # while one rank waits for the other
                time.sleep(0.3 * (rank + 1))
                loader.load_state_dict(kept[0])
                begun = time.monotonic()
                batch = next(loader)
                found.append(time.monotonic() - begun)
                assert [int(batch.pack_ids[0]) // 12, [int(n) for n in batch.document_ids]] == again[0]
            jumps[worker] = max(found)

    said = {
        "jumps": jumps,
        "rows": rows,
        "steps": sorted({step for step, _ in rows}),
        "targets": targets,
        "end": end,
        "saved": saved[0],
        "again": again,
        "further": further,
        "restarts": stats.restarts,
        "encoded": encoded,
    }
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
