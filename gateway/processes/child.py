"""One child process of the parent: started, heard, started again when it dies, and stopped.

Knows nothing of what the child does. Rule: children hold the read end of a pipe whose write end only this
process has, so that they end with it however it ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping

from gateway.events import EndReason

logger = logging.getLogger("gateway")

RESTART_FIRST_S = 0.1
RESTART_LONGEST_S = 5.0
# What it may write in one line: what hundreds of models can do is one.
LINE_BYTES_MAX = 64 * 1024 * 1024
# A child that ran this long died of something new: it is restarted at once again.
STABLE_S = 30.0

Report = Callable[[bytes], None]


class Child:
    """One process that is started again when it dies, until it is stopped.

    boot: its first line of standard input, given the number of its status pipe. report: told each line that
    it writes there. environment: all that it sees of this process' own. ended: told of each end that nobody
    asked for, why and how.
    """

    def __init__(
        self,
        name: str,
        module: str,
        boot: Callable[[int], bytes],
        report: Report,
        fds: tuple[int, ...],
        environment: Mapping[str, str],
        ended: Callable[[EndReason, str], None] = lambda _, __: None,
    ) -> None:
        self.name = name
        self._module = module
        self._boot = boot
        self._report = report
        self._fds = fds
        self._environment = environment
        self._ended = ended
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._hung = False

    async def keep_running(self) -> None:
        """Start, wait for the end, start again; returns after `stop`."""
        wait_s = RESTART_FIRST_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            started_s = loop.time()
            code = await self._run_once()
            if self._stopping:
                return
            if loop.time() - started_s > STABLE_S:
                wait_s = RESTART_FIRST_S
            logger.warning("%s ended (%s); starting it again", self.name, _ending(code))
            self._ended("hung" if self._hung else "ended", _ending(code))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, RESTART_LONGEST_S)

    def send(self, line: bytes) -> bool:
        """One more line of standard input; False where there is no process to read it."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        return True

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def kill_hung(self) -> None:
        """End it at once, because it hangs; `keep_running` starts it again."""
        if self._process is not None and self._process.returncode is None:
            self._hung = True
            self._process.kill()

    async def stop(self, sign: signal.Signals, patience_s: float) -> None:
        """Ask it to end, wait, then kill it."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(sign)
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _run_once(self) -> int:
        self._hung = False
        read_fd, write_fd = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd, *self._fds),
                # Its own session: the terminal's Ctrl-C reaches this process only.
                start_new_session=True,
                env=self._environment,
            )
        finally:
            os.close(write_fd)
        assert process.stdin is not None
        process.stdin.write(self._boot(write_fd) + b"\n")
        reading = asyncio.create_task(_read_lines(read_fd, self._report))
        code = await process.wait()
        await reading
        return code


async def _read_lines(fd: int, report: Report) -> None:
    """Pass on each line of a child's status pipe until the child has closed it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    with os.fdopen(fd, "rb") as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while line := await reader.readline():
            report(line)
        transport.close()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
