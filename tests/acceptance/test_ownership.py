"""Nothing is destroyed that isn't provably ours: what lies where a verb writes is, after it, as it was."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.support.rarely import mostly
from tests.support.training import settings, table, write_store, write_toml
from typer.testing import CliRunner

from varlen.cli.app import app
from varlen.errors import SettingError
from varlen.files.ours import unfinished
from varlen.train.trainer import train

FORMS = ("folder", "file", "link to a folder", "link to a file", "link to nothing", "pipe")
PLACES = {
    "index": ("po", "po.partial", "po.partial/.work", "po.partial/.work/lock", "po.partial/.work/state.json"),
    "pack": (
        "po",
        "po.partial",
        "po.partial/.work/tokens",
        "tk",
        "tk.partial",
        "po.partial/part-00000.parquet",
    ),
    "inspect": ("page.html",),
    "plan": ("page.html", "trace.json", "trace.json.gz", "step.plan"),
    "train": (
        "run/model",
        "run/model/mine",
        "run/metrics.jsonl",
        "run/.running",
        "run/checkpoints",
        "run/checkpoints/step-00000001",
        "run/checkpoints/.step-00000001.part",
        "run/plans.json",
        "run/hardware.json",
    ),
}
OFTEN = {"folder", "file", "link to a folder"}


def lay(place: Path, form: str, elsewhere: Path) -> None:
    """Put somebody else's bytes at a place, or a link to them."""
    place.parent.mkdir(parents=True, exist_ok=True)
    elsewhere.mkdir()
    (elsewhere / "deep").mkdir()
    for name in (
        "thesis.txt",
        "deep/notes.md",
        "config.json",
        "part-00000.parquet",
        "checkpoint.json",
        "lock",
    ):
        (elsewhere / name).write_text(f"mine, {name}")
    if form == "folder":
        shutil.copytree(elsewhere, place)
    elif form == "file":
        place.write_text('{"step": 1, "loss": 2.5}\nmine\n')
    elif form == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(
            {"folder": elsewhere, "file": elsewhere / "thesis.txt"}.get(form.split()[-1], "gone")
        )


