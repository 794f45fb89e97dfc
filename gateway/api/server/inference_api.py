"""The part of the gateway that inference handlers use, and the headers of a successful reply."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from backends.contract import Capabilities, Operation
from gateway.api.server.authentication import Authenticator
from gateway.api.server.batches_api import BatchesApi
from gateway.api.server.body import without_mark
from gateway.api.server.body_bounds import too_many_inputs
from gateway.api.server.error_bodies import as_gateway_error
from gateway.api.server.request_context import HttpContext, RequestContext
from gateway.calls import Call
from gateway.config.schema import Config, EndUsersSettings, Limits
from gateway.declared.host import InstanceTable
from gateway.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EmptyInput,
    GatewayError,
    GatewayFull,
    InvalidInput,
    NoReplica,
    QuotaExceeded,
    QuotaUnavailable,
    Unauthenticated,
)
from gateway.media.fetch import Fetcher
from gateway.media.sources import Fetched
from gateway.prepare import PreparedWork
from gateway.quotas.limit_text import rate_limit_headers
from gateway.quotas.limits import Cost
from gateway.serve import Caller, Gateway, Served
from gateway.tenants.end_users import EndUserReader
from gateway.tenants.keyring import Tenant
from gateway.upstreams.fair_threads import FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where tokens are read.
    from backends.tokens.tokenizer import TextCounter

# Of a body whose caller is not known before it is read.
OPEN_BODY_BYTES_MAX = 64 * 1024
# All ranges of 2,048 inputs fit. Some HTTP clients refuse a header of more than 8 KiB.
RANGES_CHARACTERS_MAX = 6 * 1024
LENGTH_DIGITS = len(str(OPEN_BODY_BYTES_MAX))
# Refused without any work on the content.
UNCHARGED = frozenset({"quota_exceeded", "unauthenticated", "auth_throttled"})


class InferenceApi:
    """Collaborators of inference handlers.

    batches: files and jobs. inputs_max: most inputs in one request. refuses_unknown_fields: of bodies.
    fetcher: of pictures and recordings; None fetches none. interactive_calls: number of calls so far that are
    not of class bulk. arrow_threads: read Arrow streams. end_users: reads for whom a request is sent; None if
    that is not asked for.
    """

    def __init__(
        self,
        gateway: Gateway,
        authenticator: Authenticator,
        batches: BatchesApi,
        instances: InstanceTable,
        limits: Limits,
        fetcher: Fetcher | None = None,
        end_users: EndUsersSettings | None = None,
    ) -> None:
        self.gateway = gateway
        self.authenticator = authenticator
        self.batches = batches
        self.instances = instances
        self.inputs_max = limits.inputs
        self.refuses_unknown_fields = limits.unknown_fields == "refuse"
        self.end_users = None if end_users is None else EndUserReader(end_users)
        self._fetcher = fetcher
        self.interactive_calls = 0
        self.arrow_threads = FairThreads(purpose="read")

    def follow(self, config: Config) -> None:
        """Take the limits of a new configuration, and the names of end users."""
        self.inputs_max = config.limits.inputs
        self.refuses_unknown_fields = config.limits.unknown_fields == "refuse"
        users = config.end_users
        self.end_users = None if users is None else EndUserReader(users)

    def admit_caller(self, context: HttpContext, least: Cost) -> None:
        """Check what the head of a request decides, before its body is read: key, known limits, size.

        least: the least that a request at this path costs. Raises: GatewayError.
        """
        tenant, io = context.tenant or self.authenticator.authenticate(context), context.io
        io.set_tenant(tenant.name)
        self.gateway.charges.refuse_if_spent(tenant, least)
        io.claim_connection()
        if (announced := context.by_name.get(b"content-length")) is not None:
            io.check_length(announced.decode("latin-1"))

    async def read_keyed_body(self, context: HttpContext, least: Cost, field: str) -> bytes | bytearray:
        """Return the body of a request whose key may be in this field of it, after `admit_caller`.

        Without a key in its head only a small body is read, and nothing of it but the key is looked at. A
        larger one of a caller that needs no key is read for the tenant of its place. Raises: GatewayError.
        """
        refusal = None
        try:
            self.authenticator.authenticate(context)
        except Unauthenticated as error:
            refusal = error
        if self.authenticator.key_of(context) is not None:
            if refusal is not None:
                raise refusal
            self.admit_caller(context, least)
            return await context.io.read_body()
        if is_open := refusal is not None or _is_small(context):
            body = await _read_open_body(context, field)
        else:
            self.admit_caller(context, least)
            body = await context.io.read_body()
        if (key := _key_in(body, field)) is not None:
            # What the place has counted until here is given back: the caller is not of it.
            context.io.leave_tenant()
            context.take_key(key)
        elif refusal is not None:
            raise Unauthenticated(f"{refusal.message}, or the key as `{field}`") from None
        if is_open or key is not None:
            self.admit_caller(context, least)
            context.io.hold(len(body))
        return body

    def admit(self, context: RequestContext, least: Cost) -> Tenant:
        """Return the tenant of a request's key, unless one of its limits is known to be spent.

        least: the least that the request costs. Raises: GatewayError.
        """
        tenant = self.authenticator.authenticate(context)
        self.gateway.charges.refuse_if_spent(tenant, least)
        return tenant

    @asynccontextmanager
    async def charging(self, tenant: Tenant) -> AsyncGenerator[dict[str, str], None]:
        """Charge one request that reaches no model, whatever becomes of it; yield the headers of its reply.

        Raises: QuotaExceeded, QuotaUnavailable.
        """
        headers = rate_limit_headers(await self.gateway.charges.charge_request(tenant))
        try:
            yield headers
        except GatewayError as error:
            error.settle(headers)
            raise

    async def charge_failure(self, context: RequestContext, error: Exception, least: Cost) -> Exception:
        """Charge one request if its own content made it fail before a reserve; return the error to report.

        least: the least that a request at this path costs.
        """
        failure = as_gateway_error(error)
        is_full = isinstance(failure, GatewayFull)
        if context.tenant is None or not (is_full or _is_bad_request(failure)):
            return error
        try:
            if is_full:
                await self.gateway.charges.charge_unfinished(context.tenant, least, is_callers_fault=False)
                return error
            charged = await self.gateway.charges.charge_bad_request(context.tenant)
        except QuotaExceeded as spent:
            return spent
        except QuotaUnavailable:
            # The cause is of more use to the caller than an outage that it did not run into.
            return error
        failure.headers.update(rate_limit_headers(charged))
        return failure

    async def charge_abandoned_body(self, context: HttpContext, least: Cost) -> None:
        """Charge one request if its caller has left a large body unfinished, or let its time pass."""
        if context.tenant is not None and context.io.has_abandoned_body:
            with suppress(QuotaExceeded, QuotaUnavailable):
                await self.gateway.charges.charge_unfinished(context.tenant, least, is_callers_fault=True)

    async def prepare_all(
        self,
        context: RequestContext,
        calls: Sequence[Call],
        name_error: Callable[[GatewayError, int], None],
    ) -> Sequence[PreparedWork | None]:
        """Prepare the calls of one request, and refuse them if its limits have no room for all of them.

        Without limits none is prepared here. name_error: names the call of that index. Raises: GatewayError.
        """
        caller = self._caller(context)
        if not (caller.tenant.has_limits or self.gateway.routes.has_limits):
            return [None] * len(calls)
        is_bulk = b"x-priority" in context.by_name and context.is_bulk()
        prepared: list[PreparedWork] = []
        for index, call in enumerate(calls):
            try:
                prepared.append(await self.gateway.prepare(_as_bulk(call) if is_bulk else call, caller))
            except GatewayError as error:
                context.timeline.name(call.model, call.work.operation.value)
                name_error(error, index)
                raise
        context.timeline.name(prepared[0].route.model, prepared[0].route.operation.value)
        await self.gateway.check_sum(caller, prepared)
        context.timeline.lap("quota")
        return prepared

    def _caller(self, context: RequestContext, body: Any = None) -> Caller:
        """Return the sender of a request, for its calls. Raises: InvalidInput."""
        tenant = context.tenant or self.authenticator.authenticate(context)
        if self.end_users is not None:
            context.find_end_user(self.end_users, tenant, body)
        cache_mode = context.cache_mode() if b"cache-control" in context.by_name else "use"
        return Caller(tenant, context.timeout_s(), cache_mode, context.reservation, context.end_user)

    async def serve(
        self, context: RequestContext, call: Call, body: Any = None, early: PreparedWork | None = None
    ) -> Served:
        """Run a decoded call through the gateway's stages. Raises: GatewayError.

        body: may have the field `user`. early: the call as `prepare_all` returned it.
        """
        caller = self._caller(context, body)
        if context.begin_call(call, caller.tenant):
            call = _as_bulk(call)
        else:
            self.interactive_calls += 1
        served = await self.gateway.serve(call, caller, context.timeline, early)
        tokens, cache = served.reply.tokens, self.gateway.cache
        price = served.route.price
        if served.cache is None:
            context.settle(tokens, 0, price)
        else:
            is_charged = cache is None or cache.is_charged
            context.settle(tokens if is_charged else tokens - served.cache.tokens, served.cache.tokens, price)
        if (truncated := served.reply.truncated) != ():
            context.truncated_inputs = None if truncated is None else len(truncated)
        return served

    async def fetch_media(
        self, context: RequestContext, model: str | None, operation: Operation, urls: Sequence[str]
    ) -> Fetched:
        """Fetch the media of a request, once it is clear that its model takes them and no limit is spent.

        operation: that needs them. Their bytes count as the request's body does.

        Raises: InvalidInput, GatewayFull, QuotaExceeded, QuotaUnavailable, ScopeForbidden, the errors of
        `Routes.resolve`.
        """
        if self._fetcher is None:
            return {}
        if len(urls) > self._fetcher.addresses_max:
            # Otherwise one request makes the gateway send thousands to a host that did not ask for them.
            raise InvalidInput(
                f"the request has {len(urls)} addresses of media; this gateway fetches "
                f"{self._fetcher.addresses_max} for one request (`media.fetch.request_addresses`)"
            )
        tenant = self.authenticator.authenticate(context)
        tenant.require_operation(operation)
        self.gateway.routes.resolve(tenant, model, operation)
        # With recordings, how many of the addresses are pictures is only known from what is fetched.
        images = 0 if operation is Operation.EMBED_AUDIO else len(urls)
        self.gateway.charges.refuse_if_spent(tenant, Cost(inputs=1, images=images))
        context.timeline.lap("parse")
        try:
            fetched = await self._fetcher.fetch_all(urls, tenant.name, context.timeout_s())
        finally:
            context.timeline.lap("fetch")
        size = sum(len(data) for data in fetched.values() if isinstance(data, bytes))
        context.body.hold_decoded(context.body.held_bytes + size)
        return fetched

    async def decode_ids(
        self, context: RequestContext, model: str | None, operation: Operation, ids: Sequence[list[int]]
    ) -> list[str]:
        """Decode token ids with the vocabulary in the model's config.

        Raises: the errors of `Gateway.decode_ids`.
        """
        tenant = self.authenticator.authenticate(context)
        return await self.gateway.decode_ids(tenant, model, operation, ids)

    async def open_vocabulary(
        self, context: RequestContext, model: str | None, operation: Operation
    ) -> "TextCounter | None":
        """Return the tokens of a model, None if they are not known. Raises: as `Gateway.open_vocabulary`."""
        tenant = self.authenticator.authenticate(context)
        return await self.gateway.open_vocabulary(tenant, model, operation)

    def named(self, model: str | None, operation: Operation, tenant: Tenant | None) -> str:
        """Return a model's name, or that of the operation's default.

        tenant: of the request, whose key may have a default of its own. Raises: the errors of
        `Routes.default_model`.
        """
        return self.gateway.routes.default_model(operation, tenant) if model is None else model

    def capabilities_of(
        self, model: str | None, operation: Operation, tenant: Tenant | None
    ) -> Capabilities | None:
        """Return the capabilities of the model that `named` returns; None until a replica has joined.

        Whether the tenant may use it is checked when the call is served. Raises: ModelNotFound, NoReplica,
        and the errors of `named`.
        """
        return self.gateway.view_of(self.named(model, operation, tenant)).capabilities

    def dimensions_of(self, model: str | None, operation: Operation, tenant: Tenant | None) -> int | None:
        """Return the width of its vectors, None if unknown. Raises: as `capabilities_of`."""
        return self.gateway.view_of(self.named(model, operation, tenant)).dimensions

    def check_health(self, model: str | None) -> None:
        """Check that a model, or the one of root paths, has a usable replica.

        Raises: NoReplica, ModelNotFound, and the errors of `Routes.root_model`.
        """
        routes = self.gateway.routes
        if self.gateway.view_of(routes.root_model() if model is None else model).health != "ready":
            raise NoReplica("unhealthy")

    def check_count(self, count: int, field: str) -> None:
        """Check the number of inputs of a call, before each of them is looked at.

        Raises: EmptyInput, InvalidInput.
        """
        if not count:
            raise EmptyInput(f"`{field}` is an empty list", param=field)
        if count > self.inputs_max:
            raise too_many_inputs(count, self.inputs_max, field)

    def texts(self, given: str | Sequence[str], field: str) -> tuple[str, ...]:
        """Return the inputs of a call, which may be one text or a list.

        Raises: EmptyInput, InvalidInput.
        """
        if isinstance(given, str):
            return (given,)
        self.check_count(len(given), field)
        return tuple(given)

    def whole_texts(self, given: str | Sequence[str], field: str) -> tuple[str, ...]:
        """Return the inputs like `texts`, and refuse an empty one."""
        texts = self.texts(given, field)
        for index, text in enumerate(texts):
            if not text:
                raise EmptyInput(f"`{field}` {index} is an empty string", param=field)
        return texts


def _as_bulk(call: Call) -> Call:
    return msgspec.structs.replace(call, bulk=True)


async def _read_open_body(context: HttpContext, field: str) -> bytes | bytearray:
    """Return a small body, whose caller is not known yet. Raises: BodyTooLarge, GatewayFull."""
    io = context.io
    io.set_body_bytes_max(min(OPEN_BODY_BYTES_MAX, io.body_bytes_max))
    try:
        io.check_length(context.header(b"content-length"))
        return await io.read_body()
    except BodyTooLarge:
        raise BodyTooLarge(
            f"a body with its key as `{field}` has at most {io.body_bytes_max} bytes: send the key as the "
            "header `Authorization: Bearer <key>`, or as the password in the address, http://:<key>@…"
        ) from None
    finally:
        # The bytes of a body are held for one tenant, which is known only later.
        io.release()


def _is_small(context: HttpContext) -> bool:
    """Return whether the head announces a body that is read before its caller is known."""
    announced = context.header(b"content-length")
    return announced.isdigit() and len(announced) <= LENGTH_DIGITS and int(announced) <= OPEN_BODY_BYTES_MAX


def _key_in(body: bytes | bytearray, field: str) -> str | None:
    """Return the key in a body, None if it has none."""
    try:
        fields = msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw])
        key: str | None = msgspec.json.decode(fields.get(field, b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return (key or "").strip() or None


def _is_bad_request(failure: GatewayError) -> bool:
    """Return whether the caller is at fault and no limit has been charged or asked.

    A deadline that passes before the reserve ended the counting of much text.
    """
    is_at_fault = failure.facts.source == "caller" or isinstance(failure, DeadlineExceeded)
    return is_at_fault and not failure.is_settled and failure.kind not in UNCHARGED


def reply_headers(served: Served, rows: Sequence[int] | None = None) -> dict[str, str]:
    """Return the headers that every successful reply carries.

    rows: of the inputs, in the caller's table; None if inputs are counted as they are.
    """
    headers = rate_limit_headers(served.limit_statuses, show_unlimited=served.show_unlimited)
    if served.degraded:
        headers["x-quota-mode"] = "degraded"
    if served.reply.truncated != ():
        headers["x-truncated-inputs"] = _ranges(rows_of(served.reply.truncated, rows))
    if served.shares_tokens:
        headers["x-usage"] = "shared"
    if served.fingerprint is not None:
        headers["x-embedding-fingerprint"] = served.fingerprint
    if served.has_cache:
        use = served.cache
        headers["x-cache"] = "bypass" if use is None else f"hit={use.hits}, miss={use.misses}"
    return headers


def joined_headers(found: Sequence[tuple[Served, Sequence[int]]]) -> dict[str, str]:
    """Return the headers of a reply that several calls make together; limits are those after the last one.

    found: each with the rows of its inputs.
    """
    headers: dict[str, str] = {}
    truncated: list[int] | None = []
    for served, rows in found:
        headers |= reply_headers(served, rows)
        cut = rows_of(served.reply.truncated, rows)
        truncated = None if truncated is None or cut is None else [*truncated, *cut]
    if truncated != []:
        headers["x-truncated-inputs"] = _ranges(None if truncated is None else tuple(sorted(truncated)))
    if len({served.fingerprint for served, _ in found}) > 1:
        headers.pop("x-embedding-fingerprint", None)
    uses = [served.cache for served, _ in found if served.cache is not None]
    if uses:
        hits, misses = sum(use.hits for use in uses), sum(use.misses for use in uses)
        headers["x-cache"] = f"hit={hits}, miss={misses}"
    return headers


def rows_of(indices: tuple[int, ...] | None, rows: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the rows of some inputs; None for unknown ones."""
    if indices is None or rows is None:
        return indices
    return tuple([rows[index] for index in indices])


def _ranges(indices: tuple[int, ...] | None) -> str:
    """Write indices as 0-3,7; each by itself, 2,048 of them exceed the header size of some clients.

    More than fit into one header are unknown to the caller.
    """
    if indices is None:
        return "unknown"
    ranges = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        ranges.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    text = ",".join(ranges)
    return text if len(text) <= RANGES_CHARACTERS_MAX else "unknown"
