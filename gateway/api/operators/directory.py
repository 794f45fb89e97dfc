"""Pages of tenants for operators, who may have thousands: rows with usage and the fullest limit."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

import msgspec

from gateway.api.operators.access import store_errors
from gateway.api.operators.admin import Admin
from gateway.api.operators.pages import Paging
from gateway.config.money import in_currency
from gateway.config.schema import LimitAmount
from gateway.quotas.ledger import Ledger
from gateway.quotas.limits import Limit, LimitStatus, parse_limit
from gateway.quotas.refusals import Refusals
from gateway.quotas.usage import TenantUsage
from gateway.serve import Gateway
from gateway.tenants.directory import Directory, TenantEntry, directory_of, folded
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import FIRST_TENANT, model_scope
from gateway.tenants.snapshot import Stored
from gateway.tenants.store import UNREADABLE, tag_of

SORTS = ("name", "calls", "tokens", "cost", "refused", "keys", "last_used")
# How long the counts of all tenants are good to sort by.
COUNTS_GOOD_S = 5.0
NO_TENANT_USAGE = TenantUsage()
NOTHING_STORED = Stored()


class TodayUsage(msgspec.Struct, frozen=True):
    """Settled usage of today (UTC). cost: in the gateway's currency. refused: calls that quotas refused."""

    calls: int
    tokens: int
    cost: float
    refused: int


class MonthToDate(msgspec.Struct, frozen=True):
    """Settled usage of this month (UTC). cost: in the gateway's currency."""

    cost: float
    tokens: int
    calls: int


class UsedLimit(msgspec.Struct, frozen=True):
    """Limit and its used part now, with reservations. used, of: of a budget in the currency.

    share: from 0 to 1.
    """

    limit: str
    used: float
    of: float
    share: float


class TenantRow(msgspec.Struct, frozen=True):
    """A tenant in a list, as its calls meet it.

    in_file: router.yaml defines it. etag: of the stored settings, for `if-match`; null if it is not stored.
    keys: their number. last_used: day in UTC on which one of its stored keys was used last. most_used: the
    limit with the largest used share, null without limits. notes: warnings.
    """

    name: str
    in_file: bool
    etag: str | None
    models: list[str] | None
    limits: dict[str, LimitAmount]
    model_limits: dict[str, dict[str, LimitAmount]]
    weight: int
    priority: Literal["interactive", "bulk"]
    keys: int
    last_used: str | None
    today: TodayUsage
    month: MonthToDate
    most_used: UsedLimit | None
    notes: list[str]


class TenantPage(msgspec.Struct, frozen=True):
    """Page of tenants. total: those that the filters select. currency: of the costs and budgets."""

    data: list[TenantRow]
    total: int
    currency: str | None


