"""Records of changes in a file: pages of them, bounds, and what a crash leaves."""

import asyncio
import os
import pwd
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gateway.audit.file import FILE_NAME, AuditFile
from gateway.audit.query import EXAMINED_MAX, AuditQuery, InvalidCursor
from gateway.audit.records import (
    RECORD_BYTES_MAX,
    Actor,
    AuditRecord,
    ChangedField,
    command_actor,
    new_record,
    time_text,
)
from gateway.config.schema import AuditSettings, TenantConfig
from gateway.telemetry.access_log import EventLine
from gateway.tenants.create_key import make_key
from gateway.tenants.file_store import FILE_NAME as TENANTS_NAME
from gateway.tenants.file_store import FileTenantStore
from tests.actors import TESTER

OPERATOR = Actor("ops", "key", "10.0.0.9", "req-1", "host:8080")
DAY_S = 24 * 3600
# Dies where it would append the record of a change that it has made.
KILLED = """
import asyncio, os, sys
from pathlib import Path
from gateway.audit.file import AuditFile
from gateway.config.schema import TenantConfig
from gateway.tenants.file_store import FileTenantStore
from tests.actors import TESTER

AuditFile.append = lambda *_: os._exit(9)
asyncio.run(FileTenantStore(Path(sys.argv[1])).put_tenant("acme", TenantConfig(weight=7), by=TESTER))
"""


def audit_file(folder: Path, records: int = 100, keep_days: int = 400) -> AuditFile:
    return AuditFile(folder / FILE_NAME, AuditSettings(records, keep_days))


def record(number: int, at_s: float = 0.0, by: Actor = OPERATOR) -> AuditRecord:
    made = new_record(by, "change", f"tenant/t{number}", [ChangedField("weight", number, number + 1)])
    return AuditRecord(
        f"{number:016x}",
        time_text(at_s or time.time()),
        *(getattr(made, name) for name in made.__struct_fields__[2:]),
    )


def pages(file: AuditFile, query: AuditQuery) -> list[list[str]]:
    """Return the objects of all pages, following their cursors."""
    found = []
    while True:
        page = file.page(query)
        found.append([record.object for record in page.data])
        if page.next is None:
            return found
        query = AuditQuery(query.since, query.until, query.object, query.actor, query.limit, page.next)


def test_pages_are_newest_first_and_lose_nothing(tmp_path: Path) -> None:
    file, now_s = audit_file(tmp_path), time.time()
    # Records of the same millisecond have an order too, and one that was copied is older than its place.
    times = [now_s, now_s, now_s + 1, now_s - 5]
    file.append([record(number, at_s) for number, at_s in enumerate(times)])

    assert [["tenant/t2"], ["tenant/t1"], ["tenant/t0"], ["tenant/t3"]] == pages(file, AuditQuery(limit=1))
    assert [["tenant/t2", "tenant/t1"], ["tenant/t0", "tenant/t3"]] == pages(file, AuditQuery(limit=2))
    assert [[]] == pages(audit_file(tmp_path / "none"), AuditQuery())
    with pytest.raises(InvalidCursor):
        file.page(AuditQuery(cursor="2026"))


def test_filters_by_time_object_and_actor(tmp_path: Path) -> None:
    file, now_s = audit_file(tmp_path), time.time()
    other = Actor("acme:jo@acme.example", "token")
    file.append([record(1, now_s - 20), record(2, now_s - 10, other), record(3, now_s)])

    assert [["tenant/t3", "tenant/t2"]] == pages(file, AuditQuery(since=time_text(now_s - 10)))
    assert [["tenant/t1"]] == pages(file, AuditQuery(until=time_text(now_s - 10)))
    assert [["tenant/t2"]] == pages(file, AuditQuery(actor=other.name))
    assert [["tenant/t1"]] == pages(file, AuditQuery(object="tenant/t1"))
    assert [["tenant/t3", "tenant/t2", "tenant/t1"]] == pages(file, AuditQuery(object="tenant"))
    assert [[]] == pages(file, AuditQuery(object="ten"))


def test_a_request_examines_a_bounded_number_of_records(tmp_path: Path) -> None:
    file, now_s = audit_file(tmp_path, EXAMINED_MAX + 10), time.time()
    file.append([record(number, now_s + number / 1000) for number in range(EXAMINED_MAX + 10)])

    first = file.page(AuditQuery(object="tenant/t3"))
    assert ([], True) == (first.data, first.next is not None)
    assert [[], ["tenant/t3"]] == pages(file, AuditQuery(object="tenant/t3"))


def test_keeps_the_newest_records_within_number_and_age(tmp_path: Path) -> None:
    file, now_s = audit_file(tmp_path, records=20, keep_days=2), time.time()
    file.append([record(number, now_s - 1) for number in range(22)])
    assert 22 == len(file.records())
    assert [f"tenant/t{number}" for number in range(21, 1, -1)] == pages(file, AuditQuery())[0]
    file.append([record(22, now_s)])
    assert [f"tenant/t{number}" for number in range(3, 23)] == [kept.object for kept in file.records()]

    aged = audit_file(tmp_path / "aged", records=20, keep_days=2)
    aged.append([record(1, now_s - 2.5 * DAY_S), record(2, now_s - 1.5 * DAY_S)])
    assert [["tenant/t2"]] == pages(aged, AuditQuery())
    older = audit_file(tmp_path / "older", records=20, keep_days=2)
    older.append([record(1, now_s - 4 * DAY_S), record(2, now_s)])
    assert ["tenant/t2"] == [kept.object for kept in older.records()]


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = audit_file(tmp_path)
    file.append([record(1)])
    with file.path.open("ab") as torn:
        torn.write(b'{"id":"00')
    file.append([record(2)])

    assert ["tenant/t1", "tenant/t2"] == [kept.object for kept in file.records()]


