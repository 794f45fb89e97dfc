"""Metrics of one process: memory, CPU time, file descriptors, and the lag of its event loop."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

# Interval between two samples of the event loop's lag.
LAG_EVERY_S = 0.5


class ProcessShare:
    """Share of this process in the `process_*` metrics of all workers.

    The library's own collector reports one process only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._collector = ProcessCollector(registry=None)
        self._cpu = Counter("process_cpu_seconds", "CPU time of all workers, in seconds.", registry=registry)
        self._reported_cpu_s = 0.0
        self._gauges = {
            name: Gauge(name, documentation, multiprocess_mode="livesum", registry=registry)
            for name, documentation in (
                ("process_resident_memory_bytes", "Resident memory of all workers, in bytes."),
                ("process_open_fds", "Open file descriptors of all workers."),
            )
        }

    def refresh(self) -> None:
        """Read /proc into the metrics; without /proc they stay as they are."""
        read = {family.name: family.samples[0].value for family in self._collector.collect()}
        cpu_s = read.get("process_cpu_seconds", self._reported_cpu_s)
        self._cpu.inc(cpu_s - self._reported_cpu_s)
        self._reported_cpu_s = cpu_s
        for name, gauge in self._gauges.items():
            if name in read:
                gauge.set(read[name])


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Report by how many seconds the event loop wakes a task too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        observe(max(0.0, loop.time() - due_s))
