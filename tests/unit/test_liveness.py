"""Who no longer answers is killed; who never did, and a parent that was paused itself, is left alone."""

import asyncio
import time
from collections.abc import Callable

from gateway.processes.liveness import MISSES_MAX, Heartbeats, watch_liveness

EVERY_S = 0.01


class Watched:
    """A child that is killed for hanging: another process takes its place."""

    name = "worker"

    def __init__(self) -> None:
        self.pid = 1
        self.killed: list[int] = []

    def kill_hung(self) -> None:
        """Take its place."""
        self.killed.append(self.pid)
        self.pid += 1


async def watched(answer: Callable[[int, Watched], bool], looks: int, grace: int | None = None) -> list[int]:
    """Which processes were killed, given what each look found."""
    child, seen, over = Watched(), 0, asyncio.Event()

    async def answers() -> bool:
        nonlocal seen
        seen += 1
        if seen >= looks:
            over.set()
        return answer(seen, child)

    watching = asyncio.create_task(watch_liveness(child, answers, EVERY_S, grace))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
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
        # As long as a stopped process is: nothing else runs meanwhile.
        time.sleep(3 * EVERY_S)
        return False

    assert [] == await watched(answer, 2 * MISSES_MAX)


async def test_message_counts_as_heartbeat_once() -> None:
    signs = Heartbeats()
    signs.record()
    signs.record()

    assert [True, False] == [await signs.is_alive() for _ in range(2)]


async def test_message_of_the_previous_process_does_not_count() -> None:
    signs = Heartbeats()
    signs.record()
    signs.reset()

    assert not await signs.is_alive()
