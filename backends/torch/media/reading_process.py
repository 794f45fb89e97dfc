"""Processes that read pictures and recordings of callers, where a decoder can be ended.

    python -m backends.torch.media.reading_process FD

This process imports the libraries once and forks a reading process for each request on the socket FD; it has
one thread, so that a fork is safe. It ends its reading processes on request, and all of them with the engine.
A reading process answers one request after the other on a socket of its own.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from backends.contract import Image
from backends.contract.errors import BackendError, InvalidWork
from backends.torch.media.features import open_reader
from backends.torch.media.reading_wire import (
    CPU_S_MAX,
    END,
    FORK,
    NUMBER_BYTES,
    READING_BYTES_MAX,
    ReaderKind,
    ReadReply,
    ReadRequest,
    ReadsMedium,
    encoder,
    reply_of,
    request_decoder,
)
from backends.torch.memory import release_to_system
from backends.torch.priority import lower_priority

READERS_MAX = 4
# Freed at once after a picture of this size.
LARGE_PIXELS = 4_000_000


def main() -> None:
    """Fork and end reading processes until the engine closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    running: set[int] = set()
    # The first byte reports that the libraries are imported.
    control.sendall(FORK)
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1, 1)
        if request == FORK:
            running.add(pid := _fork(fds[0], control.fileno()))
            os.close(fds[0])
            control.sendall(pid.to_bytes(NUMBER_BYTES, "big"))
        elif request == END:
            pid = int.from_bytes(control.recv(NUMBER_BYTES, socket.MSG_WAITALL), "big")
            running.discard(pid)
            control.sendall(_end(pid).to_bytes(NUMBER_BYTES, "big"))
        else:
            break
    for pid in running:
        _end(pid)
    # Without the seconds that libraries take to end.
    os._exit(0)


def _end(pid: int) -> int:
    """End a reading process, and return the signal that it ended with.

    Nothing else waits for its end, so that its number cannot have become another process's.
    """
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _fork(own: int, control: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(control)
        _serve(own)
        status = 0
    finally:
        os._exit(status)


def _serve(own: int) -> None:
    """Answer requests until the engine closes the socket."""
    lower_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    readers: dict[tuple[ReaderKind, str, int], ReadsMedium] = {}
    with contextlib.suppress(EOFError), Connection(own) as connection:
        while True:
            request = request_decoder.decode(connection.recv_bytes())
            connection.send_bytes(encoder.encode(_answer(request, readers)))
            if isinstance(request.part, Image) and request.part.width * request.part.height > LARGE_PIXELS:
                release_to_system()


def _answer(request: ReadRequest, readers: dict[tuple[ReaderKind, str, int], ReadsMedium]) -> ReadReply:
    try:
        key = request.kind, request.checkpoint, request.load
        if key not in readers:
            if len(readers) >= READERS_MAX:
                readers.clear()
            readers[key] = open_reader(request.kind, Path(request.checkpoint))
        _limit()
        return reply_of(readers[key].read(request.part, request.truncate))
    except BackendError as error:
        return ReadReply(error=error.kind, message=error.message)
    except MemoryError:
        return ReadReply(error="failed", message="there is not enough memory to read it")
    except Exception as error:  # noqa: BLE001 - processors of foreign bytes raise what they come across
        return ReadReply(error=InvalidWork.kind, message=f"it could not be read: {error}")


def _limit() -> None:
    """Bound the processor time and the memory of the next picture."""
    used_s = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + CPU_S_MAX + 1, resource.RLIM_INFINITY))
    held = _data_bytes()
    if held is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + READING_BYTES_MAX, resource.RLIM_INFINITY))


def _data_bytes() -> int | None:
    """Return the bytes of this process that its limit counts, None where the system does not report them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return None


if __name__ == "__main__":
    main()
