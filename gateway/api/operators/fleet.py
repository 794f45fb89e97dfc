"""Operator endpoints of a gateway among others: its drain, the fleet, and the recent calls of all of them."""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery

from gateway import __version__
from gateway.api.operators.access import OPERATORS
from gateway.api.operators.pages import LIMIT_MAX, check_limit, moment_of
from gateway.api.operators.probes import Readiness
from gateway.api.operators.reply_cache import ReplyCache
from gateway.api.operators.status import STATUS, StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.audit.records import Actor, new_record
from gateway.audit.trail import AuditTrail
from gateway.config.identity import Identity
from gateway.errors import DeadlineExceeded, NotFound
from gateway.events import GatewayDrained
from gateway.fleet.fleet import Fleet, FleetCalls, chosen
from gateway.fleet.members import DRAINED_SHOWN, FleetReport, Load, Member
from gateway.fleet.store import CallFilter
from gateway.telemetry.history import CALLS_MAX, RecentCall
from gateway.telemetry.snapshot import since
from gateway.telemetry.totals import Totals

FAILURES = document_errors(TEI)
# Time for which a load is good: it is read from the metrics, which takes milliseconds with many workers.
LOAD_GOOD_S = 4.0
# Asks the parent process to drain this gateway, or to put it back. Raises: TimeoutError.
SetDrain = Callable[[bool], Awaitable[GatewayDrained]]


class DrainReport(msgspec.Struct, frozen=True):
    """Drain of one gateway. gateway: host and port. drained_since_s: seconds since 1970, null without one."""

    id: str
    gateway: str
    drained_since_s: float | None


class Calls(msgspec.Struct, frozen=True):
    """The last calls, the newest first.

    kept: most calls that a gateway keeps. missing: gateways that did not answer in time. problem: why other
    gateways are not known, nothing if they are or were not asked.
    """

    kept: int
    calls: list[RecentCall]
    missing: tuple[str, ...] = ()
    problem: str = ""


class _Sample(msgspec.Struct, frozen=True):
    """Load at one moment, and the calls until then."""

    at_s: float
    calls: int
    load: Load


class Description:
    """Record of this gateway, as of each moment. configuration: digests, which each reload replaces."""

    def __init__(
        self,
        identity: Identity,
        watched: StatusSource,
        readiness: Readiness,
        configuration: Mapping[str, str],
    ) -> None:
        self.identity = identity
        self._watched = watched
        self.readiness = readiness
        self.configuration = configuration
        self._sample: _Sample | None = None

    def __call__(self) -> Member:
        """Return the record."""
        drained = (
            f"{name} {replica}"
            for name, upstream in self._watched.gateway.upstreams.items()
            for replica in upstream.settings.drained
        )
        reasons = self.readiness.reasons()
        return Member(
            gateway=self.identity,
            version=__version__,
            workers=self._watched.config.workers,
            configuration=self.configuration,
            is_stopping=self.readiness.in_flight.leaving,
            reasons=tuple(reason for name, reason in reasons.items() if reason and name != "running"),
            drained_since_s=self.readiness.in_flight.drained_since_s,
            drained_replicas=tuple(sorted(drained)[:DRAINED_SHOWN]),
            load=self._load(),
        )

    def _load(self) -> Load:
        now_s = time.monotonic()
        before = self._sample
        if before is not None and now_s - before.at_s < LOAD_GOOD_S:
            return before.load
        totals = Totals(self._watched.exporter.collected())
        calls = sum(totals.calls().outcomes.values())
        load = Load(
            int(totals.number("gateway_calls_in_flight")),
            None if before is None else round(since(before.calls, calls) / (now_s - before.at_s), 3),
            int(totals.number("gateway_lane_queued_inputs")),
            int(totals.number("gateway_lane_queued_tokens")),
        )
        self._sample = _Sample(now_s, calls, load)
        return load


