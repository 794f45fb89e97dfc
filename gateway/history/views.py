"""Replies about the kept history: a chart, the busiest models or tenants, and the states of replicas."""

import asyncio
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from gateway.config.money import in_currency
from gateway.history.folding import ALL_SHARDS
from gateway.history.latencies import quantiles
from gateway.history.ranges import Range
from gateway.history.reader import HistoryReader
from gateway.history.rows import RowKind
from gateway.history.spans import ReplicaSpan, by_replica, spans_of
from gateway.history.store import DAY_S, HEAD, KEPT_DAYS, Kept, shard_of
from gateway.history.sums import AllSums, RowSums
from gateway.history.table import CALLS, COLUMNS, COST, FAILED, TOKENS, Detail

SHARES = (0.5, 0.95, 0.99)
TopMetric: TypeAlias = Literal["calls", "tokens", "cost", "failed", "p95"]
COLUMN_OF: Mapping[str, int] = {"calls": CALLS, "tokens": TOKENS, "cost": COST, "failed": FAILED}


class HistoryPoint(msgspec.Struct, frozen=True):
    """Traffic of one interval. All but `at_s` is null for an interval in which no gateway counted.

    at_s: its start, in seconds since 1970. failed: calls that ended with an error. failures: the same by kind
    of error, of all calls only. refused: those of them that limits refused. tokens: as settled. cost: by the
    prices of the models. p50_s, p95_s, p99_s: of interactive calls, null if there were none.
    """

    at_s: int
    calls: int | None = None
    failed: int | None = None
    failures: dict[str, int] | None = None
    refused: int | None = None
    tokens: int | None = None
    cost: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None


class HistoryChart(msgspec.Struct, frozen=True):
    """Traffic of a range. until_s: end of the last interval, which may not be over.

    kept: where. currency: of the costs.
    """

    from_s: int
    until_s: int
    step_s: int
    kept: Kept
    currency: str | None
    points: list[HistoryPoint]


class TopRow(msgspec.Struct, frozen=True):
    """Model or tenant among the busiest. points: the metric in each interval, null where it is not known."""

    name: str
    calls: int
    failed: int
    refused: int
    tokens: int
    cost: float
    p50_s: float | None
    p95_s: float | None
    points: list[float | None]


class HistoryTop(msgspec.Struct, frozen=True):
    """Models or tenants with the most of a metric in a range, the first one first.

    others: number of those that are not listed. others_total: the metric of them together, with the tenants
    that were not among the busiest 1,000; null for p95. unnamed_total: the metric of calls that belong to
    none, such as those that were refused before their body was read; null for p95.
    """

    from_s: int
    until_s: int
    step_s: int
    by: Literal["model", "tenant"]
    data: list[TopRow]
    others: int
    others_total: float | None
    unnamed_total: float | None
    currency: str | None


class ReplicaStates(msgspec.Struct, frozen=True):
    """States of one replica, the oldest first."""

    upstream: str
    replica: str
    spans: list[ReplicaSpan]


class ReplicasHistory(msgspec.Struct, frozen=True):
    """States of replicas in a range."""

    from_s: int
    until_s: int
    kept: Kept
    data: list[ReplicaStates]


async def chart(
    reader: HistoryReader, range_: Range, row: int, names: Mapping[int, str], currency: str | None
) -> HistoryChart:
    """Return the chart of one row. names: of kinds of error. Raises: StoreUnavailable."""
    kind: RowKind | None = None if row else "error"
    sums = await reader.sum_up(range_, _shards(row), lambda: RowSums(range_, [row], kind))
    points = [_point(sums, row, place, range_, names) for place in range(range_.steps)]
    return HistoryChart(range_.from_s, range_.until_s, range_.step_s, reader.store.kept, currency, points)


def _shards(row: int) -> list[int]:
    """Return the shards that a chart needs: that of the row, and that of the times that are known."""
    return sorted({HEAD, shard_of(row)})


def _point(sums: RowSums, row: int, place: int, range_: Range, names: Mapping[int, str]) -> HistoryPoint:
    at_s = range_.from_s + place * range_.step_s
    if not sums.processes[place]:
        return HistoryPoint(at_s)
    calls, failed, refused, tokens, cost = sums.counts[row][:, place].tolist()
    failures = {
        names[found]: int(counts[place])
        for found, counts in sums.of_kind.items()
        if counts[place] and found in names
    }
    p50_s, p95_s, p99_s = quantiles(sums.latencies[row][:, place], SHARES)
    return HistoryPoint(
        at_s, calls, failed, failures, refused, tokens, in_currency(cost), p50_s, p95_s, p99_s
    )


