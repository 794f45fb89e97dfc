"""The file that the config comes from: how it is read again, and how its changes are noticed."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.config.load import load_config
from gateway.config.schema import Config

POLL_EVERY_S = 1.0


class ConfigSource(msgspec.Struct, frozen=True):
    """Path of router.yaml. environment: values of its placeholders."""

    path: Path
    environment: Mapping[str, str]

    async def read(self) -> Config:
        """Load the file as `gateway check` does. Raises: ConfigError."""
        # In a thread: a file system may be slow, and the parent has children to watch.
        return await asyncio.to_thread(load_config, self.path, self.environment)

    def fingerprint(self) -> tuple[int, int, int] | None:
        """Return a value that differs for an edited or replaced file, or None if there is no file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


async def watch_file(source: ConfigSource, on_change: Callable[[], None]) -> None:
    """Call back after each change of the file; runs until cancelled."""
    reported = previous = source.fingerprint()
    while True:
        await asyncio.sleep(POLL_EVERY_S)
        current = source.fingerprint()
        # A change counts once two polls agree, so that a file that is still being written is not read.
        if current is not None and current == previous and current != reported:
            reported = current
            on_change()
        previous = current