class FleetApi:
    """Drain of this gateway, and its fleet. set_drain: None if no parent process keeps a drain."""

    def __init__(self, description: Description, fleet: Fleet, set_drain: SetDrain | None) -> None:
        self.description = description
        self.fleet = fleet
        self._set_drain = set_drain
        # Tenants ask all gateways in turns, so that operators may ask at any time. No reply is kept.
        self._tenants = ReplyCache("the calls of all gateways")

    async def calls_for_tenant(self, tenant: str, wanted: CallFilter) -> FleetCalls:
        """Return a tenant's recent calls of all gateways. Raises: Overloaded."""
        return await self._tenants.reply(
            wanted, 0.0, lambda: self.fleet.calls(wanted, asker=tenant), asker=tenant
        )

    async def drain(self, *, is_drained: bool) -> DrainReport:
        """Take this gateway out of its load balancers, or put it back. Raises: NotFound, DeadlineExceeded."""
        if self._set_drain is None:
            raise NotFound("this gateway cannot be drained")
        try:
            drained = await self._set_drain(is_drained)
        except TimeoutError as error:
            raise DeadlineExceeded("the gateway's parent process does not answer") from error
        identity = self.fleet.identity
        return DrainReport(identity.id, identity.name, drained.since_s)


@get("/admin/fleet", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def fleet_report(fleet_api: NamedDependency[FleetApi]) -> FleetReport:
    """Return the gateways that share this gateway's Redis, with state, version, configuration and load.

    `differs` names what a gateway has otherwise than most of them: the version, or sections of the
    configuration. Without Redis the fleet is this gateway.
    """
    return await fleet_api.fleet.report()


@get("/admin/calls", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def calls(
    watched: NamedDependency[StatusSource],
    fleet_api: NamedDependency[FleetApi],
    tenant: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    since: FromQuery[str] = "",
    request_id: FromQuery[str] = "",
    limit: FromQuery[int | None] = None,
    *,
    failed: FromQuery[bool] = False,
    fleet: FromQuery[bool] = False,
) -> Calls:
    """Return the last calls of all workers, without any content.

    `tenant`, `key` (an id) and `model` select those of one; `failed` those that ended with an error; `since`,
    a day, a moment or a duration such as `5m`, those that ended later; `request_id` those with it in their
    id. `fleet` asks all gateways that share this gateway's Redis, for a few seconds at most.
    """
    most = check_limit(limit, LIMIT_MAX)
    wanted = CallFilter(tenant, key, model, failed, moment_of("since", since) or 0.0, request_id)
    if not fleet:
        return Calls(CALLS_MAX, chosen(watched.history.calls.calls(), wanted)[:most])
    found = await fleet_api.fleet.calls(wanted)
    return Calls(CALLS_MAX, found.calls[:most], found.missing, found.problem)


# Declares a handler of an action on this gateway.
_action = partial(post, status_code=200, responses=FAILURES, tags=["Operators"], opt=OPERATORS)


@_action("/admin/drain")
async def drain(
    fleet_api: NamedDependency[FleetApi],
    audit: NamedDependency[AuditTrail],
    operator: NamedDependency[Actor],
) -> DrainReport:
    """Have load balancers send this gateway no more calls: `/readyz` and gRPC's health report it.

    Calls that arrive are served. It lasts until `/admin/undrain`, or until the gateway stops.
    """
    report = await fleet_api.drain(is_drained=True)
    await audit.record(new_record(operator, "drain", f"gateway/{report.gateway}"))
    return report


@_action("/admin/undrain")
async def undrain(
    fleet_api: NamedDependency[FleetApi],
    audit: NamedDependency[AuditTrail],
    operator: NamedDependency[Actor],
) -> DrainReport:
    """Have load balancers send this gateway calls again."""
    report = await fleet_api.drain(is_drained=False)
    await audit.record(new_record(operator, "undrain", f"gateway/{report.gateway}"))
    return report


HANDLERS = [fleet_report, calls, drain, undrain]
