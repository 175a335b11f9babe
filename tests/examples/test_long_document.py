"""The example of a long document has the gradients of the uncut model in a fraction of its memory."""

import re

import pytest
from tests.support.one_by_one import EXAMPLES


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import long_document

    return long_document


def test_it_says_what_slices_take_and_trains(example, capsys):
    example.main(2048, 128)

    said = capsys.readouterr().out
    sliced_mb, uncut_mb = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) MB", said))
    apart = float(re.search(r"than (\S+) of it", said)[1])
    first, *_, last = (float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said))
    assert "2,048 tokens in 16 slices of 128" in said
    assert sliced_mb < uncut_mb / 5
    assert 0 < apart < 1e-5
    assert last < first


def test_longer_documents_run_in_slices_alone(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "UNCUT", 500)

    example.main(600, 200)

    said = capsys.readouterr().out
    assert "600 tokens in 3 slices of 200" in said
    assert "uncut" not in said
