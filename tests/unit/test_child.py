"""A parent receives the lines that its children write."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gateway.processes.child import Child, ChildSpec
from tests.waiting import PATIENCE_S

# Writes two lines to the file descriptor that its first line of standard input names.
TALKER = "tests.fakes.talker"
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the variables of a child that finds the tests' modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


async def test_receives_lines_of_any_length() -> None:
    lines: list[bytes] = []
    child = Child(ChildSpec("talker", TALKER, environment()), lambda fd: str(fd).encode(), lines.append)
    running = asyncio.create_task(child.keep_running())
    async with asyncio.timeout(PATIENCE_S):
        while len(lines) < 2:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.01)
    await child.stop(signal.SIGTERM, 10)
    await running

    assert [1_000_001, 6] == [len(line) for line in lines[:2]]


async def test_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talker_of_another.py").write_text("import os\nos.write(int(input()), b'foreign\\n')\n")
    monkeypatch.chdir(tmp_path)
    lines: list[bytes] = []
    spec = ChildSpec("talker", "talker_of_another", dict(os.environ))
    child = Child(spec, lambda fd: str(fd).encode(), lines.append)
    running = asyncio.create_task(child.keep_running())
    await asyncio.sleep(2)
    await child.stop(signal.SIGTERM, 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [] == lines
