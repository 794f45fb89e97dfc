"""One request, whatever brought it: HTTP, gRPC, or a line of a job.

The transport creates the `RequestContext` from the head of a request, and hands it to the endpoint, which
knows no transport. Authentication, limits, stages and errors note their facts in it. At the end the transport
calls `finish`, which emits the one event of the request.
"""

import copy
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from litestar import Request

from gateway.api.server.call_io import CallIO, Scope
from gateway.api.server.error_bodies import as_gateway_error, render_error
from gateway.api.server.in_flight import HeldBody
from gateway.api.server.paths import OTHER, Target
from gateway.api.server.responses import HttpReply
from gateway.calls import CacheMode, Call
from gateway.config.money import in_currency
from gateway.config.schema import ListenerSettings
from gateway.errors import GatewayError, Internal, InvalidInput
from gateway.events import CallFinished, Observe
from gateway.quotas.end_users import EndUser
from gateway.quotas.limits import FREE, Price
from gateway.telemetry.timeline import Timeline
from gateway.tenants.client_certificate import ClientCertificate
from gateway.tenants.end_users import EndUserReader
from gateway.tenants.keyring import Tenant

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTraces

logger = logging.getLogger("gateway")

# The keys of the ASGI scope that the gateway sets: Litestar hands handlers nothing else.
STATE_KEY = "context"
SERVICES_KEY = "services"
REQUEST_ID_CHARACTERS_MAX = 128
# No spaces: the next field of a log line begins after one.
REQUEST_ID = re.compile(rb"[!-~]+")
# Of the path of a request that no handler serves, in its log line.
PATH_CHARACTERS_MAX = 128
# Kinds whose messages are kept for lists of calls: they have names and numbers, and nothing of an input.
KINDS_WITH_KEPT_MESSAGE = frozenset(
    {"quota_exceeded", "overloaded", "model_forbidden", "model_not_found", "no_replica", "deadline_exceeded"}
)
KEPT_CHARACTERS_MAX = 300


