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


async def test_after_so_many_misses_in_a_row_it_is_killed_once() -> None:
    assert [1] == await watched(lambda seen, child: seen == 1 and child.pid == 1, 1 + 3 * MISSES_MAX)


async def test_what_has_not_answered_yet_is_still_being_started() -> None:
    assert [] == await watched(lambda _, __: False, 3 * MISSES_MAX)


async def test_a_few_misses_between_answers_are_a_busy_moment() -> None:
    assert [] == await watched(lambda seen, _: seen % MISSES_MAX == 1, 4 * MISSES_MAX)


async def test_one_that_ended_by_itself_meanwhile_begins_anew() -> None:
    def answer(seen: int, child: Watched) -> bool:
        if seen == MISSES_MAX:
            child.pid = 7
        return seen == 1

    assert [] == await watched(answer, 3 * MISSES_MAX)


async def test_one_that_never_answers_has_so_many_misses_more() -> None:
    def never(_: int, __: Watched) -> bool:
        return False

    assert [] == await watched(never, 2 + MISSES_MAX, grace=3)
    assert [1] == await watched(never, 4 + MISSES_MAX, grace=3)


async def test_a_pause_of_the_watcher_itself_counts_for_nothing() -> None:
    def answer(seen: int, _: Watched) -> bool:
        if seen == 1:
            return True
        # As long as a stopped process is: nothing else runs meanwhile.
        time.sleep(3 * EVERY_S)
        return False

    assert [] == await watched(answer, 2 * MISSES_MAX)


async def test_whatever_it_says_is_a_sign_of_life_once() -> None:
    signs = Heartbeats()
    signs.record()
    signs.record()

    assert [True, False] == [await signs.is_alive() for _ in range(2)]


async def test_what_the_process_before_it_said_is_no_sign_of_the_next() -> None:
    signs = Heartbeats()
    signs.record()
    signs.reset()

    assert not await signs.is_alive()
