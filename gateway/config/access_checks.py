"""Checks of who may call, and where: listeners, tenants and their keys, single sign-on. Reads no files."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TypeAlias
from urllib.parse import urlsplit

from gateway.config.certificate_entries import canonical_entry, entry_problem
from gateway.config.money import is_budget
from gateway.config.problems import Problem, unknown_models, unknown_name
from gateway.config.schema import (
    KEY_DIGEST,
    OPERATORS,
    ClaimMapping,
    Config,
    ConsoleClient,
    EndUsersSettings,
    IssuerSettings,
    Key,
    LimitAmount,
    default_problems,
    digest_of,
    host_and_port,
    is_loopback,
    limit_problems,
    shared_limit_problems,
)

Network: TypeAlias = IPv4Network | IPv6Network

# An origin as browsers send it, without a path or a trailing slash. A * may stand for a part of the host.
ORIGIN = re.compile(r"https?://[^/\s?#@]+")
ENDPOINT = re.compile(r"https?://[^/\s?#]+(/[^\s]*)?")
TRACE_ID = "{trace_id}"
TRACE_LINK = re.compile(r"https?://[^/\s?#{}@]+[/?#]\S*\{trace_id\}\S*")
CURRENCY_MEANING = "the name of the money in which prices and budgets are written, such as EUR"
NO_CLIENT_CA = "needs `tls.client_ca`, the authority that signs clients' certificates"
NO_OPERATORS = "operators need a key"
NO_NETWORK = "not an address or a network, such as 10.0.0.0/8"
EVERY_ADDRESS = "is every address; for callers without a key from anywhere, `listeners` has a port of its own"
# No caller has such an address: a listener on both protocols shows IPv4.
MAPPED_IPV4 = IPv6Network("::ffff:0:0/96")
# Keys that an attacker tries first. The empty one is the digest of a variable that was not set.
GUESSABLE_KEYS = ("", "admin", "changeme", "password", "secret", "test")
GUESSABLE_DIGESTS = frozenset("sha256:" + hashlib.sha256(key.encode()).hexdigest() for key in GUESSABLE_KEYS)
# Of end users: a header, or the field `user`.
HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
# Part of the ids under which its users appear in usage, limits and logs. Those of client certificates begin
# with `certificate`.
ISSUER_NAME = re.compile(r"(?!certificate\Z)[A-Za-z0-9_-]{1,32}")
ISSUER_NAME_PROBLEM = (
    "a name has up to 32 letters, digits, - and _, and is not `certificate`: it is part of users' ids"
)
# Printable ASCII without the characters that RFC 3986 has no place for.
ISSUER_ADDRESS = re.compile(r"[!#-;=?@A-Z\[\]_a-z~]{1,2048}")


def _tracing_problems(config: Config) -> Iterator[Problem]:
    tracing = config.tracing
    if tracing is None:
        return
    if not ENDPOINT.fullmatch(tracing.endpoint):
        yield Problem("tracing.endpoint", "not a URL, such as http://127.0.0.1:4318/v1/traces")
    if tracing.link is not None and not TRACE_LINK.fullmatch(tracing.link):
        yield Problem(
            "tracing.link",
            f"not an address of a trace, http or https with {TRACE_ID} in it, such as "
            f"https://jaeger.example/trace/{TRACE_ID}",
        )


def listener_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of listeners, proxies, origins and collectors."""
    yield from _port_problems(config)
    yield from _tracing_problems(config)
    if (tls := config.tls) is not None and tls.client_ca is None and tls.client_certificates == "optional":
        yield Problem("tls.client_certificates", NO_CLIENT_CA)
    if config.metrics and not ENDPOINT.fullmatch(config.metrics.endpoint):
        yield Problem("metrics.endpoint", "not a URL, such as http://127.0.0.1:4318/v1/metrics")
    for index, network in enumerate(config.trusted_proxies):
        if problem := _form_problem(network):
            yield Problem(f"trusted_proxies[{index}]", problem)
    for index, origin in enumerate(config.cors.origins if config.cors else ()):
        if origin != "*" and not ORIGIN.fullmatch(origin):
            yield Problem(f"cors.origins[{index}]", "not an origin, such as https://app.example.org, or *")


