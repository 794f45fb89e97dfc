"""OpenAI's /v1/batches: fields and bounds of jobs, each of many requests in one file.

Source: OpenAI OpenAPI document 2.3.0.
"""

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from gateway.api.server.batches_api import BatchesApi, batch_errors, key_of, owner_of
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import OPENAI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import LEAST_OF_BATCHES, Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.batch_objects import (
    EXPIRES_MAX_S,
    EXPIRES_MIN_S,
    OPERATIONS,
    BatchList,
    BatchObject,
    batch_list,
    batch_object,
)
from gateway.batches.records import Endpoint
from gateway.errors import InvalidInput, ScopeForbidden, Unauthenticated
from gateway.tenants.keyring import Tenant

FAILURES = document_errors(OPENAI)
METADATA_MAX = 16
METADATA_KEY_MAX = 64
METADATA_VALUE_MAX = 512


class ExpiresAfter(msgspec.Struct):
    """Time for which results are kept. anchor: created_at, which is the end of the batch."""

    seconds: Annotated[int, msgspec.Meta(ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)]
    anchor: str = "created_at"


class BatchRequest(msgspec.Struct):
    """Body of /v1/batches.

    endpoint: /v1/embeddings, /v2/rerank or /score. completion_window: 24h.
    """

    input_file_id: Annotated[str, msgspec.Meta(max_length=128)]
    endpoint: Annotated[str, msgspec.Meta(max_length=128)]
    completion_window: Annotated[str, msgspec.Meta(max_length=32)]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


@inference(
    "/v1/batches",
    errors=OPENAI,
    reply=BatchObject,
    description="The batch, which is validated next",
    tags=["Batches"],
    below_models=False,
    least=LEAST_OF_BATCHES,
)
async def create_batch(request: Request[BatchRequest]) -> HttpReply:
    """Run the requests in an uploaded file within 24 hours, behind all interactive calls.

    Each line of the file is one request: `custom_id`, `method`, `url` and `body`.
    """
    batches = request.api.batches
    tenant = await batches.authenticate(request.context)
    _check_has_key(tenant, request.api)
    data = request.body
    endpoint, expires = _checked_endpoint(data, tenant), data.output_expires_after
    async with request.api.charging(tenant) as headers:
        with batch_errors():
            job = await batches.jobs.create(
                tenant.name,
                key_of(tenant),
                endpoint,
                data.input_file_id,
                data.metadata,
                None if expires is None else float(expires.seconds),
                owner_of(tenant),
            )
    return HttpReply(msgspec.json.encode(batch_object(job)), headers)


def _check_has_key(tenant: Tenant, api: InferenceApi) -> None:
    """Check that a request came with an API key, as whose owner its lines run. Raises: ScopeForbidden."""
    try:
        api.gateway.keyring.owner_by_id(tenant.name, tenant.key_id)
    except Unauthenticated as error:
        raise ScopeForbidden(
            "a batch may run for 24 hours, longer than a token of single sign-on: create it with an API key"
        ) from error


def _checked_endpoint(data: BatchRequest, tenant: Tenant) -> Endpoint:
    """Check a request for a job, and return its endpoint. Raises: InvalidInput, ScopeForbidden."""
    endpoint = next((path for path in OPERATIONS if path == data.endpoint), None)
    if endpoint is None:
        raise InvalidInput(f"`endpoint` must be one of {', '.join(OPERATIONS)}", param="endpoint")
    if data.completion_window != "24h":
        raise InvalidInput("`completion_window` must be 24h", param="completion_window")
    tenant.require_operation(OPERATIONS[endpoint])
    expires = data.output_expires_after
    if expires is not None and expires.anchor != "created_at":
        raise InvalidInput("`output_expires_after.anchor` must be created_at", param="output_expires_after")
    for key, value in (data.metadata or {}).items():
        if len(key) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX:
            raise InvalidInput(
                f"a key of `metadata` may have {METADATA_KEY_MAX} characters, and a value "
                f"{METADATA_VALUE_MAX}",
                param="metadata",
            )
    if len(data.metadata or {}) > METADATA_MAX:
        raise InvalidInput(f"`metadata` may have at most {METADATA_MAX} pairs", param="metadata")
    return endpoint


@get("/v1/batches", responses=FAILURES, tags=["Batches"])
async def list_batches(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    after: FromQuery[str | None] = None,
    limit: FromQuery[int] = 20,
) -> BatchList:
    """List the tenant's batches, newest first."""
    tenant = await batches.authenticate(context)
    states, has_more = await batches.page(tenant.name, after, limit, owner_of(tenant))
    return batch_list(states, has_more=has_more)


@get("/v1/batches/{batch_id:str}", responses=FAILURES, tags=["Batches"])
async def get_batch(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    batch_id: FromPath[str],
) -> BatchObject:
    """Describe one batch of the tenant, with its counts so far."""
    tenant = await batches.authenticate(context)
    state = await batches.job(tenant, batch_id)
    return batch_object(state.job, state.wait_reason)


@post(
    "/v1/batches/{batch_id:str}/cancel",
    status_code=200,
    responses=FAILURES,
    tags=["Batches"],
)
async def cancel_batch(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    batch_id: FromPath[str],
) -> BatchObject:
    """Cancel one batch of the tenant.

    Requests that run are finished, and the results so far are kept.
    """
    tenant = await batches.authenticate(context)
    await batches.job(tenant, batch_id)
    with batch_errors():
        return batch_object(await batches.jobs.cancel(tenant.name, batch_id, owner_of(tenant)))


HANDLERS = [create_batch, list_batches, get_batch, cancel_batch]