class RequestContext:
    """One request. Filled while it is answered, read when it is over.

    target: of its path. headers: as sent, names in lower case; the metadata of an RPC. address: of the
    client, behind trusted proxies; empty for a line of a job. peer: address of the connection's other end.
    listener: that it came to, if a caller without a key is a tenant there. came_to_operators: to
    `admin.listen` or `manager.listen`, if there is one. body: counts its bytes. observe: takes its one event.
    by_name: the last value of each header. dialect: whose errors the caller reads; on a
    path that dialects share, the body decides it. model: named outside the body, in the path or the metadata.
    rows: of the texts of an Arrow stream (`api/wire/arrow.py`), None for any other body. certificate: of the
    client, verified; None if it has shown none. tenant: of its key or certificate, once that is known.
    tenant_name, key_id: of the event, for a line even if its key is gone. reason: class of the cause of a
    refusal, for the log line. ignored_fields: unknown names in its body, as a header has them. reservation:
    of quota, the id of a line of a job. end_user: for whom it is sent; None if none is stated, or none is
    read. budget: what it has cost, in nano-units of the currency; None if it was not served, or its model has
    no price. truncated_inputs: number of those that were cut, None if that is unknown. body_key: the
    key in the body of a request that has none in its head.
    """

    http_version = ""
    query = b""
    listener: ListenerSettings | None = None
    came_to_operators = False
    rows: Any = None
    ignored_fields = ""
    reservation: str | None = None
    certificate: ClientCertificate | None = None
    end_user: EndUser | None = None
    budget: int | None = None
    truncated_inputs: int | None = 0
    body_key: str | None = None
    # As sent, cut and escaped, only if no handler serves it.
    path: str | None = None

    def __init__(
        self,
        target: Target,
        headers: Sequence[tuple[bytes, bytes]],
        address: str,
        body: HeldBody,
        observe: Observe,
        *,
        method: str = "POST",
        peer: str = "",
    ) -> None:
        self.peer = peer
        self.target = target
        self.dialect = target.dialect
        self.model = target.model
        self.headers = headers
        self.address = address
        self.body = body
        self.method = method
        self.by_name = dict(headers)
        self.repeats_headers = len(self.by_name) != len(headers)
        sent_id = self.by_name.get(b"x-request-id")
        self.request_id = request_id_from(sent_id) if sent_id else secrets.token_hex(16)
        self.timeline = Timeline()
        self.tenant: Tenant | None = None
        self.tenant_name: str | None = None
        self.key_id: str | None = None
        self.outcome = "ok"
        self.reason: str | None = None
        self.message: str | None = None
        self.inputs = 0
        self.tokens = 0
        self.cached_tokens = 0
        self.yields = False
        self._observe = observe

    def header(self, name: bytes, missing: str = "") -> str:
        """Return a header's value, the last one if it was sent several times, or `missing`."""
        value = self.by_name.get(name)
        return missing if value is None else value.decode("latin-1")

    def is_ambiguous(self, name: bytes) -> bool:
        """Return whether a header was sent several times with different values."""
        return self.repeats_headers and len({value for sent, value in self.headers if sent == name}) > 1

    def timeout_s(self) -> float | None:
        """Return the time that the caller allows, None if it sets no limit.

        Raises: InvalidInput.
        """
        if b"x-timeout-s" not in self.by_name:
            return None
        value = self.header(b"x-timeout-s")
        try:
            seconds = float(value) if "_" not in value else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise InvalidInput("x-timeout-s must be a positive number of seconds", param="x-timeout-s")
        return seconds

    def cache_mode(self) -> CacheMode:
        """Return how `cache-control` asks to use the cache; other directives have no effect."""
        directives = {word.strip().lower() for word in self.header(b"cache-control").split(",")}
        if "no-store" in directives:
            return "bypass"
        return "refresh" if "no-cache" in directives else "use"

    def is_bulk(self) -> bool:
        """Return whether the request yields to interactive ones.

        Raises: InvalidInput.
        """
        priority = self.header(b"x-priority", "interactive").lower()
        if priority not in ("interactive", "bulk"):
            raise InvalidInput("x-priority is interactive or bulk", param="x-priority")
        return priority == "bulk"

    def begin_trace(self, traces: "CallTraces") -> None:
        """Start the trace of the request, in its caller's trace if the caller sent one."""
        self.timeline.follow(
            traces.begin(
                f"{self.method} {self.target.label}",
                self.timeline.started_s,
                self.header(b"traceparent"),
                self.header(b"tracestate"),
            )
        )

    def identify(self, tenant: Tenant) -> Tenant:
        """Record the tenant of the request's key, and return it."""
        self.tenant, self.tenant_name, self.key_id = tenant, tenant.name, tenant.key_id or None
        return tenant

    def find_end_user(self, reader: EndUserReader, tenant: Tenant, body: Any) -> None:
        """Record for whom the request is sent, if it states it."""
        self.end_user = reader.read(tenant.name, self.by_name, body)

    def choose_model(self, model: str) -> None:
        """Take the model that a message names outside its request."""
        self.model = model

    def take_key(self, key: str) -> None:
        """Take the key that the body contains, in place of a caller without a key."""
        self.body_key = key
        self.tenant = self.tenant_name = self.key_id = None

    def use_dialect(self, dialect: Any) -> None:
        """Report errors in the dialect that the body belongs to."""
        self.dialect = dialect

    def ignore_fields(self, names: str) -> None:
        """Record the names of fields of the body that the gateway ignores."""
        self.ignored_fields = names

    def begin_call(self, call: Call, tenant: Tenant) -> bool:
        """Record the decoded call, and return whether its header asks that it yield to interactive calls.

        Raises: InvalidInput.
        """
        self.timeline.lap("parse")
        self.inputs = call.work.counted_inputs
        is_bulk = b"x-priority" in self.by_name and self.is_bulk()
        self.yields = is_bulk or call.bulk or tenant.priority == "bulk"
        return is_bulk

    def settle(self, tokens: int, cached_tokens: int, price: Price = FREE) -> None:
        """Record the tokens of a served call that limits and usage count, and those that the cache had.

        price: of its model.
        """
        self.tokens, self.cached_tokens = tokens, cached_tokens
        if price.nano_per_token:
            self.budget = tokens * price.nano_per_token

    def part(self) -> "RequestContext":
        """Return the context of one message of several: this one, with times and counts of its own."""
        part = copy.copy(self)
        part.restart()
        return part

    def restart(self) -> None:
        """Begin times and counts again."""
        self.timeline = Timeline()
        self.inputs = self.tokens = 0
        self.budget, self.truncated_inputs = None, 0

    def add(self, part: "RequestContext") -> None:
        """Add the counts of one message of several."""
        self.inputs += part.inputs
        self.tokens += part.tokens
        if part.budget is not None:
            self.budget = (self.budget or 0) + part.budget
        cut = self.truncated_inputs, part.truncated_inputs
        self.truncated_inputs = None if cut[0] is None or cut[1] is None else cut[0] + cut[1]
        self.timeline.name(part.timeline.model, part.timeline.operation)

    def fail(self, error: Exception) -> GatewayError:
        """Record the error that ends the request, and log a bug; return it as the caller reads it."""
        failure = as_gateway_error(error)
        self.outcome, self.reason = failure.kind, failure.reason
        if self.rows is not None:
            failure.name_rows(self.rows.texts)
        if failure.kind in KINDS_WITH_KEPT_MESSAGE:
            self.message = failure.message[:KEPT_CHARACTERS_MAX]
        if isinstance(failure, Internal):
            kind, id_ = ("call", self.request_id) if self.reservation is None else ("line", self.reservation)
            logger.error("%s %s failed", kind, id_, exc_info=error)
        return failure

    def cancel(self) -> None:
        """Record that the caller has left, or that its deadline has passed."""
        self.outcome = "cancelled"

    def finish(self, status: int) -> None:
        """End the trace, and emit the event of the request. status: of HTTP, whatever the transport."""
        timeline = self.timeline
        attempts, trace = timeline.attempts, timeline.trace
        event = CallFinished(
            request_id=self.request_id,
            method=self.method,
            route=self.target.label,
            status=status,
            outcome=self.outcome,
            duration_s=time.perf_counter() - timeline.started_s,
            tenant=self.tenant_name,
            model=timeline.model,
            inputs=self.inputs,
            tokens=self.tokens,
            operation=timeline.operation,
            stages=timeline.laps,
            trace_id=None if trace is None else trace.trace_id,
            key_id=self.key_id,
            address=self.address or None,
            path=self.path,
            reason=self.reason,
            is_bulk=self.yields,
            is_recorded=trace is not None and trace.recorded,
            replicas=attempts.replicas,
            attempts=attempts.attempts,
            upstream_status=attempts.upstream_status,
            upstream_words=attempts.upstream_words,
            end_user=None if self.end_user is None else self.end_user.name,
            cost=None if self.budget is None else in_currency(self.budget),
            truncated_inputs=self.truncated_inputs,
            message=self.message,
        )
        if trace is not None:
            trace.finish(event)
        self._observe(event)


