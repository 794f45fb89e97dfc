"""Names that spans and metrics of OpenTelemetry share, and the resource that describes this process.

The names are those of the GenAI conventions. Loaded only where the configuration has an endpoint for OTLP.
"""

import logging

from opentelemetry.sdk.resources import Resource

from gateway import __version__
from gateway.events import UpstreamServer

# OpenTelemetry's names of our operations; it defines no others yet, and allows custom ones.
GENAI_OPERATIONS = {
    "embed": "embeddings",
    "embed_image": "embeddings",
    "embed_audio": "embeddings",
    "rerank_image": "rerank",
}
# Time for one request to a collector, with its retries, and for the last one of a worker that stops.
EXPORT_TIMEOUT_S = 2.0


def resource_of(service_name: str, instance: str) -> Resource:
    """Return the description of this process.

    instance: different for each worker and each start, so that a collector adds their counts up.
    """
    facts = {"service.name": service_name, "service.version": __version__}
    return Resource(facts | ({"service.instance.id": instance} if instance else {}))


def log_losses_only() -> None:
    """Have OpenTelemetry log what is lost only: it warns at each retry, with a different text each time."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)


def operation_name(operation: str) -> str:
    """Return the value of `gen_ai.operation.name` for one of our operations."""
    return GENAI_OPERATIONS.get(operation, operation)


def error_type(outcome: str, status: str | None) -> str:
    """Return the value of `error.type`: the upstream's status if it answered, else the kind of the error."""
    return status or outcome


def server_attributes(operation: str, server: UpstreamServer | None, model: str) -> dict[str, str | int]:
    """Return the attributes of a request to an upstream. operation: as `operation_name` returns it."""
    attributes: dict[str, str | int] = {"gen_ai.operation.name": operation}
    if model:
        attributes["gen_ai.request.model"] = model
    if server is not None:
        attributes |= {"gen_ai.provider.name": server.provider, "server.address": server.address}
        if server.port is not None:
            attributes["server.port"] = server.port
    return attributes
