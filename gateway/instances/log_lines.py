"""The last lines that a process has written, bounded in number and in bytes. Pure."""

from collections import deque

from gateway.instances.records import LogSlice

LINES_MAX = 1000
BYTES_MAX = 1024 * 1024
LINE_BYTES_MAX = 8 * 1024
CUT = "… (cut)"


class LogLines:
    """Log of one instance. Later lines push out the oldest."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._bytes = 0
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> None:
        """Add output of a process, which may end within a line."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._skipping:
                self.add(line.decode(errors="replace").rstrip("\r"))
            self._skipping = False
        if len(rest) > LINE_BYTES_MAX:
            # The rest of a line that is too long is dropped as it arrives.
            if not self._skipping:
                self.add(rest.decode(errors="replace"))
            self._skipping, rest = True, b""
        self._rest = b"" if self._skipping else rest

    def finish(self) -> None:
        """Add a last line that has no end, because its process has exited."""
        if self._rest:
            self.add(self._rest.decode(errors="replace"))
        self._rest, self._skipping = b"", False

    def add(self, line: str) -> None:
        """Add one line."""
        encoded = line.encode(errors="replace")
        if len(encoded) > LINE_BYTES_MAX:
            line = encoded[:LINE_BYTES_MAX].decode(errors="ignore") + CUT
        self._lines.append(line)
        self._bytes += _size(line)
        while len(self._lines) > LINES_MAX or self._bytes > BYTES_MAX:
            self._bytes -= _size(self._lines.popleft())

    def slice(self, start: int | None, end: int | None) -> LogSlice:
        """Return the lines from start to end as Python's slices do; negative numbers count from the end."""
        total = len(self._lines)
        first, last = _position(start, 0, total), _position(end, total, total)
        return LogSlice(list(self._lines)[first:last], first, last, total)

    def last_line(self) -> str:
        """Return the last line that is not empty, or nothing."""
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "")


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


def _position(value: int | None, default: int, total: int) -> int:
    if value is None:
        return default
    return max(0, total + value) if value < 0 else min(value, total)
