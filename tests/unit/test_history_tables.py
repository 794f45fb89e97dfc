"""Packing, merging and counting of the kept history, against plain counts of random calls."""

import random
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from gateway.events import CallFinished
from gateway.history import counter as counter_module
from gateway.history.counter import CallCounter, table_of
from gateway.history.folding import folded, merged, places_of, readable
from gateway.history.latencies import BUCKETS, bound_s, bucket_of, coded, decoded, quantiles
from gateway.history.rows import REST_ID, TENANT_KIND, TOTAL_ID, kind_of, row_id
from gateway.history.store import DAY_S, HEAD, HOUR_S, sharded
from gateway.history.table import (
    CALLS,
    COST,
    FAILED,
    REFUSED,
    TOKENS,
    UnreadableTable,
    added,
    empty_table,
    in_one_interval,
    limited,
    packed,
    unpacked,
)

NAMES = ["acme", "x" * 200, "租户" * 100, "other", "\u202eevil"]
OUTCOMES = ["ok", "ok", "ok", "quota_exceeded", "overloaded"]


def call(tenant: str | None, model: str | None, outcome: str = "ok", **more: object) -> CallFinished:
    fields = {"tokens": 0, "duration_s": 0.01, **more}
    return CallFinished("r", "POST", "/v1/embeddings", 200, outcome, tenant=tenant, model=model, **fields)  # type: ignore[arg-type]


def random_calls(seed: int, count: int = 300) -> list[CallFinished]:
    chance = random.Random(seed)
    return [
        call(
            chance.choice([*NAMES, None]),
            chance.choice(["small", "large"]),
            chance.choice(OUTCOMES),
            tokens=chance.randrange(1000),
            duration_s=chance.lognormvariate(-3, 1),
            is_bulk=chance.random() < 0.2,
        )
        for _ in range(count)
    ]


def price(model: str) -> int:
    return {"small": 20, "large": 130}[model]


def table_after(calls: list[CallFinished]) -> tuple[object, dict[int, str]]:
    counter = CallCounter()
    for each in calls:
        counter.observe(each)
    return table_of(counter.take(), price)  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(5))
def test_minutes_of_several_processes_add_up_to_plain_counts(seed: int) -> None:  # noqa: C901 - plain counts
    calls = {
        minute: [random_calls(seed * 100 + minute * 10 + process) for process in range(3)]
        for minute in (0, 7)
    }
    expected: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    durations: defaultdict[int, list[float]] = defaultdict(list)
    parts = []
    for minute, by_process in calls.items():
        for some in by_process:
            table, _ = table_after(some)
            parts.append((minute, unpacked(packed(table))))  # type: ignore[arg-type]
            for each in some:
                assert each.model is not None
                rows = [TOTAL_ID, row_id("model", each.model)]
                rows += [row_id("tenant", each.tenant)] if each.tenant is not None else []
                for row in rows:
                    counts = expected[row, minute]
                    counts["calls"] += 1
                    counts["failed"] += each.outcome != "ok"
                    counts["refused"] += each.outcome == "quota_exceeded"
                    counts["tokens"] += each.tokens
                    counts["cost"] += each.tokens * price(each.model)
                    if not each.is_bulk:
                        durations[row].append(each.duration_s)

    whole = unpacked(packed(added(60, parts)))

    assert list(np.flatnonzero(whole.processes)) == [0, 7]
    assert whole.processes[7] == 3
    columns = {"calls": CALLS, "failed": FAILED, "refused": REFUSED, "tokens": TOKENS, "cost": COST}
    for (row, minute), counts in expected.items():
        place = whole.ids.tolist().index(row)
        assert {name: int(whole.counts[column, place, minute]) for name, column in columns.items()} == counts
    for row, seconds in durations.items():
        latencies = in_one_interval(whole).latencies[whole.ids.tolist().index(row), :, 0]
        for share, found in zip((0.5, 0.95), quantiles(latencies, (0.5, 0.95)), strict=True):
            exact = float(np.quantile(seconds, share))
            assert found is not None
            # A bucket is 1.41 times as wide as the one below it.
            assert exact / 1.42 < found < exact * 1.42
    errors = dict(zip(whole.ids.tolist(), whole.counts[CALLS].sum(axis=1), strict=True))
    kinds = Counter(each.outcome for some in calls.values() for one in some for each in one)
    assert {kind: errors[row_id("error", kind)] for kind in kinds if kind != "ok"} == {
        kind: count for kind, count in kinds.items() if kind != "ok"
    }


def test_codes_of_counts_are_close_and_stay_as_they_are() -> None:
    counts = np.array([*range(2000), 12_345, 1_000_000, 2**40], dtype=np.uint64)
    once = decoded(coded(counts))
    assert (once[:16] == counts[:16]).all()
    assert (np.abs(once.astype(float) - counts) <= 0.0625 * counts).all()
    assert (decoded(coded(once)) == once).all()


