"""One child process, which is restarted whenever it exits, until it is stopped.

Rule: a child has the read end of a pipe whose write end only this process has. It therefore exits when this
process exits, for any reason.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping

import msgspec

from gateway.events import EndReason

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
            code = await self._run_once()
            if self._stopping:
                return
            if loop.time() - started_s > STABLE_S:
                delay_s = RESTART_DELAY_MIN_S
            logger.warning("%s exited (%s); restarting it", self.name, _describe_exit(code))
            self._on_exit("hung" if self._hung else "ended", _describe_exit(code))
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

    async def _run_once(self) -> int:
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
        return code


class _Output(asyncio.Protocol):
    """Reader of what a process writes. write_fd: for the process."""

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None
        self.write_fd = -1

    @classmethod
    async def open(cls, on_output: Callable[[bytes], None]) -> "_Output":
        """Return a reader that waits for output."""
        read_fd, write_fd = os.pipe()
        output = cls(on_output)
        pipe = os.fdopen(read_fd, "rb")
        output._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, pipe)
        output.write_fd = write_fd
        return output

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
