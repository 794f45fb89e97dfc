"""Processes of a measured run: started, pinned to a core, watched through /proc, stopped. Linux only."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_TIMEOUT_S = 90.0


class ResourceUsage(msgspec.Struct, frozen=True):
    """CPU seconds since the start and resident memory now, summed over a process and its descendants."""

    cpu_s: float
    rss_bytes: int


def free_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Return True if a connection to the port is accepted."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    return pids


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the command's name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def usage(pids: Sequence[int]) -> ResourceUsage:
    """Return the sum over processes; ended ones count nothing."""
    cpu_ticks = pages = 0
    for fields in filter(None, map(_stat, pids)):
        cpu_ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    return ResourceUsage(cpu_ticks / _TICKS_PER_S, pages * os.sysconf("SC_PAGE_SIZE"))


class MemoryUsage(msgspec.Struct, frozen=True):
    """Memory of one process in MB. peak: the most ever resident."""

    rss_mb: float
    private_mb: float
    peak_mb: float


def memory(pid: int) -> MemoryUsage:
    """Return the memory of a process.

    Raises: OSError where it has ended.
    """
    kib = _kib(Path(f"/proc/{pid}/smaps_rollup"))
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    peak = _kib(Path(f"/proc/{pid}/status"))["VmHWM"]
    return MemoryUsage(*(round(size * 1024 / 1e6, 2) for size in (kib["Rss"], private, peak)))


def _kib(path: Path) -> dict[str, int]:
    """Return the lines `name: number kB` of a file."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def peak_mb(pid: int) -> float:
    """Return the highest resident memory of a process and its descendants, summed."""
    return sum(_kib(Path(f"/proc/{member}/status")).get("VmHWM", 0) for member in family(pid)) * 1024 / 1e6


def open_files(pid: int) -> int:
    """Return the number of descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def workers_of(pid: int) -> list[int]:
    """Return the HTTP workers of a gateway."""
    return [
        member
        for member in family(pid)
        if b"gateway.processes.worker" in Path(f"/proc/{member}/cmdline").read_bytes()
    ]


def machine_cpu_s() -> float:
    """Return the CPU seconds of all processes of this machine since its start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class PinnedProcess:
    """A process on one core, or on several. log: the file with its output."""

    def __init__(
        self,
        command: Sequence[str],
        core: int | str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        working_directory: Path | None = None,
    ) -> None:
        pinned = ["taskset", "-c", str(core), *command]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                pinned,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                cwd=working_directory,
                start_new_session=True,
            )
        self.log = log

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll until the process is ready: another process's state sends no event.

        Raises: RuntimeError with the end of its log.
        """
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            if ready():
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.log.stem} did not start:\n" + self.log.read_text(errors="replace")[-2000:])

    def unpin(self) -> None:
        """Allow all its threads to use every core."""
        for pid in family(self.process.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                # A thread may end meanwhile.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))

    def usage(self) -> ResourceUsage:
        """Return the usage of all its processes."""
        return usage(family(self.process.pid))

    def kill(self) -> None:
        """Send SIGKILL to its descendants, and to its process group."""
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM; after ten seconds, and to processes that remain, SIGKILL."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()
        self.process.wait(5)


@contextlib.contextmanager
def process_group() -> Iterator[list[PinnedProcess]]:
    """Stop the appended processes at the end, last one first, also where this process gets SIGTERM."""
    processes: list[PinnedProcess] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield processes
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in reversed(processes):
            process.stop()
