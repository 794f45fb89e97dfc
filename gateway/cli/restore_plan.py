"""Plan of `gateway restore`: what a file adds to a store, as lines of a difference. Pure.

Rule: what is stored stays. A tenant, key or addition that differs, or that an operator has removed since the
file was written, is restored only on request. Counts are never lowered, and drains never ended.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.audit.records import ChangedField, changed_fields
from gateway.cli.context import shown_number
from gateway.cli.exported import (
    DrainRecord,
    Exported,
    KeyRecord,
    ModelRecord,
    TenantRecord,
    UpstreamRecord,
)
from gateway.config.money import in_currency
from gateway.config.schema import Config, TenantConfig
from gateway.declared.additions import Additions
from gateway.declared.settings import redact, shown_url
from gateway.quotas.stored_counts import Counter, DayUsageRow, is_current, limit_of
from gateway.tenants.audited import key_fields, tenant_fields
from gateway.tenants.client_certificate import sharing_problem
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import SettingsChange

OVERWRITES = "--replace overwrites it"
NO_ADDITIONS = (
    "without Redis they are lost with the gateway's process: add them with PUT /admin/upstreams/{name} and "
    "/admin/models/{name}"
)


class Current(msgspec.Struct, frozen=True):
    """Content of the store.

    keys: by id. file: router.yaml, or what is known of it. removed: objects of the audit that operators have
    removed since the file was written, and drains that they have ended. additions: None if the store keeps
    none.
    """

    tenants: Mapping[str, TenantConfig]
    keys: Mapping[str, StoredKey]
    file: Config
    counters: Sequence[Counter] = ()
    usage: Sequence[DayUsageRow] = ()
    removed: Collection[str] = ()
    additions: Additions | None = None


class ChangedMeanwhile(Exception):
    """An entry is no longer what it was when a restore was planned."""


class Plan:
    """Changes of a restore. replace: overwrite what differs, and restore what was removed since.

    lines: of the difference, as they are printed. kept: number of entries that differ and stay. same: number
    of those that need no change. past: number of counters whose period is over.
    """

    def __init__(self, exported: Exported, current: Current, *, replace: bool) -> None:
        self._current, self._replace = current, replace
        self.lines: list[str] = []
        self.kept = self.same = self.past = 0
        self.tenants = [record for record in exported.tenants if self._restores_tenant(record)]
        self.keys = [record for record in exported.keys if self._restores_key(record)]
        self.upstreams = [record for record in exported.upstreams if self._restores_entry(record)]
        self.models = [record for record in exported.models if self._restores_entry(record)]
        self.drains = [record for record in exported.drains if self._restores_drain(record)]
        if current.additions is None and (exported.upstreams or exported.models or exported.drains):
            self.lines.append(f"! upstreams, models and drains are not restored: {NO_ADDITIONS}")
        self.counters = self._raised_counters(exported.counters)
        self.usage = self._raised_usage(exported.usage)

    def __bool__(self) -> bool:
        """Return whether anything changes."""
        return bool(self.changes_counts or self.changes_additions or self.tenants or self.keys)

    @property
    def changes_counts(self) -> bool:
        """Return whether counters or usage are raised."""
        return bool(self.counters or self.usage)

    @property
    def changes_additions(self) -> bool:
        """Return whether upstreams, models or drains are restored."""
        return bool(self.upstreams or self.models or self.drains)

    @property
    def restored(self) -> Exported:
        """The entries that are restored."""
        return Exported(
            "",
            tuple(self.tenants),
            tuple(self.keys),
            tuple(self.upstreams),
            tuple(self.models),
            tuple(self.drains),
            tuple(self.counters),
            tuple(self.usage),
        )

    def change(self, record: TenantRecord) -> SettingsChange:
        """Return the change of a tenant, which raises ChangedMeanwhile if it differs from the plan's."""

        def change(before: TenantConfig | None) -> TenantConfig:
            if before != self._current.tenants.get(record.name):
                raise ChangedMeanwhile
            return record.settings

        return change

    def known_key(self, id_: str) -> StoredKey | None:
        """Return the stored key of an id, as the plan knows it."""
        return self._current.keys.get(id_)

    def additions(self, before: Additions) -> Additions:
        """Return the additions with those of the plan."""
        drained = dict(before.drained)
        for record in self.drains:
            drained[record.upstream] = tuple(
                dict.fromkeys((*drained.get(record.upstream, ()), record.replica))
            )
        return Additions(
            {**before.upstreams, **{record.name: record.settings for record in self.upstreams}},
            {**before.models, **{record.name: record.settings for record in self.models}},
            drained,
        )

    def counted(self) -> dict[str, list[ChangedField]]:
        """Return what changes in counters and usage, by tenant, as records of the audit have it."""
        before = {counter.key: counter.used for counter in self._current.counters}
        found: dict[str, list[ChangedField]] = defaultdict(list)
        for counter in self.counters:
            was, now = _shown(counter, before.get(counter.key, 0)), _shown(counter, counter.used)
            found[counter.tenant].append(ChangedField(f"{counter.limit} of {counter.start}", was, now))
        for tenant, rows in _by_tenant(self.usage).items():
            found[tenant].append(ChangedField("rows of usage raised", None, len(rows)))
        return found

    def _restores_tenant(self, record: TenantRecord) -> bool:
        known, certificates = self._current.tenants.get(record.name), record.settings.certificates
        problem = sharing_problem(record.name, certificates, self._current.tenants, self._current.file)
        if problem is not None:
            self.keep(f"tenant {record.name}: {problem}")
            return False
        was = None if known is None else tenant_fields(known)
        name = f"tenant {record.name}"
        return self._restores(name, f"tenant/{record.name}", was, tenant_fields(record.settings))

    def _restores_key(self, record: KeyRecord) -> bool:
        key = record.key
        name, known = f"key {key.id} of {key.tenant}", self._current.keys.get(key.id)
        others = (other for other in self._current.keys.values() if other.digest == key.digest)
        if (other := next(others, None)) is not None and other.id != key.id:
            self.keep(f"{name}: the stored key {other.id} is the same key; it stays as it is")
            return False
        # With what may not be shown: a digest, and the rest of the record.
        was = None if known is None else {**key_fields(known), "the key itself": known.digest == key.digest}
        now = {**key_fields(key), "the key itself": True}
        if f"tenant/{key.tenant}" in self._current.removed:
            # Its keys were removed with it, even if there is a new one of that name.
            return self._restores(name, f"tenant/{key.tenant}", was, now)
        return self._restores(name, f"key/{key.id}", was, now)

    def _restores_entry(self, record: UpstreamRecord | ModelRecord) -> bool:
        part = "upstreams" if isinstance(record, UpstreamRecord) else "models"
        additions, kind = self._current.additions, part[:-1]
        if additions is None:
            return False
        if record.name in getattr(self._current.file, part):
            self.keep(f"{kind} {record.name}: router.yaml defines it, and the file wins")
            return False
        known = getattr(additions, part).get(record.name)
        was = None if known is None else redact(known)
        return self._restores(f"{kind} {record.name}", f"{kind}/{record.name}", was, redact(record.settings))

    def _restores_drain(self, record: DrainRecord) -> bool:
        additions = self._current.additions
        if additions is None:
            return False
        replica = shown_url(record.replica)
        is_drained = record.replica in additions.drained.get(record.upstream, ())
        was: dict[str, Any] | None = {} if is_drained else None
        object_ = f"replica/{record.upstream}/{replica}"
        return self._restores(f"drain of {replica} of {record.upstream}", object_, was, {})

    def _restores(
        self, name: str, object_: str, was: Mapping[str, Any] | None, now: Mapping[str, Any]
    ) -> bool:
        """Return whether an entry is restored, and add its lines."""
        if was is None:
            if object_ in self._current.removed and not self._replace:
                self.keep(f"{name}: removed since the file was written; --replace restores it")
                return False
            self.lines.append(f"+ {name}")
            return True
        changes = changed_fields(was, now)
        if not changes:
            self.same += 1
            return False
        if self._replace:
            self.lines.append(f"~ {name}")
        else:
            self.keep(f"{name} differs; it stays as it is, and {OVERWRITES}")
        self.lines += [
            f"    {change.field}: {_text(change.was)} -> {_text(change.now)}" for change in changes
        ]
        return self._replace

    def keep(self, text: str) -> None:
        """Count an entry that stays, and add its line."""
        self.kept += 1
        self.lines.append(f"! {text}")

    def _raised_counters(self, counters: Iterable[Counter]) -> list[Counter]:
        known = {counter.key: counter.used for counter in self._current.counters}
        raised = []
        for counter in counters:
            if not is_current(counter):
                self.past += 1
                continue
            used = known.get(counter.key, 0)
            if counter.used <= used:
                self.same += 1
                continue
            raised.append(counter)
            was, now = _shown(counter, used), _shown(counter, counter.used)
            change = f"{shown_number(was)} -> {shown_number(now)}"
            self.lines.append(f"+ used by {counter.tenant} of {counter.limit}: {change}")
        return raised

    def _raised_usage(self, rows: Iterable[DayUsageRow]) -> list[DayUsageRow]:
        known = {row.place: row.units for row in self._current.usage}
        raised = []
        for row in rows:
            units = known.get(row.place, {})
            if any(amount > units.get(unit, 0) for unit, amount in row.units.items()):
                raised.append(row)
            else:
                self.same += 1
        for tenant, own in sorted(_by_tenant(raised).items()):
            days = sorted({row.day for row in own})
            self.lines.append(f"+ usage of {tenant}: {len(own)} rows, {days[0]} to {days[-1]}")
        return raised


def _by_tenant(rows: Iterable[DayUsageRow]) -> dict[str, list[DayUsageRow]]:
    found: dict[str, list[DayUsageRow]] = defaultdict(list)
    for row in rows:
        found[row.tenant].append(row)
    return found


def _shown(counter: Counter, used: int) -> float:
    """Return an amount as in router.yaml."""
    limit = limit_of(counter)
    return in_currency(used) if limit is not None and limit.unit == "budget" else used


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
