"""GET /admin/traffic and /admin/calls, for the console: the last hour, and the last calls."""

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from gateway.api.operators.status import STATUS, StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.telemetry.records import CALLS_MAX, INTERVAL_S, RecentCall, TrafficPoint

FAILURES = document_errors(TEI)


class Traffic(msgspec.Struct, frozen=True):
    """Traffic of the last hour. interval_s: length of the time between two points."""

    interval_s: float
    points: list[TrafficPoint]


class Calls(msgspec.Struct, frozen=True):
    """The last calls, the newest first. kept: most calls that are kept."""

    kept: int
    calls: list[RecentCall]


@get("/admin/traffic", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def traffic(watched: NamedDependency[StatusSource], after: FromQuery[float] = 0.0) -> Traffic:
    """Return the traffic of the last hour in intervals of ten seconds, over all workers.

    `after` leaves out the intervals that ended by then, in seconds since 1970.
    """
    return Traffic(INTERVAL_S, watched.records.traffic.points(after))


@get("/admin/calls", responses=FAILURES, tags=["Operators"], opt=STATUS)
async def calls(
    watched: NamedDependency[StatusSource],
    tenant: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    *,
    failed: FromQuery[bool] = False,
) -> Calls:
    """Return the last calls of all workers, without any content.

    `tenant`, `key` (an id) and `model` select those of one; `failed` those that ended with an error.
    """
    chosen = [
        call
        for call in watched.records.calls.calls()
        if tenant in {None, call.tenant}
        and key in {None, call.key_id}
        and model in {None, call.model}
        and not (failed and call.outcome == "ok")
    ]
    return Calls(CALLS_MAX, chosen)


HANDLERS = [traffic, calls]
