"""A dialect: all that the shared code knows of a wire protocol, as the protocol's folder exports it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler

from gateway.api.server.call_io import Scope


class KeyHeader(msgspec.Struct, frozen=True):
    """A header in which a dialect's clients send the bare key. scheme: its name in the OpenAPI document."""

    name: str
    scheme: str
    description: str


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A wire protocol that callers use, or the operators' own API.

    handlers: of its paths; each of them declares the format of its errors. tags: sections of the OpenAPI
    document, with their descriptions. examples: bodies by their structs. meanings: texts of `Struct.field`,
    or of a field that means the same in every body. key_header: where its key stands, besides
    `authorization`. key_parameter: of the query of its URLs, where the configuration permits a key there.
    move: replaces the path of a GET or HEAD that its headers mark as this dialect's.
    """

    handlers: Sequence[HTTPRouteHandler]
    tags: Mapping[str, str] = {}
    examples: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {}
    meanings: Mapping[str, str] = {}
    key_header: KeyHeader | None = None
    key_parameter: str | None = None
    move: Callable[[Scope], None] | None = None
