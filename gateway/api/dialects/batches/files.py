"""OpenAI's /v1/files: fields and bounds of inputs and results of batches, among them `expires_after`.

Source: OpenAI OpenAPI document 2.3.0; openai-python 3.52 sends `expires_after` as `expires_after[seconds]`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.di import NamedDependency
from litestar.enums import RequestEncodingType
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body, FromPath, FromQuery
from litestar.response import Stream

from gateway.api.dialects.batches.uploads import FormReader, Sink, UploadedForm
from gateway.api.server.batches_api import BatchesApi, batch_errors, key_of, owner_of
from gateway.api.server.error_bodies import OPENAI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request import LEAST_OF_BATCHES
from gateway.api.server.request_context import HttpContext, RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.batch_objects import (
    EXPIRES_MAX_S,
    EXPIRES_MIN_S,
    FileDeleted,
    FileList,
    FileObject,
    file_object,
)
from gateway.batches.files import FileUpload
from gateway.batches.records import FileRecord
from gateway.batches.store import Page
from gateway.errors import InvalidInput
from gateway.tenants.keyring import Tenant

FAILURES = document_errors(OPENAI)
# What surrounds the file in a form.
FORM_BYTES_MAX = 64 * 1024
LIST_MAX = 10_000


class FileForm(msgspec.Struct):
    """Form of an upload. purpose: `batch`."""

    purpose: str
    file: UploadFile
    anchor: str | None = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: Annotated[int, msgspec.Meta(ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)] | msgspec.UnsetType = (
        msgspec.field(default=msgspec.UNSET, name="expires_after[seconds]")
    )


async def answer_upload(context: HttpContext, api: InferenceApi) -> None:
    """Answer an upload, whose body is read only after its key and its announced size have been checked."""
    try:
        reply = await _upload(context, api)
    except Exception as error:  # noqa: BLE001 - every error becomes a reply
        reply = context.failure(error)
    await context.io.reply(reply)


async def _upload(context: HttpContext, api: InferenceApi) -> HttpReply:
    batches = api.batches
    tenant = await batches.authenticate(context)
    context.io.set_body_bytes_max(batches.files.settings.file_bytes + FORM_BYTES_MAX)
    api.admit_caller(context, LEAST_OF_BATCHES)
    # Before the body: with a spent limit none of it is read.
    async with api.charging(tenant) as headers:
        with batches.uploading(tenant.name), batch_errors():
            record = await _receive(context, batches, tenant)
    return HttpReply(msgspec.json.encode(file_object(record)), headers)


async def _receive(context: HttpContext, batches: BatchesApi, tenant: Tenant) -> FileRecord:
    upload: FileUpload | None = None
    announced = context.header(b"content-length")
    async with AsyncExitStack() as stack:

        async def start() -> Sink:
            nonlocal upload
            reserved = int(announced) if announced.isdigit() else 0
            uploading = batches.files.uploading(tenant.name, reserved, key_of(tenant))
            upload = await stack.enter_async_context(uploading)
            return upload

        async with aclosing(_pieces(context)) as pieces:
            form = await FormReader(context.header(b"content-type"), start).read(pieces)
        expires_after_s = _expiry_of(form)
        assert upload is not None
        upload.end(form.filename or "", expires_after_s)
    return upload.record


async def _pieces(context: HttpContext) -> AsyncGenerator[bytes, None]:
    """Yield the body of a request; only one piece of it is held at a time."""
    more = True
    while more:
        message = await context.io.receive()
        more = message.get("more_body", False)
        if message["body"]:
            yield message["body"]
        context.io.release()


def _expiry_of(form: UploadedForm) -> int | None:
    """Check the fields of an upload, and return when it expires, in seconds. Raises: InvalidInput."""
    fields = form.fields
    purpose = fields.get("purpose")
    if purpose != "batch":
        sent = "is missing" if purpose is None else f"{purpose[:64]!r} is not served"
        raise InvalidInput(f"`purpose` {sent}: files are for `batch`", param="purpose")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise InvalidInput("`expires_after[anchor]` must be created_at", param="expires_after")
    seconds = fields.get("expires_after[seconds]")
    if seconds is not None and not (
        seconds.isdecimal() and len(seconds) < 8 and EXPIRES_MIN_S <= int(seconds) <= EXPIRES_MAX_S
    ):
        raise InvalidInput(
            f"`expires_after[seconds]` must be a number from {EXPIRES_MIN_S} to {EXPIRES_MAX_S}",
            param="expires_after",
        )
    return None if seconds is None else int(seconds)


@post(
    "/v1/files",
    status_code=200,
    responses={200: ResponseSpec(FileObject, description="The file")} | FAILURES,
    tags=["Batches"],
    opt=route_options(errors=OPENAI, answer=answer_upload),
)
async def create_file(
    data: Annotated[FileForm, Body(media_type=RequestEncodingType.MULTI_PART)],
) -> Response[bytes]:
    """Upload the input of a batch, as JSON Lines.

    The file is streamed to the gateway's storage. `expires_after[seconds]` shortens the time for which it is
    kept.
    """
    raise NotImplementedError


@get("/v1/files", responses=FAILURES, tags=["Batches"])
async def list_files(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    purpose: FromQuery[str | None] = None,
    limit: FromQuery[int] = LIST_MAX,
    order: FromQuery[Literal["asc", "desc"]] = "desc",
    after: FromQuery[str | None] = None,
) -> FileList:
    """List the tenant's files, newest first."""
    tenant = await batches.authenticate(context)
    if not 1 <= limit <= LIST_MAX:
        raise InvalidInput(f"`limit` must be from 1 to {LIST_MAX}", param="limit")
    with batch_errors():
        page = Page("file", tenant.name, limit, after, newest_first=order == "desc")
        records, has_more = await batches.files.list(page, purpose, owner_of(tenant))
    data = [file_object(record) for record in records]
    return FileList(data, has_more, data[0].id if data else None, data[-1].id if data else None)


@get("/v1/files/{file_id:str}", responses=FAILURES, tags=["Batches"])
async def get_file(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    file_id: FromPath[str],
) -> FileObject:
    """Describe one file of the tenant."""
    tenant = await batches.authenticate(context)
    with batch_errors():
        return file_object(await batches.files.get(tenant.name, file_id, owner_of(tenant)))


@get(
    "/v1/files/{file_id:str}/content",
    responses={200: ResponseSpec(None, generate_examples=False, description="JSON Lines")} | FAILURES,
    tags=["Batches"],
)
async def get_content(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    file_id: FromPath[str],
) -> Stream:
    """Return the content of one file of the tenant."""
    tenant = await batches.authenticate(context)
    files = batches.files
    with batch_errors():
        record = await files.get(tenant.name, file_id, owner_of(tenant))
        await batches.check_results(tenant, record)
        blocks = files.content(record)
        # Before the head of the reply is sent, so that a missing file is reported.
        first = await anext(blocks, b"")
    headers = {
        "content-length": str(record.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return Stream(_content(first, blocks), headers=headers, media_type="application/jsonl")


async def _content(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for block in rest:
        yield block


@delete("/v1/files/{file_id:str}", status_code=200, responses=FAILURES, tags=["Batches"])
async def delete_file(
    context: NamedDependency[RequestContext],
    batches: NamedDependency[BatchesApi],
    file_id: FromPath[str],
) -> FileDeleted:
    """Delete one file of the tenant."""
    tenant = await batches.authenticate(context)
    with batch_errors():
        await batches.files.remove(tenant.name, file_id, owner_of(tenant))
    return FileDeleted(file_id)


HANDLERS = [create_file, list_files, get_file, get_content, delete_file]
