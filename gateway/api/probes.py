"""For whoever watches: /livez (the process), /readyz (fit for traffic), /metrics (Prometheus)."""

from typing import Any

from litestar import Request, Response, get
from litestar.di import NamedDependency

from gateway.api.answering import Api
from gateway.api.exchange import exchange_of
from gateway.errors import ModelLoading, ShuttingDown
from gateway.in_flight import InFlight
from gateway.telemetry.metrics import Metrics


@get("/livez", tags=["Probes"])
async def livez() -> Response[bytes]:
    """200 while the process answers at all."""
    return Response(b"")


@get("/readyz", tags=["Probes"])
async def readyz(api: NamedDependency[Api], in_flight: NamedDependency[InFlight]) -> Response[bytes]:
    """200 once every engine has loaded and every remote replica was tried, until the gateway drains."""
    if in_flight.draining:
        raise ShuttingDown("this gateway is stopping")
    waiting = [name for name, one in api.gateway.upstreams.items() if not one.settled]
    if waiting:
        raise ModelLoading(f"waiting for: {', '.join(waiting)}")
    return Response(b"")


@get("/metrics", tags=["Probes"])
async def metrics(
    request: Request[Any, Any, Any], api: NamedDependency[Api], exporter: NamedDependency[Metrics]
) -> Response[bytes]:
    """Prometheus' text format; beyond the loopback interface it needs a key for that."""
    if not exporter.is_open:
        api.identity.of(exchange_of(request.scope)).require("metrics")
    body, content_type = exporter.render()
    return Response(body, media_type=content_type)


HANDLERS = [livez, readyz, metrics]
