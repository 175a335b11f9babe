"""One rank of a job whose rows are in memory: `memory_job.py OUT MODE FORM ...`, as torchrun starts it."""

import hashlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
from tests.support.memory_rows import FORMS, ITERABLES, TEXTS

import varlen as vl


def rows_and_state(mode, form):
    data = (FORMS | ITERABLES)[form](TEXTS)
    usual = {"capacity": 128, "global_batch_size": 4, "window": 8, "seed": 3, "epochs": 2, "deadline_s": 60}
    ranks = {"dp_rank": dist.get_rank(), "dp_world_size": dist.get_world_size()}
    with vl.PackedLoader(data, "bytes", mode=mode, **ranks, **usual) as loader:
        rows = [
            [int(pack) // 4, hashlib.sha256(ids.tobytes()).hexdigest(), int(batch.step_num_targets)]
            for batch in loader
            for pack, ids in zip(batch.pack_ids, batch.input_ids)
        ]
        return {"rows": rows, "state": loader.state_dict()}


def main():
    out, *asked = sys.argv[1:]
    dist.init_process_group("gloo")
    found = {" ".join(one): rows_and_state(*one) for one in zip(asked[::2], asked[1::2])}
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
