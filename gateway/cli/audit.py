"""`gateway audit`: what operators have changed, from Redis or the file of a gateway without it."""

import argparse
import time
from collections.abc import Mapping

import msgspec
from rich.table import Table

from gateway.audit.query import PAGE_MAX, AuditQuery
from gateway.audit.records import AuditRecord, ChangedField, time_text
from gateway.audit.trail import AuditTrail
from gateway.cli.context import Context, add_store_options, run_action, shown
from gateway.cli.output import NONE, show_line, show_table
from gateway.config.durations import moment_s
from gateway.tenants.file_store import FileTenantStore

WHEN = "a day, a moment, or a duration ago such as 12h"


def add_audit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway audit` to its parser."""
    add_store_options(parser)
    parser.add_argument("--since", type=_moment, metavar="TIME", help=WHEN)
    parser.add_argument("--until", type=_moment, metavar="TIME", help=f"{WHEN}; exclusive")
    parser.add_argument("--object", default="", help="such as tenant/acme, or a kind such as key")
    parser.add_argument("--actor", default="", help="id of a key, user of a token, or user@host")
    parser.add_argument("--limit", type=_limit, default=100, metavar="N", help="most records (default: 100)")
    parser.add_argument("--json", action="store_true", help="for scripts: one record a line")


def _moment(text: str) -> str:
    try:
        return time_text(moment_s(text, time.time()))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limit(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of records")
    return int(text)


def run_audit(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show the records, newest first; return 1 if the store or the config cannot be used."""
    return run_action(_show, options, environment)


async def _show(context: Context) -> int:
    options, store = context.options, context.store
    if store is None:
        show_line(f"records of changes are kept in Redis, or in `state_dir`; {context.no_store}")
        return 1
    if isinstance(store, FileTenantStore):
        await store.settle()
    trail = AuditTrail(context.redis, context.folder, context.config.audit, lambda _: None)
    query = AuditQuery(options.since or "", options.until or "", options.object, options.actor)
    left: int = options.limit
    table = Table("time", "actor", "action", "object", "changes", "from", box=None)
    while left:
        page = await trail.page(msgspec.structs.replace(query, limit=min(left, PAGE_MAX)))
        for record in page.data:
            if options.json:
                print(msgspec.json.encode(record).decode())
            else:
                table.add_row(*_cells(record))
        left -= len(page.data)
        if page.next is None:
            break
        query = msgspec.structs.replace(query, cursor=page.next)
    if not options.json:
        show_table(table)
    return 0


def _cells(record: AuditRecord) -> tuple[str, ...]:
    return (
        f"{record.time[:19].replace('T', ' ')}",
        f"{record.actor} ({record.actor_kind})",
        record.action,
        record.object,
        "; ".join(map(_change, record.changes)) or NONE,
        record.address or NONE,
    )


def _change(change: ChangedField) -> str:
    return f"{change.field}: {shown(change.was)} -> {shown(change.now)}"
