"""Attribution of a call's time to stages: complete, and without double counting."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.events import Stage
from gateway.telemetry.timeline import Timeline

STAGES: tuple[Stage, ...] = ("parse", "auth", "quota", "queue", "upstream", "encode")


def timeline(**laps: float) -> Timeline:
    """Return a timeline with these laps."""
    recorded = Timeline(0.0)
    recorded.laps = {stage: laps[stage] for stage in STAGES if stage in laps}
    return recorded


def test_laps_add_up_to_the_elapsed_time() -> None:
    started_s = time.perf_counter()
    recorded = Timeline(started_s)
    for stage in STAGES:
        recorded.lap(stage)

    assert pytest.approx(recorded._last_s - started_s) == recorded.total_s()
    assert list(STAGES) == list(recorded.laps)
    assert all(seconds >= 0 for seconds in recorded.laps.values())


def test_the_first_lap_begins_at_the_given_start() -> None:
    recorded = Timeline(time.perf_counter() - 10)
    recorded.lap("parse")

    assert recorded.laps["parse"] >= 10


def test_a_repeated_stage_accumulates() -> None:
    recorded = timeline(queue=5.0)
    recorded.lap("queue")

    assert recorded.laps["queue"] > 5.0
    assert ["queue"] == list(recorded.laps)


@pytest.mark.parametrize(
    ("seconds", "upstream", "queue"), [(0.0, 2.0, 1.0), (0.5, 1.5, 1.5), (2.0, 0.0, 3.0), (9.0, 0.0, 3.0)]
)
def test_moves_at_most_the_time_of_the_source_stage(seconds: float, upstream: float, queue: float) -> None:
    recorded = timeline(queue=1.0, upstream=2.0)
    recorded.move("upstream", "queue", seconds)

    assert {"queue": queue, "upstream": upstream} == recorded.laps


@given(
    st.dictionaries(st.sampled_from(STAGES), st.floats(0, 100), max_size=6),
    st.lists(st.tuples(st.sampled_from(STAGES), st.sampled_from(STAGES), st.floats(0, 100)), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_moving_time_keeps_the_total(laps: dict[str, float], moves: list[tuple[Stage, Stage, float]]) -> None:
    recorded = timeline(**laps)
    before_s = recorded.total_s()
    for source, target, seconds in moves:
        recorded.move(source, target, seconds)

    assert pytest.approx(before_s, abs=1e-9) == recorded.total_s()
    assert all(seconds >= 0 for seconds in recorded.laps.values())


def test_server_timing_lists_stages_in_order_in_milliseconds() -> None:
    header = timeline(parse=0.0012345, queue=1.5, encode=0.0).server_timing()

    assert "parse;dur=1.23, queue;dur=1500.00, encode;dur=0.00" == header


@given(st.dictionaries(st.sampled_from(STAGES), st.floats(0, 1e5), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_server_timing_is_always_a_valid_header(laps: dict[str, float]) -> None:
    entry = r"[a-z]+;dur=\d+\.\d\d"

    assert re.fullmatch(rf"{entry}(, {entry})*", timeline(**laps).server_timing())


def test_server_timing_without_laps_is_empty() -> None:
    assert ("", 0.0) == (Timeline().server_timing(), Timeline().total_s())


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.0004, 0), (0.0006, 1), (1.2344, 1234)])
def test_rounds_a_stage_to_whole_milliseconds(seconds: float, expected: int) -> None:
    assert expected == timeline(upstream=seconds).milliseconds("upstream")
    assert 0 == timeline(upstream=seconds).milliseconds("queue")
