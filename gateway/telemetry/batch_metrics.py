"""Metrics of batches."""

from collections.abc import Callable

from gateway.events import BatchChanged
from gateway.telemetry.metric_factory import MetricFactory

# Batches that have not ended, and bytes of all files, as this process last saw them.
ReadBatches = Callable[[], tuple[int, int]]


class BatchMetrics:
    """Batches by the statuses that they have reached, and the bytes of their files."""

    def __init__(self, create: MetricFactory) -> None:
        self._changes = create.counter("batches", "Batches that have reached a status.", ("status",))
        self._lines = create.counter("batch_lines", "Lines of batches that have ended.", ("outcome",))
        self._active = create.gauge("batches_active", "Batches that have not ended.", (), "livemax")
        self._bytes = create.gauge(
            "batch_file_bytes", "Bytes of the files and results of batches.", (), "livemax"
        )

    def observe(self, event: BatchChanged) -> None:
        """Count a status, and the lines of a batch that has ended."""
        self._changes.labels(event.status).inc()
        if event.has_ended:
            self._lines.labels("completed").inc(event.completed)
            self._lines.labels("failed").inc(event.failed)

    def refresh(self, read: ReadBatches) -> None:
        """Read the table into the metrics."""
        active, size = read()
        self._active.set(active)
        self._bytes.set(size)
