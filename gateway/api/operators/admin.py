"""Collaborators and guard of the admin endpoints, reports of reloads, and /admin/usage and /admin/reload.

Requests from this machine need no key if the listener is on loopback, `admin` lists no keys or certificates,
and only one person can log in. A key that is wrong is refused even then.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import Literal, cast

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, OpenAPIType, Operation, Schema
from litestar.params import FromQuery, JSONBody

from gateway.api.operators.access import OPERATORS, is_local_request, store_errors
from gateway.api.server.authentication import Authenticator
from gateway.api.server.body import OnePass
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.request_context import HttpContext
from gateway.audit.records import Actor, new_record
from gateway.audit.trail import AuditTrail
from gateway.config import schema as config
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.money import is_budget
from gateway.config.problems import Problem
from gateway.config.schema import host_and_port, is_loopback
from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InvalidInput,
    NotFound,
    QuotaUnavailable,
    SignOnUnavailable,
    TenantUnknown,
)
from gateway.quotas.ledger import Ledger
from gateway.quotas.usage import (
    MonthUsage,
    UsageBy,
    UsageRow,
    as_csv,
    days_between,
    days_of_month,
    first_of_month,
    month_csv,
    month_usage,
)
from gateway.tenants.client_certificate import ID_PREFIX, UNVERIFIED_NOTE, sharing_problem
from gateway.tenants.end_users import names_of
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.follower import KeyFollower, StoredState
from gateway.tenants.keyring import FIRST_KEY_NOTE, FIRST_TENANT, NO_PRICE_NOTE
from gateway.tenants.store import TenantStore

# Kind of an outcome's problems → error of the reply.
PROBLEM_ERRORS: dict[str, type[GatewayError]] = {
    "invalid": InvalidInput,
    "unknown": NotFound,
    "unavailable": QuotaUnavailable,
}


class ReportedChange(msgspec.Struct):
    """One changed setting. detail: old → new value, unless one of them is a secret."""

    path: str
    how: Literal["added", "removed", "changed"]
    detail: str


class ReloadReport(msgspec.Struct):
    """Changes that a reload applied, and changes of the file that need a restart."""

    changes: list[ReportedChange]
    needs_restart: list[ReportedChange]


CHANGED = {
    200: ResponseSpec(
        ReloadReport, generate_examples=False, description="The changes, which apply to every new call"
    )
}


async def report(pending: Awaitable[ReloadOutcome]) -> ReloadReport:
    """Wait for the outcome of a reload or an edit, and report it.

    Raises: InvalidInput, NotFound or QuotaUnavailable if nothing has changed; DeadlineExceeded.
    """
    try:
        outcome = await pending
    except TimeoutError as error:
        message = "the reload takes long and continues in the background; the log reports its result"
        raise DeadlineExceeded(message) from error
    if outcome.problems:
        raise problems_error(outcome.problems, PROBLEM_ERRORS[outcome.kind])
    return ReloadReport(_reported(outcome.changes), _reported(outcome.needs_restart))


def problems_error(problems: Iterable[Problem], kind: type[GatewayError] = InvalidInput) -> GatewayError:
    """Return an error that lists every problem with its path, and its line if it is one of the file."""
    return kind("nothing has changed: " + "; ".join(map(str, problems)))


def _reported(changes: Iterable[ConfigChange]) -> list[ReportedChange]:
    return [ReportedChange(change.path, change.how, change.detail) for change in changes]


FAILURES = document_errors(TEI)
# Reads router.yaml again for an operator and returns the outcome. Raises: TimeoutError.
Reload = Callable[[Actor], Awaitable[ReloadOutcome]]


class UsageResponse(msgspec.Struct):
    """Settled usage of a tenant, or of all. currency: of the costs."""

    data: list[UsageRow]
    currency: str | None = None


@dataclass
class UsageOperation(Operation):
    """OpenAPI operation that documents CSV too, because Litestar documents one media type per response."""

    def __post_init__(self) -> None:
        """Add CSV to the media types of the response."""
        response = (self.responses or {})["200"]
        assert isinstance(response, OpenAPIResponse)
        assert response.content is not None
        response.content["text/csv"] = OpenAPIMediaType(Schema(type=OpenAPIType.STRING))


class Admin:
    """Collaborators of the admin endpoints, and the guard in front of them.

    file_tenants: names of the tenants in router.yaml. models: names of the served models. name: of this
    gateway in records. is_shared_host: several people can log in to this machine.
    """

    def __init__(
        self,
        served: config.Config,
        ledger: Ledger,
        follower: KeyFollower | None,
        authenticator: Authenticator,
        reload: Reload | None,
        name: str,
        *,
        is_shared_host: bool = False,
    ) -> None:
        self.ledger = ledger
        self._authenticator = authenticator
        self._follower = follower
        self._reload = reload
        self._name = name
        addresses = [served.admin.listen or served.listen]
        if served.manager is not None:
            # Operators' paths are served there too.
            addresses.append(served.manager.listen)
        self._is_private = not is_shared_host and all(
            is_loopback(host_and_port(address)[0]) for address in addresses
        )
        self.apply(served)

    def apply(self, served: config.Config) -> None:
        """Use the tenants, models and operator keys of a new config. The listener stays as it is."""
        self._served = served
        self.file_tenants: Collection[str] = served.tenants.keys()
        self.models: Collection[str] = served.models.keys()
        self.currency = served.currency
        self._has_prices = any(model.price_per_million_tokens for model in served.models.values())
        self._is_open = self._is_private and not (served.admin.keys or served.admin.certificates)

    def authorize(self, context: HttpContext) -> None:
        """Check that the caller is an operator, before Litestar reads the body.

        Raises: Unauthenticated, AuthThrottled, ScopeForbidden.
        """
        if self._is_open and is_local_request(context):
            if self._authenticator.key_of(context) is not None:
                # What cannot be decided now is not wrong.
                with suppress(QuotaUnavailable, SignOnUnavailable, TenantUnknown):
                    self._authenticator.authenticate(context)
            return
        owner = self._authenticator.authenticate(context)
        if context.method not in ("GET", "HEAD") or "admin" in owner.scopes:
            owner.require("admin")
        else:
            owner.require("admin:read")

    def actor(self, context: HttpContext) -> Actor:
        """Return the operator of a request that was authorized.

        Where operators of this machine need no key, the one that they send names them all the same.
        """
        with suppress(GatewayError):
            self._authenticator.authenticate(context)
        owner = context.tenant
        place = (context.address, context.request_id, self._name)
        if owner is None:
            return Actor("local", "local", *place)
        if not owner.key_mark:
            return Actor(owner.key_id, "token", *place)
        is_certificate = owner.key_id.startswith(ID_PREFIX)
        return Actor(owner.key_id, "certificate" if is_certificate else "key", *place)

    def stored_state(self) -> StoredState:
        """Return the numbers of stored keys and tenants, and what is lost of them."""
        return StoredState() if self._follower is None else self._follower.state

    def keeps_key(self, id_: str) -> bool:
        """Return whether a key is valid only because the store has lost it."""
        return self._follower is not None and self._follower.keeps_key(id_)

    @property
    def store(self) -> TenantStore | FileTenantStore:
        """Return the store of tenants and keys.

        Raises: NotFound if router.yaml is the only source of both.
        """
        return self._stored.store

    async def tenants(self) -> list[str]:
        """Return the tenants of the file, of the store, of its keys, and of the first key."""
        stored = await self._follower.store.names() if self._follower else set()
        return sorted({*self.file_tenants, *stored, FIRST_TENANT})

    async def settle_records(self) -> None:
        """Append the records that a killed process has left. Raises: StoreUnavailable."""
        if self._follower is not None and isinstance(self._follower.store, FileTenantStore):
            await self._follower.store.settle()

    async def refresh(self) -> None:
        """Let this gateway use the change that was just made in the store, before the operator's reply."""
        await self._stored.refresh()

    def first_key_notes(self, *, is_first: bool) -> list[str]:
        """Return a note if a change ends the first key. is_first: there was no tenant in the store before.

        Lost tenants have ended it before, unless this gateway runs since.
        """
        ends = is_first and self._follower is not None and self._follower.first_key_is_ending
        return [FIRST_KEY_NOTE] if ends else []

    def budget_notes(self, *limits: Iterable[str]) -> list[str]:
        """Return a note if limits contain a budget that no call can spend, because no model has a price."""
        has_budget = any(is_budget(name) for names in limits for name in names)
        return [NO_PRICE_NOTE] if has_budget and not self._has_prices else []

    def check_certificates(
        self, tenant: str, entries: Sequence[str], stored: Mapping[str, config.TenantConfig]
    ) -> None:
        """Check that no other tenant lists an entry of a client certificate. Raises: InvalidInput."""
        if problem := sharing_problem(tenant, entries, stored, self._served):
            raise InvalidInput(problem, param="certificates")

    def certificate_notes(self, entries: Sequence[str]) -> list[str]:
        """Return a note if client certificates are listed, and this gateway verifies none."""
        return [UNVERIFIED_NOTE] if entries and not self._served.verifies_clients else []

    @property
    def _stored(self) -> KeyFollower:
        if self._follower is None:
            raise NotFound(
                "tenants and keys are defined in router.yaml here; adding others needs a Redis "
                "`quotas.store`, or a folder for them: `state_dir`"
            )
        return self._follower

    @property
    def reload(self) -> Reload:
        """Return the function that reads router.yaml again.

        Raises: NotFound if this gateway cannot.
        """
        if self._reload is None:
            raise NotFound("this gateway does not read its configuration again")
        return self._reload


