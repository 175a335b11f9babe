"""Examples that the pages' own test doesn't run, each with the test that runs it or with what it needs."""

import pages
import pytest

HAS_OUTPUT = ("text",)
SHOWS = {"toml": "tests/docs/test_writing.py reads it as settings"}
"""Languages whose blocks one test goes over."""
NOT_RUN = {
    "README.md": [("pip install", "needs a network; CI installs varlen from its clone")],
    "CONTRIBUTING.md": [
        ("make test", "CI runs the checks and the tests themselves"),
        ("python scripts/trips.py", "needs an earlier commit to compare with"),
    ],
    "docs/benchmarks.md": [("make bench", "needs a network for the peers, and an hour")],
    "docs/data.md": [("from datasets import", "tests/adapters/trl/test_trainers.py")],
    "docs/demo.md": [("make demo", "tests/train/demo/test_demo.py")],
    "docs/frameworks/accelerate.md": [
        ("loader = vl.PackedLoader(...", "an excerpt of the example below it"),
        ("torchrun --nproc-per-node 2", "tests/examples/test_accelerate.py"),
    ],
    "docs/frameworks/axolotl.md": [
        ("plugins:", "tests/adapters/axolotl/test_plugin.py"),
        ("python examples/axolotl_plugin", "tests/examples/test_axolotl.py"),
    ],
    "docs/frameworks/instructlab.md": [
        (
            "from varlen.adapters.instructlab",
            "needs InstructLab; tests/adapters/test_instructlab.py has its loop",
        ),
        ("trainer = Trainer(", "tests/adapters/test_instructlab.py"),
    ],
    "docs/frameworks/lightning.md": [
        ("python examples/lightning_module.py", "tests/examples/test_lightning.py")
    ],
    "docs/frameworks/megatron-batches.md": [
        ("from varlen.adapters.megatron", "an excerpt of the example below it")
    ],
    "docs/frameworks/megatron-config.md": [
        ("varlen verify --megatron", "tests/cli/test_verify.py"),
        ("from varlen.adapters.megatron", "an excerpt of the example below it"),
    ],
    "docs/frameworks/megatron-loader.md": [("from dataclasses", "needs Megatron-Bridge and GPUs")],
    "docs/frameworks/megatron-schedule.md": [
        ("from megatron.core", "needs Megatron-Core's main branch and GPUs")
    ],
    "docs/frameworks/multipack.md": [("from varlen.adapters.multipack", "tests/adapters/test_multipack.py")],
    "docs/frameworks/nemo-rl.md": [("from varlen.adapters.nemo_rl", "an excerpt of the example below it")],
    "docs/frameworks/torchtitan.md": [
        ("from varlen.adapters.torchtitan", "tests/examples/test_torchtitan.py"),
        ("python examples/torchtitan_trainer.py", "tests/examples/test_torchtitan.py"),
    ],
    "docs/frameworks/torchtune.md": [
        ("from torchtune", "needs torchtune, and a data set of the hub"),
        ("dataset:", "needs torchtune"),
    ],
    "docs/frameworks/transformers.md": [
        ("+from varlen.adapters.hf", "the lines of the example below it"),
        ("python examples/transformers_trainer.py", "tests/examples/test_hf.py"),
    ],
    "docs/frameworks/trl.md": [
        ("-from trl import pack_dataset", "tests/adapters/trl/test_trainers.py"),
        ("+from varlen.adapters.trl import Data", "tests/adapters/trl/test_trainers.py"),
        ("+from varlen.adapters.hf.trainer", "tests/adapters/trl/test_trainers.py"),
        ("python examples/trl_sft.py", "tests/examples/test_hf.py"),
        ("-from trl import DPOTrainer", "tests/adapters/trl/test_dpo.py"),
        ("python examples/trl_dpo.py", "tests/examples/test_hf.py"),
    ],
    "docs/frameworks/verl.md": [
        ("from varlen.adapters.verl", "an excerpt of the example below it"),
        ("import verl.utils", "needs verl"),
    ],
    "docs/heads.md": [("-from trl import RewardTrainer", "tests/adapters/trl/test_reward.py")],
    "docs/isolation.md": [("varlen verify qwen3", "tests/cli/test_verify.py")],
    "docs/long-documents.md": [("python examples/long_document.py", "tests/examples/test_slices.py")],
    "docs/planning-cluster.md": [("varlen plan --calibrate", "tests/cli/test_plan.py")],
    "docs/planning.md": [("varlen plan lengths.npz", "tests/cli/test_plan.py")],
    "docs/running-meshes.md": [
        ('dist.init_process_group("nccl")', "needs four GPUs; on gloo tests/distributed/test_pipelines.py"),
        ("torchrun --nproc-per-node 4", "tests/examples/test_slices.py"),
        ("mesh, rank = vl.Mesh(dp=4, pp=2", "needs eight GPUs; on gloo tests/distributed/test_pipelines.py"),
        ("mesh = vl.Mesh(dp=4, tp=2", "needs eight GPUs; on gloo tests/distributed/test_pipelines.py"),
    ],
    "docs/schedulers.md": [
        ("torchrun --standalone", "tests/train/test_signals.py sends the signals"),
        ("varlen train config.toml --set", "tests/train/test_checkpoints.py"),
    ],
    "docs/several-nodes.md": [
        ("torchrun --nnodes 2", "needs two machines; below it two processes stand for them")
    ],
    "docs/strategies.md": [("make bench ARGS=strategies", "needs hours")],
    "docs/training.md": [
        ("varlen index 'data/*.jsonl'", "tests/docs/test_pages.py"),
    ],
    "docs/training-plans.md": [("torchrun --standalone", "tests/distributed/test_runs.py")],
    "docs/tutorials/chats.md": [
        ("varlen inspect", "make soak; tests/docs/test_tutorial.py"),
        ("varlen inspect", "make soak; tests/docs/test_tutorial.py"),
        ("cp train.jsonl broken.jsonl", "make soak; tests/docs/test_tutorial.py"),
        ("varlen index", "make soak; tests/docs/test_tutorial.py"),
        ("varlen train chats.toml --dry-run", "make soak; tests/docs/test_tutorial.py"),
        ("varlen train chats.toml", "make soak; tests/docs/test_tutorial.py"),
        ("varlen train chats.toml --set", "make soak; tests/docs/test_tutorial.py"),
        ("from transformers import", "make soak; tests/docs/test_tutorial.py"),
    ],
}
"""By page: the beginning of each block in order, and what runs it, or what it needs."""


def not_run(text: str) -> list[pages.Block]:
    others = (*pages.RUN, *HAS_OUTPUT, *SHOWS)
    return [block for block in pages.blocks(text) if block.language not in others]


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_what_the_page_does_not_run_stands_in_the_list(page):
    blocks = not_run(page.read_text(encoding="utf-8"))
    known = NOT_RUN.get(page.relative_to(pages.ROOT).as_posix(), [])

    assert len(blocks) == len(known), [block.code.splitlines()[0] for block in blocks]
    for block, (beginning, _) in zip(blocks, known):
        assert block.code.startswith(beginning)


def test_tests_of_the_list_are_there_and_the_list_is_printed(root, capsys):
    lines = []
    for page, blocks in NOT_RUN.items():
        assert (root / page).is_file(), page
        for beginning, how in blocks:
            for word in how.split():
                assert not word.startswith("tests/") or (root / word.rstrip(";")).is_file(), word
            lines.append(f"  {page}: {beginning} … {how}")
    lines += [f"  {page}: all of it … make soak" for page in pages.LONG]

    with capsys.disabled():
        print("\nExamples of pages that run elsewhere, or need what isn't here:", *lines, sep="\n")
