"""Operator endpoints for the batches of all tenants. Their contents are their tenants' alone."""

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from gateway.api.operators.access import OPERATORS
from gateway.api.operators.pages import LIMIT_MAX
from gateway.api.server.batches_api import BatchesApi, batch_errors
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.wire.batch_objects import BatchObject, batch_object
from gateway.audit.records import Actor, ChangedField, new_record
from gateway.audit.trail import AuditTrail
from gateway.batches.jobs import JobState

FAILURES = document_errors(TEI)


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
    tenant: FromQuery[str | None] = None,
) -> TenantBatches:
    """List the batches of all tenants, or of the one that `tenant` names, newest first.

    `after` is the id of the last batch of the page before. A page has 1,000 batches at most, and fewer if
    they are large.
    """
    await batches.require()
    states, has_more = await batches.page(tenant, after, limit, most=LIMIT_MAX)
    return TenantBatches([_of_tenant(state) for state in states], has_more)


def _of_tenant(state: JobState) -> TenantBatch:
    return TenantBatch(state.job.tenant, state.job.key, batch_object(state.job, state.wait_reason))


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
async def cancel_any_batch(
    batches: NamedDependency[BatchesApi],
    audit: NamedDependency[AuditTrail],
    operator: NamedDependency[Actor],
    batch_id: FromPath[str],
) -> BatchObject:
    """Cancel a batch of any tenant."""
    await batches.require()
    with batch_errors():
        job = await batches.jobs.cancel(None, batch_id)
    tenant = ChangedField("tenant", job.tenant, job.tenant)
    await audit.record(new_record(operator, "cancel", f"batch/{job.id}", [tenant]))
    return batch_object(job)


HANDLERS = [list_all_batches, get_any_batch, cancel_any_batch]
