"""From the text of router.yaml to a Config, or to every problem at once.

Parsed, then `${NAME}`, `${NAME:-default}` and `${file:/path}` are filled inside scalars, then typed.
The environment is an argument: only the command line reads the real one.
"""

import hashlib
import re
import ssl
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from backends.checkpoints import is_path
from gateway.config.schema import (
    KEY_DIGEST,
    OPERATION_SEGMENTS,
    Config,
    Key,
    ListenerTls,
    Model,
    Section,
    Tenant,
    Tracing,
    Upstream,
    UpstreamTls,
    digest_of,
    host_and_port,
    limit_problems,
)

MERGE_TAG = "tag:yaml.org,2002:merge"
# A file that says more than this says it by aliases of aliases, and would fill the memory.
VALUES_MAX = 100_000
PLACEHOLDER = re.compile(r"\$\$\{|\$\{([^}]*)\}")
STORE = re.compile(r"(rediss?|redis\+cluster)://[^/]|redis\+sentinel://[^/]+/[^/]+")
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
STORES_ALLOWED = "memory, redis://host:port/db, rediss://host:port/db, redis+sentinel://h1,h2/name/db, redis+cluster://h1,h2"
# As browsers send it: no path, not even its slash; a part of the host may be left open by *.
ORIGIN = re.compile(r"https?://[^/\s?#@]+")
ENDPOINT = re.compile(r"https?://[^/\s?#]+(/[^\s]*)?")
# Keys that would be tried first; the empty one is what an unset variable was hashed to.
GUESSED_FIRST = ("", "admin", "changeme", "password", "secret", "test")
GUESSED_DIGESTS = frozenset("sha256:" + hashlib.sha256(one.encode()).hexdigest() for one in GUESSED_FIRST)
VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


_Tls = TypeVar("_Tls", ListenerTls, UpstreamTls)


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong: where in the file, and what would be allowed there."""

    path: str
    message: str


class ConfigError(Exception):
    """The file cannot be used; problems lists every reason found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(f"{one.path}: {one.message}" for one in problems))
        self.problems = problems


