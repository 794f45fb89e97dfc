"""Files with the results of a batch: each is replaced when it is complete, and nothing else is written."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

from gateway.cli.gateway_client import GatewayClient, RequestRefused

# Of one file, if no other bound is given: what a gateway keeps of one tenant, if no other is configured.
BYTES_MAX = 10 * 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """File that is written. replaces: also if there is one of that name."""

    path: Path
    replaces: bool

    def check(self) -> None:
        """Check that the file may be written now. Raises: RequestRefused."""
        path = self.path
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise RequestRefused(f"{path} is a link or no file, and is not replaced")
        if path.exists() and not self.replaces:
            raise RequestRefused(f"{path} exists: choose another name, or replace it with --force")


def check_targets(*targets: Target) -> None:
    """Check that results may be written. Raises: RequestRefused."""
    if len({target.path.absolute() for target in targets}) < len(targets):
        raise RequestRefused(f"{targets[0].path}: results and failed lines need a file each")
    for target in targets:
        target.check()


def fetch_file(
    client: GatewayClient,
    file_id: str,
    target: Target,
    bytes_max: int,
    on_progress: Callable[[int, int], object],
) -> None:
    """Write a file, which gets its name once it is complete.

    Raises: RequestRefused, GatewayUnavailable, OSError.
    """
    with _unfinished(target) as file:
        client.download(f"/v1/files/{quote(file_id, safe='')}/content", file, on_progress, bytes_max)


@contextmanager
def _unfinished(target: Target) -> Iterator[IO[bytes]]:
    """Open a new file that becomes the target if the block succeeds, and is deleted if not."""
    path = target.path
    part = path.with_name(f"{path.name}.part")
    try:
        # Follows no link either.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise RequestRefused(
            f"{part} exists: another command writes it, or one was killed; delete it in that case"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        target.check()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
