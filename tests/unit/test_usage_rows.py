"""Rows of usage: by model, by key, fields of earlier releases, and CSV."""

import csv
import io
from datetime import UTC, date, datetime

import msgspec
import pytest

from gateway.errors import InvalidInput
from gateway.quotas.ledger import MemoryLedger, QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost
from gateway.quotas.operations import usage_field_parts
from gateway.quotas.usage import (
    UsageRow,
    as_csv,
    days_of_month,
    first_of_month,
    month_csv,
    month_usage,
    usage_rows,
)

COUNTS = {
    ("bge", "laptop"): {"requests": 1, "tokens": 5},
    ("bge", ""): {"requests": 2, "tokens": 7, "inputs": 3},
    ("cross", "laptop"): {"requests": 4},
}


def test_keys_are_added_up_unless_they_are_asked_for() -> None:
    rows = usage_rows("acme", "2026-11-24", COUNTS)
    assert [(row.model, row.requests, row.tokens, row.inputs) for row in rows] == [
        ("bge", 3, 12, 3),
        ("cross", 4, 0, 0),
    ]
    assert b'"key"' not in msgspec.json.encode(rows)
    by_key = usage_rows("acme", "2026-11-24", COUNTS, "key")
    assert [(row.model, row.key, row.requests) for row in by_key] == [
        ("bge", "", 2),
        ("bge", "laptop", 1),
        ("cross", "laptop", 4),
    ]


def test_csv_has_key_and_currency_behind_the_counts() -> None:
    rows = usage_rows("acme", "2026-11-24", COUNTS, "key")
    lines = as_csv(rows, "EUR", "key").decode().split()
    assert lines[0] == "tenant,day,model,requests,tokens,inputs,images,cost,key,currency"
    assert lines[2] == "acme,2026-11-24,bge,1,5,0,0,0.00,laptop,EUR"
    assert as_csv([]).decode().strip() == "tenant,day,model,requests,tokens,inputs,images,cost,currency"