def load_config(path: Path, environment: Mapping[str, str]) -> Config:
    """Read, fill, type and cross-check a router.yaml.

    Raises: ConfigError with all problems.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(str(path), f"cannot be read: {reason}")]) from error
    config = parse_config(text, environment, path.parent)
    if problems := [*_missing_folders(config), *_tls_problems(config), *_missing_exporter(config)]:
        raise ConfigError(problems)
    return config


def _missing_exporter(config: Config, exporter: str = EXPORTER) -> Iterator[Problem]:
    """What sends spans is an extra of the package."""
    if config.tracing is None:
        return
    try:
        found = find_spec(exporter)
    except ModuleNotFoundError:
        found = None
    if found is None:
        yield Problem("tracing", "needs the package's extra `otlp`: pip install 'embedding-gateway[otlp]'")


def parse_config(text: str, environment: Mapping[str, str], base: Path) -> Config:
    """Like `load_config`, from text; base is what relative paths are relative to."""
    data = _parsed(text)
    problems: list[Problem] = []
    try:
        filled = _Filler(environment, base, problems).fill(data, "")
    except RecursionError as error:
        raise ConfigError([Problem("the file", "a value holds itself, or far too much")]) from error
    unfilled = {one.path for one in problems}
    problems.extend(p for p in type_problems(filled, Config, "") if p.path not in unfilled)
    config = _typed(filled, [one.path for one in problems])
    if config is not None:
        known = _Names(frozenset(filled["upstreams"]), frozenset(filled["models"]))
        reported = {one.path for one in problems}
        problems.extend(p for p in _cross_problems(config, known) if p.path not in reported)
    if problems or config is None:
        raise ConfigError(problems)
    return _anchored(config, base)


class _Names(msgspec.Struct, frozen=True):
    """What the file names, so that an entry with a mistake of its own still counts as there."""

    upstreams: frozenset[str]
    models: frozenset[str]


_REQUIRED: dict[str, tuple[str, ...]] = {
    section: tuple(field.name for field in msgspec.structs.fields(kind) if field.required)
    for section, kind in (("upstreams", Upstream), ("models", Model), ("tenants", Tenant))
}


def _typed(filled: dict[str, Any], bad_paths: list[str]) -> Config | None:
    """The config without the values already found wrong, so that the rest is checked too.

    None where so much is wrong that nothing is left to cross-check.
    """
    sound = _without(filled, "", bad_paths)
    try:
        return msgspec.convert(sound, Config, strict=False)
    except msgspec.ValidationError:
        return None


def _without(value: Any, path: str, bad_paths: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, one in value.items():
        place = _join(path, str(name))
        # An entry goes only where the value at fault is one that it cannot be without.
        needed = _REQUIRED.get(path, ())
        if place in bad_paths or any(_join(place, one) in bad_paths for one in needed):
            continue
        kept[name] = _without(one, place, bad_paths)
    return kept


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice; PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:
                # What a merge brings may be overridden: that is what it is for.
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is one word", problem_mark=key_node.start_mark)
            # As text: every key here is a name, and 1 would become the same name as "1".
            key = key_node.value
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_moment(self, node: yaml.ScalarNode) -> datetime:
        """A day alone is its beginning, as on the command line."""
        found = self.construct_yaml_timestamp(node)
        return (
            found if isinstance(found, datetime) else datetime(found.year, found.month, found.day, tzinfo=UTC)
        )


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_moment)


def _parsed(text: str) -> Any:
    try:
        # A subclass of SafeLoader, which makes plain values only.
        data = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "the file"
        raise ConfigError([Problem(line, f"not valid YAML: {error.problem}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([Problem("the file", f"not valid YAML: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem("the file", "expected a mapping with upstreams and models")])
    return data


class _Filler:
    """Replaces placeholders inside scalars, and collects those it cannot fill."""

    def __init__(self, environment: Mapping[str, str], base: Path, problems: list[Problem]) -> None:
        self._environment = environment
        self._base = base
        self._problems = problems
        self._values = 0

    def fill(self, value: Any, path: str) -> Any:
        """A copy of a parsed value with every placeholder filled.

        Raises: RecursionError where a value holds itself or far too much.
        """
        self._values += 1
        if self._values > VALUES_MAX:
            raise RecursionError
        match value:
            case dict():
                return {str(k): self.fill(v, _join(path, str(k))) for k, v in value.items()}
            case list():
                return [self.fill(v, f"{path}[{i}]") for i, v in enumerate(value)]
            case str():
                return PLACEHOLDER.sub(lambda found: self._filled(found, path), value)
        return value

    def _filled(self, found: re.Match[str], path: str) -> str:
        inside = found.group(1)
        if inside is None:
            return "${"
        if inside.startswith("file:"):
            return self._file(inside.removeprefix("file:"), path)
        variable = VARIABLE.fullmatch(inside)
        if variable is None:
            return self._problem(
                path, f"${{{inside}}} is not ${{NAME}}, ${{NAME:-default}} or ${{file:/path}}"
            )
        name, default = variable.groups()
        value = self._environment.get(name) or default
        if value is None:
            return self._problem(
                path, f"the environment has no {name}; set it, or write ${{{name}:-default}}"
            )
        return value

    def _file(self, name: str, path: str) -> str:
        try:
            return (self._base / name).read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            return self._problem(path, f"the file {name} cannot be read ({type(error).__name__})")

    def _problem(self, path: str, message: str) -> str:
        self._problems.append(Problem(path, message))
        return ""


def type_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    """Walk the schema beside the data, so that one wrong leaf does not hide the next."""
    if value is not None and get_origin(kind) is UnionType:
        # A section that may be absent is here.
        kind = next((one for one in get_args(kind) if _is_section(one)), kind)
    if _is_section(kind):
        yield from _section_problems(value, kind, path)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            yield Problem(path, f"expected a mapping, not {_shown(value)}")
            return
        for name, one in value.items():
            yield from type_problems(one, get_args(kind)[1], _join(path, name))
    else:
        yield from _leaf_problems(value, kind, path)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _section_problems(value: Any, kind: type[Section], path: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(path, f"expected a mapping, not {_shown(value)}")
        return
    annotations = get_type_hints(kind, include_extras=True)
    for name, one in value.items():
        if name in annotations:
            yield from type_problems(one, annotations[name], _join(path, name))
        else:
            yield Problem(_join(path, name), f"unknown key; allowed here: {', '.join(annotations)}")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            yield Problem(_join(path, field.name), "is missing")


def _leaf_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0]
        if choices := _choices(kind):
            reason = f"{value!r} is not one of: {', '.join(choices)}"
        yield Problem(path, reason[0].lower() + reason[1:])


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, also of one that may be absent."""
    if get_origin(kind) is Literal:
        return [str(one) for one in get_args(kind)]
    return [choice for one in get_args(kind) if get_origin(one) is Literal for choice in _choices(one)]


