"""What tests of runs share, and none of them writes into."""

import pytest
from tests.support.training import write_hardware, write_store


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A token store, and beside it the chats that it was made of."""
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def hardware(tmp_path_factory):
    return write_hardware(tmp_path_factory.mktemp("hardware") / "slow.json")
