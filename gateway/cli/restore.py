"""`gateway restore FILE`: merge what `gateway export` has written into the store, never lowering a count."""

import argparse
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.audit.query import PAGE_MAX, AuditQuery
from gateway.audit.records import AuditRecord, new_record
from gateway.audit.trail import AuditTrail
from gateway.cli.context import (
    Context,
    add_store_options,
    find_lost_tenants,
    run_action,
    warn_of_first_key_end,
)
from gateway.cli.export import counted_tenants, read_input, stored_additions, stored_counts
from gateway.cli.exported import Exported, NotExported, decode_export, numbers_of, summary
from gateway.cli.operator_options import add_json_option
from gateway.cli.output import print_json, show_line
from gateway.cli.printable import plain
from gateway.cli.restore_plan import ChangedMeanwhile, Current, Plan
from gateway.declared.additions import Additions, Drain, Part, Put
from gateway.declared.audited import edit_record
from gateway.declared.store import AdditionsInRedis
from gateway.events import tenants_and_keys
from gateway.store.errors import StoreUnavailable
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.snapshot import Stored
from gateway.tenants.store import TenantStore

# Actions of records after which an object is gone.
REMOVALS = frozenset({"remove", "revoke", "undrain"})
NO_SNAPSHOT_NOTE = (
    "no gateway's snapshot was found on this host: a key that was revoked after the export is valid again, "
    "unless you revoke it again"
)
SNAPSHOT_NOTE = (
    "tenants and keys that Redis has lost are taken from the snapshot on this host, not from the file"
)
# Others may change the additions between reading and writing them.
ATTEMPTS = 20