async def test_several_processes_append_and_trim_at_once(tmp_path: Path) -> None:
    files = [audit_file(tmp_path, records=30) for _ in range(4)]
    await asyncio.gather(
        *(asyncio.to_thread(files[number % 4].append, [record(number)]) for number in range(100))
    )
    kept = [found.id for found in files[0].records()]
    assert len(kept) == len(set(kept))
    assert 30 <= len(kept) <= 33


def test_a_record_is_bounded() -> None:
    wide = new_record(
        OPERATOR, "change", "tenant/x", [ChangedField(f"f{n}", None, "v" * 900) for n in range(99)]
    )
    long = new_record(
        OPERATOR, "create", "key/" + "k" * 5000, [ChangedField("models", None, ["m" * 500] * 99)]
    )

    escaped = new_record(
        OPERATOR, "change", "tenant/x", [ChangedField(f"\x1b{n}" * 99, "\x1b" * 900) for n in range(40)]
    )

    for cut in (wide, long, escaped):
        assert len(msgspec.json.encode(cut)) <= RECORD_BYTES_MAX
    assert "and 35 more" == escaped.changes[-1].field
    assert "and 59 more" == wide.changes[-1].field
    assert str(long.changes[0].now).endswith("… (cut)")


async def test_a_change_and_its_record_survive_a_kill_between_them(tmp_path: Path) -> None:
    path = tmp_path / TENANTS_NAME
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, str(path)], timeout=60, check=False
    )
    assert 9 == killed.returncode
    store, file = FileTenantStore(path), audit_file(tmp_path)
    assert 7 == (await store.tenants())["acme"].weight
    assert [] == file.records()

    await store.settle()
    await store.settle()
    await store.put_tenant("acme", TenantConfig(weight=8), by=TESTER)
    assert [(1, 7), (7, 8)] == [
        (change.was, change.now)
        for kept in file.records()
        for change in kept.changes
        if change.field == "weight"
    ]


async def test_every_change_of_the_file_store_is_recorded_without_secrets(tmp_path: Path) -> None:
    path, events = tmp_path / TENANTS_NAME, []
    store = FileTenantStore(path, AuditSettings(), events.append)
    key = make_key("acme", "laptop", limits={"requests_per_day": 5}, created_by="ops")
    await store.put_tenant("acme", TenantConfig(), by=OPERATOR)
    await store.put_tenant("acme", TenantConfig(), by=OPERATOR)
    await store.put_tenant("acme", TenantConfig(limits={"tokens_per_day": 9}), by=OPERATOR)
    await store.create_key(key.stored, by=OPERATOR)
    await store.create_key(key.stored, by=OPERATOR)
    await store.create_key(make_key("acme", "other", limits={}).stored, by=OPERATOR)
    await store.revoke("laptop", by=OPERATOR)
    await store.revoke("laptop", by=OPERATOR)
    await store.remove_tenant("acme", by=OPERATOR)
    await store.remove_tenant("acme", by=OPERATOR)

    file = audit_file(tmp_path)
    found = [(kept.action, kept.object) for kept in file.records()]
    assert [
        ("create", "tenant/acme"),
        ("change", "tenant/acme"),
        ("create", "key/laptop"),
        ("create", "key/other"),
        ("revoke", "key/laptop"),
        ("remove", "tenant/acme"),
    ] == found
    assert found == [(event.action, event.object) for event in events]
    changed, removed = file.records()[1], file.records()[-1]
    assert (ChangedField("limits.tokens_per_day", None, 9),) == changed.changes
    assert (ChangedField("keys", ["other"]), ChangedField("limits.tokens_per_day", 9)) == removed.changes
    assert ("ops", "key", "10.0.0.9", "req-1", "host:8080") == (
        changed.actor,
        changed.actor_kind,
        changed.address,
        changed.request_id,
        changed.gateway,
    )
    written = file.path.read_text()
    assert key.text not in written
    assert "sha256" not in written


def test_a_command_acts_as_the_user_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    name, _, host = command_actor().name.rpartition("@")
    assert pwd.getpwuid(os.getuid()).pw_name == name
    assert socket.gethostname() == host


def test_a_record_is_one_line_of_the_log() -> None:
    changes = [ChangedField("limits.tokens_per_day", None, 9), ChangedField("models", ["a"], ["a", "b"])]
    made = new_record(OPERATOR, "change", "tenant/acme", changes)
    line = EventLine(made.event())
    assert (
        "audit: ops (key) change tenant/acme: limits.tokens_per_day: not set -> 9, "
        f'models: ["a"] -> ["a","b"]  from=10.0.0.9  record={made.id}'
    ) == str(line)
    named = new_record(OPERATOR, "change", "tenant/acme", [ChangedField("model_limits.\x1b[2K\naudit: root")])
    assert "tenant/acme: model_limits.\\x1b[2K\\naudit: root: " in str(EventLine(named.event()))
    fields = msgspec.to_builtins(line.fields())
    assert {"field": "limits.tokens_per_day", "was": None, "is": 9} == fields["changes"][0]
    assert ("audit", "ops", "req-1", "host:8080") == tuple(
        fields[name] for name in ("event", "actor", "request_id", "gateway")
    )
