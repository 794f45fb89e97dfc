"""Counts of one process in the minute that runs.

A call costs one entry of a dict: calls, tokens and latencies are counted by tenant, model and outcome. Once a
minute the entries become a table, on a thread, with rows of the total, the models, the tenants and the kinds
of error. Money is tokens times the price of the model at the end of the minute. Entries are bounded: a call
that would need one more is counted without its tenant, among the rest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import log2

from gateway.events import CallFinished
from gateway.history.latencies import BUCKETS, FIRST_BOUND_S, OFFSET, PER_DOUBLING
from gateway.history.rows import REST_ID, TOTAL_ID, RowKind, row_id
from gateway.history.table import CALLS, COLUMNS, Table, empty_table
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
            bucket = 0 if seconds <= FIRST_BOUND_S else int(log2(seconds) * PER_DOUBLING + OFFSET)
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
        self.counts = [0] * len(COLUMNS)
        self.latencies = [0] * BUCKETS

    def add(self, amounts: Sequence[int], latencies: Mapping[int, int]) -> None:
        """Add amounts in the order of the columns, and latencies by bucket."""
        self.counts = [count + amount for count, amount in zip(self.counts, amounts, strict=True)]
        for bucket, calls in latencies.items():
            self.latencies[min(bucket, BUCKETS - 1)] += calls


class _Rows:
    """Rows of a minute. names: by number."""

    def __init__(self) -> None:
        self.rows: defaultdict[int, _Row] = defaultdict(_Row)
        self.names: dict[int, str] = {}
        self._ids: dict[tuple[RowKind, str], int] = {}

    def number(self, kind: RowKind, name: str) -> int:
        """Return the number of a row."""
        found = self._ids.get((kind, name))
        if found is None:
            found = self._ids[kind, name] = row_id(kind, name)
            self.names[found] = name
        return found

    def add(self, key: EntryKey, entry: Entry, price: Callable[[str], int]) -> None:
        """Add an entry to the rows that it belongs to."""
        tenant, model, outcome = key
        failed = 0 if outcome == "ok" else entry.calls
        refused = entry.calls if outcome in REFUSALS else 0
        cost = 0 if model is None else entry.tokens * price(model)
        amounts = entry.calls, failed, refused, entry.tokens, cost
        self.rows[TOTAL_ID].add(amounts, entry.latencies)
        if model is not None:
            self.rows[self.number("model", model)].add(amounts, entry.latencies)
        if tenant is not None:
            row = REST_ID if tenant == REST else self.number("tenant", tenant)
            self.rows[row].add(amounts, entry.latencies)
        if failed:
            self.rows[self.number("error", outcome)].counts[CALLS] += failed


def table_of(entries: Entries, price: Callable[[str], int]) -> tuple[Table, Mapping[int, str]]:
    """Return the table of a minute, and the names of its rows. price: of a token, by model, in nano-units."""
    rows = _Rows()
    for key, entry in entries.items():
        rows.add(key, entry, price)
    table = empty_table(1, rows.rows.keys() | {TOTAL_ID})
    table.processes[0] = 1
    for place, number in enumerate(table.ids.tolist()):
        row = rows.rows[number]
        table.counts[:, place, 0] = row.counts
        table.latencies[place, :, 0] = row.latencies
    return table, rows.names
