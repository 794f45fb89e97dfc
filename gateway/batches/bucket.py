"""Objects in an S3-compatible bucket. Imported only where one is configured: obstore is an optional package.

`create` is a conditional write (`If-None-Match`). An upload goes in parts; the bucket's own rule removes the
parts of one that was never completed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from gateway.batches.objects import BLOCK_BYTES, ObjectLost, ObjectsUnavailable, Write
from gateway.config.schema import BucketSettings

# S3 takes no smaller parts of a multipart upload, apart from the last one.
PART_BYTES = 5 * 1024 * 1024
PARTS_AT_ONCE = 2
NAMES_AT_ONCE = 1000


@contextmanager
def _failures() -> Iterator[None]:
    """Translate failures of the bucket; their own texts may contain an address."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise ObjectsUnavailable(f"the bucket failed: {type(error).__name__}") from error


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

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Write]:
        writer: Any = obstore.open_writer_async(
            self._store, name, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )

        async def write(data: bytes) -> None:
            with _failures():
                await writer.write(data)

        try:
            yield write
            with _failures():
                await writer.close()
        except BaseException:
            with suppress(BaseError, OSError):
                # The library aborts an upload whose block has failed, and has no other way to.
                await writer.__aexit__(ObjectsUnavailable, None, None)
            raise

    async def add(self, name: str, path: Path) -> None:
        with _failures():
            await obstore.put_async(
                self._store, name, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def create(self, name: str, data: bytes) -> bool:
        with _failures():
            try:
                await obstore.put_async(self._store, name, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    async def read(self, name: str) -> bytes | None:
        with _failures():
            try:
                return bytes(await (await obstore.get_async(self._store, name)).bytes_async())
            except FileNotFoundError:
                return None

    async def stream(
        self, name: str, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        part: Any = {"offset": offset} if length is None else (offset, offset + length)
        options: Any = {"range": part} if offset or length else None
        with _failures():
            try:
                found = await obstore.get_async(self._store, name, options=options)
                async for block in found.stream(min_chunk_size=BLOCK_BYTES):
                    yield bytes(block)
            except FileNotFoundError as error:
                raise ObjectLost from error

    async def names(self, prefix: str) -> list[str]:
        with _failures():
            pages = obstore.list(self._store, prefix.rstrip("/"), chunk_size=NAMES_AT_ONCE)
            return sorted([entry["path"] async for page in pages for entry in page])

    async def folders(self, prefix: str) -> list[str]:
        with _failures():
            found = await obstore.list_with_delimiter_async(self._store, prefix.rstrip("/"))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    async def remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), NAMES_AT_ONCE):
            with _failures(), suppress(FileNotFoundError):
                await obstore.delete_async(self._store, names[start : start + NAMES_AT_ONCE])

    async def sweep(self, older_s: float) -> None:
        """Do nothing: only the bucket's own rule sees uploads that were not completed."""
