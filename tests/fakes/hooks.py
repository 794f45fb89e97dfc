"""What a test puts in front of a fake server's answers, and how it waits for what must come."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.fakes.tei import FakeTei, Hook

LABELS = ("joy", "anger", "fear")
CLASSIFIER = {"classifier": {"id2label": {str(i): one for i, one in enumerate(LABELS)}, "label2id": {}}}
SPLADE = {"embedding": {"pooling": "splade"}}
RERANKER = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def respond_with(status: int, body: bytes = b"") -> Hook:
    """Every call gets this answer."""

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        return status, body

    return hook


def fail_with(error: Exception) -> Hook:
    """Every call ends in this exception, as if the transport had raised it."""

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        raise error

    return hook


class Gate:
    """Holds every call until it is opened; waiting is how many it holds now."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.waiting = 0

    async def __call__(self, *_: Any) -> None:
        """A hook: let the call pass once the gate is open."""
        self.waiting += 1
        try:
            await self.opened.wait()
        finally:
            self.waiting -= 1


def tei_with_hook(hook: Hook | Gate, **info: Any) -> FakeTei:
    """A server with a hook in front of its answers."""
    server = FakeTei(**info)
    server.hook = hook
    return server


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until something is so; never longer than ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is plain state, which tells nobody
            await asyncio.sleep(0)
