"""The Litestar application: operators' pages, the OpenAPI document, and the `Services` of its handlers.

It is built once per process, because registering the handlers takes longer than building everything else, and
gets the services of a request's gateway from the ASGI scope.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, Router
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import Method, Scope
from litestar.types.internal_types import PathParameterDefinition

from gateway import __version__
from gateway.api.document.complete import OPTION, operation_id, texts_of
from gateway.api.operators import docs_page
from gateway.api.operators.additions import AdditionsApi
from gateway.api.operators.admin import Admin
from gateway.api.operators.directory import TenantDirectory
from gateway.api.operators.fleet import FleetApi
from gateway.api.operators.history import HistoryApi
from gateway.api.operators.manager import HostApi
from gateway.api.operators.probes import Readiness
from gateway.api.operators.replicas import ReplicasApi
from gateway.api.operators.status import StatusSource
from gateway.api.server.batches_api import BatchesApi
from gateway.api.server.dialect import Dialect
from gateway.api.server.in_flight import InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import options_of
from gateway.api.server.request_context import SERVICES_KEY, context_of, context_of_request
from gateway.audit.records import Actor
from gateway.audit.trail import AuditTrail
from gateway.telemetry.metrics import Metrics
from gateway.tenants.sign_on.sign_in import SignIns

# The ways to send a key, in the OpenAPI document, besides the headers of dialects. Any of them is enough.
KEYS = {
    "key": SecurityScheme(type="http", scheme="bearer", description="The key as a bearer token."),
    "password": SecurityScheme(
        type="http",
        scheme="basic",
        description="The key as the password, with any user name, for clients that only take a URL.",
    ),
    "token": SecurityScheme(
        type="apiKey",
        name="authorization",
        security_scheme_in="header",
        description="The key as the whole value of the header.",
    ),
}


class LeanLitestar(Litestar):
    """Litestar without its plugins for pydantic and attrs, which take 14 MB a process and are not used."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


class Services(msgspec.Struct, frozen=True):
    """Collaborators of Litestar's handlers, which name the fields that they need."""

    api: InferenceApi
    in_flight: InFlight
    exporter: Metrics
    watched: StatusSource
    readiness: Readiness
    admin: Admin
    directory: TenantDirectory
    adding: AdditionsApi
    replicas: ReplicasApi
    fleet_api: FleetApi
    host: HostApi
    sign_ins: SignIns
    batches: BatchesApi
    audit: AuditTrail
    history: HistoryApi


def services_of(scope: Mapping[str, Any]) -> Services:
    """Return the services of the gateway that a request came to."""
    services: Services = scope["state"][SERVICES_KEY]
    return services


def litestar_application(dialects: Sequence[Dialect]) -> Litestar:
    """Return the application that serves these dialects."""
    keys = KEYS | {
        header.scheme: SecurityScheme(
            type="apiKey", name=header.name, security_scheme_in="header", description=header.description
        )
        for header in (dialect.key_header for dialect in dialects)
        if header is not None
    }
    return LeanLitestar(
        [handler for dialect in dialects for handler in dialect.handlers],
        opt={OPTION: texts_of(dialects)},
        dependencies={
            "context": Provide(context_of_request, sync_to_thread=False),
            "operator": Provide(_actor, sync_to_thread=False),
            **{name: _dependency(name) for name in Services.__struct_fields__},
        },
        guards=[_guard],
        exception_handlers={Exception: _reply_to_failure, HTTPException: _reply_to_failure},
        # The body's bound is the gateway's own, in `CallIO`.
        request_max_body_size=None,
        # Litestar's own would turn on httpx's line for every upstream request.
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="Embedding gateway",
            version=__version__,
            openapi_router=Router(
                "/docs",
                route_handlers=[],
                include_in_schema=False,
                before_request=_answer_docs,
            ),
            components=Components(security_schemes=dict(keys)),
            security=[{name: []} for name in keys],
            operation_id_creator=_operation_id,
            use_handler_docstrings=True,
            render_plugins=[docs_page.ROUTES],
        ),
    )


async def _answer_docs(request: Request[Any, Any, Any]) -> Response[bytes] | None:
    """Answer /docs, as Litestar's hook before a handler."""
    config = services_of(request.scope).watched.config
    has_console = config.admin.listen is None or context_of(request.scope).came_to_operators
    return await docs_page.answer(request, has_console=has_console)


def _operation_id(
    handler: HTTPRouteHandler, method: Method, path: list[str | PathParameterDefinition]
) -> str:
    """Return the id of an operation, as Litestar's creator of ids."""
    del handler
    return operation_id(method, " ".join(part if isinstance(part, str) else part.name for part in path))


def _dependency(name: str) -> Provide:
    """Return the provider of one of the services."""

    def provide(scope: Scope) -> Any:
        return getattr(services_of(scope), name)

    return Provide(provide, sync_to_thread=False)


def _actor(scope: Scope) -> Actor:
    """Return the operator of a request, as a dependency of handlers that change something."""
    return services_of(scope).admin.actor(context_of(scope))


async def _guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Check the key of an operator before Litestar reads a body."""
    if options_of(handler).needs_admin:
        services_of(connection.scope).admin.authorize(context_of(connection.scope))


def _reply_to_failure(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Render a handler's exception, as Litestar's exception handler."""
    reply = context_of(request.scope).failure(error)
    return Response(
        bytes(reply.body), status_code=reply.status, headers=reply.headers, media_type=reply.media_type
    )
