"""Spans of replicas: days, gateways that differ, processes that stopped, and bounds."""

from gateway.events import ReplicaChanged
from gateway.history.spans import (
    SHOWN_MAX,
    SILENT_AFTER_S,
    SPANS_MAX,
    ReplicaSpan,
    SpanRecorder,
    by_replica,
    spans_of,
)
from gateway.history.store import DAY_S

NOON_S = 20_000 * DAY_S + DAY_S / 2
MIDNIGHT_S = 20_001.0 * DAY_S


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = NOON_S

    def __call__(self) -> float:
        return self.now_s


def shown(contents: list[bytes], now_s: float, from_s: float = 0.0) -> list[ReplicaSpan]:
    return by_replica(spans_of(contents, now_s), from_s, now_s + 1)["up", "a"]


def test_an_open_span_goes_on_over_midnight_without_a_seam() -> None:
    clock = Clock()
    recorder = SpanRecorder(clock)
    recorder.observe(ReplicaChanged("up", "a", "up"))
    clock.now_s = NOON_S + 10
    recorder.observe(ReplicaChanged("up", "a", "down", "refused"))
    clock.now_s = MIDNIGHT_S + 100
    (past, first), (today, second) = recorder.contents()
    assert (past, today) == (20_000, 20_001)
    recorder.forget_past(past)
    assert [day for day, _ in recorder.contents()] == [20_001]

    assert shown([first, second], clock.now_s) == [
        ReplicaSpan(NOON_S, NOON_S + 10, "up", ""),
        ReplicaSpan(NOON_S + 10, None, "down", "refused"),
    ]
    # Each day can be read without those before it.
    assert shown([second], clock.now_s) == [ReplicaSpan(MIDNIGHT_S, None, "down", "refused")]


def test_a_process_that_stopped_ends_its_spans_where_it_was_seen() -> None:
    clock = Clock()
    recorder = SpanRecorder(clock)
    recorder.observe(ReplicaChanged("up", "a", "up"))
    clock.now_s += 60
    ((_, content),) = recorder.contents()
    assert shown([content], clock.now_s)[-1].until_s is None
    assert shown([content], clock.now_s + SILENT_AFTER_S + 1) == [ReplicaSpan(NOON_S, NOON_S + 60, "up", "")]


def test_the_worst_state_of_several_gateways_counts() -> None:
    clock, contents = Clock(), []
    recorders = [SpanRecorder(clock), SpanRecorder(clock)]
    for recorder in recorders:
        recorder.observe(ReplicaChanged("up", "a", "up"))
    clock.now_s = NOON_S + 10
    recorders[0].observe(ReplicaChanged("up", "a", "down", "reset"))
    clock.now_s = NOON_S + 20
    recorders[1].observe(ReplicaChanged("up", "a", "probation"))
    clock.now_s = NOON_S + 30
    recorders[0].observe(ReplicaChanged("up", "a", "up"))
    recorders[1].observe(ReplicaChanged("up", "a", "up"))
    contents = [content for recorder in recorders for _, content in recorder.contents()]
    assert shown(contents, clock.now_s) == [
        ReplicaSpan(NOON_S, NOON_S + 10, "up", ""),
        ReplicaSpan(NOON_S + 10, NOON_S + 30, "down", "reset"),
        ReplicaSpan(NOON_S + 30, None, "up", ""),
    ]


def test_a_replica_that_is_gone_or_forgotten_has_no_open_span() -> None:
    clock = Clock()
    recorder = SpanRecorder(clock)
    recorder.observe(ReplicaChanged("up", "a", "up"))
    recorder.observe(ReplicaChanged("other", "b", "up"))
    clock.now_s += 5
    recorder.observe(ReplicaChanged("up", "a", "gone"))
    recorder.forget("other")
    ((_, content),) = recorder.contents()
    found = by_replica(spans_of([content, b"damaged"], clock.now_s), 0, clock.now_s)
    assert [span.until_s for spans in found.values() for span in spans] == [NOON_S + 5] * 2
    assert not by_replica(spans_of([content], clock.now_s), 0, clock.now_s, "third")


def test_a_replica_that_flaps_is_bounded() -> None:
    clock = Clock()
    recorder = SpanRecorder(clock)
    for number in range(SPANS_MAX * 3):
        clock.now_s += 1
        recorder.observe(ReplicaChanged("up", "a", "down" if number % 2 else "up", "r" * 10_000))
    ((_, content),) = recorder.contents()
    spans = spans_of([content], clock.now_s)
    assert len(spans) == SPANS_MAX
    assert spans[-1].until_s is None
    assert len(content) < 32 * 1024
    assert len(by_replica(spans * 20, 0, clock.now_s + 1)["up", "a"]) <= SHOWN_MAX
