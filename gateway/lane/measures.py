"""Measurements that completed batches give a lane. Pure."""

from gateway.lane.batch_size import BatchSizer
from gateway.lane.drain_rate import DrainRate
from gateway.routing.latencies import Latencies


class LaneMeasures:
    """Drain rate, batch size, and the latencies of batches with a single input."""

    def __init__(self, now_s: float) -> None:
        self.drain_rate = DrainRate(now_s)
        self.sizer = BatchSizer()
        self.single_latencies = Latencies()

    def record_batch(self, inputs: int, tokens: int, took_s: float, now_s: float) -> None:
        """Learn from a completed batch."""
        self.drain_rate.add(tokens, now_s)
        self.sizer.record_batch(tokens, took_s)
        if inputs == 1:
            self.single_latencies.add(took_s)
