"""Settings that are right and may not do what their author expects."""

from collections.abc import Iterator

from gateway.config.ignored_keys import ignored_keys
from gateway.config.problems import Problem
from gateway.config.schema import OPERATORS, Config


def notes(config: Config) -> Iterator[Problem]:
    """Yield a note for each setting that has no effect, or less than it seems to have."""
    yield from ignored_keys(config)
    yield from _cache_notes(config)
    yield from _sign_on_notes(config)


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
