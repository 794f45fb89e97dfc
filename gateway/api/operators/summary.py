"""GET /admin/tenants/{name}/summary: all that a console shows of one tenant."""

from datetime import UTC, datetime

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.operators.access import OPERATORS
from gateway.api.operators.admin import Admin
from gateway.api.operators.directory import TenantDirectory, TodayUsage, UsedLimit, shown, used_limit
from gateway.api.operators.keys import ListedKey, listed_key
from gateway.api.operators.tenants import TenantSettings, settings_of
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.errors import NotFound
from gateway.quotas.limits import SECOND_US, LimitStatus
from gateway.quotas.usage import Forecast, days_of_month, month_usage
from gateway.tenants.directory import KeyEntry
from gateway.tenants.store import tag_of

FAILURES = document_errors(TEI)
# Keys of a tenant that the summary lists; GET /admin/keys has all of them.
KEYS_MAX = 1_000


class LimitState(UsedLimit, frozen=True):
    """Limit that applies to a tenant, its keys, or its use of a model, and its state now.

    remaining: what is left, as `of` in the currency for a budget. resets_at_s: when all of it is available
    again if nothing more is used, in seconds since 1970.
    """

    remaining: float
    resets_at_s: float


class MonthSummary(msgspec.Struct, frozen=True):
    """Settled usage of this month (UTC). cost: in the gateway's currency. forecast: as in /admin/usage."""

    cost: float
    tokens: int
    calls: int
    forecast: Forecast | None


class ModelSummary(msgspec.Struct, frozen=True):
    """Settled usage of one model this month. cost: in the gateway's currency."""

    model: str
    calls: int
    tokens: int
    cost: float


class TenantSummary(msgspec.Struct, frozen=True):
    """A tenant of router.yaml or of the store, with its keys, limits and usage.

    in_file: router.yaml defines it. etag: of the stored settings, for `if-match`; null if it is not stored.
    settings: those that apply. key_count: number of its keys, of which `keys` has 1,000 at most. limits: all
    that apply, but those of end users. by_model: of this month. currency: of the costs and budgets. notes:
    warnings.
    """

    name: str
    in_file: bool
    etag: str | None
    settings: TenantSettings
    keys: list[ListedKey]
    key_count: int
    limits: list[LimitState]
    today: TodayUsage
    month: MonthSummary
    by_model: list[ModelSummary]
    currency: str | None
    notes: list[str]


@get("/admin/tenants/{name:str}/summary", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def summarize_tenant(
    admin: NamedDependency[Admin], directory: NamedDependency[TenantDirectory], name: FromPath[str]
) -> TenantSummary:
    """Return a tenant with its keys, the state of its limits, and its usage today and this month.

    Tenants of router.yaml have one too, and that of the first key.
    """
    known = await directory.current()
    tenant = known.tenants.get(name)
    if tenant is None:
        raise NotFound(f"there is no tenant {name!r}")
    entries = [entry for entry in known.keys if entry.key.tenant == name and entry.source != "operators"]
    now = datetime.now(UTC)
    first = now.date().replace(day=1)
    rows = await admin.ledger.usage(name, days_of_month(first, now))
    month = month_usage(first, now, rows, admin.currency)
    states = await directory.states_of([tenant])
    today, _ = (await directory.usage_of([name]))[name]
    total = month.total
    return TenantSummary(
        name,
        tenant.in_file,
        None if tenant.stored is None else tag_of(tenant.stored),
        settings_of(tenant.settings),
        await _keys(directory, entries[:KEYS_MAX]),
        len(entries),
        [_limit_state(state, now.timestamp()) for state in states.get(name, ())],
        today,
        MonthSummary(total.cost, total.tokens, total.requests, total.forecast),
        [ModelSummary(row.model, row.requests, row.tokens, row.cost) for row in month.data],
        admin.currency,
        directory.notes_on(tenant),
    )


async def _keys(directory: TenantDirectory, entries: list[KeyEntry]) -> list[ListedKey]:
    days = await directory.last_uses([entry.key.id for entry in entries])
    return [listed_key(entry, days.get(entry.key.id)) for entry in entries]


def _limit_state(state: LimitStatus, now_s: float) -> LimitState:
    used = used_limit(state)
    return LimitState(
        used.limit,
        used.used,
        used.of,
        used.share,
        shown(state.limit, state.remaining),
        round(now_s + state.reset_us / SECOND_US, 3),
    )


HANDLERS = [summarize_tenant]
