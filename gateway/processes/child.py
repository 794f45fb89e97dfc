"""Child processes: each is restarted when it exits or hangs, and its restarts are counted.

Rule: a child has the read end of a pipe whose write end only this process has. It therefore exits when this
process exits, for any reason.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import get_args

import msgspec

from gateway.events import EndReason, ProcessRestarted

logger = logging.getLogger("gateway")

RESTART_DELAY_MIN_S = 0.1
RESTART_DELAY_MAX_S = 5.0
# Bound on one line of a child: a report on hundreds of models is one line.
LINE_BYTES_MAX = 64 * 1024 * 1024
# Time for the last output of a process that has exited.
OUTPUT_PATIENCE_S = 1.0
# A child that ran this long failed for a new reason, and the restart delay starts from its minimum again.
STABLE_S = 30.0


class ChildSpec(msgspec.Struct, frozen=True):
    """Command of a child: its name in logs, a module with a `main`, its environment, and inherited files."""

    name: str
    module: str
    environment: Mapping[str, str]
    fds: tuple[int, ...] = ()


class Child:
    """A process that is restarted when it exits, until `stop`.

    boot: returns its first line of standard input, given the number of its status pipe. on_line: called with
    each line that it writes to that pipe. on_exit: called with the reason and the exit status or signal each
    time it exits without having been stopped.
    """

    def __init__(
        self,
        spec: ChildSpec,
        boot: Callable[[int], bytes],
        on_line: Callable[[bytes], None],
        on_exit: Callable[[EndReason, str], None] = lambda _, __: None,
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._boot = boot
        self._on_line = on_line
        self._on_exit = on_exit
        self._on_output: Callable[[bytes], None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._hung = False

    def capture(self, on_output: Callable[[bytes], None]) -> None:
        """Pass on what the process writes to its standard output and error; otherwise they are this one's."""
        self._on_output = on_output

    async def keep_running(self) -> None:
        """Start the process and restart it on each exit; return after `stop`."""
        delay_s = RESTART_DELAY_MIN_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            started_s = loop.time()
            end = await self._run_once()
            if self._stopping:
                return
            if loop.time() - started_s > STABLE_S:
                delay_s = RESTART_DELAY_MIN_S
            logger.warning("%s exited (%s); restarting it", self.name, end)
            self._on_exit("hung" if self._hung else "ended", end)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RESTART_DELAY_MAX_S)

    def send(self, line: bytes) -> bool:
        """Write one line to standard input; return False if no process is running to read it."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        return True

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def kill_hung(self) -> None:
        """Kill the process because it hangs; `keep_running` restarts it."""
        if self._process is not None and self._process.returncode is None:
            self._hung = True
            self._process.kill()

    async def stop(self, signal_number: signal.Signals, patience_s: float) -> None:
        """Send a signal, wait for the exit, and kill the process if it takes too long."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal_number)
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _run_once(self) -> str:
        """Run the process once, and return how it ended."""
        self._hung = False
        read_fd, write_fd = os.pipe()
        output = None if self._on_output is None else await _Output.open(self._on_output)
        output_fd = None if output is None else output.write_fd
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Not from the current folder, in which anyone may have put a module.
                "-P",
                "-m",
                "gateway.processes.launch",
                self._spec.module,
                stdin=asyncio.subprocess.PIPE,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=(write_fd, *self._spec.fds),
                # A session of its own, so that the terminal's Ctrl-C reaches only this process.
                start_new_session=True,
                env=self._spec.environment,
            )
        except OSError as error:
            # Such as at a limit on processes, which may have room for it later.
            os.close(read_fd)
            return f"it could not be started: {error.strerror or error}"
        finally:
            os.close(write_fd)
            if output_fd is not None:
                os.close(output_fd)
        assert process.stdin is not None
        process.stdin.write(self._boot(write_fd) + b"\n")
        reading = asyncio.create_task(_read_lines(read_fd, self._on_line))
        code = await process.wait()
        await reading
        if output is not None:
            await output.finish()
        return _describe_exit(code)


