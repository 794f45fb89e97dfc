"""Stored files of tenants: rows, content and removal, within bounds on bytes; no wire format.

An upload first takes a row that is not shown, which reserves its bytes; then its content becomes an object,
then its record, and then its row is shown. It is removed in the opposite order: without its record it is not
found again. The content of a file of results is the objects of its job's chunks, in order.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from gateway.batches.objects import Objects, ObjectsUnavailable, Write, create_record, read_record
from gateway.batches.records import FILE_DATA, FILE_RECORD, JOB_FINAL, FileRecord, FinalRecord, Owner, new_id
from gateway.batches.store import (
    BoundExceeded,
    Bounds,
    JobStore,
    Kind,
    Page,
    Row,
    file_of,
    file_row,
    find,
)
from gateway.config.schema import BatchesSettings
from gateway.errors import BodyTooLarge, FileStorageFull, GatewayError, InvalidInput, NotFound, Overloaded
from gateway.store.errors import StoreUnavailable

# Bytes of an upload of unknown length are reserved in steps.
STEP_BYTES = 16 * 1024 * 1024
NO_OWNER = Owner("", "")


class FileUpload:
    """One upload, whose bytes are reserved before they are written. record: as it is known so far."""

    def __init__(self, files: "Files", record: FileRecord, write: Write) -> None:
        self.record = record
        self._files = files
        self._write = write
        self._size = 0

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises: BodyTooLarge, FileStorageFull, ObjectsUnavailable, StoreUnavailable."""
        bytes_max = self._files.settings.file_bytes
        self._size += len(data)
        if self._size > bytes_max:
            raise BodyTooLarge(
                f"the file is larger than {bytes_max} bytes (`batches.file_bytes`)", param="file"
            )
        if self._size > self.record.bytes:
            reserved = min(self._size + STEP_BYTES, bytes_max)
            self.record = msgspec.structs.replace(self.record, bytes=reserved)
            await self._files.reserve(self.record)
        await self._write(data)

    def end(self, filename: str, expires_after_s: int | None = None) -> None:
        """End a whole file. expires_after_s: of its owner's choice."""
        expires_s = self.record.expires_s
        if expires_after_s is not None:
            expires_s = min(expires_s, self.record.created_s + expires_after_s)
        self.record = msgspec.structs.replace(
            self.record, filename=filename, bytes=self._size, expires_s=expires_s, is_ready=True
        )


