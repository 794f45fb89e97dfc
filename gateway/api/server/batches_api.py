"""The part of the gateway that handlers of files and jobs use."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gateway.api.server.authentication import Authenticator
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.batch_objects import OPERATIONS
from gateway.batches.files import Files
from gateway.batches.jobs import Jobs, JobState
from gateway.batches.objects import ObjectsUnavailable
from gateway.batches.records import FileRecord, Owner
from gateway.batches.service import Batches
from gateway.batches.store import Page
from gateway.errors import (
    BatchesUnavailable,
    FileStorageFull,
    InvalidInput,
    ModelForbidden,
    NotFound,
    ScopeForbidden,
)
from gateway.store.errors import StoreUnavailable
from gateway.tenants.keyring import Tenant

# Uploads of one worker, and of one tenant in it: each has buffers and an open file.
UPLOADS_MAX = 64
UPLOADS_PER_TENANT = 8
# Longest wait of a request that comes while a starting gateway reads its files.
START_S = 2.0
# Batches of one page.
LIST_MAX = 100
# Scopes of the operations that batches run.
BATCHED = frozenset(operation.value for operation in OPERATIONS.values())
OFF = "this gateway has no files and batches: add the section `batches` to its router.yaml"


class BatchesApi:
    """Collaborators of handlers of files and jobs. parts: None if the configuration has no jobs."""

    def __init__(self, authenticator: Authenticator, parts: Batches | None) -> None:
        self._authenticator = authenticator
        self._parts = parts
        self._uploads: dict[str, int] = {}

    async def authenticate(self, context: RequestContext) -> Tenant:
        """Return the tenant of a request's key, if files and jobs are served.

        Raises: Unauthenticated, AuthThrottled, ScopeForbidden, NotFound, BatchesUnavailable.
        """
        tenant = self._authenticator.authenticate(context)
        tenant.require_key()
        if tenant.scopes.isdisjoint(BATCHED):
            raise ScopeForbidden("this key is for no operation of batches, and has no files and batches")
        await self.require()
        return tenant

    async def job(self, tenant: Tenant, id_: str) -> JobState:
        """Return a job that a key may see. Raises: NotFound, ScopeForbidden, BatchesUnavailable."""
        with batch_errors():
            state = await self.jobs.get(tenant.name, id_, owner_of(tenant))
        tenant.require_operation(OPERATIONS[state.job.endpoint])
        return state

    async def check_results(self, tenant: Tenant, record: FileRecord) -> None:
        """Check that a key may read a file: of results, that it may still compute them.

        Raises: ScopeForbidden, ModelForbidden, BatchesUnavailable.
        """
        if record.job is None or not tenant.is_narrowed:
            return
        try:
            job = (await self.job(tenant, record.job)).job
        except NotFound:
            # The job is removed before the last of its results, which only its key sees.
            return
        if job.model is not None and not tenant.may_use(job.model):
            raise ModelForbidden(f"this key may not use the model {job.model!r} of these results")

    async def require(self) -> None:
        """Check that files and jobs are served; wait for a start. Raises: NotFound, BatchesUnavailable."""
        opened = self._opened
        if opened.problem is not None and not opened.ready.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(START_S):
                    await opened.ready.wait()
        if opened.problem is not None:
            raise BatchesUnavailable(opened.problem)

    @property
    def _opened(self) -> Batches:
        if self._parts is None:
            raise NotFound(OFF)
        return self._parts

    @property
    def files(self) -> Files:
        """Files of all tenants. Raises: NotFound."""
        return self._opened.files

    @property
    def jobs(self) -> Jobs:
        """Jobs of all tenants. Raises: NotFound."""
        return self._opened.jobs

    async def page(
        self,
        tenant: str | None,
        after: str | None,
        limit: int,
        owner: Owner | None = None,
        most: int = LIST_MAX,
    ) -> tuple[list[JobState], bool]:
        """Return jobs of a tenant, or of all, newest first, and whether there are more.

        owner: whose jobs alone are listed. most: the largest limit. Raises: NotFound, InvalidInput,
        BatchesUnavailable.
        """
        if not 1 <= limit <= most:
            raise InvalidInput(f"`limit` must be from 1 to {most}", param="limit")
        with batch_errors():
            return await self.jobs.list(Page("batch", tenant, limit, after), owner)

    @contextmanager
    def uploading(self, tenant: str) -> Iterator[None]:
        """Take the permit of one upload. Raises: BatchesUnavailable."""
        own = self._uploads.get(tenant, 0)
        if own >= UPLOADS_PER_TENANT or sum(self._uploads.values()) >= UPLOADS_MAX:
            raise BatchesUnavailable("too many files are uploaded at once; try again")
        self._uploads[tenant] = own + 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]


def owner_of(tenant: Tenant) -> Owner | None:
    """Return the owner of the files and jobs that a key sees, None if it sees all of its tenant's."""
    return key_of(tenant) if tenant.is_narrowed else None


def key_of(tenant: Tenant) -> Owner:
    """Return the owner of what a key uploads and creates."""
    return Owner(tenant.key_id, tenant.key_mark)


@contextmanager
def batch_errors() -> Iterator[None]:
    """Translate outages of the stores of files and jobs. Raises: BatchesUnavailable, FileStorageFull."""
    try:
        yield
    except ObjectsUnavailable as error:
        if error.is_full:
            raise FileStorageFull("the gateway's disk for files is full; try again later") from error
        raise BatchesUnavailable(f"files cannot be read or written now: {error}") from error
    except StoreUnavailable as error:
        raise BatchesUnavailable(f"the store of batches is unavailable: {error}") from error