class TenantDirectory:
    """Tenants and keys that this gateway knows, with their counts. follower: None without a store."""

    def __init__(
        self,
        gateway: Gateway,
        follower: KeyFollower | None,
        ledger: Ledger,
        refusals: Refusals,
        admin: Admin,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._gateway = gateway
        self._follower = follower
        self._ledger = ledger
        self._refusals = refusals
        self._admin = admin
        self._now = now
        # As of a version of the keyring, and of what is stored.
        self._known: tuple[tuple[int, int, int], Directory] | None = None
        self._counted: tuple[float, Mapping[str, TenantUsage]] | None = None
        self._counting = asyncio.Lock()

    async def current(self) -> Directory:
        """Return all tenants and keys, as the store has them now. Raises: QuotaUnavailable."""
        stored = kept = NOTHING_STORED
        if self._follower is not None:
            await self._follower.refresh()
            with store_errors():
                self._follower.require_store()
            stored, kept = self._follower.stored, self._follower.kept
        keyring = self._gateway.keyring
        version = keyring.version, id(stored), id(kept)
        if self._known is None or self._known[0] != version:
            found = directory_of(keyring.file_tenants, keyring.configured_keys, stored, kept)
            self._known = version, found
        return self._known[1]

    async def last_uses(self, ids: Sequence[str] | None = None) -> dict[str, str]:
        """Return the days on which stored keys were used last. Raises: QuotaUnavailable."""
        if self._follower is None:
            return {}
        with store_errors():
            return await self._follower.store.last_uses(ids)

    async def page(self, paging: Paging, search: str, source: str | None) -> TenantPage:
        """Return a page of tenants. Raises: QuotaUnavailable."""
        tenants = (await self.current()).tenants.values()
        wanted = folded(search.strip())
        found = [
            tenant
            for tenant in tenants
            if wanted in tenant.searched
            and (source is None or (tenant.in_file if source == "file" else tenant.stored is not None))
        ]
        key = await self._key_of(paging.sort, [tenant.name for tenant in found])
        part = paging.part(found, key)
        return TenantPage(await self._rows(part), len(found), self._admin.currency)

    async def states_of(self, tenants: Sequence[TenantEntry]) -> dict[str, tuple[LimitStatus, ...]]:
        """Return the present states of all limits that apply to tenants. Raises: QuotaUnavailable."""
        of_models = self._gateway.routes.limits
        return await self._ledger.limit_states(
            {tenant.name: limits_of(tenant, of_models) for tenant in tenants}
        )

    async def usage_of(self, names: Sequence[str]) -> dict[str, tuple[TodayUsage, MonthToDate]]:
        """Return the usage of tenants today and this month. Raises: QuotaUnavailable."""
        sums = await self._ledger.usage_sums(names, days_to_date(self._now().date()))
        refused = await self._refusals.today(names)
        found = {}
        for name in names:
            usage = sums.get(name, NO_TENANT_USAGE)
            today, month = usage.latest, usage.total
            found[name] = (
                TodayUsage(today.requests, today.tokens, in_currency(today.budget), refused.get(name, 0)),
                MonthToDate(in_currency(month.budget), month.tokens, month.requests),
            )
        return found

    def notes_on(self, tenant: TenantEntry) -> list[str]:
        """Return what an operator should know of a tenant."""
        notes, settings = [], tenant.settings
        if tenant.in_file and tenant.stored is not None:
            notes.append(
                "router.yaml defines this tenant too: its settings apply, and the stored ones do not"
            )
        if tenant.is_lost:
            notes.append("the store has lost this tenant: it stays valid until `quotas.key_grace_s` is over")
        if tenant.stored == UNREADABLE and not tenant.in_file:
            notes.append("it may use no model, or its stored settings cannot be read")
        if not tenant.in_file and tenant.stored is None and tenant.name == FIRST_TENANT:
            notes.append("this is the tenant of the first key, which has no settings")
        notes += self._admin.budget_notes(
            settings.limits, settings.end_user_limits, *settings.model_limits.values()
        )
        return notes + self._admin.certificate_notes(settings.certificates)

    async def _key_of(self, sort: str, names: Sequence[str]) -> Callable[[TenantEntry], Any] | None:
        """Return the function whose results are sorted, None for names. It reads counts only for a sort."""
        match sort:
            case "keys":
                return lambda tenant: len(tenant.keys)
            case "last_used":
                days = await self.last_uses()
                return lambda tenant: latest_use(tenant, days)
            case "refused":
                refused = await self._refusals.today()
                return lambda tenant: refused.get(tenant.name, 0)
            case "calls" | "tokens" | "cost":
                usage = await self._usage_today(names)
                unit = {"calls": "requests", "tokens": "tokens", "cost": "budget"}[sort]
                return lambda tenant: getattr(usage.get(tenant.name, NO_TENANT_USAGE).latest, unit)
            case _:
                return None

    async def _usage_today(self, names: Sequence[str]) -> Mapping[str, TenantUsage]:
        """Return today's usage of all tenants, which is some seconds old."""
        async with self._counting:
            now_s = time.monotonic()
            known = self._counted
            if known is None or now_s - known[0] >= COUNTS_GOOD_S or not known[1].keys() >= set(names):
                all_names = list((await self.current()).tenants)
                usage = await self._ledger.usage_sums(all_names, [self._now().date().isoformat()])
                self._counted = known = time.monotonic(), usage
            return known[1]

    async def _rows(self, tenants: Sequence[TenantEntry]) -> list[TenantRow]:
        days = await self.last_uses([key.id for tenant in tenants for key in tenant.keys])
        usage = await self.usage_of([tenant.name for tenant in tenants])
        states = await self.states_of(tenants)
        return [
            TenantRow(
                tenant.name,
                tenant.in_file,
                None if tenant.stored is None else tag_of(tenant.stored),
                None if tenant.settings.models is None else list(tenant.settings.models),
                tenant.settings.limits,
                tenant.settings.model_limits,
                tenant.settings.weight,
                tenant.settings.priority,
                len(tenant.keys),
                latest_use(tenant, days),
                *usage[tenant.name],
                most_used(states.get(tenant.name, ())),
                self.notes_on(tenant),
            )
            for tenant in tenants
        ]


def limits_of(tenant: TenantEntry, of_models: Mapping[str, Sequence[Limit]]) -> tuple[Limit, ...]:
    """Return all limits of a tenant, its keys, and its use of models, but those of its end users.

    of_models: each tenant's use of a model, where it has no limits of its own for that.
    """
    settings = tenant.settings
    found = [parse_limit(*limit) for limit in settings.limits.items()]
    for model, own in settings.model_limits.items():
        found += [parse_limit(*limit, model_scope(model)) for limit in own.items()]
    for model, limits in of_models.items():
        if model not in settings.model_limits and (settings.models is None or model in settings.models):
            found += limits
    for key in tenant.keys:
        found += [parse_limit(*limit, f"key {key.id} ") for limit in key.limits.items()]
    return tuple(dict.fromkeys(found))


def most_used(states: Sequence[LimitStatus]) -> UsedLimit | None:
    """Return the limit with the largest used share."""
    fullest = min(states, key=lambda state: state.remaining / state.limit.amount, default=None)
    return None if fullest is None else used_limit(fullest)


def used_limit(state: LimitStatus) -> UsedLimit:
    """Return a limit with its used part."""
    limit = state.limit
    used = limit.amount - state.remaining
    return UsedLimit(limit.name, shown(limit, used), limit.shown_amount, round(used / limit.amount, 4))


def shown(limit: Limit, amount: int) -> float:
    """Return an amount of a limit, that of a budget in the currency."""
    return in_currency(amount) if limit.unit == "budget" else amount


def latest_use(tenant: TenantEntry, days: Mapping[str, str]) -> str | None:
    """Return the day on which a key of a tenant was used last."""
    return max((days[key.id] for key in tenant.keys if key.id in days), default=None)


def days_to_date(today: date) -> list[str]:
    """Return the days of the month until today, the latest first."""
    return [(today - timedelta(days=number)).isoformat() for number in range(today.day)]