def _port_problems(config: Config) -> Iterator[Problem]:
    listeners = {
        "listen": config.listen,
        "admin.listen": config.admin.listen,
        "grpc.listen": None if config.grpc is None else config.grpc.listen,
        "manager.listen": None if config.manager is None else config.manager.listen,
    }
    for number, listener in enumerate(config.listeners):
        listeners[f"listeners[{number}].address"] = listener.address
    ports: list[int] = []
    for index, (path, listen) in enumerate(listeners.items()):
        if listen is None:
            continue
        try:
            _, port = host_and_port(listen)
        except ValueError as error:
            yield Problem(path, f"{listen!r}: {error}")
            continue
        if port and port in ports:
            *names, last = (f"`{name}`" for name in [*listeners][:index])
            others = f"those of {', '.join(names)} and {last}" if names else f"that of {last}"
            yield Problem(path, f"needs a port of its own, other than {others}")
        ports.append(port)


def is_network(text: str) -> bool:
    """Return True if a text is an address or a network."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def tenant_problems(config: Config, models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of tenants, keys and client certificates. models: names that exist in the file."""
    first_use: dict[str, str] = {}
    yield from _key_problems(config.admin.keys, "admin", first_use)
    yield from _key_default_problems(config, models)
    yield from _certificate_problems(config)
    yield from _place_problems(config, models)
    for name, tenant in config.tenants.items():
        path = f"tenants.{name}"
        if any(ord(character) < ord(" ") for character in name):
            # The ledgers count accounts of upstreams under such names.
            yield Problem(path, "the name of a tenant has no control characters")
        yield from _key_problems(tenant.keys, path, first_use)
        yield from unknown_models(tenant.models or (), f"{path}.models", models)
        if tenant.end_user_limits and config.end_users is None:
            yield Problem(f"{path}.end_user_limits", "needs `end_users`, which says where requests name them")
        for model in tenant.model_limits:
            if model not in models:
                yield Problem(f"{path}.model_limits.{model}", unknown_name("model", model, models))


def end_user_problems(settings: EndUsersSettings | None) -> Iterator[Problem]:
    """Yield the problems of the places where requests name their end users."""
    for index, name in enumerate(() if settings is None else settings.sources):
        if not HEADER_NAME.fullmatch(name):
            yield Problem(
                f"end_users.from[{index}]", "expected `user`, the field of a body, or a header's name"
            )
        elif name.lower() in SECRET_HEADERS:
            yield Problem(f"end_users.from[{index}]", "is the header of a secret, not of a name")


