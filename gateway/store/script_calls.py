"""Calls of scripts that travel in batches."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from gateway.store.errors import StoreUnavailable
from gateway.store.scripts import Script


class ScriptCall(Protocol):
    """One call of a script, which is packed when its batch is sent."""

    @property
    def script(self) -> Script:
        """Script to run."""

    def enqueue(self) -> None:
        """Join the next batch, unless there is nothing left to send."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """Return the keys, all under one hash tag, and the argument."""

    def on_reply(self, reply: bytes | StoreUnavailable) -> None:
        """Take the reply, once per enqueueing. A call that fails before it was sent was never packed."""


class SingleCall:
    """A script call with a fixed argument and one waiting caller."""

    def __init__(self, script: Script, keys: Sequence[str], argument: bytes) -> None:
        self.script = script
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._payload = keys, argument

    def enqueue(self) -> None:
        """Do nothing: the caller has enqueued it already."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """Return the keys and the argument that it was called with."""
        return self._payload

    def on_reply(self, reply: bytes | StoreUnavailable) -> None:
        """Wake the caller, unless it was cancelled."""
        if self.reply.done():
            return
        if isinstance(reply, StoreUnavailable):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)
