"""Probes: /livez (the process responds), /readyz (it can take traffic), /metrics (Prometheus), /load."""

from collections.abc import Callable
from ipaddress import ip_address

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromQuery

from gateway.api.operators.access import HOST, is_relayed
from gateway.api.server.error_bodies import TEI, VLLM, document_errors
from gateway.api.server.in_flight import InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import HttpContext
from gateway.api.server.responses import EMPTY, NO_KEY, empty
from gateway.errors import ModelLoading, QuotaUnavailable, ShuttingDown
from gateway.serve import Gateway
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.upstream import Upstream

FAILURES = document_errors(TEI)
# The processes that start and watch this one may use either listener.
LIVENESS = route_options(is_probe=True, on_both_listeners=True)
SCRAPED = route_options(is_probe=True, for_operators=True)
EXPOSITION = ResponseSpec(
    str, generate_examples=False, description="Prometheus' text format", media_type="text/plain"
)


class ServerLoad(msgspec.Struct):
    """Load of one worker. server_load: requests in flight, of all tenants."""

    server_load: int


@get("/livez", responses={200: EMPTY}, tags=["Probes"], opt=LIVENESS, security=NO_KEY)
async def livez() -> Response[bytes]:
    """Answer 200 while the process responds at all."""
    return empty()


class Check(msgspec.Struct):
    """Part of the readiness, or an upstream. reason: why it does not hold, empty if it does."""

    name: str
    ok: bool
    reason: str = ""


class ReadyReport(msgspec.Struct, omit_defaults=True):
    """Reply to /readyz. checks, upstreams: with `verbose`.

    An upstream that serves nothing does not end the readiness of others.
    """

    ready: bool
    checks: list[Check] = []
    upstreams: list[Check] = []


class Readiness(msgspec.Struct, frozen=True):
    """Readiness of this gateway for callers.

    store_problem: returns why no caller of the store can be served, nothing if they can.
    """

    gateway: Gateway
    in_flight: InFlight
    store_problem: Callable[[], str]

    def reasons(self) -> dict[str, str]:
        """Return why this gateway is not ready, by check; nothing where it is."""
        waiting = [name for name, upstream in self.gateway.upstreams.items() if not upstream.startup_done]
        return {
            "running": self.in_flight.departure,
            "upstreams": f"waiting for: {', '.join(waiting)}" if waiting else "",
            "store": self.store_problem(),
        }


@get(
    "/readyz",
    responses={200: ResponseSpec(ReadyReport, generate_examples=False, description="Ready")} | FAILURES,
    tags=["Probes"],
    opt=LIVENESS,
    security=NO_KEY,
)
async def readyz(
    api: NamedDependency[InferenceApi],
    readiness: NamedDependency[Readiness],
    verbose: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Answer 200 once this gateway can serve callers, until SIGTERM or `/admin/drain`.

    All engines have loaded, all remote replicas were tried, and the keys and tenants of the store are known.
    `?verbose` lists these checks and the upstreams, with the reason of each that does not hold.
    """
    reasons = readiness.reasons()
    if verbose is not None:
        checks = [Check(name, not reason, reason) for name, reason in reasons.items()]
        upstreams = [_upstream_check(name, upstream) for name, upstream in api.gateway.upstreams.items()]
        report = ReadyReport(not any(reasons.values()), checks, upstreams)
        return Response(
            msgspec.json.encode(report),
            status_code=200 if report.ready else 503,
            headers={} if report.ready else {"retry-after": "1"},
            media_type="application/json",
        )
    if reasons["running"]:
        raise ShuttingDown(reasons["running"])
    if reasons["upstreams"]:
        raise ModelLoading(reasons["upstreams"])
    if reasons["store"]:
        raise QuotaUnavailable(reasons["store"], retry_after_s=1)
    return Response(msgspec.json.encode(ReadyReport(ready=True)), media_type="application/json")


def _upstream_check(name: str, upstream: Upstream) -> Check:
    """Return whether an upstream serves callers, with the reason in words that a caller may read."""
    is_ready = upstream.state == "ready"
    return Check(
        name, is_ready, "" if is_ready else f"{upstream.state}: {upstream.pool.no_replica_error().message}"
    )


@get("/metrics", responses={200: EXPOSITION} | FAILURES, tags=["Probes"], opt=SCRAPED)
async def metrics(
    context: NamedDependency[HttpContext],
    api: NamedDependency[InferenceApi],
    exporter: NamedDependency[Metrics],
) -> Response[bytes]:
    """Return the metrics in Prometheus' text format.

    A key is needed beyond the loopback interface, and through a proxy. With traces and one worker, a scraper
    that accepts OpenMetrics gets that, with exemplars.
    """
    require_metrics(context, api, exporter)
    accept = b",".join(value for name, value in context.headers if name == b"accept").decode("latin-1")
    body, content_type = await exporter.render(accept)
    # Litestar adds the charset of a plain text itself.
    media_type = (
        content_type.removesuffix("; charset=utf-8") if content_type.startswith("text/") else content_type
    )
    return Response(body, media_type=media_type)


@get("/load", responses=document_errors(VLLM), tags=["vLLM"], opt=SCRAPED)
async def load(
    context: NamedDependency[HttpContext],
    api: NamedDependency[InferenceApi],
    exporter: NamedDependency[Metrics],
    in_flight: NamedDependency[InFlight],
) -> ServerLoad:
    """Return the requests that the worker which answers has in flight, as vLLM reports its load.

    The same key is needed as for /metrics.
    """
    require_metrics(context, api, exporter)
    return ServerLoad(in_flight.calls)


def require_metrics(context: HttpContext, api: InferenceApi, exporter: Metrics) -> None:
    """Check that a caller may read load and metrics: by its key, or as a program of this machine.

    Raises: Unauthenticated, and the error of a key without the scope.
    """
    if not (exporter.is_open and has_address_as_host(context) and not is_relayed(context)):
        api.authenticator.authenticate(context).require("metrics")


def has_address_as_host(context: HttpContext) -> bool:
    """Return whether the `host` header of a request is localhost, an address, or missing.

    Any other name may have been pointed to this machine by a foreign web page, which could then
    read the reply.
    """
    hosts = [value.decode("latin-1") for name, value in context.headers if name == b"host"]
    return all(_is_address(host) for host in hosts)


def _is_address(host: str) -> bool:
    match = HOST.fullmatch(host)
    if match is None:
        return False
    name = (match["bracketed"] or match["plain"]).lower()
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


HANDLERS = [livez, readyz, metrics, load]
