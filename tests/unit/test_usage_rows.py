"""Rows of usage: by model, by key, fields of earlier releases, and CSV."""

import csv
import io

import msgspec
import pytest

from gateway.quotas.ledger import MemoryLedger, QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost
from gateway.quotas.operations import usage_field_parts
from gateway.quotas.usage import as_csv, usage_rows

COUNTS = {
    ("bge", "laptop"): {"requests": 1, "tokens": 5},
    ("bge", ""): {"requests": 2, "tokens": 7, "inputs": 3},
    ("cross", "laptop"): {"requests": 4},
}


def test_keys_are_added_up_unless_they_are_asked_for() -> None:
    rows = usage_rows("acme", "2026-11-24", COUNTS, by_key=False)
    assert [(row.model, row.requests, row.tokens, row.inputs) for row in rows] == [
        ("bge", 3, 12, 3),
        ("cross", 4, 0, 0),
    ]
    assert b'"key"' not in msgspec.json.encode(rows)
    by_key = usage_rows("acme", "2026-11-24", COUNTS, by_key=True)
    assert [(row.model, row.key, row.requests) for row in by_key] == [
        ("bge", "", 2),
        ("bge", "laptop", 1),
        ("cross", "laptop", 4),
    ]


def test_csv_has_the_key_as_its_last_column() -> None:
    rows = usage_rows("acme", "2026-11-24", COUNTS, by_key=True)
    lines = as_csv(rows, by_key=True).decode().split()
    assert lines[0] == "tenant,day,model,requests,tokens,inputs,images,cost,key"
    assert lines[2] == "acme,2026-11-24,bge,1,5,0,0,0.00,laptop"
    assert as_csv([]).decode().strip() == "tenant,day,model,requests,tokens,inputs,images,cost"


@pytest.mark.parametrize("start", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_no_cell_is_a_formula(start: str) -> None:
    rows = usage_rows(start, "2026-11-24", {(start, start): {"requests": 1}}, by_key=True)
    [_, row] = csv.reader(io.StringIO(as_csv(rows, by_key=True).decode(), newline=""))
    assert [f"'{start}"] * 3 == [row[0], row[2], row[-1]]
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
    rows = await ledger.usage("acme", ["1970-01-01"], by_key=True)
    assert [(row.key, row.requests, row.tokens) for row in rows] == [("batch", 1, 5), ("laptop", 2, 10)]
    assert [row.tokens for row in await ledger.usage("acme", ["1970-01-01"])] == [15]
