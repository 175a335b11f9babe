"""Numbers of tokens as users give them: one reader for every option and every setting that counts tokens."""

import json

import pytest
from tests.support.command_line import asked, one_sentence

from varlen.arguments import as_tokens
from varlen.errors import SettingError
from varlen.train.configuration import read_config

TAKEN = {
    "4096": 4096,
    "4k": 4096,
    " 4K ": 4096,
    "4_096": 4096,
    "4,096": 4096,
    "1m": 1 << 20,
    "128 k": 131_072,
    7: 7,
}
WRONG = (
    "4q",
    "-4k",
    "0",
    "4.5k",
    "",
    "k",
    "4kk",
    "1e3",
    "9m9",
    "3000m",
    "9" * 30,
    "\u0664k",
    0,
    -4,
    4.5,
    True,
    None,
)
PLACES = (
    ("pack", "a.jsonl", "-o", "out", "--capacity"),
    ("pack", "a.jsonl", "-o", "out", "--format", "megatron", "--longest"),
    ("pack", "a.jsonl", "-o", "out", "--format", "megatron", "--part-tokens"),
    ("inspect", "a.jsonl", "--capacity"),
    ("plan", "a.jsonl", "--capacity"),
)
SETTINGS = ("data.capacity", "plan.slice_tokens", "plan.least_rows")
CONFIG = """
[data]
source = "a.jsonl"
capacity = 64
global_batch_size = 2
[model]
type = "llama"
[plan]
"""


@pytest.mark.parametrize("given", TAKEN)
def test_thousands_of_1024_are_taken(given):
    assert as_tokens(given, "--capacity") == TAKEN[given]


@pytest.mark.parametrize("given", WRONG)
def test_anything_else_is_refused_with_what_is_taken(given):
    with pytest.raises(
        SettingError, match=r"^x must be a whole number of tokens .* such as 4096, 4k \(of 1,024\) or 1m"
    ):
        as_tokens(given, "x")


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    (tmp_path / "c.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("place", PLACES, ids=lambda place: " ".join((place[0], place[-1])))
@pytest.mark.parametrize("given", ["4q", "-4k", "0", "4.5k"])
def test_every_option_that_counts_tokens_says_what_it_takes(place, given, texts):
    said = one_sentence(asked(*place[:-1], f"{place[-1]}={given}", cwd=texts))

    assert f"{place[-1]} must be a whole number of tokens" in said
    assert f"got '{given}'" in said
    assert not (texts / "out").exists()


def test_every_option_that_counts_tokens_takes_thousands(texts):
    for place in (PLACES[0], PLACES[3]):
        run = asked(*place, "4k", "--json", cwd=texts)
        found = json.loads(run.stdout)
        assert 4096 in (
            found.get("settings", {}).get("capacity"),
            found.get("capacities", [{}])[0].get("capacity"),
        )


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_that_counts_tokens_takes_thousands(key, texts):
    table, name = key.split(".")

    found = getattr(getattr(read_config(texts / "c.toml", [f'{key}="4k"']), table), name)
    plain = getattr(getattr(read_config(texts / "c.toml", [f"{key}=4k"]), table), name)

    assert found == plain == 4096
    for wrong in ("4q", "-4k", "0", "4.5k", "4.5", "true"):
        with pytest.raises(SettingError, match=f"{key} must be a whole number of tokens"):
            read_config(texts / "c.toml", [f"{key}={wrong}"])
