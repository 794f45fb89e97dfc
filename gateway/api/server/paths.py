"""Which model, operation and dialect a path names, settled in front of the router. Pure.

A model's name may hold slashes, which a router's path parameter cannot: below /models/ the operation is
the known last segment, and the name is all before it; below SIE's prefixes, and where operators add models,
the name is all that is left.
"""

from typing import Literal

from gateway.config.schema import OPERATION_SEGMENTS

# rerank: Cohere's and Jina's /v1/rerank, whose errors both read.
Dialect = Literal["openai", "tei", "cohere", "rerank", "vllm", "infinity", "sie"]

PREFIX = "/models/"
# SIE names the model last, and so do operators.
SIE_PREFIXES = ("/v1/encode/", "/v1/score/")
NAME_LAST = (*SIE_PREFIXES, "/admin/models/", "/admin/upstreams/")
# What a handler's path has in the place of a name.
NAME = "{name:str}"
# Stands for "/" inside a name while the router looks at the path; no URL carries it unescaped.
SLASH = "\x1f"

# Operations whose route has a version before it, as base URLs of one model have it.
VERSIONED = {
    "v1": frozenset({"embed", "embeddings", "rerank", "score"}),
    "v2": frozenset({"embed", "rerank"}),
}

# Whose errors a path speaks; a model's prefix does not count. What is in neither table is TEI's.
DIALECT_OF_PATH: dict[str, Dialect] = {
    "/embeddings": "openai",
    "/v1/embed": "cohere",
    "/v1/rerank": "rerank",
    "/v1/score": "vllm",
    "/score": "vllm",
    "/classify": "vllm",
    "/pooling": "vllm",
    "/detokenize": "vllm",
}
DIALECT_OF_PREFIX: dict[str, Dialect] = {
    "/v1/encode/": "sie",
    "/v1/score/": "sie",
    "/v1/": "openai",
    "/v2/": "cohere",
    "/infinity/": "infinity",
}


def settled(path: str) -> str:
    """The path with a model's name made one segment; any other path as it is."""
    if path in DIALECT_OF_KNOWN:
        return path
    for prefix in NAME_LAST:
        if path.startswith(prefix):
            return prefix + path.removeprefix(prefix).strip("/").replace("/", SLASH)
    name, operation = _parts(path)
    return f"{PREFIX}{name.replace('/', SLASH)}{operation.rstrip('/')}" if name else path


def _parts(path: str) -> tuple[str, str]:
    """The model's name below /models/, and the path after it; no name and the whole path elsewhere.

    A name with nothing after it stands for what the model does by default.
    """
    if not path.startswith(PREFIX):
        return "", path
    rest = path.removeprefix(PREFIX).strip("/")
    name, _, operation = rest.rpartition("/")
    if operation not in OPERATION_SEGMENTS:
        return (rest, "/") if rest else ("", path)
    if not name:
        return "", path
    rest, _, version = name.rpartition("/")
    if rest and operation in VERSIONED.get(version, ()):
        return rest, f"/{version}/{operation}"
    return name, f"/{operation}"


def template_and_name(path: str) -> tuple[str, str | None]:
    """A settled path as handlers write it, and the model's name in it."""
    for prefix in NAME_LAST:
        if path.startswith(prefix):
            return prefix + NAME, model_name(path.removeprefix(prefix))
    if not path.startswith(PREFIX):
        return path, None
    name, slash, operation = path.removeprefix(PREFIX).partition("/")
    return f"{PREFIX}{NAME}{slash}{operation}", model_name(name)


def model_name(segment: str | None) -> str | None:
    """The name that a path parameter stands for."""
    return None if segment is None else segment.replace(SLASH, "/")


def dialect_of(path: str) -> Dialect:
    """Whose errors a path speaks, also where nothing is served."""
    return DIALECT_OF_KNOWN.get(path) or _dialect_of(path)


def _dialect_of(path: str) -> Dialect:
    _, route = _parts(_read(path))
    if route in DIALECT_OF_PATH:
        return DIALECT_OF_PATH[route]
    below = f"{route}/"
    return next((one for prefix, one in DIALECT_OF_PREFIX.items() if below.startswith(prefix)), "tei")


def _read(path: str) -> str:
    """As the router reads it: slashes that are doubled or last make no other path."""
    if "//" not in path and not path.endswith("/"):
        return path
    return "/" + "/".join(filter(None, path.split("/")))


def is_for_operators(path: str) -> bool:
    """Whether a path belongs on `admin.listen`, where there is one."""
    read = _read(path)
    return read == "/metrics" or read.startswith(("/admin/", "/ui"))


# Paths whose end is a name, and how metrics label them.
NAMED_ENDS = {
    "/admin/keys/": "/admin/keys/{key_id}",
    "/admin/models/": "/admin/models/{name}",
    "/admin/tenants/": "/admin/tenants/{name}",
    "/admin/upstreams/": "/admin/upstreams/{name}",
    "/v1/models/": "/v1/models/{model}",
    "/v1/encode/": "/v1/encode/{model}",
    "/v1/score/": "/v1/score/{model}",
}


def template_of(path: str) -> str:
    """The path as metrics label it: a model's name would make a series of each typing mistake."""
    if path in DIALECT_OF_KNOWN:
        return path
    if path.startswith(PREFIX):
        name, operation = _parts(path)
        return f"{PREFIX}{{model}}{operation}" if name else "other"
    return next((label for prefix, label in NAMED_ENDS.items() if path.startswith(prefix)), "other")


KNOWN = frozenset(
    {
        "/",
        "/classify",
        "/decode",
        "/detokenize",
        "/embed_all",
        "/embed_sparse",
        "/infinity/classify",
        "/infinity/embeddings",
        "/infinity/health",
        "/infinity/models",
        "/infinity/rerank",
        "/pooling",
        "/predict",
        "/score",
        "/v1/score",
        "/admin/keys",
        "/admin/models",
        "/admin/reload",
        "/admin/status",
        "/admin/tenants",
        "/admin/upstreams",
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
        "/ui",
        "/ui/icon.svg",
        "/ui/page.css",
        "/ui/page.js",
        "/v1/embed",
        "/v1/embeddings",
        "/v1/models",
        "/v1/rerank",
        "/v2/embed",
        "/v2/rerank",
    }
)
# Asked on every call; names are in none of them.
DIALECT_OF_KNOWN: dict[str, Dialect] = {path: _dialect_of(path) for path in KNOWN}
