"""Lines as JSON or text, and a flood of equal ones as one with a count."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.events import CallFinished, Event, ReplicaChanged, StoreChanged
from gateway.telemetry.access_log import EventLine
from gateway.telemetry.log_lines import (
    FLOOD_S,
    REMEMBERED_MAX,
    CallLines,
    FloodHandler,
    JsonLines,
    TextLines,
)

CALL = CallFinished(
    "id-1", "POST", "/embed", 200, "ok", 0.0123, "acme", "bge", 3, 57, "embed", {"queue": 0.01}, "ab" * 16
)


class Bench:
    """A handler whose clock and timer the test moves."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.now_s = 0.0
        self.timers: list[Callable[[], None]] = []
        self._out = io.StringIO()
        self.handler = FloodHandler(self._out, lambda: self.now_s, lambda _, run: self.timers.append(run))
        self.handler.setFormatter(formatter)

    def say(self, message: object, level: int = logging.INFO) -> None:
        self.handler.handle(logging.LogRecord("gateway", level, "", 0, message, None, None))

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().splitlines()

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def test_a_call_is_flat_json_with_its_timings_and_its_trace() -> None:
    bench = Bench(JsonLines())
    bench.say(EventLine(CALL))

    (told,) = bench.told
    assert told.pop("time").endswith("+00:00")
    assert {
        "level": "info",
        "event": "call",
        "request_id": "id-1",
        "trace_id": "ab" * 16,
        "method": "POST",
        "route": "/embed",
        "status": 200,
        "outcome": "ok",
        "tenant": "acme",
        "model": "bge",
        "operation": "embed",
        "inputs": 3,
        "tokens": 57,
        "duration_ms": 12.3,
        "queue_ms": 10.0,
    } == told


def test_changes_of_state_have_fields_and_words() -> None:
    events: list[Event] = [ReplicaChanged("up", "http://a", "down", "gone"), StoreChanged(True, "late")]
    json_lines, text_lines = Bench(JsonLines()), Bench(TextLines())
    for event in events:
        assert isinstance(event, ReplicaChanged | StoreChanged)
        json_lines.say(EventLine(event))
        text_lines.say(EventLine(event))

    assert [("replica", "gone"), ("store", "late")] == [
        (one["event"], one["reason"]) for one in json_lines.told
    ]
    assert text_lines.lines[0].endswith("upstream up: http://a is down (gone)")
    assert text_lines.lines[1].endswith("the quota store is unreachable (late): counting without it")


def test_an_exception_stays_in_its_line() -> None:
    bench = Bench(JsonLines())
    try:
        int("broken")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    bench.handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("failed",), info))

    (told,) = bench.told
    assert ("x", "it failed", "error") == (told["logger"], told["message"], told["level"])
    assert "ValueError: invalid literal" in told["exception"]


def test_a_flood_of_equal_lines_is_one_line_and_a_count() -> None:
    bench = Bench(JsonLines())
    for _ in range(1000):
        bench.say("the same")
    bench.say("another")
    before = len(bench.lines)
    bench.now_s = FLOOD_S
    (timer,) = bench.timers
    timer()

    assert 2 == before
    assert [("the same", 999)] == [(one["message"], one["repeated"]) for one in bench.told[2:]]
    bench.say("the same")
    assert 4 == len(bench.lines)


def test_the_count_is_told_at_the_end_too() -> None:
    bench = Bench(TextLines())
    bench.say("the same")
    bench.say("the same")
    bench.handler.close()

    assert bench.lines[1].endswith("the same (1 more like this within 10 s)")


def test_other_levels_and_calls_are_never_equal() -> None:
    bench = Bench(TextLines())
    bench.say("the same")
    bench.say("the same", logging.WARNING)
    for _ in range(3):
        bench.say(EventLine(CALL))

    assert 5 == len(bench.lines)


def test_what_is_remembered_is_bounded_and_nothing_counted_is_lost() -> None:
    bench = Bench(JsonLines())
    for number in range(2 * REMEMBERED_MAX):
        bench.say(f"line {number}")
        bench.say(f"line {number}")
    assert REMEMBERED_MAX == len(bench.handler._recent)
    bench.handler.close()

    assert 2 * REMEMBERED_MAX == sum(one.get("repeated", 0) for one in bench.told)


@pytest.mark.parametrize("as_text", [False, True])
async def test_lines_of_calls_are_what_the_logging_module_would_write_and_leave_together(
    *, as_text: bool
) -> None:
    out = io.StringIO()
    lines = CallLines(out, as_text=as_text, delay_s=0)
    bench = Bench(TextLines() if as_text else JsonLines())
    for event in (CALL, msgspec.structs.replace(CALL, request_id="id-2")):
        lines.observe(event)
        bench.say(EventLine(event))
    assert not out.getvalue()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    def timeless(line: str) -> object:
        return line[9:] if as_text else {**json.loads(line), "time": None}

    assert [timeless(line) for line in bench.lines] == [
        timeless(line) for line in out.getvalue().splitlines()
    ]


async def test_what_is_asked_by_those_who_watch_has_no_line() -> None:
    out = io.StringIO()
    lines = CallLines(out, as_text=False)
    lines.observe(msgspec.structs.replace(CALL, route="/livez"))
    lines.flush()

    assert not out.getvalue()
