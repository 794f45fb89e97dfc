"""GET /admin/status and /admin/traffic, for `gateway status` and the console at /ui.

Counts and loads are sums over all workers. States and changes are those of the worker that replies.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from gateway import __version__
from gateway.api.operators.manager import HostApi
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.in_flight import InFlight
from gateway.api.server.paths import route_options
from gateway.config.schema import Config, LimitAmount
from gateway.declared.host import InstanceTable, ModelInfo
from gateway.serve import Gateway
from gateway.telemetry.history import INTERVAL_S, History, TrafficPoint
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.snapshot import (
    CheckpointStatus,
    InstanceStatus,
    LaneStatus,
    LossStatus,
    ModelStatus,
    ModelUpstreamStatus,
    ReplicaStatus,
    Snapshot,
    StoreStatus,
    TenantStatus,
    TenantTotals,
    UpstreamLimitStatus,
)
from gateway.telemetry.totals import Totals
from gateway.tenants.follower import StoredState
from gateway.upstreams.group import UpstreamGroup

FAILURES = document_errors(TEI)
STATUS = route_options(is_probe=True, for_operators=True, needs_admin=True)
# Outcomes that are no failure of the replica: success, cancellation (a hedge was faster, or the caller
# hung up), and caller errors.
NOT_FAILED = ("ok", "cancelled", "invalid_input", "unsupported")


class StatusSource(msgspec.Struct, frozen=True):
    """Sources of a snapshot. worker: the number of this process among `config.workers`.

    stored: keys and tenants in the store.
    """

    gateway: Gateway
    in_flight: InFlight
    exporter: Metrics
    history: History
    config: Config
    worker: int
    started_s: float
    instances: InstanceTable
    stored: Callable[[], StoredState] = StoredState

    def snapshot(self, registry: Sequence[ModelInfo] = (), *, with_tenants: bool = True) -> Snapshot:
        """Return the state of the gateway now. registry: the models of this host.

        with_tenants: False leaves the list of tenants empty, which may be long.
        """
        totals = Totals(self.exporter.collected())
        tenants = totals.tenants()
        now_s = time.time()
        return Snapshot(
            version=__version__,
            at_s=now_s,
            uptime_s=now_s - self.started_s,
            worker=self.worker,
            workers=self.config.workers,
            calls_in_flight=int(totals.number("gateway_calls_in_flight")),
            in_flight_bytes=int(totals.number("gateway_in_flight_bytes")),
            store=self._store(totals),
            calls=totals.calls(),
            lanes=tuple(
                _lane(name, upstream.settings.limits, totals)
                for name, upstream in self.gateway.upstreams.items()
            ),
            replicas=tuple(self._replicas(totals)),
            models=tuple(self._models(totals)),
            tenants=tenants if with_tenants else (),
            changes=self.history.changes.changes(),
            instances=msgspec.convert(
                tuple(self.instances), tuple[InstanceStatus, ...], from_attributes=True
            ),
            registry=tuple(map(_checkpoint, registry)),
            currency=self.gateway.serving.config.currency,
            drained_since_s=self.in_flight.drained_since_s,
            tenant_totals=_tenant_totals(tenants),
            trace_link=tracing.link if (tracing := self.gateway.serving.config.tracing) else None,
        )

    def _store(self, totals: Totals) -> StoreStatus:
        # Only the kind of store is shown, because its address may contain a password.
        kind, _, _ = self.config.quotas.store.partition("://")
        stored = self.stored()
        loss = None
        if stored.loss is not None and stored.until_s is not None:
            loss = LossStatus(
                stored.loss.at_s, stored.until_s, stored.loss.reason, stored.kept_keys, stored.kept_tenants
            )
        away = totals.greatest("gateway_quota_store_away") > 0
        # The current reason, which may not be the first, or that of counts in a store that can be read.
        reason = (stored.trouble or self.history.changes.store_trouble) if away else ""
        return StoreStatus(kind, away, stored.keys, stored.tenants, loss, reason)

    def _replicas(self, totals: Totals) -> Iterator[ReplicaStatus]:
        for name, upstream in self.gateway.upstreams.items():
            present = {replica.name for replica in upstream.pool.replicas}
            for absent in set(upstream.settings.drained) - present:
                # It gets no work when it is listed again, which must be in sight.
                reason = "it is drained, and is not among the replicas"
                yield ReplicaStatus(name, absent, "absent", reason, None, 0, 0, None, 0, 0, is_drained=True)
            for replica, state in upstream.replica_states():
                labels = {"upstream": name, "replica": replica.name}
                history = self.history.changes.of(name, replica.name)
                attempts = int(totals.number("gateway_attempts_total", **labels))
                not_failed = sum(
                    int(totals.number("gateway_attempts_total", outcome=outcome, **labels))
                    for outcome in NOT_FAILED
                )
                yield ReplicaStatus(
                    name,
                    replica.name,
                    state,
                    replica.rejection or history.reason,
                    history.since_s,
                    int(totals.number("gateway_replica_in_flight_batches", **labels)),
                    int(totals.number("gateway_replica_window_batches", **labels)),
                    history.latency_s,
                    attempts,
                    attempts - not_failed,
                    replica.request_limits.learned_bytes,
                    replica.is_drained,
                )

    def _models(self, totals: Totals) -> Iterator[ModelStatus]:
        routes, settings = self.gateway.routes, self.gateway.serving.config.models
        for name in routes.all_names():
            upstream = self.gateway.view_of(name)
            capabilities = upstream.capabilities
            yield ModelStatus(
                name,
                upstream.name,
                upstream.settings.backend,
                upstream.state,
                tuple(operation.value for operation in routes.operations(name)) if capabilities else (),
                upstream.fingerprint,
                upstream.dimensions,
                capabilities.notes if capabilities else (),
                self.gateway.cache_state(name),
                int(totals.number("gateway_model_memory_bytes", upstream=upstream.name))
                if upstream.settings.is_local
                else None,
                tuple(self._group(self.gateway.serving.groups.get(name), totals)),
                settings[name].price_per_million_tokens,
            )

    def _group(self, group: UpstreamGroup | None, totals: Totals) -> Iterator[ModelUpstreamStatus]:
        """Yield the upstreams of a model; none if it has only one, which needs no choice."""
        if group is None:
            return
        settings, upstreams, judge = group.model_settings, self.gateway.upstreams, group.judge

        def status(name: str, role: Literal["member", "canary"], **more: Any) -> ModelUpstreamStatus:
            labels = {"model": group.model, "upstream": name, "outcome": "ok"}
            calls = int(totals.number("gateway_upstream_calls_total", **labels))
            judgement = judge.judgements[name]
            state = upstreams[name].state
            return ModelUpstreamStatus(name, role, judgement.standing, judgement.reason, state, calls, **more)

        for member in settings.members:
            yield status(member.name, "member", weight=member.weight, priority=member.priority)
        if (canary := judge.canary) is not None:
            yield status(
                canary.settings.name,
                "canary",
                share=canary.settings.share,
                cosine=canary.cosine,
                min_cosine=canary.settings.min_cosine,
            )
        if settings.mirror is not None:
            name, share = settings.mirror.name, settings.mirror.share
            labels = {"model": group.model, "upstream": name, "purpose": "mirror", "outcome": "ok"}
            copies = int(totals.number("gateway_copies_total", **labels))
            yield ModelUpstreamStatus(
                name, "mirror", "serving", "", upstreams[name].state, copies, share=share
            )


def _tenant_totals(tenants: Sequence[TenantStatus]) -> TenantTotals:
    return TenantTotals(
        len(tenants),
        sum(tenant.calls for tenant in tenants),
        sum(tenant.inputs for tenant in tenants),
        sum(tenant.tokens for tenant in tenants),
        sum(tenant.refused for tenant in tenants),
    )


def _checkpoint(info: ModelInfo) -> CheckpointStatus:
    return CheckpointStatus(
        info.model_id,
        info.status,
        info.stored_bytes,
        info.done_bytes,
        info.total_bytes,
        info.bytes_per_s,
        info.upstreams,
        info.error,
    )


def _lane(upstream: str, limits: Mapping[str, LimitAmount], totals: Totals) -> LaneStatus:
    metric = "gateway_upstream_limit_used_ratio"
    used = {name: totals.greatest(metric, upstream=upstream, limit=name) for name in limits}
    return LaneStatus(
        upstream,
        int(totals.number("gateway_lane_queued_inputs", upstream=upstream)),
        int(totals.number("gateway_lane_queued_tokens", upstream=upstream)),
        totals.greatest("gateway_lane_oldest_seconds", upstream=upstream),
        int(totals.number("gateway_replica_in_flight_batches", upstream=upstream)),
        int(totals.number("gateway_replica_window_batches", upstream=upstream)),
        totals.durations("gateway_attempt_duration_seconds", upstream=upstream),
        tuple(UpstreamLimitStatus(name, amount, used[name]) for name, amount in limits.items()),
        int(totals.number("gateway_upstream_limited_total", upstream=upstream)),
    )


@get("/admin/status", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def status(
    watched: NamedDependency[StatusSource],
    host: NamedDependency[HostApi],
    *,
    tenants: FromQuery[bool] = True,
) -> Snapshot:
    """Return the gateway's current status.

    Counters count since the start. The difference of two replies gives a rate. `tenants=false` leaves out the
    list of tenants, which has one entry for each that has sent calls; their sums are in `tenant_totals`.
    """
    return watched.snapshot(await host.recent_models(), with_tenants=tenants)


class Traffic(msgspec.Struct, frozen=True):
    """Traffic of the last hour. interval_s: length of the time between two points."""

    interval_s: float
    points: list[TrafficPoint]


@get("/admin/traffic", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def traffic(watched: NamedDependency[StatusSource], after: FromQuery[float] = 0.0) -> Traffic:
    """Return the traffic of the last hour in intervals of ten seconds, over all workers.

    `after` leaves out the intervals that ended by then, in seconds since 1970.
    """
    return Traffic(INTERVAL_S, watched.history.traffic.points(after))


HANDLERS = [status, traffic]