@get(
    "/admin/usage",
    responses={
        200: ResponseSpec(
            cast("type[msgspec.Struct]", UsageResponse | MonthUsage),
            generate_examples=False,
            description="Usage by model and day, or of a month with its totals, as JSON or CSV",
        )
    }
    | FAILURES,
    operation_class=UsageOperation,
    tags=["Operators"],
    opt=OPERATORS,
)
async def usage(
    admin: NamedDependency[Admin],
    tenant: FromQuery[str | None] = None,
    since: FromQuery[date | None] = None,
    until: FromQuery[date | None] = None,
    month: FromQuery[str | None] = None,
    form: FromQuery[Literal["json", "csv"]] = "json",
    by: FromQuery[UsageBy] = "model",
) -> Response[bytes]:
    """Return a tenant's usage by model and day, or that of all tenants if the query names none.

    Days are in UTC. Without `since` and `until` the usage is today's. `month`, such as 2027-01, adds the days
    of a month up, with totals of each tenant and of all, and a forecast of the current month. `form` selects
    JSON or CSV. `by=key` gives a row for each key, and `by=end_user` for each end user.
    """
    first, now = None if month is None else first_of_month(month), datetime.now(UTC)
    if first is not None and (since is not None or until is not None):
        raise InvalidInput("send `month`, or `since` and `until`", param="month")
    days = days_between(since, until) if first is None else days_of_month(first, now)
    with store_errors():
        tenants = await admin.tenants() if tenant is None else [tenant]
    rows = [row for name in tenants for row in await admin.ledger.usage(name, days, by)]
    if first is None:
        reply: UsageResponse | MonthUsage = UsageResponse(rows, admin.currency)
        encode = partial(as_csv, rows, admin.currency, by)
    else:
        reply = total = month_usage(first, now, rows, admin.currency)
        encode = partial(month_csv, total, by)
    if form == "csv":
        return Response(encode(), media_type="text/csv")
    return Response(msgspec.json.encode(reply), media_type="application/json")


