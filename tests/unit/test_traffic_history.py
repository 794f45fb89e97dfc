"""Traffic of the last hour: intervals between samples, the bound, and the file that workers share."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from gateway.events import CallFinished
from gateway.telemetry.history import FILE_NAME, POINTS_MAX, TrafficHistory
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.totals import Totals


def totals_of(metrics: Metrics, *calls: tuple[str, float]) -> Totals:
    for outcome, seconds in calls:
        status = 200 if outcome == "ok" else 400
        event = CallFinished(
            "id", "POST", "/embed", status, outcome, seconds, "acme", "bge", 1, 7 if outcome == "ok" else 0
        )
        metrics.observe(event)
    return Totals(metrics.collected())


@pytest.fixture
def clock() -> Iterator[int]:
    return count(1000, 10)


async def test_points_are_the_differences_between_samples(clock: Iterator[int]) -> None:
    history, metrics = TrafficHistory(clock=lambda: next(clock)), Metrics(is_open=True)
    history.record(totals_of(metrics, ("ok", 0.02)))
    assert not history.points()
    history.record(totals_of(metrics, ("ok", 0.02), ("ok", 0.02), ("invalid_input", 0.02)))
    history.record(totals_of(metrics))

    first, second = history.points()
    assert (first.at_s, first.seconds) == (1010, 10)
    assert (first.calls, first.failures, first.tokens) == (3, {"invalid_input": 1}, 14)
    assert first.p50_s is not None
    assert 0.01 < first.p50_s < 0.05
    assert (second.calls, second.failures, second.tokens, second.p50_s) == (0, {}, 0, None)
    assert history.points(first.at_s) == [second]


async def test_only_the_last_hour_is_kept(clock: Iterator[int]) -> None:
    history, totals = TrafficHistory(clock=lambda: next(clock)), Totals([])
    for _ in range(POINTS_MAX + 50):
        history.record(totals)
    assert len(history.points()) == POINTS_MAX


async def test_a_clock_that_is_set_back_adds_no_point() -> None:
    times = iter([2000.0, 1000.0, 1010.0])
    history, totals = TrafficHistory(clock=lambda: next(times)), Totals([])
    for _ in range(3):
        history.record(totals)
    assert [point.seconds for point in history.points()] == [10]


async def test_workers_share_the_points_by_a_file(tmp_path: Path, clock: Iterator[int]) -> None:
    file, totals = tmp_path / FILE_NAME, Totals([])
    writer, reader = TrafficHistory(file, lambda: next(clock)), TrafficHistory(file)
    assert not reader.points()
    for _ in range(3):
        writer.record(totals)
    assert reader.points() == writer.points()
    assert len(reader.points()) == 2

    file.write_bytes(b"[{")
    assert not reader.points()


async def test_latency_leaves_out_calls_of_class_bulk(clock: Iterator[int]) -> None:
    history, metrics = TrafficHistory(clock=lambda: next(clock)), Metrics(is_open=True)
    history.record(Totals(metrics.collected()))
    event = CallFinished("id", "POST", "/embed", 200, "ok", 0.02, "acme", "bge", 1, 7)
    metrics.observe(event)
    for route in ("/v1/embeddings", "batches"):
        metrics.observe(msgspec.structs.replace(event, route=route, duration_s=20.0, is_bulk=True))
    history.record(Totals(metrics.collected()))

    (point,) = history.points()
    assert (3, 2) == (point.calls, point.bulk_calls)
    assert point.p99_s is not None
    assert point.p99_s < 0.05
