"""A worker sends heartbeats without ever waiting for its parent."""

import asyncio
import fcntl
import os

import msgspec
import pytest

from gateway.processes import messages
from gateway.processes.child import WORKER_CHECK_EVERY_S
from gateway.processes.worker import HEARTBEAT_EVERY_S, ParentLink
from tests.waiting import PATIENCE_S


async def read_messages(read_fd: int, lines: int) -> list[object]:
    """Read the next messages from a worker's pipe."""
    found: list[bytes] = []
    while len(found) < lines:
        found += (await asyncio.to_thread(os.read, read_fd, 65536)).splitlines()
    return [msgspec.json.decode(line, type=messages.ToParent) for line in found]


async def test_sends_heartbeats_more_often_than_they_are_checked() -> None:
    read_fd, write_fd = os.pipe()
    sending = asyncio.create_task(ParentLink(write_fd).send_heartbeats())
    async with asyncio.timeout(PATIENCE_S):
        assert [messages.Heartbeat()] * 2 == await read_messages(read_fd, 2)
    sending.cancel()
    os.close(read_fd)
    os.close(write_fd)

    assert 2 * HEARTBEAT_EVERY_S < WORKER_CHECK_EVERY_S


async def test_full_pipe_does_not_block_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.processes.worker.HEARTBEAT_EVERY_S", 0)
    read_fd, write_fd = os.pipe()
    room = fcntl.fcntl(write_fd, fcntl.F_GETPIPE_SZ)
    sending = asyncio.create_task(ParentLink(write_fd).send_heartbeats())
    # More turns than the pipe has room for: a write that waited would block the loop.
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(room // len(msgspec.json.encode(messages.Heartbeat())) + 1):
            await asyncio.sleep(0)
        # Once the pipe is read again, heartbeats continue.
        read = 0
        while read < 2 * room:
            read += len(await asyncio.to_thread(os.read, read_fd, room))
    sending.cancel()
    os.close(read_fd)
    os.close(write_fd)
