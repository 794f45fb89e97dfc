"""Files with the results of a batch: each is replaced when it is complete, and nothing else is written."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

from gateway.cli.gateway_client import GatewayClient, RequestRefused

# Of one file, if no other bound is given: what a gateway keeps of one tenant, if no other is configured.
BYTES_MAX = 10 * 1024 * 1024 * 1024


def check_targets(*paths: Path) -> None:
    """Check that results may be written to paths. Raises: RequestRefused."""
    if len({path.absolute() for path in paths}) < len(paths):
        raise RequestRefused(f"{paths[0]}: results and failed lines need a file each")
    for path in paths:
        _check_target(path)


def fetch_file(
    client: GatewayClient,
    file_id: str,
    path: Path,
    bytes_max: int,
    on_progress: Callable[[int, int], object],
) -> None:
    """Write a file, which gets its name once it is complete.

    Raises: RequestRefused, GatewayUnavailable, OSError.
    """
    with _unfinished(path) as file:
        client.download(f"/v1/files/{quote(file_id, safe='')}/content", file, on_progress, bytes_max)


@contextmanager
def _unfinished(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of another one if the block succeeds, and is deleted if not."""
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
        _check_target(path)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _check_target(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RequestRefused(f"{path} is a link or no file, and is not replaced")
