"""GET /admin/history and those below it, and GET /usage/history: traffic and replicas of up to 90 days."""

import time
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from gateway.api.operators.access import OPERATORS
from gateway.api.operators.reply_cache import ReplyCache
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext
from gateway.errors import InvalidInput, NotFound, QuotaUnavailable
from gateway.history import views
from gateway.history.keeper import HistoryKeeper
from gateway.history.ranges import Range, range_of
from gateway.history.reader import HistoryReader
from gateway.history.rows import TOTAL_ID, RowKind, row_id
from gateway.history.store import HOUR_S
from gateway.history.views import HistoryChart, HistoryTop, ReplicasHistory, TopMetric
from gateway.store.errors import StoreUnavailable

FAILURES = document_errors(TEI)
TOP_MAX = 100
REPLY_KEPT_S = 5.0
# A reply about days changes slowly, and costs more.
LONG_REPLY_KEPT_S = 30.0
# Of names that are not known: no name has more.
NAME_CHARACTERS_MAX = 256
Reply = TypeVar("Reply")


class HistoryApi:
    """History of this gateway, or of all that share its Redis.

    is_alone: no other process counts calls, so that the minute that runs is known here. currency: returns
    that of the prices. known_name: returns the name of a model as it is counted, and raises ModelNotFound.
    knows_tenant: returns whether there is a tenant, which may not have called yet.
    """

    def __init__(
        self,
        keeper: HistoryKeeper,
        currency: Callable[[], str | None],
        known_name: Callable[[str], str],
        knows_tenant: Callable[[str], bool],
        *,
        is_alone: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keeper = keeper
        self._currency = currency
        self._known_name = known_name
        self._knows_tenant = knows_tenant
        self._is_alone = is_alone
        self._clock = clock
        self._reader = (
            HistoryReader(keeper.store, keeper.current, keeper.lock)
            if is_alone
            else HistoryReader(keeper.store, lambda: None)
        )
        # A tenant that asks for many charts delays no operator.
        self._replies = {"operator": ReplyCache("the history"), "tenant": ReplyCache("the history")}

    def range_of(
        self, name: str | None, from_s: float | None, until_s: float | None, *, with_current: bool = False
    ) -> Range:
        """Return the range of a request. with_current: in any case. Raises: InvalidInput."""
        return range_of(name, from_s, until_s, self._clock(), with_current=with_current or self._is_alone)

    async def chart(
        self,
        range_: Range,
        kind: RowKind = "total",
        name: str = "",
        asker: Literal["operator", "tenant"] = "operator",
    ) -> HistoryChart:
        """Return the chart of all calls, or of one model or tenant.

        Raises: ModelNotFound, NotFound, QuotaUnavailable, Overloaded.
        """

        async def make() -> HistoryChart:
            names = await self._names()
            row = TOTAL_ID if kind == "total" else row_id(kind, name)
            if asker == "operator" and kind != "total" and row not in names:
                row = row_id(kind, self._counted_name(kind, name))
            return await views.chart(self._reader, range_, row, names, self._currency())

        return await self._reply((range_, kind, name), range_, make, asker, name if asker == "tenant" else "")

    async def top(
        self, range_: Range, by: Literal["model", "tenant"], metric: TopMetric, limit: int
    ) -> HistoryTop:
        """Return the models or tenants with the most of a metric. Raises: QuotaUnavailable, Overloaded."""

        async def make() -> HistoryTop:
            names = await self._names()
            return await views.top(self._reader, range_, by, metric, limit, names, self._currency())

        return await self._reply((range_, by, metric, limit), range_, make)

    async def replicas(self, range_: Range, upstream: str | None) -> ReplicasHistory:
        """Return the states of replicas. Raises: QuotaUnavailable, Overloaded."""

        async def make() -> ReplicasHistory:
            await self.keeper.put_replicas()
            return await views.replicas(self._reader, range_, upstream, self._clock())

        return await self._reply((range_, "replicas", upstream), range_, make)

    async def _names(self) -> Mapping[int, str]:
        # Those of this process may grow while the minute that runs is read.
        return ChainMap(self.keeper.names, dict(await self.keeper.store.names()))

    def _counted_name(self, kind: RowKind, name: str) -> str:
        """Return the name under which calls would be counted. Raises: ModelNotFound, NotFound."""
        if kind == "tenant":
            if self._knows_tenant(name):
                return name
            raise NotFound(f"no call of tenant {name!r} is kept")
        return self._known_name(name)

    async def _reply(
        self,
        key: Any,
        range_: Range,
        make: Callable[[], Awaitable[Reply]],
        asker: Literal["operator", "tenant"] = "operator",
        tenant: str = "",
    ) -> Reply:
        is_long = range_.step_s >= HOUR_S
        kept_s = LONG_REPLY_KEPT_S if is_long else REPLY_KEPT_S
        with _store_errors():
            # Charts of minutes, which take milliseconds, wait for none of days.
            return await self._replies[asker].reply(
                key, kept_s, make, queue="long" if is_long else "short", asker=tenant
            )


@contextmanager
def _store_errors() -> Iterator[None]:
    """Translate an outage of the store. Raises: QuotaUnavailable."""
    try:
        yield
    except StoreUnavailable as error:
        raise QuotaUnavailable(f"the history is unavailable: {error}") from error


def _name(param: str, name: str) -> str:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        raise InvalidInput(f"{param}: from 1 to {NAME_CHARACTERS_MAX} characters", param=param)
    return name


@get("/admin/history", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def history_chart(
    history: NamedDependency[HistoryApi],
    range_: Annotated[str | None, QueryParameter(name="range")] = None,
    from_: Annotated[float | None, QueryParameter(name="from")] = None,
    until: FromQuery[float | None] = None,
    model: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
) -> HistoryChart:
    """Return the traffic of a range in at most some 400 intervals: of all calls, a model, or a tenant.

    `range` is 15m, 1h (the default), 6h, 24h, 7d, 30d or 90d. `from` and `until`, in seconds since 1970, are
    another one. Minutes are kept for 24 hours, and hours for 90 days.
    """
    wanted = history.range_of(range_, from_, until)
    if model is not None and tenant is not None:
        raise InvalidInput("model: it cannot be combined with `tenant`", param="model")
    if model is not None:
        return await history.chart(wanted, "model", _name("model", model))
    if tenant is not None:
        return await history.chart(wanted, "tenant", _name("tenant", tenant))
    return await history.chart(wanted)


@get("/admin/history/top", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def history_top(
    history: NamedDependency[HistoryApi],
    range_: Annotated[str | None, QueryParameter(name="range")] = None,
    from_: Annotated[float | None, QueryParameter(name="from")] = None,
    until: FromQuery[float | None] = None,
    by: FromQuery[Literal["model", "tenant"]] = "model",
    metric: FromQuery[TopMetric] = "calls",
    limit: FromQuery[int] = 10,
) -> HistoryTop:
    """Return the models or tenants with the most calls, tokens, cost or failures, or the longest p95.

    `range`, `from` and `until` are those of `/admin/history`.
    """
    if not 1 <= limit <= TOP_MAX:
        raise InvalidInput(f"limit: from 1 to {TOP_MAX}", param="limit")
    return await history.top(history.range_of(range_, from_, until), by, metric, limit)


@get("/admin/history/replicas", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def history_replicas(
    history: NamedDependency[HistoryApi],
    range_: Annotated[str | None, QueryParameter(name="range")] = None,
    from_: Annotated[float | None, QueryParameter(name="from")] = None,
    until: FromQuery[float | None] = None,
    upstream: FromQuery[str | None] = None,
) -> ReplicasHistory:
    """Return the states of replicas in a range, the worst one where gateways differ.

    `range`, `from` and `until` are those of `/admin/history`. `upstream` selects the replicas of one.
    """
    name = None if upstream is None else _name("upstream", upstream)
    return await history.replicas(history.range_of(range_, from_, until, with_current=True), name)


@get("/usage/history", responses=FAILURES, tags=["Operators"], opt=route_options())
async def own_history(
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    history: NamedDependency[HistoryApi],
    range_: Annotated[str | None, QueryParameter(name="range")] = None,
    from_: Annotated[float | None, QueryParameter(name="from")] = None,
    until: FromQuery[float | None] = None,
) -> HistoryChart:
    """Return the traffic of the tenant whose key is sent.

    `range`, `from` and `until` are those of `/admin/history`.
    """
    tenant = api.authenticator.authenticate(context)
    tenant.require_key()
    return await history.chart(history.range_of(range_, from_, until), "tenant", tenant.name, "tenant")


HANDLERS = [history_chart, history_top, history_replicas, own_history]