def bytes_of(folder: Path) -> dict[str, object]:
    """Everything below a folder: files by content, links by where they lead, folders and pipes by what they are."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else path.is_dir()
    return found


def arguments(verb: str, folder: Path, place: str) -> list[str]:
    data = str(folder / "texts.jsonl")
    if verb == "index":
        return ["index", data, "-o", str(folder / "po")]
    if verb == "pack":
        more = ["--tokens", str(folder / "tk")] if place.startswith("tk") else []
        return ["pack", data, "-o", str(folder / "po"), "--capacity", "64", "--processes", "1", *more]
    if verb == "inspect":
        return ["inspect", data, "--capacity", "64", "--output", str(folder / place)]
    if verb == "plan":
        option = {"page.html": "--output", "step.plan": "--save"}.get(place, "--trace")
        (folder / "lengths.txt").write_text("\n".join("100" for _ in range(40)))
        return ["plan", data, "--gpus", "2", "--pp", "2", "--capacity", "4096", option, str(folder / place)]
    made = table(
        folder / "texts.jsonl", folder / "run", run__steps=1, run__checkpoint_every=1, plan__slice_tokens=64
    )
    if not place.endswith(("plans.json", "hardware.json")):
        del made["plan"]
    (folder / "c.json").write_text(json.dumps(made))
    return ["train", str(folder / "c.toml")]


CASES = [(verb, place, form) for verb, places in PLACES.items() for place in places for form in FORMS]


@pytest.mark.parametrize(
    ("verb", "place", "form"), mostly([case for case in CASES if case[2] in OFTEN], CASES)
)
def test_somebody_elses_bytes_are_as_they_were_after_every_verb(tmp_path, verb, place, form):
    (tmp_path / "texts.jsonl").write_text('{"text": "some words to learn from"}\n' * 40)
    lay(tmp_path / place, form, tmp_path / "elsewhere")
    command = arguments(verb, tmp_path, place)
    if verb == "train":
        write_toml(tmp_path / "c.toml", json.loads((tmp_path / "c.json").read_text()))
    before = bytes_of(tmp_path)

    done = CliRunner().invoke(app, command)

    after = bytes_of(tmp_path)
    lost = {name: after.get(name) for name, content in before.items() if after.get(name) != content}
    assert lost == {}, done.output
    assert done.exit_code in (0, 2), done.output
    assert isinstance(done.exception, SystemExit | None), done.exception
    mine = sorted(set(after) - set(before))
    assert all(not name.startswith("elsewhere") for name in mine), mine


def test_what_is_ours_is_cleared_and_what_somebody_laid_into_it_is_not(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "some words"}\n' * 40)
    index = ["index", str(data), "-o", str(tmp_path / "po")]
    work = tmp_path / "po.partial/.work"
    work.mkdir(parents=True)
    (work / "state.json").write_text('{"fingerprint": "of another run"}')  # as 0.1.0 wrote it
    (tmp_path / "po.partial/00000-0000").mkdir()
    (tmp_path / "po.partial/thesis.txt").write_text("mine")

    done = CliRunner().invoke(app, index)
    assert done.exit_code == 2
    assert "thesis.txt" in done.output
    assert "move it away" in done.output
    assert (tmp_path / "po.partial/thesis.txt").read_text() == "mine"

    (tmp_path / "po.partial/thesis.txt").unlink()
    assert CliRunner().invoke(app, index).exit_code == 0
    assert not (tmp_path / "po.partial").exists()

    (tmp_path / "po/thesis.txt").write_text("mine")
    data.write_text('{"text": "other words"}\n' * 40)
    done = CliRunner().invoke(app, [*index, "--overwrite"])
    assert done.exit_code == 2
    assert "thesis.txt" in done.output
    assert (tmp_path / "po/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "inside", ["00000-0000/thesis.txt", "00000-0000/deep/notes.md", ".tables/notes", "a.part"]
)
@pytest.mark.parametrize("result", ["po", "po.partial"])
def test_what_somebody_laid_deep_into_a_result_is_not_replaced_with_it(tmp_path, inside, result):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "some words"}\n' * 40)
    index = ["index", str(data), "-o", str(tmp_path / "po"), "--overwrite"]
    if result == "po":
        assert CliRunner().invoke(app, index).exit_code == 0
        data.write_text('{"text": "other words"}\n' * 40)
    else:
        (tmp_path / "po.partial/.work").mkdir(parents=True)
        (tmp_path / "po.partial/.work/state.json").write_text('{"fingerprint": "of another run"}')
    mine = tmp_path / result / inside
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")

    done = CliRunner().invoke(app, index)

    assert done.exit_code == 2
    assert "not varlen's and would be lost" in done.output
    assert mine.read_text() == "mine"
    mine.unlink()
    if mine.parent.name == "deep":
        mine.parent.rmdir()
    assert CliRunner().invoke(app, index).exit_code == 0


def test_a_folder_that_was_made_and_not_marked_is_gone_on_with(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "some words"}\n' * 40)
    (tmp_path / "po.partial/.work").mkdir(parents=True)
    (tmp_path / "po.partial/.work/lock").touch()
    unfinished(tmp_path / "po.partial/.work/state.json").write_text('{"finger')

    assert CliRunner().invoke(app, ["index", str(data), "-o", str(tmp_path / "po")]).exit_code == 0


def test_a_model_is_replaced_by_a_run_only_as_a_run_wrote_it(tmp_path):
    store = write_store(tmp_path)
    given = settings(store, tmp_path / "run", run__steps=1)
    train(given)
    train(settings(store, tmp_path / "run", run__steps=2))

    weights = tmp_path / "run/model/model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(SettingError, match=r"model\.safetensors was changed since varlen wrote it"):
        train(settings(store, tmp_path / "run", run__steps=3))
    assert weights.read_bytes() == changed


def test_a_checkpoint_beside_which_somebody_keeps_notes_is_not_pruned(tmp_path):
    store = write_store(tmp_path)
    given = {"run__checkpoint_every": 1, "run__keep": 1}
    train(settings(store, tmp_path / "run", run__steps=1, **given))
    notes = tmp_path / "run/checkpoints/step-00000001/notes.txt"
    notes.write_text("mine")

    train(settings(store, tmp_path / "run", run__steps=3, **given))

    assert notes.read_text() == "mine"
    assert sorted(path.name for path in notes.parent.parent.iterdir()) == ["step-00000001", "step-00000003"]
