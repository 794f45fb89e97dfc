"""Every moment of a call belongs to one stage, and none is counted twice."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.events import Stage
from gateway.timeline import Timeline

STAGES: tuple[Stage, ...] = ("parse", "auth", "quota", "queue", "upstream", "encode")


def timeline(**laps: float) -> Timeline:
    """One whose laps have been run."""
    made = Timeline(0.0)
    made.laps = {stage: laps[stage] for stage in STAGES if stage in laps}
    return made


def test_laps_add_up_to_all_the_time_there_was() -> None:
    started_s = time.perf_counter()
    made = Timeline(started_s)
    for stage in STAGES:
        made.lap(stage)

    assert pytest.approx(made._last_s - started_s) == made.total_s()
    assert list(STAGES) == list(made.laps)
    assert all(seconds >= 0 for seconds in made.laps.values())


def test_what_came_before_the_start_given_belongs_to_the_first_stage() -> None:
    made = Timeline(time.perf_counter() - 10)
    made.lap("parse")

    assert made.laps["parse"] >= 10


def test_a_stage_entered_again_is_added_to() -> None:
    made = timeline(queue=5.0)
    made.lap("queue")

    assert made.laps["queue"] > 5.0
    assert ["queue"] == list(made.laps)


@pytest.mark.parametrize(
    ("seconds", "upstream", "queue"), [(0.0, 2.0, 1.0), (0.5, 1.5, 1.5), (2.0, 0.0, 3.0), (9.0, 0.0, 3.0)]
)
def test_only_as_much_is_moved_as_there_is(seconds: float, upstream: float, queue: float) -> None:
    made = timeline(queue=1.0, upstream=2.0)
    made.move("upstream", "queue", seconds)

    assert {"queue": queue, "upstream": upstream} == made.laps


@given(
    st.dictionaries(st.sampled_from(STAGES), st.floats(0, 100), max_size=6),
    st.lists(st.tuples(st.sampled_from(STAGES), st.sampled_from(STAGES), st.floats(0, 100)), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_moving_time_neither_makes_nor_loses_any(
    laps: dict[str, float], moves: list[tuple[Stage, Stage, float]]
) -> None:
    made = timeline(**laps)
    before_s = made.total_s()
    for source, target, seconds in moves:
        made.move(source, target, seconds)

    assert pytest.approx(before_s, abs=1e-9) == made.total_s()
    assert all(seconds >= 0 for seconds in made.laps.values())


def test_server_timing_is_in_milliseconds_in_the_order_of_the_stages() -> None:
    shown = timeline(parse=0.0012345, queue=1.5, encode=0.0).server_timing()

    assert "parse;dur=1.23, queue;dur=1500.00, encode;dur=0.00" == shown


@given(st.dictionaries(st.sampled_from(STAGES), st.floats(0, 1e5), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_server_timing_is_always_a_valid_header(laps: dict[str, float]) -> None:
    one = r"[a-z]+;dur=\d+\.\d\d"

    assert re.fullmatch(rf"{one}(, {one})*", timeline(**laps).server_timing())


def test_a_call_that_has_run_no_lap_shows_nothing() -> None:
    assert ("", 0.0) == (Timeline().server_timing(), Timeline().total_s())


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (0.0004, 0), (0.0006, 1), (1.2344, 1234)])
def test_one_stage_is_shown_in_whole_milliseconds(seconds: float, expected: int) -> None:
    assert expected == timeline(upstream=seconds).milliseconds("upstream")
    assert 0 == timeline(upstream=seconds).milliseconds("queue")
