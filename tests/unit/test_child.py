"""A parent receives the lines that its children write."""

import asyncio
import os
import signal

from gateway.processes.child import Child, ChildSpec

# Writes two lines to the file descriptor that its first line of standard input names.
TALKER = "tests.fakes.talker"


async def test_receives_lines_of_any_length() -> None:
    lines: list[bytes] = []
    child = Child(ChildSpec("talker", TALKER, os.environ), lambda fd: str(fd).encode(), lines.append)
    running = asyncio.create_task(child.keep_running())
    async with asyncio.timeout(30):
        while len(lines) < 2:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.01)
    await child.stop(signal.SIGTERM, 10)
    await running

    assert [1_000_001, 6] == [len(line) for line in lines[:2]]