@pytest.mark.parametrize("start", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_no_cell_is_a_formula(start: str) -> None:
    rows = usage_rows(start, "2026-11-24", {(start, start): {"requests": 1}}, "key")
    [_, row] = csv.reader(io.StringIO(as_csv(rows, by="key").decode(), newline=""))
    assert [f"'{start}"] * 3 == [row[0], row[2], row[-2]]
    assert "2026-11-24" == row[1]


def test_fields_of_earlier_releases_have_no_key() -> None:
    assert usage_field_parts("org/bge|tokens") == ("org/bge", "", "tokens")
    assert usage_field_parts("a|b|tokens") == ("a|b", "", "tokens")
    assert usage_field_parts("laptop\x1forg/bge|requests") == ("org/bge", "laptop", "requests")


async def test_a_ledger_in_memory_records_the_key() -> None:
    ledger = MemoryLedger(lambda: 0)
    for number, key in enumerate(("laptop", "laptop", "batch")):
        request = QuotaRequest(str(number), "acme", (), Cost(), 60 * SECOND_US, "bge", key=key)
        ledger.settle(await ledger.reserve(request), Cost(tokens=5))
    rows = await ledger.usage("acme", ["1970-01-01"], "key")
    assert [(row.key, row.requests, row.tokens) for row in rows] == [("batch", 1, 5), ("laptop", 2, 10)]
    assert [row.tokens for row in await ledger.usage("acme", ["1970-01-01"])] == [15]


NOVEMBER = date(2026, 11, 1)
NOON = datetime(2026, 11, 11, 12, tzinfo=UTC)


def row(day: str, cost: float, tenant: str = "acme", model: str = "bge") -> UsageRow:
    return UsageRow(tenant, day, model, requests=1, tokens=100, inputs=1, cost=cost)


def test_a_month_is_added_up_by_tenant_and_over_all() -> None:
    rows = [
        row("2026-10-31", 5),
        row("2026-11-01", 0.1),
        row("2026-11-02", 0.2),
        row("2026-11-02", 0.000000001, model="cross"),
        row("2026-11-30", 0.0000004, tenant="globex"),
    ]
    usage = month_usage(NOVEMBER, datetime(2027, 1, 1, tzinfo=UTC), rows, "EUR")

    assert [("acme", "bge", 0.3), ("acme", "cross", 1e-9), ("globex", "bge", 4e-7)] == [
        (each.tenant, each.model, each.cost) for each in usage.data
    ]
    assert [("acme", 3, 0.300000001, None), ("globex", 1, 4e-7, None)] == [
        (each.tenant, each.requests, each.cost, each.forecast) for each in usage.tenants
    ]
    assert (None, 4, 400, 0.300000401) == (
        usage.total.tenant,
        usage.total.requests,
        usage.total.tokens,
        usage.total.cost,
    )
    assert [
        "total,tenant,month,model,requests,tokens,inputs,images,cost,forecast_cost,currency",
        ",acme,2026-11,bge,2,200,2,0,0.30,,EUR",
        ",acme,2026-11,cross,1,100,1,0,0.00,,EUR",
        ",globex,2026-11,bge,1,100,1,0,0.00,,EUR",
        "tenant,acme,2026-11,,3,300,3,0,0.30,,EUR",
        "tenant,globex,2026-11,,1,100,1,0,0.00,,EUR",
        "all,,2026-11,,4,400,4,0,0.30,,EUR",
    ] == month_csv(usage).decode().split()


def test_forecast_adds_the_mean_of_the_last_seven_days() -> None:
    # 19.5 days are left. Today's own usage says little before it is over.
    days = days_of_month(NOVEMBER, NOON)
    rows = [row(f"2026-11-{number:02}", 7 if number == 8 else 0.7) for number in range(4, 12)]
    [acme] = month_usage(NOVEMBER, NOON, rows).tenants

    assert ("2026-11-01", "2026-11-11") == (days[0], days[-1])
    assert acme.forecast is not None
    used, rate = 7 * 0.7 + 7, (6 * 0.7 + 7) / 7
    assert pytest.approx(used + 19.5 * rate) == acme.forecast.cost
    assert 8 + round(19.5) == pytest.approx(acme.forecast.requests, abs=1)


def test_forecast_of_a_new_tenant_counts_the_days_since_its_first() -> None:
    rows = [row("2026-11-09", 1), row("2026-11-10", 3)]
    [acme] = month_usage(NOVEMBER, NOON, rows).tenants

    assert acme.forecast is not None
    assert pytest.approx(4 + 19.5 * 2) == acme.forecast.cost
    assert month_usage(NOVEMBER, NOON, [row("2026-11-11", 9)]).total.forecast is None


def test_forecast_of_the_first_day_uses_the_month_before() -> None:
    now = datetime(2026, 11, 1, 6, tzinfo=UTC)
    days = days_of_month(NOVEMBER, now)
    rows = [row(day, 1) for day in days[:-1]]

    assert ("2026-10-25", "2026-11-01", 8) == (days[0], days[-1], len(days))
    usage = month_usage(NOVEMBER, now, rows)
    assert ([], 0) == (usage.data, usage.total.requests)
    assert usage.total.forecast is not None
    assert pytest.approx(29.75) == usage.total.forecast.cost


@pytest.mark.parametrize("month", ["2026-13", "2026-1", "november", "9999-01", "２０２６-01"])
def test_rejects_what_is_no_month(month: str) -> None:
    with pytest.raises(InvalidInput):
        first_of_month(month)


def test_money_is_rounded_to_six_places_in_tables() -> None:
    lines = as_csv([row("2026-11-01", cost) for cost in (1.23456789, 2.0, 0.500000501)]).decode().split()
    assert ["1.234568", "2.00", "0.500001"] == [line.split(",")[7] for line in lines[1:]]