class Files:
    """Files of all tenants. now_s: seconds since 1970. owner: whose files alone are found, None for all."""

    def __init__(
        self,
        settings: BatchesSettings,
        objects: Objects,
        store: JobStore,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.objects = objects
        self.store = store
        self.bounds = Bounds(settings.tenant_bytes, settings.bytes)
        self._now_s = now_s

    @asynccontextmanager
    async def uploading(
        self, tenant: str, announced_bytes: int, owner: Owner = NO_OWNER
    ) -> AsyncIterator[FileUpload]:
        """Take an upload, which appears when the block ends; after an error nothing is left of it.

        announced_bytes: reserved at once; 0 if its length is unknown. owner: its key. Raises:
        FileStorageFull, ObjectsUnavailable, StoreUnavailable.
        """
        now_s, reserved = self._now_s(), min(announced_bytes, self.settings.file_bytes)
        record = FileRecord(
            new_id("file-"),
            tenant,
            "",
            "batch",
            reserved,
            now_s,
            now_s + self.settings.keep_s,
            is_ready=False,
            key=owner.key,
            key_mark=owner.mark,
        )
        has_content = False
        await self.reserve(record)
        try:
            async with self.objects.writing(FILE_DATA.format(record.id)) as write:
                upload = FileUpload(self, record, write)
                yield upload
                has_content = True
            await create_record(self.objects, FILE_RECORD.format(record.id), upload.record)
            # Its tenant may have uploaded other files meanwhile.
            await self.reserve(upload.record)
        except BaseException:
            # The client may have gone: that must not leave its bytes behind.
            with suppress(ObjectsUnavailable, StoreUnavailable):
                await asyncio.shield(self.discard(record) if has_content else self.store.remove(record.id))
            raise

    async def reserve(self, record: FileRecord) -> None:
        """Reserve a place in the tenant's list, and the bytes of a file.

        Raises: FileStorageFull, StoreUnavailable.
        """
        bounds = msgspec.structs.replace(self.bounds, shown=self.settings.files_per_tenant)
        try:
            await self.store.put(file_row(record), bounds)
        except BoundExceeded as error:
            raise self.refusal(error, "file") from error

    def refusal(self, error: BoundExceeded, kind: Kind) -> GatewayError:
        """Return the error of a file or a job for which there is no room."""
        settings = self.settings
        match error.bound, kind:
            case "total", _:
                message = "the files of all tenants take all of the gateway's storage; try again later"
            case "tenant", _:
                message = (
                    f"your files and batches take all of the {settings.tenant_bytes} bytes that a tenant may "
                    "store; delete files"
                )
            case "active", _:
                most = settings.jobs_per_tenant
                return Overloaded(f"you have {most} unfinished batches; wait for one, or cancel one")
            case _, "file":
                message = (
                    f"you have {settings.files_per_tenant} files, the most that a tenant may "
                    "(`batches.files_per_tenant`); delete some"
                )
            case _:
                message = (
                    f"you have {settings.kept_jobs_per_tenant} batches, ended ones included, the most that a "
                    "tenant may (`batches.kept_jobs_per_tenant`); an ended batch is removed "
                    f"{settings.keep_s:.0f} s after its end"
                )
        return FileStorageFull(message)

    async def get(self, tenant: str, id_: str, owner: Owner | None = None) -> FileRecord:
        """Return a file of a tenant. Raises: NotFound, StoreUnavailable."""
        row = await self.store.get(id_)
        if row is None or row.kind != "file" or not row.is_shown or row.tenant != tenant:
            raise NotFound(f"there is no file {id_!r}", param="file_id")
        record = file_of(row)
        if owner is not None and not owner.owns(record):
            raise NotFound(f"there is no file {id_!r}", param="file_id")
        if record.expires_s <= self._now_s():
            raise NotFound(f"the file {id_!r} has expired", param="file_id")
        return record

    async def list(
        self, page: Page, purpose: str | None, owner: Owner | None = None
    ) -> tuple[list[FileRecord], bool]:
        """Return files of a tenant and whether there are more. Raises: StoreUnavailable."""
        now_s = self._now_s()

        def read(row: Row) -> FileRecord | None:
            record = file_of(row)
            if record.expires_s <= now_s or purpose not in {None, record.purpose}:
                return None
            return record if owner is None or owner.owns(record) else None

        return await find(self.store, page, read)

    async def remove(self, tenant: str, id_: str, owner: Owner | None = None) -> None:
        """Remove a file of a tenant.

        Raises: NotFound, InvalidInput, ObjectsUnavailable, StoreUnavailable.
        """
        record = await self.get(tenant, id_, owner)
        for row in await self.store.active(tenant):
            if f'"{id_}"' in row.data:
                raise InvalidInput(f"{row.id} reads this file; cancel it first", param="file_id")
        await self.discard(record)

    async def discard(self, record: FileRecord) -> None:
        """Remove a file and its content. Raises: ObjectsUnavailable, StoreUnavailable."""
        content = await self._content_of(record)
        # The record goes first: a file without content would be listed.
        await self.objects.remove([FILE_RECORD.format(record.id)])
        await self.store.remove(record.id)
        await self.objects.remove(content)

    async def content(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of a file. Raises: ObjectsUnavailable."""
        for name in await self._content_of(record):
            async for block in self.objects.stream(name):
                yield block

    async def _content_of(self, record: FileRecord) -> Sequence[str]:
        """Return the objects of a file, in their order."""
        if record.job is None or record.part is None:
            return [FILE_DATA.format(record.id)]
        final = await read_record(self.objects, JOB_FINAL.format(record.job), FinalRecord)
        return [] if final is None else final.parts[record.part]
