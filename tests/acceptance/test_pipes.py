"""What is read by its name is a file: a FIFO of that name is refused, and no writer is waited for."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import varlen as vl
from varlen.adapters.megatron import check_config, read_metadata
from varlen.adapters.megatron.files.npy import read_packed_npy
from varlen.cost.hardware import load_hardware
from varlen.documents.source import open_source
from varlen.errors import VarlenError
from varlen.store.lengths import counted_lengths
from varlen.text.load_tokenizer import _read_json, _template_files
from varlen.train.changes import WeightsMark
from varlen.train.configuration import read_config


def _template(path: Path) -> Any:
    return open_source([{"messages": []}], tokenizer="bytes", chat_template=path)


def _template_of_a_folder(path: Path) -> Any:
    (path.parent / "additional_chat_templates").mkdir()
    path.rename(path.parent / "additional_chat_templates/tool_use.jinja")
    return list(_template_files(path.parent))


def _weights(path: Path) -> Any:
    path.rename(path.with_suffix(".safetensors"))
    mark = WeightsMark(str(path.parent), None, None)
    raise mark._future.exception() or AssertionError("it was read")


OPENERS: dict[str, Callable[[Path], Any]] = {
    "configuration": read_config,
    "chat template": _template,
    "template of a folder": _template_of_a_folder,
    "metadata": read_metadata,
    "configuration of Megatron": check_config,
    "rows of Megatron": read_packed_npy,
    "hardware": load_hardware,
    "plan": vl.load_plan,
    "data": open_source,
    "weights": _weights,
}


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits for a writer")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("opener", OPENERS)
def test_a_fifo_is_a_sentence(opener, tmp_path):
    path = tmp_path / "named"
    os.mkfifo(path)

    with pytest.raises((VarlenError, OSError), match=r"FIFO|pipe") as said:
        OPENERS[opener](path)
    assert isinstance(said.value, VarlenError) or opener == "weights", "the thread keeps what it was raised"


def test_what_a_folder_says_by_the_way_is_read_from_files_alone(tmp_path):
    os.mkfifo(tmp_path / "tokenizer_config.json")
    os.mkfifo(tmp_path / "chat_template.jinja")
    os.mkfifo(tmp_path / "lengths.npy")

    assert _read_json(tmp_path / "tokenizer_config.json") == {}
    assert list(_template_files(tmp_path)) == []
    with pytest.raises(VarlenError, match=r"FIFO|pipe"):
        counted_lengths(tmp_path / "lengths.npy")
