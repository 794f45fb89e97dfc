"""Processes of a measured run: started, pinned to a core, watched through /proc, ended. Linux only."""

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


class Usage(msgspec.Struct, frozen=True):
    """Of one process and all below it: CPU seconds since their start, resident memory now."""

    cpu_s: float
    rss_bytes: int


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def family(pid: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields after the command's name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def usage(pids: Sequence[int]) -> Usage:
    """Summed over processes; those that have ended count nothing."""
    cpu_ticks = pages = 0
    for fields in filter(None, map(_stat, pids)):
        cpu_ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    return Usage(cpu_ticks / _TICKS_PER_S, pages * os.sysconf("SC_PAGE_SIZE"))


class Memory(msgspec.Struct, frozen=True):
    """Of one process, in MB. pss: shared pages by their share. peak: the most that was ever resident."""

    rss_mb: float
    pss_mb: float
    private_mb: float
    peak_mb: float

    def __str__(self) -> str:
        """For the terminal."""
        return f"{self.rss_mb:.1f} MB resident, {self.pss_mb:.1f} PSS, {self.private_mb:.1f} private"


def memory(pid: int) -> Memory:
    """Raises: OSError where it has ended."""
    kib = _kib(Path(f"/proc/{pid}/smaps_rollup"))
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    peak = _kib(Path(f"/proc/{pid}/status"))["VmHWM"]
    return Memory(*(round(one * 1024 / 1e6, 2) for one in (kib["Rss"], kib["Pss"], private, peak)))


def _kib(path: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0][:-1]: int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def open_files(pid: int) -> int:
    """How many descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def workers_of(pid: int) -> list[int]:
    """The HTTP workers below a gateway."""
    return [
        one for one in family(pid) if b"gateway.processes.worker" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def machine_cpu_s() -> float:
    """CPU seconds that all processes of this machine have used, since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class Running:
    """A process on one core, and what it cost. log: where its output went."""

    def __init__(
        self,
        command: Sequence[str],
        core: int,
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
        """Poll another process's state: there is no event to wait for.

        Raises: RuntimeError with the end of its log.
        """
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            if ready():
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.log.stem} did not start:\n" + self.log.read_text(errors="replace")[-2000:])

    def spread(self) -> None:
        """Let it use every core from now on."""
        for pid in family(self.process.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                # One may end just now.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))

    def usage(self) -> Usage:
        """Of all its processes."""
        return usage(family(self.process.pid))

    def stop(self) -> None:
        """SIGTERM; after ten seconds, and for whatever it left behind, SIGKILL."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(5)


@contextlib.contextmanager
def group() -> Iterator[list[Running]]:
    """Processes appended to it end with the block, the last one first, and with this process's SIGTERM."""
    started: list[Running] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield started
    finally:
        signal.signal(signal.SIGTERM, before)
        for one in reversed(started):
            one.stop()


def listens(port: int) -> bool:
    """Whether a connection is taken."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
