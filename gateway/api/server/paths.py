"""The table of routes, and the interpretation of a request path. Pure.

The table is built from the handlers' own declarations. A path is parsed once, in the outermost layer. A
model's name may contain slashes, which a path parameter of the router cannot: below /models/ the operation is
a declared last segment and the name is everything before it. In the other paths with a name, such as SIE's
and Azure's, it is everything between the declared beginning and end. Gemini's paths end in a method after a
colon, which a handler declares as a segment of its own: `/v1beta/models/{name:str}/:embedContent`.

Two kinds of requests are moved to other paths before: those for models by Google's clients, and those that
come to `manager.listen`.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.utils.path import normalize_path

from gateway.api.server.error_bodies import TEI, ErrorFormat

# Placeholder of a model's name in the path that a handler declares.
NAME = "{name:str}"
BELOW_MODEL = f"/models/{NAME}"
MODELS_PREFIX = "/models/"
# Below a model these are the last two segments of a path, so that a model may be called "live".
WELL_KNOWN = "/.well-known/"
# Begins a method in a declared path; callers send only the colon.
METHOD = "/:"
# Stands for "/" inside a name while the router looks at the path. No URL carries it unescaped.
SLASH = "\x1f"
# The metrics label of a path that no handler declares.
OTHER = "other"
# What a browser requests besides operators' paths: the way to the console, its playground, a key's own usage,
# and the link to the documentation. They are served on `admin.listen` too, and check the key there as well.
CONSOLE_PATHS = frozenset(
    (
        "/",
        "/v1/models",
        "/v1/embeddings",
        "/v1/multi-vector",
        "/v1/rerank",
        "/usage",
        "/usage/calls",
        "/usage/history",
        "/docs",
        "/docs/docs.js",
        "/docs/docs.css",
        "/docs/openapi.json",
    )
)
# Key of a Litestar handler's `opt`.
OPTIONS_KEY = "route"


# Answers a request; called with its `HttpContext` and the `InferenceApi`, which this module cannot import.
Answer: TypeAlias = Callable[[Any, Any], Awaitable[None]]


class RouteOptions(msgspec.Struct, frozen=True):
    """Declaration of a handler about its paths, in addition to Litestar's own.

    errors: format of error replies; None: by the path's prefix. answer: answers a POST without
    Litestar, for endpoints that run a model.
    for_operators: served on `admin.listen`, if there is one, and only there. needs_admin: callers need the
    scope admin. is_probe: also answered while the gateway drains, and not traced. on_both_listeners: for
    the processes that start and watch the gateway. name_has_slashes: the name in the path may contain them.
    body_bytes_max: bound on the body where it is lower than that of all paths. key_field: field of the body
    that has the key if `authorization` has none; headers in which clients of other dialects send keys are
    not read then.
    """

    errors: ErrorFormat | None = None
    answer: Answer | None = None
    for_operators: bool = False
    needs_admin: bool = False
    is_probe: bool = False
    on_both_listeners: bool = False
    name_has_slashes: bool = False
    body_bytes_max: int | None = None
    key_field: str | None = None


NO_OPTIONS = RouteOptions()


def route_options(**options: Any) -> dict[str, Any]:
    """Return the `opt` argument of a Litestar handler: the fields of `RouteOptions` that it declares."""
    return {OPTIONS_KEY: RouteOptions(**options)}


def options_of(handler: Any) -> RouteOptions:
    """Return the declaration of a Litestar handler."""
    options: RouteOptions = handler.opt.get(OPTIONS_KEY, NO_OPTIONS)
    return options


class Target(msgspec.Struct, frozen=True):
    """Meaning of a request path.

    label: the route as metrics and logs show it. dialect: the format of error replies. path: the path for
    Litestar's router, in which a model's name is one segment. model: the name in it.
    """

    label: str
    dialect: ErrorFormat
    path: str
    model: str | None = None
    options: RouteOptions = NO_OPTIONS


class NamedPath(msgspec.Struct, frozen=True):
    """A declared path with a name. start, end: the path before and after it, as callers send them."""

    template: str
    start: str
    end: str

    @property
    def label(self) -> str:
        """The path as metrics show it."""
        return f"{self.start}{{model}}{self.end}"

    def name_in(self, path: str) -> str:
        """Return the name in a path, or nothing if it is a different path."""
        if path.startswith(self.start) and path.endswith(self.end):
            return path[len(self.start) : len(path) - len(self.end)].strip("/")
        return ""


class RouteTable:
    """Every path that handlers declare.

    dialects: those that inference endpoints declare. label_of_prefix: the beginning of paths that end in a
    name → how metrics show these paths.
    """

    def __init__(self, handlers: Iterable[HTTPRouteHandler]) -> None:
        # Where several handlers share a path, the one that answers without Litestar declares it.
        by_answer = sorted(handlers, key=lambda handler: options_of(handler).answer is not None)
        self._options = {path: options_of(handler) for handler in by_answer for path in handler.paths}
        declared = (options.errors for options in self._options.values())
        self.dialects = tuple(dict.fromkeys(dialect for dialect in declared if dialect is not None))
        # Longest first: /v1/encode/ is SIE's, the rest of /v1/ is OpenAI's.
        prefixes = [(prefix, dialect) for dialect in self.dialects for prefix in dialect.prefixes]
        self._prefixes = sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)
        self._suffixes = frozenset(
            template.removeprefix(BELOW_MODEL)
            for template in self._options
            if template.startswith(f"{BELOW_MODEL}/")
        )
        self._operations = frozenset(
            suffix.rpartition("/")[2] for suffix in self._suffixes if not suffix.startswith(WELL_KNOWN)
        )
        self._named = list(self._named_paths())
        operators = [template for template, options in self._options.items() if options.for_operators]
        self._operators_prefixes = tuple(
            {f"/{template.split('/')[1]}/" for template in operators if template.count("/") > 1}
        )
        self.label_of_prefix = dict(self._label_prefixes())
        self._targets = {path: self._plain_target(path) for path in self._options if "{" not in path}

    @property
    def plain_paths(self) -> frozenset[str]:
        """The declared paths without a name."""
        return frozenset(self._targets)

    @property
    def labels(self) -> frozenset[str]:
        """Every label that `parse` can return."""
        below_models = {f"{MODELS_PREFIX}{{model}}{suffix}" for suffix in (*self._suffixes, "/")}
        named = {named.label for named in self._named if named.end}
        return self.plain_paths | below_models | named | {OTHER, *self.label_of_prefix.values()}

    def parse(self, path: str) -> Target:
        """Return the target of a request path."""
        return self._targets.get(path) or self._parse(path)

    def _plain_target(self, path: str) -> Target:
        options = self._options[path]
        if path in CONSOLE_PATHS:
            options = msgspec.structs.replace(options, on_both_listeners=True)
        return Target(path, self._dialect_of(path, options), path, options=options)

    def _parse(self, path: str) -> Target:
        """Parse a path that contains a name, has surplus slashes, or is not served."""
        template, name = self._split(path)
        label = self._label_of(path, template)
        normalized = normalize_path(path)
        if not name:
            template, name = self._split(normalized)
        routed = template.replace(NAME, name.replace("/", SLASH)) if name else path
        if not name and normalized.startswith(MODELS_PREFIX):
            # An operation without a model before it: the router takes it for the name of a model.
            template, name = BELOW_MODEL, normalized.removeprefix(MODELS_PREFIX)
        options = self._options.get(template)
        dialect = self._dialect_of(normalized, options)
        if options is None:
            below_operators = normalized.startswith(self._operators_prefixes)
            options = RouteOptions(for_operators=below_operators, on_both_listeners=path in CONSOLE_PATHS)
        elif not name:
            options = msgspec.structs.replace(options, is_probe=False, on_both_listeners=False)
        return Target(label, dialect, routed, name or None, options)

    def _split(self, path: str) -> tuple[str, str]:
        """Return the template that a path matches and the name in it; no name and the path itself if none.

        A model's name with nothing after it means the model's default operation.
        """
        if not path.startswith(MODELS_PREFIX):
            names = ((named.template, named.name_in(path)) for named in self._named)
            return next(((template, name) for template, name in names if name), (path, ""))
        rest = path.removeprefix(MODELS_PREFIX).strip("/")
        name, _, operation = rest.rpartition("/")
        model, _, version = name.rpartition("/")
        if model and f"/{version}/{operation}" in self._suffixes:
            return f"{BELOW_MODEL}/{version}/{operation}", model
        if operation not in self._operations:
            return (BELOW_MODEL, rest) if rest else (path, "")
        return (f"{BELOW_MODEL}/{operation}", name) if name else (path, "")

    def _label_of(self, path: str, template: str) -> str:
        """Return the path as metrics show it. A name in it would create a time series for each typo."""
        if template.startswith(BELOW_MODEL):
            suffix = template.removeprefix(BELOW_MODEL)
            # Some operations exist below a version only.
            is_route = not suffix or suffix in self._suffixes
            return f"{MODELS_PREFIX}{{model}}{suffix or '/'}" if is_route else OTHER
        for named in self._named:
            if named.template == template and named.end:
                return named.label
        return next(
            (label for prefix, label in self.label_of_prefix.items() if path.startswith(prefix)), OTHER
        )

    def _dialect_of(self, path: str, options: RouteOptions | None) -> ErrorFormat:
        """Return the error dialect of a path, even if nothing is served there."""
        if options is not None and options.errors is not None:
            return options.errors
        below = f"{path}/"
        return next((dialect for prefix, dialect in self._prefixes if below.startswith(prefix)), TEI)

    def _named_paths(self) -> Iterator[NamedPath]:
        """Yield the paths with a name that may contain slashes, apart from those below a model."""
        templates = [path for path, options in self._options.items() if options.name_has_slashes]
        for template in sorted(templates, key=len, reverse=True):
            if NAME in template and not template.startswith(BELOW_MODEL):
                start, _, end = template.partition(NAME)
                yield NamedPath(template, start, end.replace(METHOD, ":"))

    def _label_prefixes(self) -> Iterator[tuple[str, str]]:
        for template, options in self._options.items():
            prefix, _, parameter = template.rpartition("/")
            if parameter.startswith("{") and template != BELOW_MODEL:
                name = "model" if options.answer is not None else parameter.strip("{}").partition(":")[0]
                yield f"{prefix}/", f"{prefix}/{{{name}}}"


def model_name(segment: str | None) -> str | None:
    """Return the name that a path parameter of the router stands for."""
    return None if segment is None else segment.replace(SLASH, "/")