def _cross_problems(config: Config, known: _Names) -> Iterator[Problem]:
    """What each value alone cannot show: names that must exist, kinds that must fit."""
    yield from _process_problems(config)
    for name, upstream in config.upstreams.items():
        yield from upstream_problems(upstream, f"upstreams.{name}")
    for name, model in config.models.items():
        yield from model_problems(name, model, known.upstreams)
    for operation in ("embed", "rerank", "classify"):
        default = getattr(config.defaults, operation)
        if default is not None and default not in known.models:
            yield Problem(f"defaults.{operation}", _unknown("model", default, known.models))
    yield from _tenant_problems(config, known)


def _process_problems(config: Config) -> Iterator[Problem]:
    """The listener, the store, and what stands before them."""
    try:
        host_and_port(config.listen)
    except ValueError as error:
        yield Problem("listen", f"{config.listen!r}: {error}")
    yield from _admin_problems(config)
    yield from _tracing_problems(config.tracing)
    if problem := _store_problem(config.quotas.store):
        yield Problem("quotas.store", problem)
    for index, network in enumerate(config.trusted_proxies):
        if not _is_network(network):
            yield Problem(f"trusted_proxies[{index}]", "not an address or a network, such as 10.0.0.0/8")
    for index, origin in enumerate(config.cors.origins if config.cors else ()):
        if origin != "*" and not ORIGIN.fullmatch(origin):
            yield Problem(f"cors.origins[{index}]", "not an origin, such as https://app.example.org, or *")
    if config.workers > 1 and config.quotas.store == "memory":
        yield Problem(
            "workers", "more than 1 need quotas that they count together: a Redis in `quotas.store`"
        )


def _tracing_problems(tracing: Tracing | None) -> Iterator[Problem]:
    if tracing and not ENDPOINT.fullmatch(tracing.endpoint):
        yield Problem("tracing.endpoint", "not a URL, such as http://127.0.0.1:4318/v1/traces")


def _store_problem(store: str) -> str | None:
    """What is wrong with it, without any part of it: it may hold a password."""
    if store == "memory":
        return None
    if not STORE.match(store):
        return f"not one of: {STORES_ALLOWED}"
    try:
        parts = urlsplit(store)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        ports = [urlsplit(f"//{host}").port for host in hosts]
        if (
            all(urlsplit(f"//{host}").hostname for host in hosts)
            and 0 not in ports
            and "@" not in (parts.path + parts.query + parts.fragment)
        ):
            return None
    except ValueError:
        pass
    return "its host or port cannot be read; in a password / # ? @ and % are written %2F %23 %3F %40 and %25"


def _admin_problems(config: Config) -> Iterator[Problem]:
    if config.admin.listen is None:
        return
    try:
        _, port = host_and_port(config.admin.listen)
    except ValueError as error:
        yield Problem("admin.listen", f"{config.admin.listen!r}: {error}")
        return
    if port and str(port) == config.listen.rpartition(":")[2].lstrip("0"):
        yield Problem("admin.listen", "needs a port of its own, other than that of `listen`")


