"""Hooks that a test puts in front of a fake server's replies, and a way to wait for a condition."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.fakes.tei import FakeTei, Hook
from tests.waiting import PATIENCE_S

# Turns of the loop without a pause, in which most conditions become true.
BUSY_TURNS = 1000
LABELS = ("joy", "anger", "fear")
CLASSIFIER = {"classifier": {"id2label": {str(i): label for i, label in enumerate(LABELS)}, "label2id": {}}}
SPLADE = {"embedding": {"pooling": "splade"}}
RERANKER = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def respond_with(status: int, body: bytes = b"") -> Hook:
    """Return a hook that answers every request with this response."""

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        return status, body

    return hook


def fail_with(error: Exception) -> Hook:
    """Return a hook that raises this exception for every request, as a transport would."""

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        raise error

    return hook


class Gate:
    """Hook that holds every request until it is opened. waiting: the number of requests held now."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.waiting = 0

    async def __call__(self, *_: Any) -> None:
        """Wait until the gate is open, then let the request pass."""
        self.waiting += 1
        try:
            await self.opened.wait()
        finally:
            self.waiting -= 1


def tei_with_hook(hook: Hook | Gate, **info: Any) -> FakeTei:
    """Return a TEI server with a hook in front of its replies."""
    server = FakeTei(**info)
    server.hook = hook
    return server


async def until(condition: Callable[[], bool]) -> None:
    """Run other tasks until a condition is true; one that waits for a time is not polled without a pause."""
    async with asyncio.timeout(PATIENCE_S):
        for turn in count():
            if condition():
                return
            await asyncio.sleep(0 if turn < BUSY_TURNS else 0.002)


def embedder_and_reranker() -> dict[str, FakeTei]:
    """Return the servers of an embedding model and of a reranker, as `tests.conftest.CONFIG` names them."""
    return {"tei-0": FakeTei(), "rerank-0": FakeTei(model_type=RERANKER)}
