"""Window on simulated replicas: it finds the useful number of batches in flight and stays there."""

import heapq
from collections.abc import Sequence
from random import Random

import pytest

from gateway.routing.window import SIZE_MAX, SIZE_MIN, SIZE_START, Window


class Server:
    """A server that runs `parallel` batches at once, with jitter, and queues the rest.

    callers: as many batches as ever want to be in flight.
    """

    def __init__(
        self, window: Window, parallel: int, batch_s: float, jitter: float, seed: int, callers: int = 10**6
    ) -> None:
        self.window = window
        self._callers = callers
        self.parallel = parallel
        self._batch_s = batch_s
        self._jitter = jitter
        self._random = Random(seed)
        self._ends: list[float] = []
        self._in_flight = 0
        self.now_s = 0.0
        self.done = 0

    def run(self, until_s: float) -> tuple[float, list[int]]:
        """Return the time-weighted mean size until a moment, and all sizes it had."""
        weighted, started_s, sizes = 0.0, self.now_s, []
        while self.now_s < until_s:
            self._in_flight = min(self._callers, max(self._in_flight, self.window.size))
            while len(self._ends) < min(self.parallel, self._in_flight):
                spread = self._jitter * self._random.uniform(-1.7, 1.7)
                heapq.heappush(self._ends, self.now_s + self._batch_s * (1 + spread))
            end_s = heapq.heappop(self._ends)
            weighted += self.window.size * (end_s - self.now_s)
            sizes.append(self.window.size)
            self.now_s = end_s
            self.done += 1
            full = self._in_flight >= self.window.size
            self.window.recover(end_s)
            self.window.record_batch(self._random.randint(400, 600), end_s, self._in_flight, was_full=full)
            self._in_flight -= 1
        return weighted / (self.now_s - started_s), sizes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("jitter", [0, 0.3])
@pytest.mark.parametrize("parallel", [1, 2, 4, 8, 16, 32])
def test_window_settles_near_the_replicas_parallelism(parallel: int, jitter: float, seed: int) -> None:
    server = Server(Window(), parallel, 0.1, jitter, seed)
    server.run(120)
    before = server.done
    mean, sizes = server.run(300)

    assert max(SIZE_MIN, parallel) * 0.8 <= mean <= max(SIZE_MIN, parallel) * 1.6 + 1
    assert max(sizes) <= max(6, parallel * 2.4)
    assert (server.done - before) / (180 * parallel / 0.1) >= 0.88


@pytest.mark.parametrize("parallel", [1, 2, 8])
@pytest.mark.parametrize("callers", [4, 5, 6, 8, 9])
def test_partly_filled_larger_window_is_kept_only_if_it_brings_more(callers: int, parallel: int) -> None:
    server = Server(Window(), parallel, 0.1, 0.3, 1, callers)
    server.run(60)
    mean, _ = server.run(120 if parallel == 8 else 400)

    assert mean >= min(callers, 8) * 0.8 if parallel == 8 else mean < 3.5


@pytest.mark.parametrize(
    ("in_flight", "was_full", "sizes"),
    [
        # Calls wait, yet no more may be in flight: a server's own bound, or a slot reserved for a tenant.
        (4, True, range(SIZE_START + 1)),
        (1, False, [SIZE_START]),
    ],
    ids=["limited from outside", "not full"],
)
def test_window_that_is_not_used_does_not_grow(in_flight: int, was_full: bool, sizes: Sequence[int]) -> None:
    window = Window()
    for step in range(10_000):
        window.record_batch(500, step * 0.1, in_flight, was_full=was_full)

    assert window.size in sizes


def test_larger_window_keeps_no_more_slots_than_were_used() -> None:
    server = Server(Window(), 5, 0.1, 0.3, 1, callers=5)
    server.run(60)
    _, sizes = server.run(120)
    server = Server(server.window, 1, 0.1, 0.3, 2, callers=5)
    server.run(120)
    mean, _ = server.run(300)

    assert 5 in sizes
    assert mean < 3.5


