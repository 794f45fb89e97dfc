"""Reading of pictures and recordings in processes that are ended if they take too long.

Work is divided fairly: one piece of work has at most half of the processes, and pieces take turns. Knows
nothing of torch, queues or replies.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Condition, Lock, Thread, local
from typing import Any, NamedTuple, TypeVar

import msgspec

from backends.contract import Audio, Image, Truncate
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.torch.inputs.sequences import InputSequence, ReadPart
from backends.torch.media import reading_wire as wire
from backends.torch.media.reading_wire import ReaderKind, ReadsMedium
from backends.torch.priority import lower_priority

T = TypeVar("T")

# Each may hold the largest picture, in several forms.
READING_MAX = 8
READING_COUNT = min(READING_MAX, max(2, (os.cpu_count() or 2) // 2))
# A picture that is not read in this time ends its process. The bound of processor time comes first, unless
# the machine is busy.
READ_S_MAX = 25.0
# The libraries take 5 s to import.
START_S_MAX = 120.0
REPLY_S_MAX = 10.0


class ForkServer:
    """Process that forks reading processes; started by the first use, and again after its end."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            self._started()

    def fork(self) -> tuple[Connection, int]:
        """Return the connection to a new reading process, and its number. Raises: OSError."""
        own, others = socket.socketpair()
        with others:
            try:
                with self._lock:
                    number = self._ask(wire.FORK, others.fileno())
            except OSError:
                own.close()
                raise
        return Connection(own.detach()), number

    def end(self, number: int) -> int:
        """End a reading process, and return the signal that ended it, 0 if that is not known."""
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(wire.END + number.to_bytes(wire.NUMBER_BYTES, "big"))
                return self._number(self._control)
        return 0

    def close(self) -> None:
        """End the process, and with it all reading processes."""
        with self._lock:
            if self._control is not None and self._process is not None:
                self._control.close()
                self._control = None
                self._process.wait(START_S_MAX)

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        elif self._process is None:
            atexit.register(self.close)
        own, others = socket.socketpair()
        # One thread in that process: libraries start theirs when they are imported.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env["TOKENIZERS_PARALLELISM"] = "false"
        command = [sys.executable, "-P", "-m", wire.PROCESS_MODULE, str(others.fileno())]
        with others:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=env, pass_fds=[others.fileno()]
            )
        self._control, self._is_ready = own, False
        return own

    def _ask(self, request: bytes, fd: int) -> int:
        control = self._started()
        try:
            if not self._is_ready:
                control.settimeout(START_S_MAX)
                if not control.recv(1):
                    raise ConnectionError("the reading process ended while it started")
                self._is_ready = True
            control.settimeout(REPLY_S_MAX)
            socket.send_fds(control, [request], [fd])
            return self._number(control)
        except OSError:
            self._control = None
            control.close()
            raise

    def _number(self, control: socket.socket) -> int:
        found = control.recv(wire.NUMBER_BYTES, socket.MSG_WAITALL)
        if len(found) < wire.NUMBER_BYTES:
            raise ConnectionError("the reading process ended")
        return int.from_bytes(found, "big")


SERVER = ForkServer()