class HttpContext(RequestContext):
    """One HTTP request.

    io: its connection, which is its `body` too. query: of its URL.
    """

    def __init__(
        self,
        scope: Scope,
        target: Target,
        io: CallIO,
        address: str,
        observe: Observe,
        *,
        peer: str = "",
        came_to_operators: bool = False,
        listener: ListenerSettings | None = None,
    ) -> None:
        super().__init__(target, scope["headers"], address, io, observe, method=scope["method"], peer=peer)
        self.io = io
        self.certificate = io.certificate
        self.came_to_operators = came_to_operators
        self.listener = listener
        self.http_version = scope["http_version"]
        self.query = scope.get("query_string", b"")
        if target.label == OTHER:
            self.path = quote(scope["path"][:PATH_CHARACTERS_MAX], errors="replace")

    def failure(self, error: Exception) -> HttpReply:
        """Return the reply that reports an error in the caller's dialect."""
        return render_error(self.fail(error), self.dialect)


def request_id_from(sent: bytes) -> str:
    """Return the caller's own id if it is fit for headers and logs, else a new one."""
    is_fit = len(sent) <= REQUEST_ID_CHARACTERS_MAX and REQUEST_ID.fullmatch(sent)
    return sent.decode("ascii") if is_fit else secrets.token_hex(16)


def context_of(scope: Mapping[str, Any]) -> HttpContext:
    """Return the context of a request from its ASGI scope."""
    # The scope is an untyped mapping by ASGI's definition; this is the one place that reads it.
    context: HttpContext = scope["state"][STATE_KEY]
    return context


def context_of_request(request: Request[Any, Any, Any]) -> HttpContext:
    """Return the context, as a dependency of handlers that Litestar calls."""
    return context_of(request.scope)