class _Output(asyncio.Protocol):
    """Reader of what a process writes. write_fd: for the process."""

    def __init__(self, on_output: Callable[[bytes], None], write_fd: int) -> None:
        self._on_output = on_output
        self.write_fd = write_fd
        self._ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, on_output: Callable[[bytes], None]) -> "_Output":
        """Return a reader that waits for output."""
        read_fd, write_fd = os.pipe()
        output = cls(on_output, write_fd)
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(read_fd, "rb"))
        return output

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport of the pipe."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived."""
        self._on_output(data)

    def connection_lost(self, _: Exception | None) -> None:
        """Note that every process with the other end has closed it."""
        self._ended.set()

    async def finish(self) -> None:
        """Read the rest after the process has exited. A process that it left behind may keep its end."""
        try:
            async with asyncio.timeout(OUTPUT_PATIENCE_S):
                await self._ended.wait()
        except TimeoutError:
            assert self._transport is not None
            self._transport.close()


async def _read_lines(fd: int, on_line: Callable[[bytes], None]) -> None:
    """Pass on each line of a child's status pipe until the child has closed it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    with os.fdopen(fd, "rb") as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while line := await reader.readline():
            on_line(line)
        transport.close()


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


# Missed checks in a row before the kill. A busy machine, or one long turn of an event loop, must not cost
# requests.
MISSES_MAX = 4
WORKER_CHECK_EVERY_S = 4.0
# Additional misses for a worker that is still starting: one that is silent for a minute will stay silent.
WORKER_START_MISSES = 11


async def watch_liveness(
    child: Child, is_alive: Callable[[], Awaitable[bool]], every_s: float, start_misses: int | None = None
) -> None:
    """Check a child periodically, and kill it after too many misses in a row; runs until cancelled.

    is_alive: gives up after every_s at the latest. start_misses: additional misses for a child that has not
    responded yet, because it is still starting; None for any number. A check during which this process itself
    was paused does not count.
    """
    loop = asyncio.get_running_loop()
    pid: int | None = None
    misses: int | None = None
    while True:
        await asyncio.sleep(every_s)
        if child.pid != pid:
            pid, misses = child.pid, None if start_misses is None else -start_misses
        checked_s = loop.time()
        if await is_alive():
            misses = 0
        elif misses is not None and loop.time() - checked_s < 2 * every_s:
            misses += 1
            if misses >= MISSES_MAX:
                logger.warning("%s does not respond; killing it", child.name)
                child.kill_hung()
                misses = 0


class Heartbeats:
    """Sign of life of a worker: any message that it has sent since the last check.

    The worker sends them unasked. A request from here would reach it through a thread next to its event loop,
    and a worker that serves requests must not be killed because that thread is late.
    """

    def __init__(self) -> None:
        self._received = False

    def record(self) -> None:
        """Note that the worker has sent a message."""
        self._received = True

    def reset(self) -> None:
        """Forget the messages of a process that has exited."""
        self._received = False

    async def is_alive(self) -> bool:
        """Return True if a message has arrived since the last check."""
        received, self._received = self._received, False
        return received


class Restarts:
    """Restart counts by process and reason. broadcast: sends an update to every running worker."""

    def __init__(self, broadcast: Callable[[ProcessRestarted], None]) -> None:
        self._broadcast = broadcast
        self._latest: dict[tuple[str, EndReason], ProcessRestarted] = {}

    def register(self, process: str) -> None:
        """Start counting a process at zero: a counter that first appears at 1 hides that first restart."""
        for reason in get_args(EndReason):
            self._latest.setdefault((process, reason), ProcessRestarted(process, reason))

    def record(self, process: str, reason: EndReason, how: str) -> None:
        """Count one exit and broadcast it. how: the signal or exit status."""
        self.register(process)
        times = self._latest[process, reason].times + 1
        restart = ProcessRestarted(process, reason, how, times, time.time())
        self._latest[process, reason] = restart
        self._broadcast(restart)

    @property
    def latest(self) -> tuple[ProcessRestarted, ...]:
        """The last update of each process and reason, for a worker that is being started."""
        return tuple(self._latest.values())
