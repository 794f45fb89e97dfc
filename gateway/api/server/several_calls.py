"""Several calls that together answer one request: served at once, with their counts and headers joined."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import RequestContext
from gateway.calls import Call
from gateway.errors import GatewayError
from gateway.prepare import PreparedWork
from gateway.serve import Served
from gateway.tenants.keyring import Tenant

OK = 200


class CallPart(msgspec.Struct, frozen=True):
    """One of the calls. rows: of its inputs, in the request."""

    call: Call
    rows: Sequence[int]


async def serve_parts(
    api: InferenceApi,
    context: RequestContext,
    parts: Sequence[CallPart],
    parallel: int,
    name_error: Callable[[GatewayError, CallPart], None],
) -> list[Served]:
    """Run calls through the gateway's stages, at most `parallel` at once, and return what each served.

    None is sent unless the limits have room for all of them. The first that fails ends the others. The calls
    of one model are one event, as those of a request are.
    name_error: names the part of the request that an error is about. Raises: GatewayError.
    """
    tenant = context.tenant
    free = asyncio.Semaphore(parallel if tenant is None else _at_once(tenant, parallel))
    contexts = _contexts_by_model(context, parts)

    async def serve(part: CallPart, prepared: PreparedWork | None) -> Served:
        of_model = contexts[part.call.model]
        async with free:
            own = of_model if len(parts) == 1 else of_model.part()
            try:
                served = await api.serve(own, part.call, early=prepared)
            except GatewayError as error:
                context.timeline.name(own.timeline.model, own.timeline.operation)
                name_error(error, part)
                raise
        if own is not of_model:
            of_model.add(own)
        return served

    context.timeline.lap("parse")
    early = await _prepare(api, context, parts, name_error)
    tasks = [asyncio.ensure_future(serve(*pair)) for pair in zip(parts, early, strict=True)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if len(parts) > 1:
            context.timeline.lap("upstream")
        for other in contexts.values():
            if other is not context and other.inputs:
                other.finish(OK)


async def _prepare(
    api: InferenceApi,
    context: RequestContext,
    parts: Sequence[CallPart],
    name_error: Callable[[GatewayError, CallPart], None],
) -> Sequence[PreparedWork | None]:
    """Return the work of several calls, for all of which the limits have room now. Raises: GatewayError."""
    if len(parts) == 1:
        return [None]
    calls = [part.call for part in parts]
    return await api.prepare_all(context, calls, lambda error, index: name_error(error, parts[index]))


def _contexts_by_model(
    context: RequestContext, parts: Sequence[CallPart]
) -> dict[str | None, RequestContext]:
    """Return the context of each model's calls: that of the request for the first one."""
    contexts: dict[str | None, RequestContext] = {}
    for part in parts:
        if part.call.model not in contexts:
            contexts[part.call.model] = context.part() if contexts else context
    return contexts


def _at_once(tenant: Tenant, parallel: int) -> int:
    """Return how many calls may be in flight: a request must not be refused for its own other calls."""
    own = [tenant.limits, *tenant.model_limits.values()]
    slots = [limit.amount for limits in own for limit in limits if limit.period == "in_flight"]
    return max(1, min([parallel, *slots]))
