"""What a parent hears of its children."""

import asyncio
import os
import signal

from gateway.processes.child import Child, ChildSpec

# Says two lines to the number that its first line of standard input holds.
TALKER = "tests.fakes.talker"


async def test_receives_lines_of_any_length() -> None:
    heard: list[bytes] = []
    child = Child(ChildSpec("talker", TALKER, os.environ), lambda fd: str(fd).encode(), heard.append)
    running = asyncio.create_task(child.keep_running())
    async with asyncio.timeout(30):
        while len(heard) < 2:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    await child.stop(signal.SIGTERM, 10)
    await running

    assert [1_000_001, 6] == [len(line) for line in heard[:2]]