def upstream_problems(upstream: Upstream, path: str) -> Iterator[Problem]:
    """What is wrong with an upstream beside its types."""
    if upstream.is_hosted:
        if not upstream.model:
            yield Problem(f"{path}.model", "is missing; a hub id or the path of a checkpoint")
        if upstream.replicas:
            yield Problem(f"{path}.replicas", "torch runs here; replicas are for remote backends")
        return
    yield from _remote_problems(upstream, path)


def _remote_problems(upstream: Upstream, path: str) -> Iterator[Problem]:
    if not upstream.replicas:
        yield Problem(f"{path}.replicas", "is missing; a list of base URLs, http://host:port")
    if upstream.backend == "infinity" and not upstream.tokenizer:
        yield Problem(
            f"{path}.tokenizer",
            "is missing; Infinity counts characters, so its tokens are counted here: a hub id, or the path "
            "of a checkpoint's tokenizer.json and config files",
        )
    for index, url in enumerate(upstream.replicas):
        if _has_credentials(url):
            # They would be shown wherever the replica is named: in logs, metrics and events.
            yield Problem(
                f"{path}.replicas[{index}]", "a user or password; write them as `api_key` or `headers`"
            )
        elif not _is_base_url(url):
            yield Problem(f"{path}.replicas[{index}]", "not a base URL, http://host:port")
        elif url in upstream.replicas[:index]:
            yield Problem(f"{path}.replicas[{index}]", "is listed twice")


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def _has_credentials(url: str) -> bool:
    # Also where a password with a / or # of its own makes it another URL.
    return "@" in url


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            return False
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def model_problems(name: str, model: Model, upstreams: Collection[str]) -> Iterator[Problem]:
    """What is wrong with a model beside its types. upstreams: those there are."""
    path = f"models.{name}"
    yield from _limit_problems(model.limits, f"{path}.limits")
    if model.upstream not in upstreams:
        yield Problem(f"{path}.upstream", _unknown("upstream", model.upstream, upstreams))
    if not name or name.strip("/") != name or "//" in name:
        yield Problem(path, "a name is not empty, and its slashes stand between other characters")
    if name.rsplit("/", 1)[-1] in OPERATION_SEGMENTS | {"v1", "v2"}:
        yield Problem(
            path, "a name may not end in an operation, v1 or v2: /models/{name}/{operation} must be clear"
        )


def _tenant_problems(config: Config, known: _Names) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    yield from _key_problems(config.admin.keys, "admin", owners)
    for name, tenant in config.tenants.items():
        path = f"tenants.{name}"
        yield from _key_problems(tenant.keys, path, owners)
        for index, model in enumerate(tenant.models or ()):
            if model not in known.models:
                yield Problem(f"{path}.models[{index}]", _unknown("model", model, known.models))
        yield from _limit_problems(tenant.limits, f"{path}.limits")
        for model, limits in tenant.model_limits.items():
            place = f"{path}.model_limits.{model}"
            if model not in known.models:
                yield Problem(place, _unknown("model", model, known.models))
            yield from _limit_problems(limits, place)


def _limit_problems(limits: Iterable[str], path: str) -> Iterator[Problem]:
    return (Problem(f"{path}.{name}", message) for name, message in limit_problems(limits).items())


def _key_problems(keys: Iterable[str | Key], path: str, owners: dict[str, str]) -> Iterator[Problem]:
    for index, key in enumerate(keys):
        digest, place = digest_of(key), f"{path}.keys[{index}]"
        if not KEY_DIGEST.fullmatch(digest):
            # The value itself stays out of the message: it may be a key in the clear.
            yield Problem(place, 'expected "sha256:" and 64 hex digits')
        elif digest in GUESSED_DIGESTS:
            yield Problem(
                place, "is a key that anybody would guess, or an empty one; `gateway keys create` makes one"
            )
        elif digest in owners:
            yield Problem(place, f"is also {owners[digest]}")
        if isinstance(key, Key):
            yield from _limit_problems(key.limits, f"{place}.limits")
        owners.setdefault(digest, place)


