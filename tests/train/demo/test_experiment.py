"""The whole demo on a few documents: equal work, equal losses, balanced ledger, and failures that are told."""

import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.support.demo_figures import METHODS as FIGURES

from varlen.errors import LedgerError, VarlenError
from varlen.train.demo.corpus import Documents
from varlen.train.demo.experiment import check_equal_work, run_demo
from varlen.train.demo.job import Job
from varlen.train.demo.orders import make_order
from varlen.train.demo.settings import METHODS, DemoSettings, ModelSettings
from varlen.train.demo.worker import Worker

SETTINGS = DemoSettings(
    steps=2,
    batch_documents=4,
    max_length=96,
    num_seeds=2,
    validation_documents=3,
    threads=1,
    model=ModelSettings(vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24),
)


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def demo(tmp_path_factory, progress):
    rows = [{"text": f"def function_{n}(): " + f"return {n * n}; " * (1 + n * n % 23)} for n in range(60)]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_demo(path, SETTINGS, lambda *told: progress.append(told))


def test_every_method_trains_the_same_documents_targets_and_steps(demo):
    assert [method.name for method in demo.methods] == [method.name for method in METHODS]
    for name in ("steps", "num_documents", "num_tokens", "num_targets"):
        assert len({getattr(method, name) for method in demo.methods}) == 1
    ours = demo.method("flattened")
    assert (ours.steps, ours.num_documents) == (2, 8)
    assert ours.num_targets == ours.num_tokens - ours.num_documents
    assert demo.ledger.packed == ours.num_tokens
    assert demo.ledger.tokens_in == demo.ledger.packed + demo.ledger.truncated


def test_flattened_and_padded_runs_have_equal_losses_and_the_control_another(demo):
    ours = demo.method("flattened")

    for name in ("padded_with_mask", "padded"):
        assert demo.loss_difference(ours, demo.method(name)) < 1e-5
        assert demo.method(name).validation_losses[0] == pytest.approx(ours.validation_losses[0], abs=1e-5)
        assert demo.method(name).validation_losses[1] is None
    assert demo.loss_difference(demo.method("packed"), demo.method("without_boundaries")) > 1e-5


def test_flattened_computes_no_padding_and_padded_does(demo):
    assert demo.method("flattened").slots_per_token == 1.0
    assert demo.method("padded").num_slots == demo.method("padded_with_mask").num_slots
    assert demo.method("padded").slots_per_token > demo.method("bucketed").slots_per_token > 1.0
    assert demo.corpus.padded_ratio > demo.corpus.bucketed_ratio > 1.0


def test_isolation_is_proved_on_the_row_that_is_drawn(demo):
    assert demo.isolation.is_proved
    documents = dict(demo.isolation.rows)["documents in the row that was tried"]
    tokens = sum(piece.num_tokens for piece in demo.picture.row)
    assert documents == f"{len(demo.picture.row)} ({tokens} tokens)"


def test_the_picture_shows_the_text_of_the_documents_it_draws(demo):
    assert len(demo.picture.batch) == 4
    assert all(
        piece.excerpt.startswith("def function_") for piece in (*demo.picture.batch, *demo.picture.row)
    )


def test_progress_rises_to_the_whole_work(progress, demo):
    done = [told[0] for told in progress]
    totals = {told[1] for told in progress[1:]}

    assert done == sorted(done)
    assert len(totals) == 1
    assert done[-1] == totals.pop()


def test_methods_that_trained_other_targets_cannot_be_compared():
    check_equal_work(FIGURES)
    with pytest.raises(LedgerError, match=r"num_targets .*packed 91"):
        check_equal_work(tuple(replace(m, num_targets=91) if m.name == "packed" else m for m in FIGURES))


def small_job(layout="flat", vocab_size=50):
    documents = Documents(tokens=np.arange(40, dtype=np.int32), offsets=np.arange(0, 41, 5, dtype=np.int64))
    return Job(
        layout=layout,
        order=make_order("random", documents.lengths, steps=2, max_length=96, seed=0),
        documents=documents,
        validation=documents,
        vocab_size=vocab_size,
        seed=0,
        settings=SETTINGS,
    )


def test_a_run_that_is_killed_is_told_in_a_sentence():
    worker = Worker("flattened", small_job())
    try:
        worker.wait_until_ready()
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(
            VarlenError, match="'flattened' was killed by the system, most likely for lack of memory"
        ):
            worker.request("step", 0)
    finally:
        worker.close()


def test_a_run_that_varlen_refuses_says_why():
    worker = Worker("flattened", small_job(vocab_size=10))
    try:
        with pytest.raises(VarlenError, match="can't be done: the batch holds token id"):
            worker.wait_until_ready()
    finally:
        worker.close()


def test_a_run_that_fails_brings_its_traceback():
    worker = Worker("flattened", small_job())
    try:
        worker.wait_until_ready()
        with pytest.raises(VarlenError, match=r"(?s)'flattened' failed.*IndexError"):
            worker.request("step", 7)
    finally:
        worker.close()


def test_closing_a_worker_ends_its_process():
    worker = Worker("flattened", small_job())
    worker.wait_until_ready()
    process = worker._process.pid

    worker.close()

    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{process}")  # noqa: PTH110
