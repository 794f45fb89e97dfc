"""How lines are written: as JSON or as text, and a flood of equal ones as one line with a count.

Calls have a line each, whatever they are; equal is what says the same at the same level.
"""

import asyncio
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Timer
from typing import Any, TextIO

import msgspec

from gateway.config.schema import Logs
from gateway.events import CallFinished, Event
from gateway.telemetry.access_log import QUIET_ROUTES, EventLine, call_fields, call_line, log_change

# Within so long of a line, others that say the same are counted.
FLOOD_S = 10.0
# Different lines that are remembered; past it the oldest is told and forgotten.
REMEMBERED_MOST = 256

# So long lines of calls wait for each other.
TOGETHER_S = 0.02
# What runs a function after some seconds.
Later = Callable[[float, Callable[[], None]], None]
_Said = tuple[str, int, str]
_ENCODER = msgspec.json.Encoder()


class _Repeats:
    """A line that was written, since when, and how many said the same after it."""

    def __init__(self, record: logging.LogRecord, since_s: float) -> None:
        self.record = record
        self.since_s = since_s
        self.more = 0


class CallLines:
    """Lines of calls, many to a write; others go by the logging module at once.

    Through that module one costs as much as the gateway's whole lane does. seconds: how long a line may wait.
    """

    def __init__(self, stream: TextIO, *, as_text: bool, seconds: float = TOGETHER_S) -> None:
        self._stream = stream
        self._line = _text_of if as_text else _json_of
        self._seconds = seconds
        # With the moment at which each was over, in seconds since 1970.
        self._waiting: list[tuple[float, CallFinished]] = []

    def observe(self, event: Event) -> None:
        """Called on an event loop."""
        if not isinstance(event, CallFinished):
            log_change(event)
        elif event.route not in QUIET_ROUTES:
            if not self._waiting:
                asyncio.get_running_loop().call_later(self._seconds, self.flush)
            self._waiting.append((time.time(), event))

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._stream.write("".join([self._line(*one) for one in waiting]))
            self._stream.flush()


def _json_of(at_s: float, event: CallFinished) -> str:
    return _ENCODER.encode({"time": _moment(at_s), "level": "info"} | call_fields(event)).decode() + "\n"


def _text_of(at_s: float, event: CallFinished) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))} INFO    {call_line(event)}\n"


def _moment(at_s: float) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and an event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Raises nothing: what JSON does not know is written as text."""
        told: dict[str, Any] = {
            "time": _moment(record.created),
            "level": record.levelname.lower(),
        }
        if isinstance(record.msg, EventLine):
            told |= record.msg.fields()
        else:
            told |= {"event": "line", "logger": record.name, "message": record.getMessage()}
        if repeated := getattr(record, "repeated", 0):
            told["repeated"] = repeated
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told, enc_hook=str).decode()


class TextLines(logging.Formatter):
    """As people read them on a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """With the count of those that are not written."""
        line = super().format(record)
        repeated = getattr(record, "repeated", 0)
        return f"{line} ({repeated} more like this within {FLOOD_S:.0f} s)" if repeated else line


class FloodHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and counts those that say what was said a moment ago."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, later: Later | None = None
    ) -> None:
        super().__init__(stream)
        self._clock = clock
        self._later = later or _after
        self._said: OrderedDict[_Said, _Repeats] = OrderedDict()
        self._waiting = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        if isinstance(record.msg, EventLine) and isinstance(record.msg.event, CallFinished):
            super().emit(record)
            return
        now_s = self._clock()
        self._tell(until_s=now_s - FLOOD_S)
        key = (record.name, record.levelno, record.getMessage())
        if (repeats := self._said.get(key)) is not None:
            repeats.more += 1
            self._tell_later()
            return
        if len(self._said) >= REMEMBERED_MOST:
            self._tell_one(self._said.popitem(last=False)[1])
        self._said[key] = _Repeats(record, now_s)
        super().emit(record)

    def close(self) -> None:
        """What is counted and not told yet is told."""
        self.acquire()
        try:
            self._tell(until_s=float("inf"))
        finally:
            self.release()
        super().close()

    def _tell_later(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._later(FLOOD_S, self._tell_now)

    def _tell_now(self) -> None:
        self.acquire()
        try:
            self._waiting = False
            self._tell(until_s=self._clock() - FLOOD_S)
            if any(one.more for one in self._said.values()):
                self._tell_later()
        finally:
            self.release()

    def _tell(self, until_s: float) -> None:
        """Forget lines that were written before a moment, and tell how often they came again."""
        while self._said:
            key, oldest = next(iter(self._said.items()))
            if oldest.since_s > until_s:
                return
            del self._said[key]
            self._tell_one(oldest)

    def _tell_one(self, repeats: _Repeats) -> None:
        if repeats.more:
            record = logging.makeLogRecord({**repeats.record.__dict__, "repeated": repeats.more})
            record.created = time.time()
            super().emit(record)


def write_lines(settings: Logs) -> None:
    """Have this process' lines written to its standard error; a second time, in place of the first."""
    handler = FloodHandler(sys.stderr)
    handler.setFormatter(TextLines() if _as_text(settings) else JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def call_lines(settings: Logs) -> CallLines:
    """What writes this process' lines of calls beside them."""
    return CallLines(sys.stderr, as_text=_as_text(settings))


def _as_text(settings: Logs) -> bool:
    return settings.format == "text" or (settings.format == "auto" and sys.stderr.isatty())


def _after(seconds: float, run: Callable[[], None]) -> None:
    timer = Timer(seconds, run)
    timer.daemon = True
    timer.start()