def _missing_folders(config: Config) -> Iterator[Problem]:
    for name, upstream in config.upstreams.items():
        yield from missing_folder(upstream, f"upstreams.{name}")
    if config.admin.files is not None and not Path(config.admin.files).is_dir():
        yield Problem("admin.files", f"there is no folder {config.admin.files}")


def missing_folder(upstream: Upstream, path: str) -> Iterator[Problem]:
    """A checkpoint that can only be on this machine, and is not."""
    model = upstream.model or ""
    if upstream.is_hosted and is_path(model) and not Path(model).expanduser().is_dir():
        yield Problem(f"{path}.model", f"there is no folder {model}")


def _tls_problems(config: Config) -> Iterator[Problem]:
    """Certificates and keys that cannot be used; a context tells by loading them."""
    if (listener := config.tls) is not None:
        yield from _unusable(listener.certificate, listener.private_key, listener.client_ca, "tls")
    for name, upstream in config.upstreams.items():
        yield from upstream_tls_problems(upstream.tls, f"upstreams.{name}.tls")


def upstream_tls_problems(tls: UpstreamTls, path: str) -> Iterator[Problem]:
    """The same of one upstream."""
    if (tls.certificate is None) is not (tls.private_key is None):
        yield Problem(path, "a certificate needs its private_key, and the other way round")
    else:
        yield from _unusable(tls.certificate, tls.private_key, tls.ca, path)


def _unusable(certificate: str | None, key: str | None, ca: str | None, path: str) -> Iterator[Problem]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if certificate is not None:
            # Without a callback OpenSSL would ask a terminal for the password of an encrypted key.
            context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        yield Problem(f"{path}.certificate", f"cannot be used with its key: {_reason(error)}")
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:
        yield Problem(f"{path}.{'client_ca' if path == 'tls' else 'ca'}", f"cannot be used: {_reason(error)}")


def _no_password() -> str:
    raise ValueError("the key is encrypted; one without a password is needed")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key is that of another certificate"
    if isinstance(error, ssl.SSLError):
        return "not what a PEM file of this kind holds"
    return getattr(error, "strerror", None) or str(error)


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    return f"there is no {what} {name!r}; there are: {', '.join(sorted(known)) or 'none'}"


def _anchored(config: Config, base: Path) -> Config:
    """Make relative paths of files and folders relative to the file."""
    upstreams = {name: anchored(one, base) for name, one in config.upstreams.items()}
    tls = config.tls and _anchored_tls(config.tls, base)
    files = None if config.admin.files is None else str(base / config.admin.files)
    admin = msgspec.structs.replace(config.admin, files=files)
    return msgspec.structs.replace(config, upstreams=upstreams, tls=tls, admin=admin)


def anchored(upstream: Upstream, base: Path) -> Upstream:
    """The upstream with the paths of its files relative to a folder."""

    def anchor(name: str | None) -> str | None:
        if name is None or name.startswith(("/", "~")):
            return name
        return str((base / name).resolve()) if is_path(name) or (base / name).is_dir() else name

    return msgspec.structs.replace(
        upstream,
        tls=_anchored_tls(upstream.tls, base),
        model=anchor(upstream.model) if upstream.is_hosted else upstream.model,
        tokenizer=anchor(upstream.tokenizer),
        token_encoding=anchor(upstream.token_encoding),
    )


def _anchored_tls(tls: _Tls, base: Path) -> _Tls:
    paths = {name: path and str(base / path) for name, path in msgspec.structs.asdict(tls).items()}
    return msgspec.structs.replace(tls, **paths)


def _shown(value: Any) -> str:
    """What kind of value it is; the value itself may be a secret in the wrong place."""
    return "text" if isinstance(value, str) else type(value).__name__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
