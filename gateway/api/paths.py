"""Which model and operation a path names, settled in front of the router. Pure.

A model's name may hold slashes, which a router's path parameter cannot: below /models/ the operation is
the known last segment, and the name is all before it.
"""

from typing import Literal

from gateway.config import OPERATION_SEGMENTS

Dialect = Literal["openai", "tei"]

PREFIX = "/models/"
# Stands for "/" inside a name while the router looks at the path; no URL carries it unescaped.
SLASH = "\x1f"


def settled(path: str) -> str:
    """The path with a model's name made one segment; any other path as it is."""
    if not path.startswith(PREFIX):
        return path
    name, _, operation = path.removeprefix(PREFIX).rpartition("/")
    if operation not in OPERATION_SEGMENTS or not name:
        return path
    if operation == "embeddings" and name.endswith("/v1"):
        # TEI serves OpenAI's route too, so a base URL of one model has it.
        name, operation = name.removesuffix("/v1"), "v1/embeddings"
    return f"{PREFIX}{name.replace('/', SLASH)}/{operation}"


def model_name(segment: str | None) -> str | None:
    """The name that a path parameter stands for."""
    return None if segment is None else segment.replace(SLASH, "/")


def dialect_of(path: str) -> Dialect:
    """Whose errors a path speaks, also where nothing is served."""
    is_openai = path.startswith("/v1/") or path.endswith(("/v1/embeddings", "/embeddings"))
    return "openai" if is_openai else "tei"


def is_for_operators(path: str) -> bool:
    """Whether a path belongs on `admin.listen`, where there is one."""
    # As the router reads it: slashes that are doubled or last make no other path.
    read = "/" + "/".join(filter(None, path.split("/")))
    return read == "/metrics" or read.startswith(("/admin/", "/ui"))


def template_of(path: str) -> str:
    """The path as metrics label it: a model's name would make a series of each typing mistake."""
    if path.startswith(PREFIX):
        name, _, operation = path.removeprefix(PREFIX).rpartition("/")
        known = bool(name) and operation in OPERATION_SEGMENTS
        return f"{PREFIX}{{model}}/{operation}" if known else "other"
    if path.startswith("/admin/keys/"):
        return "/admin/keys/{key_id}"
    if path.startswith("/admin/tenants/"):
        return "/admin/tenants/{name}"
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in KNOWN else "other"


KNOWN = frozenset(
    {
        "/admin/keys",
        "/admin/tenants",
        "/admin/usage",
        "/embed",
        "/embeddings",
        "/health",
        "/info",
        "/livez",
        "/metrics",
        "/readyz",
        "/rerank",
        "/similarity",
        "/tokenize",
        "/v1/embeddings",
        "/v1/models",
    }
)
