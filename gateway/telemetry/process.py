"""What one process says of itself: memory, CPU, descriptors, and how late its event loop is."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

# How often the event loop's lateness is looked at.
LAG_EVERY_S = 0.5


class ProcessShare:
    """What this process adds to the `process_*` metrics of all workers; the library knows but one's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._collector = ProcessCollector(registry=None)
        self._cpu = Counter("process_cpu_seconds", "CPU time of all workers, in seconds.", registry=registry)
        self._cpu_told_s = 0.0
        self._gauges = {
            name: Gauge(name, documentation, multiprocess_mode="livesum", registry=registry)
            for name, documentation in (
                ("process_resident_memory_bytes", "Resident memory of all workers, in bytes."),
                ("process_open_fds", "Open file descriptors of all workers."),
            )
        }

    def refresh(self) -> None:
        """Read /proc; where there is none, nothing is told."""
        read = {one.name: one.samples[0].value for one in self._collector.collect()}
        cpu_s = read.get("process_cpu_seconds", self._cpu_told_s)
        self._cpu.inc(cpu_s - self._cpu_told_s)
        self._cpu_told_s = cpu_s
        for name, gauge in self._gauges.items():
            if name in read:
                gauge.set(read[name])


async def keep_measuring(late: Callable[[float], None]) -> None:
    """Tell how much later than it asked a task is woken, in seconds: what every call waits for too."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        late(max(0.0, loop.time() - due_s))
