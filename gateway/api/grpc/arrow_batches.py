"""Texts of an Arrow stream in one RPC, answered with an Arrow stream of vectors."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from backends.contract import Embed, EmbedReply, Encode, Operation, Output, TermWeights
from backends.tei_protos import tei_multiplexer_pb2 as mux
from gateway.api.grpc.messages import OTHER_FIELDS_MAX, field, parse
from gateway.api.grpc.rpc import Rpc
from gateway.api.grpc.targets import take_target
from gateway.api.server.inference_api import expect_reply, reply_headers
from gateway.api.wire.arrow import Form, Rows, check_installed, read_in_turn, write_sparse, write_vectors
from gateway.api.wire.least_costs import LEAST
from gateway.calls import Call, Work
from gateway.errors import GatewayError, InvalidInput

# Of one stream: a client of TEI Manager sends whole tables. Each `limits.inputs` of them are one call.
ROWS_MAX = 65_536
# Calls of one stream in flight.
PARALLEL = 2
# Of the vectors of one reply.
REPLY_BYTES_MAX = 128 * 1024 * 1024
NUMBER_BYTES = 4
# As TEI Manager's replies.
LZ4 = Form("lz4")

NO_TERMS = TermWeights(np.empty(0, np.int32), np.empty(0, np.float32))

MakeWork = Callable[[tuple[str, ...]], Work]


async def answer_embed_arrow(rpc: Rpc) -> None:
    """Embed the texts of a stream."""
    await _answer(rpc, mux.EmbedArrowRequest)


async def answer_sparse_arrow(rpc: Rpc) -> None:
    """Return the term weights of the texts of a stream."""
    await _answer(rpc, mux.EmbedSparseArrowRequest)


async def _answer(rpc: Rpc, kind: type[Any]) -> None:
    context, api = rpc.context, rpc.parts.api
    try:
        api.admit(context, LEAST)
        check_installed()
        with rpc.holding(await rpc.read_only()) as message:
            request = parse(kind, message, OTHER_FIELDS_MAX)
            take_target(rpc, request.target.SerializeToString() if request.HasField("target") else None)
            assert context.tenant is not None
            rows, texts = await read_in_turn(
                api.arrow_threads,
                context.tenant,
                request.arrow_ipc,
                ROWS_MAX,
                rpc.parts.body_bytes_max,
                first_column=True,
            )
            stream, headers = await _served(rpc, request, rows, texts)
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, LEAST) from None
    headers["server-timing"] = context.timeline.server_timing()
    await rpc.begin(headers)
    await rpc.write(field(1, bytes(stream)))


async def _served(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str]
) -> tuple[memoryview, dict[str, str]]:
    """Return the reply to the texts of a stream, and its metadata. Raises: GatewayError."""
    is_sparse = isinstance(request, mux.EmbedSparseArrowRequest)
    operation = Operation.ENCODE if is_sparse else Operation.EMBED
    api, tenant = rpc.parts.api, rpc.context.tenant
    assert tenant is not None
    # Before the width of its vectors is of use: the key may not use the model.
    tenant.require_operation(operation)
    api.gateway.routes.resolve(tenant, rpc.context.model, operation)
    if not request.noop and texts:
        if not is_sparse:
            _check_reply(len(texts), _width(rpc))
        return await _computed(rpc, request, rows, texts)
    width = None if is_sparse else _width(rpc)
    if is_sparse or width is not None:
        # One request without tokens.
        await api.gateway.charges.charge_bad_request(tenant)
    if is_sparse:
        return await asyncio.to_thread(write_sparse, [NO_TERMS] * len(texts), rows, LZ4), {}
    width = width or await _measured_width(rpc)
    _check_reply(len(texts), width)
    zeros = np.zeros((len(texts), width), np.float32)
    return await asyncio.to_thread(write_vectors, zeros, rows, LZ4), {}


def _width(rpc: Rpc) -> int | None:
    """Return the length of the model's vectors, None while it is not known."""
    capabilities = rpc.parts.api.capabilities_of(rpc.context.model, Operation.EMBED)
    return None if capabilities is None else capabilities.dimensions


async def _measured_width(rpc: Rpc) -> int:
    """Return the length of a vector of a server that does not report it: TEI. Raises: GatewayError."""
    served = await rpc.parts.api.serve(rpc.context, Call(Embed(("a",)), rpc.context.model))
    return int(expect_reply(served.reply, EmbedReply).vectors.shape[1])


def _check_reply(count: int, width: int | None) -> None:
    """Check the size of a reply before it is computed. Raises: InvalidInput."""
    most = REPLY_BYTES_MAX // (NUMBER_BYTES * (width or 1))
    if count > most:
        raise InvalidInput(f"{count} vectors of {width} numbers; send at most {most} texts in one stream")


async def _computed(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str]
) -> tuple[memoryview, dict[str, str]]:
    if isinstance(request, mux.EmbedSparseArrowRequest):
        replies, headers = await _serve_all(rpc, request, rows, texts, _sparse_work)
        terms = [weights for served in replies for weights in served.reply.sparse]
        return await asyncio.to_thread(write_sparse, terms, rows, LZ4), headers
    work = partial(_dense_work, normalize=request.normalize)
    replies, headers = await _serve_all(rpc, request, rows, texts, work)
    parts = [served.reply.vectors for served in replies]
    vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return await asyncio.to_thread(write_vectors, vectors, rows, LZ4), headers


def _dense_work(texts: tuple[str, ...], *, normalize: bool) -> Embed:
    return Embed(texts, normalize=normalize)


def _sparse_work(texts: tuple[str, ...]) -> Encode:
    return Encode(texts, frozenset({Output.SPARSE}))


async def _serve_all(
    rpc: Rpc, request: Any, rows: Rows, texts: Sequence[str], make_work: MakeWork
) -> tuple[list[Any], dict[str, str]]:
    """Return what each call served, in order, and the metadata of the last one.

    Raises: GatewayError of the first call that fails; its message names the row.
    """
    size = rpc.parts.api.inputs_max
    starts = range(0, len(texts), size)
    free = asyncio.Semaphore(PARALLEL)

    async def serve(start: int) -> Any:
        part = rows.texts[start : start + size]
        call = Call(make_work(tuple(texts[start : start + size])), rpc.context.model, bool(request.truncate))
        async with free:
            context = rpc.context if len(starts) == 1 else rpc.context.part()
            try:
                served = await rpc.parts.api.serve(context, call)
            except GatewayError as error:
                error.name_rows(part)
                raise
        if context is not rpc.context:
            rpc.context.add(context)
        return served, reply_headers(served, part)

    tasks = [asyncio.ensure_future(serve(start)) for start in starts]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    truncated = ",".join(value for _, headers in found if (value := headers.get("x-truncated-inputs")))
    headers = found[-1][1] | ({"x-truncated-inputs": truncated} if truncated else {})
    return [served for served, _ in found], headers
