"""Callers of a served gateway, and the helpers that read its replies and its log."""

import threading

import httpx

from tests.processes.conftest import Served
from tests.waiting import PATIENCE_S

PAUSE_S = 0.01


class Callers:
    """Threads that send requests until stopped; statuses: of all replies, 0 for none."""

    def __init__(self, gateway: Served, number: int) -> None:
        self.statuses: list[int] = []
        self._gateway = gateway
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the requests in flight."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _call(self) -> None:
        with self._gateway.client() as client:
            # Without a pause they would take the processor from the processes under test.
            while not self._stop.wait(PAUSE_S):
                try:
                    reply = client.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"]})
                    self.statuses.append(reply.status_code)
                except httpx.TransportError:
                    self.statuses.append(0)


def status(gateway: Served, model: str = "m") -> int:
    """Return the status of one request for a model."""
    with gateway.client() as client:
        return client.post("/v1/embeddings", json={"model": model, "input": "a"}).status_code


def is_logged(gateway: Served, words: str) -> bool:
    """Return True if a log line contains the words."""
    return any(words in line for line in gateway.log)
