"""Files of tenants: uploads with bounds, content, removal."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from gateway.batches import names
from gateway.batches.job_store import (
    ByteBounds,
    JobTable,
    Page,
    RowBounds,
    StorageFull,
    TooManyRows,
    file_of,
    file_row,
)
from gateway.batches.objects import Objects, ObjectsUnavailable, Upload
from gateway.batches.records import FileRecord, FinalRecord, Owner, new_id
from gateway.config.schema import BatchesSettings
from gateway.errors import BodyTooLarge, FileStorageFull, InvalidInput, NotFound

# Bytes of an upload of unknown length are reserved in steps.
STEP_BYTES = 16 * 1024 * 1024
NO_OWNER = Owner("", "")
# Rows that are read at a time while a list is filtered.
ROWS_AT_ONCE = 500


class NewFile(msgspec.Struct, frozen=True):
    """Facts about an upload that are known when it ends. expires_after_s: of its owner's choice."""

    filename: str
    purpose: str
    expires_after_s: int | None = None


class FileUpload:
    """One upload. Its bytes are reserved before they are written."""

    def __init__(self, files: "Files", record: FileRecord, upload: Upload) -> None:
        self._files = files
        self._record = record
        self._upload = upload
        self._size = 0
        self._has_content = False

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises: BodyTooLarge, FileStorageFull, ObjectsUnavailable, JobStoreUnavailable."""
        self._size += len(data)
        if self._size > self._files.settings.file_bytes:
            raise too_large(self._files.settings.file_bytes)
        if self._size > self._record.bytes:
            reserved = min(self._size + STEP_BYTES, self._files.settings.file_bytes)
            self._record = msgspec.structs.replace(self._record, bytes=reserved)
            await self._files.reserve(self._record)
        await self._upload.write(data)

    async def commit(self, new: NewFile) -> FileRecord:
        """Let the file appear. Raises: FileStorageFull, ObjectsUnavailable, JobStoreUnavailable."""
        files, record = self._files, self._record
        self._has_content = True
        await self._upload.commit()
        expires_s = record.expires_s
        if new.expires_after_s is not None:
            expires_s = min(expires_s, record.created_s + new.expires_after_s)
        ready = FileRecord(
            record.id,
            record.tenant,
            new.filename,
            new.purpose,
            self._size,
            record.created_s,
            expires_s,
            key=record.key,
            key_mark=record.key_mark,
        )
        await files.objects.create(names.record_of_file(ready.id), msgspec.json.encode(ready))
        # Its tenant may have uploaded other files meanwhile.
        await files.reserve(ready)
        return ready

    async def abort(self) -> None:
        """Drop the upload, also after a commit that failed.

        Raises: ObjectsUnavailable, JobStoreUnavailable.
        """
        await self._upload.abort()
        if self._has_content:
            await self._files.discard(self._record)
        else:
            await self._files.table.remove(self._record.id)


class Files:
    """Files of all tenants. now_s: seconds since 1970."""

    def __init__(
        self,
        settings: BatchesSettings,
        objects: Objects,
        table: JobTable,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.objects = objects
        self.table = table
        self._now_s = now_s

    @property
    def bounds(self) -> ByteBounds:
        """Bounds on the bytes of files and jobs."""
        return ByteBounds(self.settings.tenant_bytes, self.settings.bytes)

    async def start(self, tenant: str, announced_bytes: int, owner: Owner = NO_OWNER) -> FileUpload:
        """Begin an upload. announced_bytes: reserved at once; 0 if its length is unknown. owner: its key.

        Raises: BodyTooLarge, FileStorageFull, ObjectsUnavailable, JobStoreUnavailable.
        """
        now_s = self._now_s()
        reserved = min(announced_bytes, self.settings.file_bytes)
        expires_s = now_s + self.settings.keep_s
        record = FileRecord(
            new_id("file-"),
            tenant,
            "",
            "",
            reserved,
            now_s,
            expires_s,
            is_ready=False,
            key=owner.key,
            key_mark=owner.mark,
        )
        await self.reserve(record)
        try:
            upload = await self.objects.start(names.data_of_file(record.id))
        except ObjectsUnavailable:
            await self.table.remove(record.id)
            raise
        return FileUpload(self, record, upload)

    async def reserve(self, record: FileRecord) -> None:
        """Reserve a place in the tenant's list, and the bytes of a file.

        Raises: FileStorageFull, JobStoreUnavailable.
        """
        most = self.settings.files_per_tenant
        try:
            await self.table.put(file_row(record), self.bounds, RowBounds(shown=most, active=0))
        except StorageFull as error:
            raise storage_full(self.bounds, error) from error
        except TooManyRows as error:
            raise FileStorageFull(
                f"you have {most} files, the most that a tenant may (`batches.files_per_tenant`); delete some"
            ) from error

    async def get(self, tenant: str, id_: str, owner: Owner | None = None) -> FileRecord:
        """Return a file of a tenant. owner: whose files alone are found, None for any of the tenant's.

        Raises: NotFound, JobStoreUnavailable.
        """
        row = await self.table.get(id_)
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
        """Return files of a tenant and whether there are more. owner: as for `get`.

        Raises: JobStoreUnavailable.
        """
        found: list[FileRecord] = []
        after, now_s = page.after, self._now_s()
        room = page.data_bytes
        while rows := await self.table.rows(msgspec.structs.replace(page, after=after, limit=ROWS_AT_ONCE)):
            for row in rows:
                record = file_of(row)
                if record.expires_s <= now_s or purpose not in {None, record.purpose}:
                    continue
                if owner is not None and not owner.owns(record):
                    continue
                if len(found) == page.limit or (found and row.data_bytes > room):
                    return found, True
                found.append(record)
                room -= row.data_bytes
            after = rows[-1].id
        return found, False

    async def remove(self, tenant: str, id_: str, owner: Owner | None = None) -> None:
        """Remove a file of a tenant. owner: as for `get`.

        Raises: NotFound, InvalidInput, ObjectsUnavailable, JobStoreUnavailable.
        """
        record = await self.get(tenant, id_, owner)
        for row in await self.table.active(tenant):
            if f'"{id_}"' in row.data:
                raise InvalidInput(f"{row.id} reads this file; cancel it first", param="file_id")
        await self.discard(record)

    async def discard(self, record: FileRecord) -> None:
        """Remove a file and its content. Raises: ObjectsUnavailable, JobStoreUnavailable."""
        content: Sequence[str] = [names.data_of_file(record.id)]
        if record.job is not None:
            content = await self._results_of(record)
        # The record goes first: a file without content would be listed.
        await self.objects.remove([names.record_of_file(record.id)])
        await self.table.remove(record.id)
        await self.objects.remove(content)

    async def content(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of a file. Raises: ObjectsUnavailable."""
        content: Sequence[str] = [names.data_of_file(record.id)]
        if record.job is not None:
            content = await self._results_of(record)
        for name in content:
            async for block in self.objects.stream(name):
                yield block

    async def _results_of(self, record: FileRecord) -> Sequence[str]:
        """Return the objects of a file of results, in their order. Raises: ObjectsUnavailable."""
        assert record.job is not None
        assert record.part is not None
        found = await self.objects.read(names.final(record.job))
        if found is None:
            return []
        return msgspec.json.decode(found, type=FinalRecord).parts[record.part]


def too_large(bytes_max: int) -> BodyTooLarge:
    """Return the error of a file that is too large."""
    return BodyTooLarge(f"the file is larger than {bytes_max} bytes (`batches.file_bytes`)", param="file")


def storage_full(bounds: ByteBounds, error: StorageFull) -> FileStorageFull:
    """Return the error of what does not fit into the storage."""
    if error.of_tenant:
        return FileStorageFull(
            f"your files and batches take all of the {bounds.tenant} bytes that a tenant may store; "
            "delete files"
        )
    return FileStorageFull("the files of all tenants take all of the gateway's storage; try again later")