def _key_problems(keys: Iterable[str | Key], path: str, first_use: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems of a list of keys.

    first_use: digest → path of its first use, which is filled as keys are checked, because a key that is
    listed twice would not identify its tenant.
    """
    for index, key in enumerate(keys):
        digest, key_path = digest_of(key), f"{path}.keys[{index}]"
        if not KEY_DIGEST.fullmatch(digest):
            # The message leaves the value out: it may be a key in the clear.
            yield Problem(
                key_path,
                'expected "sha256:" and 64 hex digits, the digest of a key: printf %s "$KEY" | sha256sum; '
                "`gateway keys create TENANT --yaml` makes a key and its line",
            )
        elif digest in GUESSABLE_DIGESTS:
            yield Problem(
                key_path,
                "is an empty or easily guessed key; `gateway keys create` creates one",
            )
        elif digest in first_use:
            yield Problem(key_path, f"is also {first_use[digest]}")
        first_use.setdefault(digest, key_path)


def _certificate_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of listed client certificates: each identifies one tenant, if TLS verifies it."""
    lists = {"admin": config.admin.certificates}
    lists |= {f"tenants.{name}": tenant.certificates for name, tenant in config.tenants.items()}
    first_use: dict[str, str] = {}
    for owner, entries in lists.items():
        if entries and not config.verifies_clients:
            yield Problem(f"{owner}.certificates", NO_CLIENT_CA)
        for index, entry in enumerate(entries):
            path, canonical = f"{owner}.certificates[{index}]", canonical_entry(entry)
            if problem := entry_problem(entry):
                yield Problem(path, problem)
            elif canonical in first_use:
                yield Problem(path, f"is also {first_use[canonical]}")
            first_use.setdefault(canonical, path)


def _place_problems(config: Config, models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of places in place of keys: each network identifies one tenant."""
    for index, listener in enumerate(config.listeners):
        if listener.tenant == OPERATORS:
            yield Problem(f"listeners[{index}].tenant", NO_OPERATORS)
        tenant = config.tenants.get(listener.tenant)
        of_tenant = None if tenant is None else tenant.models
        yield from _default_problems(
            f"listeners[{index}].defaults", listener.defaults, models, None, of_tenant
        )
    proxies = [ip_network(proxy) for proxy in config.trusted_proxies if is_network(proxy)]
    first_use: dict[Network, str] = {}
    for name, tenant in config.tenants.items():
        if tenant.networks and name == OPERATORS:
            yield Problem(f"tenants.{name}.networks", NO_OPERATORS)
        for index, written in enumerate(tenant.networks):
            path = f"tenants.{name}.networks[{index}]"
            if problem := _network_problem(written, proxies, first_use):
                yield Problem(path, problem)
            else:
                first_use[ip_network(written)] = path


def _key_default_problems(config: Config, models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of the default models of all keys. models: names of all models."""
    for name, tenant in config.tenants.items():
        for index, key in enumerate(tenant.keys):
            if isinstance(key, Key):
                path, allowed = f"tenants.{name}.keys[{index}].defaults", (key.models, tenant.models)
                yield from _default_problems(path, key.defaults, models, key.scopes, *allowed)
    for index, key in enumerate(config.admin.keys):
        if isinstance(key, Key):
            path = f"admin.keys[{index}].defaults"
            yield from _default_problems(path, key.defaults, models, key.scopes or ())


def _default_problems(
    path: str,
    defaults: Mapping[str, str],
    known: Collection[str],
    scopes: Collection[str] | None,
    *models: Collection[str] | None,
) -> Iterator[Problem]:
    """Yield the problems of the default models of a key. known: names of all models."""
    for operation, model in defaults.items():
        if model not in known:
            yield Problem(f"{path}.{operation}", unknown_name("model", model, known))
    for operation, problem in default_problems(defaults, scopes, *models):
        if defaults[operation] in known:
            yield Problem(f"{path}.{operation}", problem)


def _network_problem(
    written: str, proxies: Iterable[Network], first_use: Mapping[Network, str]
) -> str | None:
    """Return why a network cannot identify a tenant, None if it can. first_use: of networks before it."""
    if is_network(written) and _is_everything(ip_network(written)):
        return EVERY_ADDRESS
    if problem := _form_problem(written):
        return problem
    network = ip_network(written)
    if network in first_use:
        return f"is also {first_use[network]}"
    is_hidden = any(proxy.version == network.version and network.subnet_of(proxy) for proxy in proxies)  # type: ignore[arg-type]
    return "has no effect: all of it are `trusted_proxies`, which are no callers" if is_hidden else None


def _form_problem(written: str) -> str | None:
    """Return why a text is no network that an address could be in, None if it is one."""
    if not is_network(written):
        return NO_NETWORK
    mapped = _mapped(ip_network(written))
    if mapped is not None:
        return f"is IPv4 in the form of IPv6, which counts as IPv4: write {mapped}"
    return None


def _is_everything(network: Network) -> bool:
    mapped = _mapped(network)
    return 0 in (network.prefixlen, mapped and mapped.prefixlen)


def _mapped(network: Network) -> IPv4Network | None:
    """Return the IPv4 network that a network of `::ffff:0:0/96` stands for, None for any other."""
    if network.version == 4 or not network.subnet_of(MAPPED_IPV4):
        return None
    return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - MAPPED_IPV4.prefixlen))


def named_limit_problems(limits: Mapping[str, LimitAmount], path: str) -> Iterator[Problem]:
    """Yield a problem for each limit whose name is unknown, or whose amount is wrong."""
    return (Problem(f"{path}.{name}", message) for name, message in limit_problems(limits).items())


def all_limit_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of all limits: also those of limits that a model cannot have, and of no currency."""
    for path, limits in _limits_of_models(config):
        for name in limits:
            if name.startswith("batch_"):
                yield Problem(f"{path}.{name}", "only `limits` of tenants and keys may have it")
    for path, limits in (*_limits_of_models(config), *_limits_of_callers(config)):
        if config.currency is None:
            for name in filter(is_budget, limits):
                yield Problem(f"{path}.{name}", f"needs `currency`, {CURRENCY_MEANING}")
        yield from named_limit_problems(limits, path)
    yield from _shared_limit_problems(config)


def _shared_limit_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of limits that end users cannot have."""
    places = [
        (f"tenants.{name}.end_user_limits", each.end_user_limits) for name, each in config.tenants.items()
    ]
    for path, limits in places:
        for name, message in shared_limit_problems(limits, "end users").items():
            yield Problem(f"{path}.{name}", message)


