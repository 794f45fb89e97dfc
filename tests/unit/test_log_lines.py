"""Format of log lines as JSON or text, and suppression of repeated lines."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.diff import ReloadOutcome
from gateway.config.problems import Problem
from gateway.events import CallFinished, Event, ReplicaChanged, StoreChanged
from gateway.processes.config_applier import log_outcome
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
REJECTED = (
    "ERROR   router.yaml was not reloaded: 1 problem; nothing has changed",
    "ERROR   models.bge: is missing",
)
RELOADED = ("INFO    router.yaml was reloaded: 0 changes",)


class Bench:
    """Log handler with a clock and timers that the test controls."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.now_s = 0.0
        self.timers: list[Callable[[], None]] = []
        self._out = io.StringIO()
        self.handler = FloodHandler(self._out, lambda: self.now_s, lambda _, run: self.timers.append(run))
        self.handler.setFormatter(formatter)

    def log(self, message: object, level: int = logging.INFO) -> None:
        self.handler.handle(logging.LogRecord("gateway", level, "", 0, message, None, None))

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def test_logs_a_call_as_flat_json_with_timings_and_trace_id() -> None:
    bench = Bench(JsonLines())
    bench.log(EventLine(CALL))

    (record,) = bench.records
    assert record.pop("time").endswith("+00:00")
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
    } == record


def test_logs_state_changes_as_json_fields_or_as_text() -> None:
    events: list[Event] = [ReplicaChanged("up", "http://a", "down", "reset"), StoreChanged(True, "late")]
    json_lines, text_lines = Bench(JsonLines()), Bench(TextLines())
    for event in events:
        assert isinstance(event, ReplicaChanged | StoreChanged)
        json_lines.log(EventLine(event))
        text_lines.log(EventLine(event))

    assert [("replica", "reset"), ("store", "late")] == [
        (record["event"], record["reason"]) for record in json_lines.records
    ]
    assert text_lines.lines[0].endswith("upstream up: http://a is down (reset)")
    assert text_lines.lines[1].endswith("the quota store is unreachable (late): counting without it")


def test_logs_an_exception_in_the_line_of_its_record() -> None:
    bench = Bench(JsonLines())
    try:
        int("broken")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    bench.handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("failed",), info))

    (record,) = bench.records
    assert ("x", "it failed", "error") == (record["logger"], record["message"], record["level"])
    assert "ValueError: invalid literal" in record["exception"]


def test_writes_repeated_lines_once_with_a_count() -> None:
    bench = Bench(JsonLines())
    for _ in range(1000):
        bench.log("the same")
    bench.log("another")
    lines_before = len(bench.lines)
    bench.now_s = FLOOD_S
    (timer,) = bench.timers
    timer()

    assert 2 == lines_before
    assert [("the same", 999)] == [(record["message"], record["repeated"]) for record in bench.records[2:]]
    bench.log("the same")
    assert 4 == len(bench.lines)


def test_close_writes_the_pending_count() -> None:
    bench = Bench(TextLines())
    bench.log("the same")
    bench.log("the same")
    bench.handler.close()

    assert bench.lines[1].endswith("the same (1 more like this within 10 s)")


def test_never_suppresses_calls_or_lines_of_another_level() -> None:
    bench = Bench(TextLines())
    bench.log("the same")
    bench.log("the same", logging.WARNING)
    for _ in range(3):
        bench.log(EventLine(CALL))

    assert 5 == len(bench.lines)


def test_writes_changes_of_state_when_they_happen() -> None:
    bench = Bench(TextLines())
    for away in (True, False, True, False):
        bench.log(EventLine(StoreChanged(away, "late")))
        bench.log(EventLine(ReplicaChanged("up", "http://a", "down" if away else "up", "reset")))

    assert 8 == len(bench.lines)
    assert [] == bench.timers


def test_bounds_the_remembered_lines_without_losing_counts() -> None:
    bench = Bench(JsonLines())
    for number in range(2 * REMEMBERED_MAX):
        bench.log(f"line {number}")
        bench.log(f"line {number}")
    assert REMEMBERED_MAX == len(bench.handler._recent)
    bench.handler.close()

    assert 2 * REMEMBERED_MAX == sum(record.get("repeated", 0) for record in bench.records)


@pytest.mark.parametrize("as_text", [False, True])
async def test_writes_call_lines_together_in_the_format_of_the_logging_module(*, as_text: bool) -> None:
    out = io.StringIO()
    lines = CallLines(out, as_text=as_text, delay_s=0)
    bench = Bench(TextLines() if as_text else JsonLines())
    for event in (CALL, msgspec.structs.replace(CALL, request_id="id-2")):
        lines.observe(event)
        bench.log(EventLine(event))
    assert not out.getvalue()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    def timeless(line: str) -> object:
        return line[9:] if as_text else {**json.loads(line), "time": None}

    assert [timeless(line) for line in bench.lines] == [
        timeless(line) for line in out.getvalue().splitlines()
    ]


async def test_does_not_log_health_probes() -> None:
    out = io.StringIO()
    lines = CallLines(out, as_text=False)
    lines.observe(msgspec.structs.replace(CALL, route="/livez"))
    lines.flush()

    assert not out.getvalue()


async def test_logs_only_refused_polls_of_the_status() -> None:
    out = io.StringIO()
    lines = CallLines(out, as_text=False)
    poll = msgspec.structs.replace(CALL, method="GET", route="/admin/status")
    lines.observe(poll)
    lines.observe(msgspec.structs.replace(poll, status=401, outcome="unauthenticated"))
    lines.flush()

    assert [401] == [json.loads(line)["status"] for line in out.getvalue().splitlines()]


def test_writes_each_outcome_of_a_reload_when_it_happens() -> None:
    bench = Bench(TextLines())
    logger = logging.getLogger("gateway")
    level = logger.level
    logger.addHandler(bench.handler)
    logger.setLevel(logging.INFO)
    failure = ReloadOutcome(problems=(Problem("models.bge", "is missing"),))
    try:
        for outcome in (failure, failure, ReloadOutcome(), failure, ReloadOutcome()):
            log_outcome(Path("router.yaml"), "file", outcome)
    finally:
        logger.setLevel(level)
        logger.removeHandler(bench.handler)

    assert [
        line for failed in (True, True, False, True, False) for line in (REJECTED if failed else RELOADED)
    ] == [line.split(" ", 1)[1].lstrip() for line in bench.lines]
    assert [] == bench.timers