def add_restore_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway restore` to its parser."""
    add_store_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="of `gateway export`; - is standard input")
    source.add_argument(
        "--lost",
        action="store_true",
        help="in place of a file: the keys and tenants that Redis has lost, as a gateway's `state_dir` on "
        "this host has them",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the difference, and change nothing")
    add_json_option(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="also overwrite what differs, and restore what was removed since; counts are never lowered",
    )


def run_restore(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Merge the file; return 1 if it is damaged, or the store or the config cannot be used."""
    return run_action(_restore, options, environment)


async def _restore(context: Context) -> int:
    options, store = context.options, context.store
    if store is None:
        show_line(context.no_store)
        return 1
    try:
        exported = Exported("") if options.lost else decode_export(read_input(options.file))
    except OSError as error:
        show_line(f"{options.file} cannot be read: {error.strerror}")
        return 1
    except NotExported as error:
        show_line(f"{options.file} is not restored:\n{error}")
        return 1
    if isinstance(store, FileTenantStore):
        await store.settle()
    trail = AuditTrail(context.redis, context.folder or context.state, context.config.audit, lambda _: None)
    lost = (await find_lost_tenants(context)).missing
    current = await _current(context, exported, lost, trail)
    plan = Plan(exported.joined(lost), current, replace=options.replace)
    if lost and exported.created:
        show_line(f"{SNAPSHOT_NOTE} ({tenants_and_keys(len(lost.tenants), len(lost.keys))})")
    elif plan.keys and not current.keys and context.redis is not None:
        show_line(NO_SNAPSHOT_NOTE)
    planned = _show_lines(plan, 0, options)
    if plan and not options.dry_run:
        await _apply(context, store, plan, trail)
        _show_lines(plan, planned, options)
    _show_numbers(plan, options)
    return 0


async def _current(context: Context, exported: Exported, lost: Stored, trail: AuditTrail) -> Current:
    """Return the content of the store. lost: what gateways on this host know that it has lost."""
    assert context.store is not None
    counts, names = stored_counts(context), {record.tenant for record in exported.counters}
    names |= await counted_tenants(context)
    rows = {row.tenant for row in exported.usage}
    removed = set[str]()
    if exported.created:
        removed = await _removed_since(trail, exported.created)
    if lost:
        # They had all keys and tenants until the loss: what is in the file only was removed before.
        removed |= exported.objects() - Exported("").joined(lost).objects()
    return Current(
        await context.store.tenants(),
        {key.id: key for key in await context.store.keys()},
        context.config,
        await counts.counters(names),
        await counts.usage(rows, {row.day for row in exported.usage}),
        removed,
        await stored_additions(context),
    )


async def _removed_since(trail: AuditTrail, since: str) -> set[str]:
    """Return the objects that operators have removed since, and the tenants' keys with them."""
    removed: set[str] = set()
    query = AuditQuery(since=since, limit=PAGE_MAX)
    while True:
        page = await trail.page(query)
        removed |= {record.object for record in page.data if record.action in REMOVALS}
        if page.next is None:
            return removed
        query = msgspec.structs.replace(query, cursor=page.next)


async def _apply(
    context: Context, store: TenantStore | FileTenantStore, plan: Plan, trail: AuditTrail
) -> None:
    """Carry out a plan: counts first, so that no key finds a spent budget full, then tenants before keys."""
    if plan.changes_counts:
        counts = stored_counts(context)
        counts.acquire()
        await counts.raise_to(plan.counters, plan.usage)
        for tenant, changes in sorted(plan.counted().items()):
            await trail.record(new_record(context.by, "restore", f"usage/{tenant}", changes))
    await _put_tenants(context, store, plan)
    if plan.changes_additions:
        await _add(context, plan)
    await _put_keys(context, store, plan)


async def _put_tenants(context: Context, store: TenantStore | FileTenantStore, plan: Plan) -> None:
    ends_first_key = False
    lost = await find_lost_tenants(context)
    for record in list(plan.tenants):
        try:
            changed = await store.change_tenant(record.name, plan.change(record), by=context.by)
            ends_first_key |= changed.is_first and not lost.has_ended_first_key
        except ChangedMeanwhile:
            plan.tenants.remove(record)
            plan.keep(f"tenant {record.name}: changed meanwhile; it stays as it is")
    warn_of_first_key_end(context, is_first=ends_first_key)


async def _put_keys(context: Context, store: TenantStore | FileTenantStore, plan: Plan) -> None:
    for record in list(plan.keys):
        key = record.key
        if not await store.put_key(key, plan.known_key(key.id), by=context.by):
            plan.keys.remove(record)
            plan.keep(f"key {key.id} of {key.tenant}: changed meanwhile; it stays as it is")
    days = {record.key.id: record.last_used for record in plan.keys if record.last_used is not None}
    if days:
        await store.note_uses(days)


async def _add(context: Context, plan: Plan) -> None:
    """Restore upstreams, models and drains in one step. Raises: StoreUnavailable."""
    assert context.redis is not None
    store = AdditionsInRedis(context.redis, context.config.audit)
    for _ in range(ATTEMPTS):
        before = await store.load()
        after = plan.additions(before.additions)
        records = list(_records(context, plan, before.additions, after))
        if await store.replace(before.version, after, records) is not None:
            return
    raise StoreUnavailable("others change upstreams and models all the time; try again")


def _records(context: Context, plan: Plan, before: Additions, after: Additions) -> Iterable[AuditRecord]:
    parts: Sequence[tuple[Part, Sequence[str]]] = (
        ("upstreams", [record.name for record in plan.upstreams]),
        ("models", [record.name for record in plan.models]),
    )
    for part, names in parts:
        for name in names:
            yield edit_record(Put(part, name, {}, context.by), before, after)
    for record in plan.drains:
        drain = Drain(record.upstream, record.replica, is_drained=True, by=context.by)
        yield edit_record(drain, before, after)


def _show_lines(plan: Plan, first: int, options: argparse.Namespace) -> int:
    """Print the lines of a difference from one of them on; return their number."""
    for line in () if options.json else plan.lines[first:]:
        # A file must not hide what it restores.
        print(plain(line))
    return len(plan.lines)


def _show_numbers(plan: Plan, options: argparse.Namespace) -> None:
    restored = plan.restored
    if options.json:
        numbers = {"unchanged": plan.same, "kept": plan.kept, "past": plan.past, "differences": plan.lines}
        print_json({"dry_run": options.dry_run, **numbers_of(restored), **numbers})
        return
    print(f"{'would restore' if options.dry_run else 'restored'}: {summary(restored)}")
    print(f"unchanged: {plan.same}; kept although they differ: {plan.kept}; of past periods: {plan.past}")