def test_buckets_are_in_order_and_contain_their_latencies() -> None:
    for seconds in (1e-9, 0.0005, 0.000501, 0.01, 0.25, 1.0, 100.0, 1e9):
        bucket = bucket_of(seconds)
        assert seconds <= bound_s(bucket) * 1.000001 or bucket == BUCKETS - 1
        assert bucket == 0 or seconds >= bound_s(bucket - 1) * 0.999999
    assert all(first < second for first, second in pairwise(map(bound_s, range(BUCKETS))))
    assert quantiles([0] * BUCKETS, (0.5,)) == [None]


def test_bytes_that_are_no_table_are_refused() -> None:
    content = packed(table_after(random_calls(1))[0])  # type: ignore[arg-type]
    for damaged in (
        b"",
        content[:10],
        content[:-3],
        b"XX1" + content[3:],
        content[:-60] + b"\0" * 20 + content[-40:],
    ):
        with pytest.raises(UnreadableTable):
            unpacked(damaged)
    assert readable([b"nothing", content]) != []


def test_the_sum_of_latencies_is_read_without_them() -> None:
    parts = [(minute, table_after(random_calls(minute))[0]) for minute in range(3)]
    content = packed(added(60, parts))  # type: ignore[arg-type]
    full, sums, none = unpacked(content), unpacked(content, "sum"), unpacked(content, "none")
    close = np.abs(sums.latencies[:, :, 0].astype(float) - full.latencies.sum(axis=2))
    assert (close <= 0.0625 * full.latencies.sum(axis=2)).all()
    assert none.latencies.shape[2] == 0
    assert (none.counts == full.counts).all()


def test_the_busiest_tenants_keep_rows_and_the_others_add_up() -> None:
    rows = {row_id("tenant", f"t{number}"): number for number in range(50)}
    table = empty_table(2, [*rows, TOTAL_ID, REST_ID])
    for place, row in enumerate(table.ids.tolist()):
        table.counts[CALLS, place] = rows.get(row, 5)
        table.latencies[place, 3] = rows.get(row, 5)

    kept = limited(table, 10)

    tenants = [row for row in kept.ids.tolist() if kind_of(row) == "tenant"]
    assert sorted(rows[row] for row in tenants) == list(range(40, 50))
    rest = kept.ids.tolist().index(REST_ID)
    assert kept.counts[CALLS, rest].tolist() == [5 + sum(range(40))] * 2
    assert kept.latencies[rest, 3].tolist() == [5 + sum(range(40))] * 2
    assert kept.counts[CALLS].sum() == table.counts[CALLS].sum()


def test_shards_together_are_the_table() -> None:
    table = table_after(random_calls(3))[0]
    shards = sharded(table)  # type: ignore[arg-type]
    assert HEAD in shards
    whole = added(1, [(0, shard) for shard in shards.values()])
    assert whole.ids.tolist() == table.ids.tolist()  # type: ignore[attr-defined]
    assert (whole.counts == table.counts).all()  # type: ignore[attr-defined]


def test_parts_that_come_late_are_added_to_the_chunks() -> None:
    hour_s = 20_000 * DAY_S + 5 * HOUR_S
    minute = hour_s // 60 + 3
    contents = [packed(table_after(random_calls(seed))[0]) for seed in range(3)]  # type: ignore[arg-type]
    places = places_of(hour_s)
    first = folded(hour_s, {minute: contents[:2], minute + 1: [b"damaged"]}, dict.fromkeys(places))
    both = folded(hour_s, {minute: contents[2:]}, {place: first.get(place) for place in places})
    for resolution, interval in (("minute", 3), ("hour", 5)):
        found = [
            table
            for place, content in both.items()
            if place.resolution == resolution
            for table in readable([content])
        ]
        whole = added(found[0].intervals, [(0, table) for table in found])
        calls = whole.counts[CALLS, whole.ids.tolist().index(TOTAL_ID)]
        assert int(calls[interval]) == 900
        assert int(calls.sum()) == 900
    assert in_one_interval(unpacked(merged(contents))).counts[CALLS, 0, 0] == 900


def test_entries_of_a_minute_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_module, "ENTRIES_MAX", 10)
    table, names = table_after([call(f"t{number}", "small") for number in range(100)])
    tenants = [row for row in table.ids.tolist() if row >> 60 == TENANT_KIND]  # type: ignore[attr-defined]
    assert len(tenants) == 10
    assert len(names) == 11
    rest = table.ids.tolist().index(REST_ID)  # type: ignore[attr-defined]
    assert table.counts[CALLS, rest, 0] == 90  # type: ignore[attr-defined]


def test_monitoring_and_lists_are_not_counted() -> None:
    counter = CallCounter()
    for route, outcome in (
        ("/readyz", "internal"),
        ("/admin/status", "unauthenticated"),
        ("/v1/models", "ok"),
    ):
        counter.observe(CallFinished("r", "GET", route, 200, outcome, 0.1, tenant="acme"))
    assert not counter.entries
