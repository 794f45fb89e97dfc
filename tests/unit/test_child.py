"""A parent receives the lines that its children write, and kills a child that stops responding."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.processes.child import MISSES_MAX, Child, ChildSpec, Heartbeats, watch_liveness
from tests.waiting import PATIENCE_S

# Writes two lines to the file descriptor that its first line of standard input names.
TALKER = "tests.fakes.talker"
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the variables of a child that finds the tests' modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def open_files() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


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


async def test_a_process_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[bytes] = []
    ends: list[tuple[str, str]] = []
    # Longer than the system allows for one variable.
    variables = {**environment(), "LONG": "a" * 4_000_000}
    spec = ChildSpec("talker", TALKER, variables)
    child = Child(spec, lambda fd: str(fd).encode(), lines.append, lambda *end: ends.append(end))
    child.capture(lambda _: None)
    before = open_files()
    running = asyncio.create_task(child.keep_running())
    async with asyncio.timeout(PATIENCE_S):
        while len(ends) < 2:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.01)
        left_open = open_files() - before
        del variables["LONG"]
        while not lines:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.01)
    await child.stop(signal.SIGTERM, 10)
    await running

    assert ("ended", "it could not be started: Argument list too long") == ends[0]
    assert "talker exited (it could not be started: Argument list too long); restarting it" in caplog.text
    assert left_open <= 0


EVERY_S = 0.01


class Watched:
    """A child whose next process starts as soon as it is killed."""

    name = "worker"

    def __init__(self) -> None:
        self.pid = 1
        self.killed: list[int] = []

    def kill_hung(self) -> None:
        """Record the kill and start the next process."""
        self.killed.append(self.pid)
        self.pid += 1


async def watched(answer: Callable[[int, Watched], bool], checks: int, grace: int | None = None) -> list[int]:
    """Return the ids of killed processes. answer: result of a check, by its number. checks: their number."""
    child, seen, over = Watched(), 0, asyncio.Event()

    async def is_alive() -> bool:
        nonlocal seen
        seen += 1
        if seen >= checks:
            over.set()
        return answer(seen, child)

    watching = asyncio.create_task(watch_liveness(child, is_alive, EVERY_S, grace))  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        await over.wait()
    watching.cancel()
    return child.killed


async def test_kills_once_after_too_many_misses_in_a_row() -> None:
    assert [1] == await watched(lambda seen, child: seen == 1 and child.pid == 1, 1 + 3 * MISSES_MAX)


async def test_does_not_kill_a_child_that_is_still_starting() -> None:
    assert [] == await watched(lambda _, __: False, 3 * MISSES_MAX)


async def test_tolerates_a_few_misses() -> None:
    assert [] == await watched(lambda seen, _: seen % MISSES_MAX == 1, 4 * MISSES_MAX)


async def test_counts_from_zero_for_a_new_process() -> None:
    def answer(seen: int, child: Watched) -> bool:
        if seen == MISSES_MAX:
            child.pid = 7
        return seen == 1

    assert [] == await watched(answer, 3 * MISSES_MAX)


async def test_grants_extra_misses_while_starting() -> None:
    def never(_: int, __: Watched) -> bool:
        return False

    assert [] == await watched(never, 2 + MISSES_MAX, grace=3)
    assert [1] == await watched(never, 4 + MISSES_MAX, grace=3)


async def test_ignores_checks_during_its_own_pause() -> None:
    def answer(seen: int, _: Watched) -> bool:
        if seen == 1:
            return True
        # Blocks the event loop, as a stopped process is blocked.
        time.sleep(3 * EVERY_S)
        return False

    assert [] == await watched(answer, 2 * MISSES_MAX)


async def test_message_counts_as_heartbeat_once() -> None:
    heartbeats = Heartbeats()
    heartbeats.record()
    heartbeats.record()

    assert [True, False] == [await heartbeats.is_alive() for _ in range(2)]


async def test_message_of_the_previous_process_does_not_count() -> None:
    heartbeats = Heartbeats()
    heartbeats.record()
    heartbeats.reset()

    assert not await heartbeats.is_alive()