async def top(
    reader: HistoryReader,
    range_: Range,
    by: Literal["model", "tenant"],
    metric: TopMetric,
    limit: int,
    names: Mapping[int, str],
    currency: str | None,
) -> HistoryTop:
    """Return the models or tenants with the most of a metric. Raises: StoreUnavailable."""
    shards = (HEAD,) if by == "model" else ALL_SHARDS
    with_latencies = metric == "p95"
    all_sums = await reader.sum_up(
        range_,
        shards,
        lambda: AllSums(range_, by, with_latencies=with_latencies),
        "sum" if with_latencies else "none",
    )
    ids, sums = all_sums.result()
    if with_latencies:
        amounts = np.array([quantiles(row[len(COLUMNS) :], SHARES)[1] or 0.0 for row in sums])
    else:
        amounts = sums[:, COLUMN_OF[metric]].astype(np.float64)
    known = [place for place in np.argsort(-amounts, kind="stable").tolist() if sums[place, CALLS]]
    chosen = [int(ids[place]) for place in known[:limit]]
    wanted = sorted({shard for row in chosen for shard in _shards(row)} | {HEAD})
    detail: Detail = "all" if with_latencies else "sum"
    series = await reader.sum_up(range_, wanted, lambda: RowSums(range_, chosen), detail)
    data = [_top_row(series, row, metric, names.get(row, f"unknown-{row:x}")) for row in chosen]
    others_total: float | None = None
    unnamed_total: float | None = None
    if not with_latencies:
        rest = await _of_kind(reader, range_, "rest", metric) if by == "tenant" else 0
        others = float(amounts[known[limit:]].sum()) + rest
        # The minute that runs may have gone on since the rows were read.
        unnamed = max(0.0, await _of_kind(reader, range_, "total", metric) - float(amounts.sum()) - rest)
        if metric == "cost":
            others, unnamed = in_currency(round(others)), in_currency(round(unnamed))
        others_total, unnamed_total = others, unnamed
    return HistoryTop(
        range_.from_s,
        range_.until_s,
        range_.step_s,
        by,
        data,
        max(0, len(known) - limit),
        others_total,
        unnamed_total,
        currency,
    )


async def _of_kind(reader: HistoryReader, range_: Range, kind: RowKind, metric: TopMetric) -> float:
    """Return the metric of all rows of a kind that has no tenants."""
    found = await reader.sum_up(range_, (HEAD,), lambda: AllSums(range_, kind, with_latencies=False), "none")
    return float(found.result()[1][:, COLUMN_OF[metric]].sum())


def _top_row(sums: RowSums, row: int, metric: TopMetric, name: str) -> TopRow:
    counts, latencies = sums.counts[row], sums.latencies[row]
    calls, failed, refused, tokens, cost = counts.sum(axis=1).tolist()
    p50_s, p95_s, _ = quantiles(sums.all_latencies[row], SHARES)
    points: list[float | None]
    if metric == "p95":
        points = [quantiles(latencies[:, place], SHARES)[1] for place in range(latencies.shape[1])]
    else:
        values = counts[COLUMN_OF[metric]].tolist()
        is_known = sums.processes.astype(bool).tolist()
        points = [
            None if not known else in_currency(value) if metric == "cost" else value
            for value, known in zip(values, is_known, strict=True)
        ]
    return TopRow(name, calls, failed, refused, tokens, in_currency(cost), p50_s, p95_s, points)


async def replicas(
    reader: HistoryReader, range_: Range, upstream: str | None, now_s: float
) -> ReplicasHistory:
    """Return the states of replicas in a range. Raises: StoreUnavailable."""
    first = max(range_.from_s, int(now_s) - KEPT_DAYS * DAY_S) // DAY_S
    contents = await reader.store.spans(list(range(first, int(range_.until_s // DAY_S) + 1)))

    def decode() -> dict[tuple[str, str], list[ReplicaSpan]]:
        return by_replica(spans_of(contents, now_s), range_.from_s, range_.until_s, upstream)

    # Of 90 days they may be hundreds of thousands.
    found = await asyncio.to_thread(decode)
    data = [ReplicaStates(*key, spans) for key, spans in found.items()]
    return ReplicasHistory(range_.from_s, range_.until_s, reader.store.kept, data)