class ReadingProcess:
    """Reading process of one thread, forked by the first use and after each end."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._connection: Connection | None = None
        self.number = 0

    def read(self, request: wire.ReadRequest, seconds: float = READ_S_MAX) -> ReadPart:
        """Return the features of a part. Raises: InvalidWork, ReplicaFailed."""
        try:
            connection = self._started()
            connection.send_bytes(wire.encoder.encode(request))
            if not connection.poll(seconds):
                self._end()
                # The caller's fault: as one of the replica it would count against all others.
                raise InvalidWork(f"it was not read within {seconds:g} s; encode it again, or smaller")
            reply = wire.reply_decoder.decode(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise _failure_of(self._end()) from error
        except msgspec.DecodeError as error:
            self._end()
            raise ReplicaFailed("the reading process gave no readable answer") from error
        if reply.error == InvalidWork.kind:
            raise InvalidWork(reply.message)
        if reply.error:
            raise ReplicaFailed(reply.message)
        return wire.part_of(reply)

    def _started(self) -> Connection:
        if self._connection is None:
            self._connection, self.number = self._server.fork()
        return self._connection

    def _end(self) -> int:
        """End the process, and return the signal that ended it."""
        if self._connection is None:
            return 0
        self._connection.close()
        self._connection = None
        return self._server.end(self.number)


def _failure_of(ended_by: int) -> InvalidWork | ReplicaFailed:
    if ended_by == signal.SIGXCPU:
        return InvalidWork(
            f"it takes more than {wire.CPU_S_MAX} s of processor time to read; encode it again, or smaller"
        )
    return ReplicaFailed("the process that read it ended; there may not be enough memory")


_own = local()
_loads = count()


class ProcessReader:
    """Reader of a checkpoint that reads in the process of the calling thread.

    reader: of the same checkpoint, for what is known without a caller's bytes.
    """

    def __init__(self, reader: ReadsMedium, kind: ReaderKind, checkpoint: Path) -> None:
        self._reader = reader
        self._kind: ReaderKind = kind
        self._checkpoint = str(checkpoint)
        self._load = next(_loads)
        SERVER.start()

    @property
    def medium(self) -> type[Image | Audio]:
        """Class of the parts that it reads."""
        return self._reader.medium

    @property
    def tokens_max(self) -> int:
        """Most tokens of a part."""
        return self._reader.tokens_max

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of one part. Raises: InvalidWork, ReplicaFailed."""
        if not hasattr(_own, "process"):
            _own.process = ReadingProcess(SERVER)
        process: ReadingProcess = _own.process
        return process.read(wire.ReadRequest(self._kind, self._checkpoint, part, truncate, self._load))

    def probe(self) -> InputSequence:
        """Return the features of a part made up, to try a network with."""
        return self._reader.probe()


class _Reading(NamedTuple):
    """One part to read. is_large: a picture that takes long for its pixels."""

    run: Callable[[], None]
    is_large: bool


class ReadingThreads:
    """Threads that read for several pieces of work, which take turns.

    threads: number of them, two at least. One piece of work has at most half of them, and so have all large
    pictures together: a small one waits for small ones only.
    """

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._share = max(1, threads // 2)
        self._changed = Condition()
        self._waiting: OrderedDict[Hashable, deque[_Reading]] = OrderedDict()
        self._running: dict[Hashable, int] = {}
        self._running_large = 0
        self._has_threads = False

    def submit(
        self, owner: Hashable, function: Callable[..., T], *arguments: Any, is_large: bool = False
    ) -> "Future[T]":
        """Run a function on a thread when it is its owner's turn. owner: identifies a piece of work."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                future.set_exception(error)

        with self._changed:
            self._start_threads()
            self._waiting.setdefault(owner, deque()).append(_Reading(run, is_large))
            self._changed.notify()
        return future

    def _start_threads(self) -> None:
        if not self._has_threads:
            self._has_threads = True
            for place in range(self.count):
                Thread(target=self._run, name=f"media-{place}", daemon=True).start()

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                while (owner := self._next_owner()) is None:
                    self._changed.wait()
                reading = self._take(owner)
            is_large = reading.is_large
            try:
                reading.run()
            finally:
                # The last reference to a picture may be here while the thread waits.
                del reading
                with self._changed:
                    self._leave(owner, is_large=is_large)

    def _next_owner(self) -> Hashable | None:
        for owner, waiting in self._waiting.items():
            is_held = waiting[0].is_large and self._running_large >= self._share
            if not is_held and self._running.get(owner, 0) < self._share:
                return owner
        return None

    def _take(self, owner: Hashable) -> "_Reading":
        waiting = self._waiting[owner]
        reading = waiting.popleft()
        self._running[owner] = self._running.get(owner, 0) + 1
        self._running_large += reading.is_large
        if waiting:
            self._waiting.move_to_end(owner)
        else:
            del self._waiting[owner]
        return reading

    def _leave(self, owner: Hashable, *, is_large: bool) -> None:
        self._running_large -= is_large
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._changed.notify_all()


READING = ReadingThreads(READING_COUNT)
