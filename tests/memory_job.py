"""One rank of a job whose rows are in memory: `memory_job.py MODE FORM OUT`, as torchrun starts it."""

import hashlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
from memory_rows import FORMS, ITERABLES, TEXTS

import varlen as vl


def main():
    """Take two epochs, and write down what came."""
    mode, form, out = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = (FORMS | ITERABLES)[form](TEXTS)
    usual = {"capacity": 128, "global_batch_size": 4, "window": 8, "seed": 3, "epochs": 2, "deadline_s": 60}
    with vl.PackedLoader(
        data, "bytes", mode=mode, dp_rank=rank, dp_world_size=dist.get_world_size(), **usual
    ) as loader:
        rows = [
            [int(pack) // 4, hashlib.sha256(ids.tobytes()).hexdigest(), int(batch.step_num_targets)]
            for batch in loader
            for pack, ids in zip(batch.pack_ids, batch.input_ids)
        ]
        said = {"rows": rows, "state": loader.state_dict()}
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
