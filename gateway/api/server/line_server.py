"""Lines of jobs, run through the same stages as callers' requests, without a connection."""

import logging
import time
from collections.abc import Mapping

from gateway.api.server.call_io import CallIO, Message
from gateway.api.server.endpoints import Endpoint
from gateway.api.server.error_bodies import OPENAI, render_error
from gateway.api.server.error_translation import as_gateway_error
from gateway.api.server.in_flight import InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import Target
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.batch_objects import OPERATIONS
from gateway.api.wire.least_costs import LEAST
from gateway.batches.lines import LineReply, LineRequest
from gateway.batches.records import Endpoint as EndpointPath
from gateway.batches.records import Job, LineProblem
from gateway.errors import GatewayError, Internal, QuotaUnavailable, Unauthenticated
from gateway.events import LINE_ROUTES, CallFinished, Observe
from gateway.tenants.keyring import Tenant

# Lines yield to interactive calls.
HEADERS = [(b"x-priority", b"bulk")]
# A new key's batch may arrive before the key does, which other gateways read from the store.
KEY_PATIENCE_S = 10.0

logger = logging.getLogger("gateway")


class GatewayLineServer:
    """Runs lines in this process. endpoints: by path. observe: takes one event for each try of a line."""

    def __init__(
        self,
        api: InferenceApi,
        endpoints: Mapping[EndpointPath, Endpoint],
        in_flight: InFlight,
        observe: Observe,
    ) -> None:
        self._api = api
        self._endpoints = endpoints
        self._in_flight = in_flight
        self._observe = observe

    async def serve(self, request: LineRequest) -> LineReply:
        """Return the reply to a line, also one that reports an error.

        Raises: GatewayError if another try might succeed.
        """
        context = self._context(request)
        status = 500
        try:
            context.tenant = self._owner(request.job).for_batches()
            reply = await self._reply(request, context)
            status = 200
        except GatewayError as error:
            context.outcome, status = error.kind, error.facts.status
            if error.facts.retryable:
                raise
            rendered = render_error(error, OPENAI)
            reply = LineReply(rendered.status, bytes(rendered.body), context.request_id)
        finally:
            context.io.release()
            self._observe(_finished(request, context, status))
        return reply

    async def _reply(self, request: LineRequest, context: RequestContext) -> LineReply:
        try:
            body = bytes(request.body)
            self._in_flight.hold(context.io, len(body))
            reply = await self._endpoints[request.job.endpoint].reply_to_line(body, context, self._api)
        except Exception as error:
            charged = await self._api.charge_failure(context, error, LEAST)
            failure = as_gateway_error(charged)
            if isinstance(failure, Internal):
                logger.error("line %s failed", request.id, exc_info=error)  # noqa: TRY400 - it may be a cause
            raise failure from error
        return LineReply(
            reply.status, bytes(reply.body), context.request_id, context.tokens, context.cached_tokens
        )

    async def settle(self) -> None:
        """Wait until the quota store has what all lines so far have cost. Raises: QuotaUnavailable."""
        await self._api.gateway.charges.flush()

    def check_model(self, job: Job, model: str | None) -> LineProblem | None:
        """Return why lines with this model cannot be served, None if they can, or might soon."""
        gateway = self._api.gateway
        operation = OPERATIONS[job.endpoint]
        try:
            owner = self._owner(job)
            owner.require_operation(operation)
            gateway.routes.resolve(owner, model, operation)
        except GatewayError as error:
            if error.facts.retryable:
                return None
            return LineProblem(error.facts.openai_code or error.kind, error.message)
        return None

    def _owner(self, job: Job) -> Tenant:
        """Return the owner of the key that created a job. Raises: Unauthenticated, QuotaUnavailable."""
        keyring = self._api.gateway.keyring
        try:
            return keyring.owner_by_id(job.tenant, job.key, job.key_mark)
        except Unauthenticated as error:
            if keyring.has_store and time.time() - job.created_s < KEY_PATIENCE_S:
                raise QuotaUnavailable("the key of this batch is not known here yet") from error
            raise

    def calls(self) -> int:
        """Return the number of interactive calls so far."""
        return self._api.interactive_calls

    def is_draining(self) -> bool:
        """Return whether the process is about to stop."""
        return self._in_flight.leaving

    def _context(self, request: LineRequest) -> RequestContext:
        scope = {"headers": HEADERS, "http_version": "1.1"}
        target = Target(LINE_ROUTES[request.job.endpoint], OPENAI, request.job.endpoint)
        context = RequestContext(scope, target, {})
        context.io = CallIO(scope, _receive, _send, self._in_flight, 0)
        context.io.tenant = request.job.tenant
        context.reservation = request.id
        return context


def _finished(request: LineRequest, context: RequestContext, status: int) -> CallFinished:
    timeline = context.timeline
    return CallFinished(
        request_id=context.request_id,
        method="POST",
        route=context.target.label,
        status=status,
        outcome=context.outcome,
        duration_s=time.perf_counter() - timeline.started_s,
        tenant=request.job.tenant,
        model=timeline.model,
        inputs=context.inputs,
        tokens=context.tokens,
        operation=timeline.operation,
        stages=timeline.laps,
        is_bulk=timeline.is_bulk,
        replicas=timeline.attempts.replicas,
        attempts=timeline.attempts.attempts,
        upstream_status=timeline.attempts.upstream_status,
        upstream_words=timeline.attempts.upstream_words,
        key_id=request.job.key,
    )


async def _receive() -> Message:
    raise NotImplementedError


async def _send(_: Message) -> None:
    raise NotImplementedError