class EndUserName(msgspec.Struct, forbid_unknown_fields=True):
    """An end user of a tenant. end_user: as requests state it, or the digest that logs and usage show."""

    tenant: str
    end_user: str


class ForgottenEndUser(msgspec.Struct):
    """Days (UTC) of which rows were deleted."""

    days: int


@post(
    "/admin/usage/forget",
    dto=OnePass[EndUserName],
    return_dto=None,
    status_code=200,
    responses={200: ResponseSpec(ForgottenEndUser, generate_examples=False, description="What was deleted")}
    | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def forget(
    data: JSONBody[EndUserName],
    admin: NamedDependency[Admin],
    audit: NamedDependency[AuditTrail],
    operator: NamedDependency[Actor],
) -> ForgottenEndUser:
    """Delete the usage of an end user, and the state of its limits.

    What it used counts as that of `other` from then on, so that all totals stay. Log lines and traces stay
    where they were sent.
    """
    days = await admin.ledger.forget_end_user(data.tenant, names_of(data.tenant, data.end_user))
    # Without the name, which is to be forgotten.
    await audit.record(new_record(operator, "forget", f"tenant/{data.tenant}"))
    return ForgottenEndUser(days)


@post(
    "/admin/reload",
    status_code=200,
    responses=CHANGED | FAILURES,
    tags=["Operators"],
    opt=OPERATORS,
)
async def reload(admin: NamedDependency[Admin], operator: NamedDependency[Actor]) -> ReloadReport:
    """Read router.yaml again and apply it.

    A file with a problem changes nothing. Calls in flight finish with the settings they began with.
    """
    return await report(admin.reload(operator))


HANDLERS = [usage, forget, reload]
