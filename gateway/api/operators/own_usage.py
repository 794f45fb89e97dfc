"""GET /usage: what the holder of a key may use, and has used."""

from datetime import date
from itertools import chain
from typing import Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from gateway.api.operators.access import store_errors
from gateway.api.operators.admin import Admin
from gateway.api.operators.directory import UsedLimit, used_limit
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext
from gateway.config.schema import LimitAmount
from gateway.errors import InvalidInput
from gateway.quotas.ledger import remaining_budgets
from gateway.quotas.usage import UsageRow, days_between

FAILURES = document_errors(TEI)
# A key that may not call a model still sees its usage; reading a year would cost more than a call.
DAYS_MAX = 31


class OwnUsage(msgspec.Struct, frozen=True):
    """Permissions, limits and settled usage of the tenant of a key.

    key: its id. expires_s: seconds since 1970, None for never. models: that the key may call, None for all.
    limits: by name; names of the key's own begin with its id. model_limits: by model. data: by day and model.
    currency: of the costs and budgets. remaining: what is left of each budget in its period, by the name of
    the limit; empty while the quota store is away. used: the limits with the part that is used now.
    """

    tenant: str
    key: str
    expires_s: float | None
    scopes: list[str]
    models: list[str] | None
    limits: dict[str, LimitAmount]
    model_limits: dict[str, dict[str, LimitAmount]]
    data: list[UsageRow]
    currency: str | None = None
    remaining: dict[str, float] = {}
    used: list[UsedLimit] = []


@get("/usage", responses=FAILURES, tags=["Operators"], opt=route_options())
async def own_usage(
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    admin: NamedDependency[Admin],
    since: FromQuery[date | None] = None,
    until: FromQuery[date | None] = None,
    by: FromQuery[Literal["model", "key"]] = "model",
) -> OwnUsage:
    """Return the limits and the usage of the tenant whose key is sent, by day and model.

    Days are in UTC. Without `since` and `until` the usage is today's; 31 days at most. `by=key` gives a row
    for each key.
    """
    tenant = api.authenticator.authenticate(context)
    tenant.require_key()
    days = days_between(since, until)
    if len(days) > DAYS_MAX:
        raise InvalidInput(f"from 1 to {DAYS_MAX} days, not {len(days)}", param="since")
    limits = [*tenant.for_batches().limits, *chain(*tenant.model_limits.values())]
    with store_errors():
        rows = await admin.ledger.usage(tenant.name, days, by)
        remaining = await remaining_budgets(admin.ledger, tenant.name, limits)
        states = await admin.ledger.limit_states({tenant.name: limits})
    return OwnUsage(
        tenant.name,
        tenant.key_id,
        tenant.expires_s,
        sorted(tenant.scopes),
        None if tenant.models is None else sorted(tenant.models),
        {limit.name: limit.shown_amount for limit in tenant.for_batches().limits},
        {
            model: {limit.name: limit.shown_amount for limit in limits}
            for model, limits in tenant.model_limits.items()
        },
        rows,
        admin.currency,
        remaining,
        [used_limit(state) for state in states.get(tenant.name, ())],
    )


HANDLERS = [own_usage]
