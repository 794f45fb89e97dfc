"""For whoever watches: /livez (the process), /readyz (fit for traffic), /metrics (Prometheus)."""

from typing import Any

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.answering import EMPTY, Api, empty
from gateway.api.exchange import exchange_of
from gateway.api.failures import documented
from gateway.errors import ModelLoading, ShuttingDown
from gateway.in_flight import InFlight
from gateway.telemetry.metrics import Metrics

FAILURES = documented("tei")
EXPOSITION = ResponseSpec(
    str, generate_examples=False, description="Prometheus' text format", media_type="text/plain"
)


@get("/livez", responses={200: EMPTY}, tags=["Probes"])
async def livez() -> Response[bytes]:
    """200 while the process answers at all."""
    return empty()


@get("/readyz", responses={200: EMPTY} | FAILURES, tags=["Probes"])
async def readyz(api: NamedDependency[Api], in_flight: NamedDependency[InFlight]) -> Response[bytes]:
    """200 once every engine has loaded and every remote replica was tried, until the gateway drains."""
    if in_flight.draining:
        raise ShuttingDown("this gateway is stopping")
    waiting = [name for name, one in api.gateway.upstreams.items() if not one.settled]
    if waiting:
        raise ModelLoading(f"waiting for: {', '.join(waiting)}")
    return empty()


@get("/metrics", responses={200: EXPOSITION} | FAILURES, tags=["Probes"])
async def metrics(
    request: Request[Any, Any, Any], api: NamedDependency[Api], exporter: NamedDependency[Metrics]
) -> Response[bytes]:
    """Prometheus' text format; beyond the loopback interface it needs a key for that."""
    if not exporter.is_open:
        api.identity.of(exchange_of(request.scope)).require("metrics")
    body, content_type = await exporter.render()
    # Litestar names the charset of a text itself.
    return Response(body, media_type=content_type.removesuffix("; charset=utf-8"))


HANDLERS = [livez, readyz, metrics]
