"""Objects in an S3-compatible bucket."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from gateway.batches.objects import BLOCK_BYTES, ObjectLost, ObjectsUnavailable
from gateway.config.schema import BucketSettings

# S3 takes no smaller parts of a multipart upload, apart from the last one.
PART_BYTES = 5 * 1024 * 1024
PARTS_AT_ONCE = 2
NAMES_AT_ONCE = 1000


class BucketUpload:
    """An object that is uploaded in parts, of which two are in memory."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises: ObjectsUnavailable."""
        try:
            await self._writer.write(data)
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error

    async def commit(self) -> None:
        """Let the object appear. Raises: ObjectsUnavailable."""
        try:
            await self._writer.close()
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error

    async def abort(self) -> None:
        """Drop the upload; the bucket's own rule removes the parts of one that was not completed."""
        with suppress(BaseError, OSError):
            # The library aborts an upload whose block has failed, and has no other way to.
            await self._writer.__aexit__(ObjectsUnavailable, None, None)


class BucketObjects:
    """Objects below the prefix of a bucket."""

    def __init__(self, settings: BucketSettings) -> None:
        options: dict[str, Any] = {
            "region": settings.region,
            "access_key_id": settings.access_key or None,
            "secret_access_key": settings.secret_key or None,
            "endpoint": settings.endpoint,
            "prefix": settings.prefix or None,
        }
        self._store = S3Store(
            settings.name,
            client_options={
                "allow_http": settings.endpoint is not None and settings.endpoint.startswith("http://"),
                "timeout": timedelta(seconds=settings.timeout_s),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=settings.timeout_s)},
            **{name: value for name, value in options.items() if value is not None},
        )

    async def start(self, name: str) -> BucketUpload:
        """Begin an object. Raises: ObjectsUnavailable."""
        writer = obstore.open_writer_async(
            self._store, name, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )
        return BucketUpload(writer)

    async def add(self, name: str, path: Path) -> None:
        """Upload a local file, and remove it. Raises: ObjectsUnavailable."""
        await self._run(
            obstore.put_async(self._store, name, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
        )
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def create(self, name: str, data: bytes) -> bool:
        """Add an object, unless there is one. Raises: ObjectsUnavailable."""
        try:
            await obstore.put_async(self._store, name, data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error
        return True

    async def read(self, name: str) -> bytes | None:
        """Return an object, None if there is none. Raises: ObjectsUnavailable."""
        try:
            found = await obstore.get_async(self._store, name)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error

    async def stream(
        self, name: str, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of an object. Raises: ObjectsUnavailable."""
        options: Any = (
            {"range": {"offset": offset}} if length is None else {"range": (offset, offset + length)}
        )
        try:
            found = await obstore.get_async(self._store, name, options=options if offset or length else None)
            async for block in found.stream(min_chunk_size=BLOCK_BYTES):
                yield bytes(block)
        except FileNotFoundError as error:
            raise ObjectLost from error
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error

    async def names(self, prefix: str) -> list[str]:
        """Return the names below a prefix. Raises: ObjectsUnavailable."""
        found: list[str] = []
        try:
            async for page in obstore.list(self._store, prefix.rstrip("/"), chunk_size=NAMES_AT_ONCE):
                found += [entry["path"] for entry in page]
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error
        return sorted(found)

    async def folders(self, prefix: str) -> list[str]:
        """Return the parts of names after a prefix, up to the next slash. Raises: ObjectsUnavailable."""
        try:
            found = await obstore.list_with_delimiter_async(self._store, prefix.rstrip("/"))
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects. Raises: ObjectsUnavailable."""
        for start in range(0, len(names), NAMES_AT_ONCE):
            with suppress(FileNotFoundError):
                await self._run(obstore.delete_async(self._store, names[start : start + NAMES_AT_ONCE]))

    async def sweep(self, older_s: float) -> None:
        """Do nothing: only the bucket's own rule sees uploads that were not completed."""

    async def _run(self, request: Any) -> None:
        try:
            await request
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise _failure_of(error) from error


def _failure_of(error: Exception) -> ObjectsUnavailable:
    """Return the error for a failure of the bucket; its own text may contain an address."""
    return ObjectsUnavailable(f"the bucket failed: {type(error).__name__}")
