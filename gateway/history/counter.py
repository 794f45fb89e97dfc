"""Counts of one process in the minute that runs.

A call costs one entry of a dict: calls, tokens and latencies are counted by tenant, model and outcome. Once a
minute the entries become a table, on a thread, with rows of the total, the models, the tenants and the kinds
of error. Money is tokens times the price of the model at the end of the minute. Entries are bounded: a call
that would need one more is counted without its tenant, among the rest.
"""

from collections.abc import Callable, Mapping
from math import log2

import numpy as np

from gateway.events import CallFinished
from gateway.history.latencies import _OFFSET, BUCKETS, FIRST_BOUND_S, PER_DOUBLING
from gateway.history.rows import REST_ID, TOTAL_ID, row_id
from gateway.history.table import CALLS, COST, FAILED, REFUSED, TOKENS, Table, empty_table
from gateway.telemetry.totals import is_monitoring

ENTRIES_MAX = 20_000
# Name of the tenants that have no entry of their own. No tenant has it.
REST = "\0rest"
# Outcomes of calls for which a limit had no room.
REFUSALS = frozenset(("quota_exceeded", "request_exceeds_limit"))

# Tenant, model and outcome.
EntryKey = tuple[str | None, str | None, str]


class Entry:
    """Counts of calls that are alike. latencies: number of interactive calls by bucket."""

    __slots__ = ("calls", "latencies", "tokens")

    def __init__(self) -> None:
        self.calls = self.tokens = 0
        self.latencies: dict[int, int] = {}


Entries = dict[EntryKey, Entry]


class CallCounter:
    """Counts of the minute that runs. `take` ends it."""

    def __init__(self) -> None:
        self.entries: Entries = {}

    def observe(self, event: CallFinished) -> None:
        """Count a call that named a model or failed, unless it belongs to monitoring."""
        if event.model is None and (event.outcome == "ok" or is_monitoring(event.route)):
            return
        key = event.tenant, event.model, event.outcome
        entry = self.entries.get(key) or self._new_entry(key)
        entry.calls += 1
        entry.tokens += event.tokens
        if not event.is_bulk:
            seconds, latencies = event.duration_s, entry.latencies
            # `bucket_of`, without a call of its own.
            bucket = 0 if seconds <= FIRST_BOUND_S else int(log2(seconds) * PER_DOUBLING + _OFFSET)
            latencies[bucket] = latencies.get(bucket, 0) + 1

    def take(self) -> Entries:
        """Return the entries so far, and begin again."""
        entries, self.entries = self.entries, {}
        return entries

    def _new_entry(self, key: EntryKey) -> Entry:
        if len(self.entries) >= ENTRIES_MAX:
            # Models and outcomes are few.
            key = (REST, *key[1:])
        return self.entries.setdefault(key, Entry())


class _Row:
    __slots__ = ("counts", "latencies")

    def __init__(self) -> None:
        self.counts = [0, 0, 0, 0, 0]
        self.latencies = [0] * BUCKETS


def table_of(entries: Entries, price: Callable[[str], int]) -> tuple[Table, Mapping[int, str]]:
    """Return the table of a minute, and the names of its rows. price: of a token, by model, in nano-units."""
    rows: dict[int, _Row] = {}
    names: dict[int, str] = {}
    ids: dict[tuple[str, str], int] = {}

    def number(kind: str, name: str) -> int:
        if (kind, name) not in ids:
            found = row_id(kind, name)  # type: ignore[arg-type]
            ids[kind, name] = found
            names[found] = name
        return ids[kind, name]

    for (tenant, model, outcome), entry in entries.items():
        keys = [TOTAL_ID]
        if model is not None:
            keys.append(number("model", model))
        if tenant is not None:
            keys.append(REST_ID if tenant == REST else number("tenant", tenant))
        money = entry.tokens * price(model) if model is not None else 0
        failed = entry.calls if outcome != "ok" else 0
        refused = entry.calls if outcome in REFUSALS else 0
        for key in keys:
            row = rows.get(key)
            if row is None:
                row = rows[key] = _Row()
            counts = row.counts
            counts[CALLS] += entry.calls
            counts[FAILED] += failed
            counts[REFUSED] += refused
            counts[TOKENS] += entry.tokens
            counts[COST] += money
            for bucket, calls in entry.latencies.items():
                row.latencies[min(bucket, BUCKETS - 1)] += calls
        if failed:
            rows.setdefault(number("error", outcome), _Row()).counts[CALLS] += failed
    table = empty_table(1, rows.keys() | {TOTAL_ID})
    table.processes[0] = 1
    for place, found in enumerate(table.ids.tolist()):
        if found in rows:
            table.counts[:, place, 0] = np.array(rows[found].counts, dtype=np.uint64)
            table.latencies[place, :, 0] = rows[found].latencies
    return table, names
