"""Lines of jobs, run through the same endpoints as callers' requests, without a connection."""

import time
from collections.abc import Mapping

from gateway.api.server.endpoints import Endpoint
from gateway.api.server.error_bodies import OPENAI, render_error
from gateway.api.server.in_flight import HeldBody, InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import Target
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.batch_objects import OPERATIONS
from gateway.batches.lines import LineReply
from gateway.batches.records import Endpoint as EndpointPath
from gateway.batches.records import Job, LineProblem
from gateway.errors import GatewayError, QuotaUnavailable, Unauthenticated
from gateway.events import LINE_ROUTES, Observe
from gateway.tenants.keyring import Tenant

# Lines yield to interactive calls.
HEADERS = [(b"x-priority", b"bulk")]
# A new key's batch may arrive before the key does, which other gateways read from the store.
KEY_PATIENCE_S = 10.0


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

    async def serve(self, job: Job, id_: str, body: bytes) -> LineReply:
        """Return the reply to a line, also one that reports an error. id_: the same for a try after a kill.

        Raises: GatewayError if another try might succeed.
        """
        held = HeldBody(self._in_flight, job.tenant)
        target = Target(LINE_ROUTES[job.endpoint], OPENAI, job.endpoint)
        context = LineContext(job, id_, target, held, self._observe)
        status = 500
        try:
            context.identify(self._owner(job).for_batches())
            endpoint = self._endpoints[job.endpoint]
            reply = await endpoint.reply_to_line(body, context, self._api)
            status = 200
        except Exception as error:
            failure = context.fail(error)
            status = failure.facts.status
            if failure.facts.retryable:
                raise failure from error
            rendered = render_error(failure, OPENAI)
            return LineReply(
                rendered.status,
                bytes(rendered.body),
                context.request_id,
                ignored_fields=context.ignored_fields,
            )
        finally:
            held.release()
            context.finish(status)
        return LineReply(
            reply.status,
            bytes(reply.body),
            context.request_id,
            context.tokens,
            context.cached_tokens,
            context.ignored_fields,
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


class LineContext(RequestContext):
    """A line. The event names its tenant and its key even if they are gone."""

    def __init__(self, job: Job, id_: str, target: Target, body: HeldBody, observe: Observe) -> None:
        super().__init__(target, HEADERS, "", body, observe)
        self.tenant_name, self.key_id = job.tenant, job.key
        self.reservation = id_
