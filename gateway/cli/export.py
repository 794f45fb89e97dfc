"""`gateway export FILE`: everything that operators declare at run time, and what was used, in one file."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.audit.records import time_text
from gateway.cli.context import (
    BLANK_NOTE,
    Context,
    add_store_options,
    find_lost_tenants,
    run_action,
    show_lost_tenants,
)
from gateway.cli.exported import (
    DrainRecord,
    Exported,
    KeyRecord,
    ModelRecord,
    TenantRecord,
    UpstreamRecord,
    encode_export,
    numbers_of,
    summary,
)
from gateway.cli.operator_options import add_json_option
from gateway.cli.output import print_result, show_line, write_document
from gateway.config.schema import TenantConfig
from gateway.config.state_folder import replace_private
from gateway.declared.additions import Additions
from gateway.declared.settings import redact, shown_url
from gateway.declared.store import AdditionsInRedis
from gateway.quotas.stored_counts import CountsInFiles, CountsInRedis, StoredCounts, usage_days
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.keyring import FIRST_TENANT
from gateway.tenants.store import UNREADABLE, TenantStore

STANDARD_OUTPUT = "-"
NO_FILE_NOTE = (
    "--store names no router.yaml: the counts and the usage of its tenants are not exported; use -c"
)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway export` to its parser."""
    add_store_options(parser)
    add_json_option(parser)
    parser.add_argument("file", metavar="FILE", help="where to write it; - is standard output")
    parser.add_argument(
        "--force", action="store_true", help="also while Redis has lost keys and tenants that gateways keep"
    )


def run_export(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Write the file; return 1 if the store or the config cannot be used, or has lost its content."""
    return run_action(_export, options, environment)


async def _export(context: Context) -> int:
    options, store = context.options, context.store
    if store is None:
        show_line(context.no_store)
        return 1
    if options.json and options.file == STANDARD_OUTPUT:
        show_line("--json and the file - both are standard output: name a file, or leave --json out")
        return 2
    if not await _is_whole(context):
        return 1
    exported = await _exported(context, store)
    content = encode_export(exported)
    if options.file == STANDARD_OUTPUT:
        write_document(content.decode())
        return 0
    path = Path(options.file)
    try:
        replace_private(path, content)
    except OSError as error:
        show_line(f"{path} cannot be written: {error.strerror}")
        return 1
    numbers = {"file": str(path), **numbers_of(exported)}
    print_result(numbers, f"exported to {path}: {summary(exported)}", as_json=options.json)
    return 0


async def _is_whole(context: Context) -> bool:
    """Return whether the store is to be exported; lines name what it lacks."""
    options, lost = context.options, await find_lost_tenants(context)
    if lost.missing and not options.force:
        await show_lost_tenants(context)
        show_line(
            "nothing is exported: `gateway restore --lost` restores them, and --force exports without them"
        )
        return False
    if lost.is_blank:
        show_line(BLANK_NOTE)
    if options.store is not None:
        show_line(NO_FILE_NOTE)
    if context.redis is None:
        show_line("without Redis, added upstreams and models are in the gateway's memory only: not exported")
    return True


async def _exported(context: Context, store: TenantStore | FileTenantStore) -> Exported:
    """Return the content of the store."""
    created, days = time_text(time.time()), await store.last_uses()
    tenants, keys = await store.tenants(), await store.keys()
    additions = await stored_additions(context) or Additions()
    counts, names = stored_counts(context), await counted_tenants(context)
    return Exported(
        created,
        tuple(_readable(tenants)),
        tuple(KeyRecord(key, days.get(key.id)) for key in keys),
        tuple(UpstreamRecord(*entry) for entry in _without_secrets("upstream", additions.upstreams)),
        tuple(ModelRecord(*entry) for entry in _without_secrets("model", additions.models)),
        tuple(
            DrainRecord(upstream, replica)
            for upstream, replicas in sorted(additions.drained.items())
            for replica in sorted(replicas)
            if shown_url(replica) == replica
        ),
        tuple(await counts.counters(names)),
        tuple(await counts.usage(names, usage_days())),
    )


def _readable(tenants: Mapping[str, TenantConfig]) -> Iterator[TenantRecord]:
    """Yield the tenants whose entries can be read; a line names the others."""
    for name, settings in tenants.items():
        if settings is UNREADABLE:
            show_line(f"tenant {name} is not exported: its entry in Redis cannot be read")
        else:
            yield TenantRecord(name, settings)


def _without_secrets(kind: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the additions whose secrets are all references; a line names the others."""
    for name, settings in sorted(entries.items()):
        if isinstance(settings, dict) and redact(settings) == settings:
            yield name, settings
        else:
            show_line(f"{kind} {name} is not exported: it contains a secret in place of a reference to one")


def stored_counts(context: Context) -> StoredCounts:
    """Return the counts of the store."""
    if context.redis is not None:
        return CountsInRedis(context.redis)
    assert context.folder is not None, "there is a store"
    return CountsInFiles(context.folder)


async def stored_additions(context: Context) -> Additions | None:
    """Return what operators have added in Redis, None without it. Raises: StoreUnavailable."""
    if context.redis is None:
        return None
    return (await AdditionsInRedis(context.redis).load()).additions


async def counted_tenants(context: Context) -> set[str]:
    """Return the tenants that may have counts: stored ones, those of router.yaml, and of the first key."""
    assert context.store is not None
    return {*context.config.tenants, *await context.store.names(), FIRST_TENANT}


def read_input(file: str) -> bytes:
    """Return the content of a file, or of standard input. Raises: OSError."""
    return sys.stdin.buffer.read() if file == STANDARD_OUTPUT else Path(file).read_bytes()
