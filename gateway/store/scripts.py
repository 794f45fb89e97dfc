"""Lua scripts, the Redis commands that run them, and their calls, which travel in batches."""

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol

import hiredis
import msgspec

from gateway.store.errors import StoreUnavailable


class Script(msgspec.Struct, frozen=True):
    """A Lua script with the SHA-1 by which servers cache it."""

    source: str
    sha: str


def load_script(*names: str, package: str = "gateway.quotas", library: str = "") -> Script:
    """Concatenate .lua files of a package into one script. library: source in front of them."""
    folder = files(package)
    texts = [(folder / f"{name}.lua").read_text(encoding="utf-8") for name in names]
    source = "\n".join([library, *texts] if library else texts)
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class ScriptCommand(msgspec.Struct, frozen=True):
    """One run of a script with its keys, all under one hash tag, and its argument."""

    script: Script
    keys: Sequence[str]
    argument: bytes

    def encode(self, *, by_source: bool) -> bytes:
        """Encode it for Redis: EVAL with the source, or EVALSHA."""
        name, text = ("EVAL", self.script.source) if by_source else ("EVALSHA", self.script.sha)
        words: tuple[Any, ...] = (name, text, len(self.keys), *self.keys, self.argument)
        encoded: bytes = hiredis.pack_command(words)
        return encoded


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
