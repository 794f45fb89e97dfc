"""Lua scripts, and the Redis commands that run them."""

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import hiredis
import msgspec


class Script(msgspec.Struct, frozen=True):
    """A Lua script with the SHA-1 by which servers cache it."""

    source: str
    sha: str


def load_script(*names: str, package: str = "gateway.quotas") -> Script:
    """Concatenate .lua files of a package into one script."""
    folder = files(package)
    source = "\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
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
