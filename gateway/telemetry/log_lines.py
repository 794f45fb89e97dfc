"""Output of log lines: as JSON or text, with a flood of equal lines reduced to one line and a count.

Every call, every outcome of a reload, and every change of a replica or of the quota store has its own line.
Other lines are equal if logger, level and message are.
"""

import asyncio
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from threading import Timer
from typing import Any, TextIO

import msgspec

from gateway.config.schema import Logs
from gateway.events import (
    AuditRecorded,
    BudgetAlert,
    CallFinished,
    Event,
    ReplicaChanged,
    ReplicaSlow,
    StoreChanged,
    StoreLost,
)
from gateway.telemetry.access_log import (
    QUIET_ROUTES,
    EventLine,
    call_fields,
    call_line,
    is_no_poll,
    log_change,
)

# Equal lines within this time after a line are counted and not written.
FLOOD_S = 10.0
# Different lines that are remembered; beyond that the oldest is reported and forgotten.
REMEMBERED_MAX = 256

# Delay in which lines of calls collect, to be written together.
BATCH_DELAY_S = 0.02
# Runs a function after a number of seconds.
Schedule = Callable[[float, Callable[[], None]], None]
# Changes of state are written when they happen: one that is counted would seem to happen later.
UNFILTERED = (
    AuditRecorded,
    BudgetAlert,
    CallFinished,
    ReplicaChanged,
    ReplicaSlow,
    StoreChanged,
    StoreLost,
)
# `extra` of a line that is no event and still bypasses the filter, such as the outcome of a reload.
WRITE_ALWAYS = {"is_unfiltered": True}
_LineKey = tuple[str, int, str]
_ENCODER = msgspec.json.Encoder()


class _Repeats:
    """Line that was written, and the number of equal lines after it."""

    def __init__(self, record: logging.LogRecord, since_s: float) -> None:
        self.record = record
        self.since_s = since_s
        self.more = 0

    def count(self) -> None:
        """Count an equal line."""
        self.more += 1


class CallLines:
    """Writer of call lines, many per write; other events go to the logging module at once.

    Through that module a line costs as much as the gateway's whole lane does. delay_s: longest time that a
    line waits.
    """

    def __init__(self, stream: TextIO, *, as_text: bool, delay_s: float = BATCH_DELAY_S) -> None:
        self._stream = stream
        self._format = _text_line if as_text else _json_line
        self._delay_s = delay_s
        # Each with the time at which its call finished, in seconds since 1970.
        self._pending: list[tuple[float, CallFinished]] = []

    def observe(self, event: Event) -> None:
        """Log one event; must be called on an event loop."""
        if not isinstance(event, CallFinished):
            log_change(event)
        elif event.route not in QUIET_ROUTES or is_no_poll(event):
            if not self._pending:
                asyncio.get_running_loop().call_later(self._delay_s, self.flush)
            self._pending.append((time.time(), event))

    def flush(self) -> None:
        """Write the lines that wait."""
        pending, self._pending = self._pending, []
        if pending:
            self._stream.write("".join([self._format(at_s, event) for at_s, event in pending]))
            self._stream.flush()


def _json_line(at_s: float, event: CallFinished) -> str:
    return _ENCODER.encode(call_fields(event, _iso_time(at_s), "info")).decode() + "\n"


def _text_line(at_s: float, event: CallFinished) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))} INFO    {call_line(event)}\n"


def _iso_time(at_s: float) -> str:
    """Return the time in UTC, to the millisecond."""
    second, milliseconds = divmod(int(at_s * 1000), 1000)
    return f"{_iso_second(second)}.{milliseconds:03d}+00:00"


# Many lines are of the same second.
@lru_cache(maxsize=2)
def _iso_second(second: int) -> str:
    """Return a second since 1970 in UTC, without its offset."""
    return datetime.fromtimestamp(second, UTC).isoformat()[: -len("+00:00")]


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, message, and the fields of an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; values that JSON does not know are written as text."""
        fields: dict[str, Any] = {
            "time": _iso_time(record.created),
            "level": record.levelname.lower(),
        }
        if isinstance(record.msg, EventLine):
            fields |= record.msg.fields()
        else:
            fields |= {"event": "line", "logger": record.name, "message": record.getMessage()}
        if repeated := getattr(record, "repeated", 0):
            fields["repeated"] = repeated
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


class TextLines(logging.Formatter):
    """Lines for people at a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with the count of equal lines that were not written."""
        line = super().format(record)
        repeated = getattr(record, "repeated", 0)
        return f"{line} ({repeated} more like this within {FLOOD_S:.0f} s)" if repeated else line


class FloodHandler(logging.StreamHandler[TextIO]):
    """Handler that writes a line once, and counts equal lines of the next FLOOD_S seconds."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, schedule: Schedule | None = None
    ) -> None:
        super().__init__(stream)
        self._clock = clock
        self._schedule = schedule or _run_later
        self._recent: OrderedDict[_LineKey, _Repeats] = OrderedDict()
        self._is_scheduled = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write or count a record; the caller holds the handler's lock."""
        if _is_unfiltered(record):
            super().emit(record)
            return
        now_s = self._clock()
        self._expire(until_s=now_s - FLOOD_S)
        key = (record.name, record.levelno, record.getMessage())
        if (repeats := self._recent.get(key)) is not None:
            repeats.count()
            self._schedule_report()
            return
        if len(self._recent) >= REMEMBERED_MAX:
            self._report(self._recent.popitem(last=False)[1])
        self._recent[key] = _Repeats(record, now_s)
        super().emit(record)

    def close(self) -> None:
        """Report all counts, then close."""
        self.acquire()
        try:
            self._expire(until_s=float("inf"))
        finally:
            self.release()
        super().close()

    def _schedule_report(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(FLOOD_S, self._report_expired)

    def _report_expired(self) -> None:
        self.acquire()
        try:
            self._is_scheduled = False
            self._expire(until_s=self._clock() - FLOOD_S)
            if any(repeats.more for repeats in self._recent.values()):
                self._schedule_report()
        finally:
            self.release()

    def _expire(self, until_s: float) -> None:
        """Forget the lines that were written before a moment, and report how often they were repeated."""
        while self._recent:
            key, oldest = next(iter(self._recent.items()))
            if oldest.since_s > until_s:
                return
            del self._recent[key]
            self._report(oldest)

    def _report(self, repeats: _Repeats) -> None:
        if repeats.more:
            changed = {"repeated": repeats.more, "created": time.time()}
            super().emit(logging.makeLogRecord({**repeats.record.__dict__, **changed}))


def _is_unfiltered(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, EventLine):
        return isinstance(record.msg.event, UNFILTERED)
    return getattr(record, "is_unfiltered", False)


def write_lines(settings: Logs) -> None:
    """Write the log lines of this process to its standard error; replaces an earlier setup."""
    handler = FloodHandler(sys.stderr)
    handler.setFormatter(TextLines() if is_text(settings) else JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Python's own warnings become lines too.
    logging.captureWarnings(capture=True)


def call_lines(settings: Logs) -> CallLines:
    """Return the writer of this process' call lines."""
    return CallLines(sys.stderr, as_text=is_text(settings))


def is_text(settings: Logs) -> bool:
    """Return whether log lines are text for people; without a terminal they are JSON."""
    return settings.format == "text" or (settings.format == "auto" and sys.stderr.isatty())


def _run_later(seconds: float, run: Callable[[], None]) -> None:
    timer = Timer(seconds, run)
    timer.daemon = True
    timer.start()
