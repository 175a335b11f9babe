"""What a packed step must equal: each document alone in the model, and the sum over all of them by hand."""

import json
from pathlib import Path

from tests.support.ranks import ROOT, as_ranks

EXAMPLES = ROOT / "examples"
GRADIENTS_JOB = Path(__file__).with_name("gradients_job.py")
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


def assert_each_once(begun, before, after):
    """Two ranks that stopped after 4 of 7 steps took 190 of 300 documents once, and went on with the others."""
    assert "190 documents so far, 190 different ones, of 300" in begun
    assert all(before)
    assert len({*before[0], *before[1]}) == len(before[0]) + len(before[1]) == 190
    assert sorted(after[0] + after[1]) == list(range(300))
    assert all(new[: len(old)] == old and len(new) > len(old) for old, new in zip(before, after))


def assert_gradients_of_first_step(folder, begun, before, model, loader):
    """The first step of two ranks had the loss and the gradients of its documents one by one."""
    import torch

    with loader:
        step = set(loader.documents(0).document_ids.tolist())
    taken = [[n for n in numbers if n in step] for numbers in before]

    loss, expected = loss_and_gradients(model, ids_of(folder / "two" / "texts.jsonl", taken[0] + taken[1]))

    assert min(map(len, taken)) > 10
    assert f"step 1  loss {loss:.3f}" in begun
    found = torch.load(folder / "gradients.pt")
    assert_same_gradients(dict(zip((name for name, _ in model.named_parameters()), found)), expected)


def python(*arguments, cwd=None, **variables):
    return as_ranks(*arguments, ranks=1, folder=cwd, **variables)


def seen_in(folder):
    """The documents that each rank has trained on."""
    return [[int(line) for line in file.read_text().split()] for file in sorted(folder.glob("seen-*.txt"))]
