"""What a packed step must equal: each document alone in the model, and the sum over all of them by hand."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training import free_port

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
GRADIENTS_JOB = ROOT / "tests" / "gradients_job.py"
EOS = 256  # of the tokenizer "bytes"


def ids_of(texts, numbers):
    """The token ids of some lines of a file of texts, as the tokenizer "bytes" has them."""
    rows = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
    return [[*rows[number].encode(), EOS] for number in numbers]


def loss_and_gradients(model, documents):
    """The mean loss over the targets of all documents, each alone in the model, and its gradients by name."""
    import torch

    model.zero_grad()
    total = sum(len(ids) - 1 for ids in documents)
    loss = 0.0
    for ids in documents:
        one = torch.tensor([ids])
        logits = model(input_ids=one).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, one[0, 1:], reduction="sum") / total
        part.backward()
        loss += float(part)
    return loss, {name: value.grad.clone() for name, value in model.named_parameters()}


def assert_same_gradients(found, expected):
    """Every parameter's gradient is the expected one, up to the rounding of float32."""
    import torch

    assert set(found) == set(expected)
    for name, value in expected.items():
        assert float(value.abs().max()) > 0, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=2e-6 * float(value.abs().max()), msg=name
        )


def python(*arguments, ranks=1, cwd=None, **variables):
    """Run a program, on several ranks as torchrun would start them; returns what the first printed."""
    paths = [str(ROOT / "tests"), str(EXAMPLES), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables}
    settings.pop("VARLEN_JIT", None)  # so few documents are packed sooner in plain Python
    if ranks > 1:
        settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        settings |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs, errors = (
            [Path(folder, f"{kind}{rank}") for rank in range(ranks)] for kind in ("out", "error")
        )
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stdout=stack.enter_context(outputs[rank].open("w")),
                stderr=stack.enter_context(errors[rank].open("w")),
                env=settings | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
                cwd=cwd,
            )
            for rank in range(ranks)
        ]
        _wait(started, errors)
        return outputs[0].read_text()


def _wait(started, errors, deadline_s=300):
    """Wait until all have ended; once one fails, or time is over, end the others, which would wait for it."""
    end = time.monotonic() + deadline_s
    try:
        while any(process.poll() is None for process in started):
            assert not any(process.returncode for process in started)
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not any(process.returncode for process in started)
    except AssertionError:
        told = "\n".join(error.read_text()[-4000:] for error in errors)
        raise AssertionError(f"ended with {[process.returncode for process in started]}\n{told}") from None
    finally:
        for process in started:
            process.kill()
            process.wait()


def seen_in(folder):
    """The documents that each rank has trained on."""
    return [[int(line) for line in file.read_text().split()] for file in sorted(folder.glob("seen-*.txt"))]