def test_window_grows_to_its_maximum_on_a_fast_replica() -> None:
    server = Server(Window(), 500, 0.1, 0.3, 1)
    server.run(120)

    assert server.run(240)[0] >= SIZE_MAX * 0.85


@pytest.mark.parametrize("seed", range(5))
def test_new_window_doubles_on_a_parallel_replica(seed: int) -> None:
    # Batches of a second, as those of a slow server in a bulk load.
    server = Server(Window(), 16, 1.0, 0.3, seed)
    server.run(14)

    assert server.run(20)[0] >= 10


def test_new_window_does_not_double_on_a_serial_replica() -> None:
    server = Server(Window(), 1, 0.1, 0.3, 1)

    assert max(server.run(60)[1]) <= 2 * SIZE_START


def test_window_follows_a_changing_replica() -> None:
    server = Server(Window(), 2, 0.05, 0.3, 1)
    server.run(60)
    server.parallel = 16
    server.run(300)
    grown, _ = server.run(400)
    server.parallel = 2
    server.run(700)
    shrunk, _ = server.run(800)

    assert grown >= 12
    assert shrunk <= 5


def test_fixed_window_does_not_change() -> None:
    window = Window(3)
    window.record_refusal(1.0)
    window.restart()
    Server(window, 8, 0.1, 0.3, 1).run(60)

    assert window.size == 3


def test_simultaneous_refusals_shrink_the_window_once() -> None:
    window = Window(None)
    server = Server(window, 500, 0.1, 0, 1)
    server.run(120)
    before = window.size
    sent_s = server.now_s
    for _ in range(before):
        window.record_refusal(sent_s + 1, sent_s)
    assert before // 2 <= window.size < before
    window.record_refusal(sent_s + 3, sent_s + 2)

    assert window.size < before // 2


def test_repeated_refusals_leave_one_slot() -> None:
    window = Window()
    for second in range(20):
        window.record_refusal(second + 0.5, second)

    assert window.size == 1


def refuse(window: Window, from_s: float, until_s: float) -> None:
    """Refuse batches, each of which was sent after the refusal before."""
    steps = 10
    for step in range(steps):
        sent_s = from_s + (until_s - from_s) * step / steps
        window.record_refusal(sent_s + 0.01, sent_s)


@pytest.mark.parametrize("parallel", [4, 16, 32])
def test_window_returns_after_a_burst_of_refusals(parallel: int) -> None:
    server = Server(Window(), parallel, 0.1, 0.3, 1)
    before, _ = server.run(120)
    refuse(server.window, server.now_s, server.now_s + 1.5)
    assert server.window.size == 1
    server.now_s += 1.5
    server.run(server.now_s + 8)

    assert server.run(server.now_s + 5)[0] >= before * 0.75


def test_window_returns_without_batches_that_teach_it_anything() -> None:
    window = Window(start=16)
    refuse(window, 0.0, 1.5)
    for tenth in range(15, 80):
        window.recover(tenth / 10)

    assert window.size == 16


def test_window_returns_to_fewer_slots_if_refusals_come_again_and_to_all_after_a_minute() -> None:
    window = Window(start=16)
    sizes = []
    for tenth in range(2000):
        now_s = tenth / 10
        window.recover(now_s)
        if window.size > 6 and now_s < 60:
            window.record_refusal(now_s, now_s - 0.05)
        sizes.append(window.size)

    assert 4 <= sizes[590] <= 6
    assert sum(size > 6 for size in sizes[:600]) <= 5
    assert sizes[-1] == 16


def test_small_window_that_was_measured_stays_after_old_refusals() -> None:
    server = Server(Window(start=16), 2, 0.1, 0.3, 1)
    refuse(server.window, 0.0, 1.0)
    server.now_s = 1.0
    server.run(90)

    assert server.run(200)[0] <= 4


def test_restart_resets_the_window() -> None:
    window = Window()
    Server(window, 500, 0.1, 0, 1).run(120)
    window.restart()

    assert window.size == SIZE_START