def _limits_of_models(config: Config) -> Iterator[tuple[str, Mapping[str, LimitAmount]]]:
    """Yield the limits of models, and of tenants for one model, with their paths."""
    for name, model in config.models.items():
        yield f"models.{name}.limits", model.limits
    for name, tenant in config.tenants.items():
        for model_name, limits in tenant.model_limits.items():
            yield f"tenants.{name}.model_limits.{model_name}", limits


def _limits_of_callers(config: Config) -> Iterator[tuple[str, Mapping[str, LimitAmount]]]:
    """Yield the limits of tenants, of keys and of users by single sign-on, with their paths."""
    owners: dict[str, Sequence[str | Key]] = {"admin": config.admin.keys}
    for name, tenant in config.tenants.items():
        yield f"tenants.{name}.limits", tenant.limits
        yield f"tenants.{name}.end_user_limits", tenant.end_user_limits
        owners[f"tenants.{name}"] = tenant.keys
    for owner, keys in owners.items():
        for index, key in enumerate(keys):
            if isinstance(key, Key):
                yield f"{owner}.keys[{index}].limits", key.limits
    for name, issuer in config.sign_on.items():
        claim = issuer.claims.limits
        for value, limits in (claim.values if claim else {}).items():
            yield f"sign_on.{name}.claims.limits.values.{value}", limits


def sign_on_problems(issuers: Mapping[str, IssuerSettings], models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of all issuers. models: names of the models."""
    names: dict[str, str] = {}
    for name, settings in issuers.items():
        path = f"sign_on.{name}"
        if not ISSUER_NAME.fullmatch(name):
            yield Problem(path, ISSUER_NAME_PROBLEM)
        if problem := issuer_address_problem(settings.issuer):
            yield Problem(f"{path}.issuer", problem)
        elif "?" in settings.issuer:
            yield Problem(f"{path}.issuer", "has a query, which the address of an issuer has not")
        elif (other := names.setdefault(issuer_key(settings.issuer), name)) != name:
            yield Problem(f"{path}.issuer", f"is also sign_on.{other}.issuer")
        if not all(settings.audience):
            yield Problem(f"{path}.audience", "has an empty text")
        if settings.console is not None:
            yield from _console_problems(settings.console, f"{path}.console")
        yield from _claim_problems(settings.claims, f"{path}.claims", models)


def issuer_key(address: str) -> str:
    """Return the address of an issuer without a slash at its end, which leads to the same description."""
    return address.removesuffix("/")


def _console_problems(client: ConsoleClient, path: str) -> Iterator[Problem]:
    if not client.client_id:
        yield Problem(f"{path}.client_id", "is empty")
    if "openid" not in client.scopes:
        yield Problem(f"{path}.scopes", "openid is missing, without which there is no ID token")


def _claim_problems(claims: ClaimMapping, path: str, models: Collection[str]) -> Iterator[Problem]:
    tables = {name: getattr(claims, name) for name in ("tenant", "scopes", "models", "limits")}
    paths = {"key": claims.key} | {name: table.claim for name, table in tables.items() if table is not None}
    for name, claim in paths.items():
        if not claim or not all(claim):
            yield Problem(f"{path}.{name}", "the name of its claim is empty")
    for value, names in ((claims.models and claims.models.values) or {}).items():
        yield from unknown_models(names, f"{path}.models.values.{value}", models)


def issuer_address_problem(url: str, *, may_be_http: bool = True) -> str | None:
    """Return why an issuer, or one of its endpoints, cannot have an address; None if it can.

    may_be_http: on this machine. Elsewhere another server could send its own keys.
    """
    problem = "not a URL such as https://login.example.org, without a user name and a fragment"
    if not ISSUER_ADDRESS.fullmatch(url) or "#" in url:
        return problem
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return problem
    if not host or port == 0 or "@" in parts.netloc:
        return problem
    if parts.scheme == "http" and may_be_http and is_loopback(host):
        return None
    return None if parts.scheme == "https" else "needs https; http only on this machine's loopback"
