"""Operator endpoints for the batches of all tenants. Their contents are their tenants' alone."""

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from gateway.api.operators.access import OPERATORS
from gateway.api.server.batches_api import BatchesApi, batch_errors
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.wire.batch_objects import BatchObject, batch_object
from gateway.batches.job_store import Page
from gateway.batches.records import Job
from gateway.errors import InvalidInput

FAILURES = document_errors(TEI)
LIST_MAX = 100


class TenantBatch(msgspec.Struct):
    """A batch, and the tenant whose key created it. key: its id."""

    tenant: str
    key: str
    batch: BatchObject


class TenantBatches(msgspec.Struct):
    """Batches of all tenants, newest first."""

    data: list[TenantBatch]
    has_more: bool


@get("/admin/batches", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_all_batches(
    batches: NamedDependency[BatchesApi],
    after: FromQuery[str | None] = None,
    limit: FromQuery[int] = 50,
) -> TenantBatches:
    """List the batches of all tenants, newest first."""
    if not 1 <= limit <= LIST_MAX:
        raise InvalidInput(f"`limit` is from 1 to {LIST_MAX}", param="limit")
    await batches.require()
    with batch_errors():
        jobs, has_more = await batches.jobs.list(Page("batch", None, limit, after))
    return TenantBatches([_of_tenant(job) for job in jobs], has_more)


def _of_tenant(job: Job) -> TenantBatch:
    return TenantBatch(job.tenant, job.key, batch_object(job))


@get("/admin/batches/{batch_id:str}", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def get_any_batch(batches: NamedDependency[BatchesApi], batch_id: FromPath[str]) -> TenantBatch:
    """Describe a batch of any tenant."""
    await batches.require()
    with batch_errors():
        return _of_tenant(await batches.jobs.get(None, batch_id))


@post(
    "/admin/batches/{batch_id:str}/cancel",
    status_code=200,
    responses=FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def cancel_any_batch(batches: NamedDependency[BatchesApi], batch_id: FromPath[str]) -> BatchObject:
    """Cancel a batch of any tenant."""
    await batches.require()
    with batch_errors():
        return batch_object(await batches.jobs.cancel(None, batch_id))


HANDLERS = [list_all_batches, get_any_batch, cancel_any_batch]
