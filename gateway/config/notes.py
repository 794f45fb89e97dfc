"""Settings that are right and may not do what their author expects."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from backends.openai.kind import COHERE
from backends.torch.kind import ENGINE
from gateway.config.problems import Problem
from gateway.config.schema import (
    FIRST_TENANT,
    KINDS_OF_KEYS,
    OPERATORS,
    Config,
    foreign_keys,
    host_and_port,
    is_loopback,
)
from gateway.config.upstream_checks import FOREIGN

# Beginning of the names of Cohere's rerankers.
COHERE_RERANKERS = "rerank-"
# For an operator who adds the first tenant to a file, and whose callers use the first key.
NO_KEYS = (
    "they end the first key, and none has a key in this file: callers get 401 until they have one of "
    "`gateway keys create TENANT`"
)


def lacks_keys(config: Config) -> bool:
    """Return whether a file has tenants, and neither keys nor an issuer of tokens for any of them."""
    return (
        bool(config.tenants)
        and not config.sign_on
        and not any(each.keys or each.certificates or each.networks for each in config.tenants.values())
    )


def notes(config: Config) -> Iterator[Problem]:
    """Yield a note for each setting that has no effect, or less than it seems to have."""
    yield from ignored_keys(config)
    yield from _cache_notes(config)
    yield from _missing_keys(config)
    yield from _uncounted_reranks(config)
    if lacks_keys(config):
        yield Problem("tenants", f"{NO_KEYS}; those that are stored are not read here")
    yield from keyless_notes(config)
    yield from _sign_on_notes(config)
    yield from _forgotten_limits(config)
    yield from _notify_notes(config)


def keyless_notes(config: Config) -> Iterator[Problem]:
    """Yield a note for each place whose callers need no key."""
    for index, listener in enumerate(config.listeners):
        place = f"listeners[{index}]"
        yield Problem(
            place,
            f"a caller at {listener.address} needs no key, and is the tenant {listener.tenant}"
            + (", from every network that leads there" if is_wildcard(listener.address) else ""),
        )
        # Tenants in Redis, or in a file of `state_dir`, are not read here.
        if listener.tenant not in (config.tenants or (FIRST_TENANT,)):
            yield Problem(
                f"{place}.tenant",
                f"there is no tenant {listener.tenant!r} in this file: callers get 403 until "
                "`gateway tenants set` has made it",
            )
    for name, tenant in config.tenants.items():
        if tenant.networks:
            yield Problem(
                f"tenants.{name}.networks",
                f"a caller from {', '.join(tenant.networks)} needs no key, and is this tenant",
            )


def is_wildcard(listen: str) -> bool:
    """Return whether an address to listen on means every interface."""
    return host_and_port(listen)[0] in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


def ignored_keys(config: Config) -> Iterator[Problem]:
    """Yield each key that is set and has no effect."""
    for name, upstream in config.upstreams.items():
        for key in foreign_keys(upstream):
            if KINDS_OF_KEYS[key] == (ENGINE.name,) and key not in FOREIGN:
                yield Problem(
                    f"upstreams.{name}.{key}",
                    f"has no effect: it is for {ENGINE.name}, and this is {upstream.backend}",
                )
    for name, model in config.models.items():
        if model.split_by == "tenant" and len(model.members) == 1 and model.canary is None:
            yield Problem(f"models.{name}.split_by", "has no effect: one upstream gets all calls")


def _cache_notes(config: Config) -> Iterator[Problem]:
    for name, model in config.models.items():
        if not model.cache:
            continue
        for member in model.members:
            if not config.upstreams[member.name].knows_each_input:
                yield Problem(
                    f"models.{name}.cache",
                    "keeps only texts that come alone: the tokens of each of several are not known without "
                    f"`upstreams.{member.name}.tokenizer`",
                )


def _missing_keys(config: Config) -> Iterator[Problem]:
    """Yield a note for each upstream that calls a vendor without any credentials."""
    for name, upstream in config.upstreams.items():
        if upstream.calls_vendor and not upstream.has_credentials:
            yield Problem(
                f"upstreams.{name}.api_key",
                "is empty: the vendor refuses requests without a key; write ${NAME}, which has to be set",
            )


def _uncounted_reranks(config: Config) -> Iterator[Problem]:
    """Yield a note for each reranker of Cohere without a tokenizer, whose replies have no tokens."""
    for name, upstream in config.upstreams.items():
        reranks = upstream.task == "rerank" or (upstream.model or "").startswith(COHERE_RERANKERS)
        if upstream.backend == COHERE.name and reranks and not upstream.tokenizer:
            yield Problem(
                f"upstreams.{name}.tokenizer",
                "is missing: Cohere reports no tokens of a rerank, and a reranker without them does not join",
            )


def lasting_limits(config: Config) -> Iterator[str]:
    """Yield the path of each limit per day or month."""
    places = [(f"models.{name}.limits", model.limits) for name, model in config.models.items()]
    for name, tenant in config.tenants.items():
        places.append((f"tenants.{name}.limits", tenant.limits))
        places += [(f"tenants.{name}.keys", key.limits) for key in tenant.keys if not isinstance(key, str)]
        places += [(f"tenants.{name}.model_limits", limits) for limits in tenant.model_limits.values()]
    for place, limits in places:
        yield from (f"{place}.{limit}" for limit in limits if limit.endswith(("_per_day", "_per_month")))


def _forgotten_limits(config: Config) -> Iterator[Problem]:
    """Yield a note for the first limit whose count may not outlive the gateway."""
    place = next(lasting_limits(config), None)
    if place is not None and config.quotas.store == "memory" and config.state_dir is None:
        yield Problem(
            place,
            "is forgotten at a restart unless the gateway's state folder survives it: set `state_dir` to a "
            "folder that does, or `quotas.store` to a Redis",
        )


def _notify_notes(config: Config) -> Iterator[Problem]:
    notify = config.notify
    if notify is None:
        return
    host = urlsplit(notify.url).hostname or ""
    if notify.url.startswith("http://") and not is_loopback(host):
        yield Problem(
            "notify.url", "is not encrypted: others on the way can read names of tenants and replicas"
        )
    if "store_loss" in notify.on and config.quotas.store == "memory":
        yield Problem("notify.on", "store_loss has no effect without a Redis in `quotas.store`")


def _sign_on_notes(config: Config) -> Iterator[Problem]:
    # Tenants in Redis are not read here.
    if config.quotas.store != "memory":
        return
    for issuer, settings in config.sign_on.items():
        for value, tenant in (settings.claims.tenant.values or {}).items():
            if tenant not in config.tenants and tenant != OPERATORS:
                yield Problem(
                    f"sign_on.{issuer}.claims.tenant.values.{value}",
                    f"there is no tenant {tenant!r} in this file: its users get 403 until "
                    "`gateway tenants set` has made it",
                )
