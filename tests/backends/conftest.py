"""Fixtures of the adapter tests."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.fakes.checkpoint import write_small_files


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Test connections on uvloop, which the gateway runs on, and on asyncio, which most tests run on."""
    del config
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return loops | ({"uvloop": uvloop.new_event_loop} if item.path.name.startswith("test_http") else {})


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a checkpoint's small files: at most 16 tokens, one prompt."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return str(write_small_files(folder))
