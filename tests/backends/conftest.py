"""What the tests of adapters share."""

from pathlib import Path

import pytest

from tests.fakes.checkpoint import write_small_files


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a checkpoint's small files: sixteen tokens, one prompt."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return str(write_small_files(folder))
