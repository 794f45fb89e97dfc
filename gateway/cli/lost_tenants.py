"""Keys and tenants that Redis has lost, as a gateway's snapshot on this host shows them to a command."""

import asyncio
import os
import time
from datetime import UTC, datetime

import msgspec

from gateway.cli.context import Context
from gateway.cli.output import show_line
from gateway.events import tenants_and_keys
from gateway.tenants.snapshot import FILE_NAME, SnapshotFile, Stored, loss_between, tenants_end_first_key
from gateway.tenants.store import TenantChange, TenantStore

READ_MORE = 'see docs/production.md, "An emptied Redis"'
BLANK_NOTE = f"Redis has no record of any tenant or key: it is new, or it was emptied; if so, {READ_MORE}"


class LostTenants(msgspec.Struct, frozen=True):
    """Loss of the store. missing: what gateways still accept.

    until_s: end of that, in seconds since 1970; None if the gateway of the snapshot has not noticed the loss
    yet. has_ended_first_key: tenants, which are lost now, have ended the first key. is_blank: the store has
    nothing, and no record of a change.
    """

    missing: Stored = Stored()
    until_s: float | None = None
    has_ended_first_key: bool = False
    is_blank: bool = False


async def find_lost_tenants(context: Context) -> LostTenants:
    """Compare Redis with the snapshot in the state folder, if there is one. Raises: StoreUnavailable."""
    store = context.store
    if not isinstance(store, TenantStore):
        return LostTenants()
    now = await store.look()
    is_blank = not (now.version or now.keys or now.tenants)
    path = None if context.state is None else context.state / FILE_NAME
    if path is None or not os.access(path, os.R_OK):
        return LostTenants(is_blank=is_blank)
    found = await asyncio.to_thread(SnapshotFile(path, context.config.quotas.store).read)
    if found is None:
        return LostTenants(is_blank=is_blank)
    snapshot, confirmed_s = found
    seen, loss = snapshot.state(confirmed_s), snapshot.loss
    reason = loss_between(seen, now)
    has_ended = tenants_end_first_key(seen, now, reason, has_ended=snapshot.ends_first_key)
    nothing = LostTenants(has_ended_first_key=has_ended, is_blank=is_blank)
    if reason:
        known, since_s, until_s = snapshot.stored.joined(snapshot.kept), seen.clock_s, None
    elif loss is not None:
        known, since_s = snapshot.kept, loss.seen_s
        until_s = loss.at_s + context.config.quotas.key_grace_s
        if until_s < time.time():
            return nothing
    else:
        return nothing
    current = Stored(tuple(await store.keys()), await store.tenants())
    missing = known.lacking_in(current, await store.removals(since_s))
    return msgspec.structs.replace(nothing, missing=missing, until_s=until_s)


async def show_lost_tenants(context: Context) -> None:
    """Print a line if Redis has lost keys or tenants, or may have. Raises: StoreUnavailable."""
    lost = await find_lost_tenants(context)
    if lost.missing:
        number = tenants_and_keys(len(lost.missing.tenants), len(lost.missing.keys))
        if lost.until_s is None:
            until = f"for quotas.key_grace_s ({context.config.quotas.key_grace_s:g} s) from the loss"
        else:
            until = datetime.fromtimestamp(lost.until_s, UTC).strftime("until %Y-%m-%d %H:%M:%S UTC")
        show_line(f"Redis has lost {number}: gateways that knew them accept them {until}; {READ_MORE}")
    elif lost.is_blank:
        show_line(BLANK_NOTE)


def show_replaced(tenant: str, lost: LostTenants, changed: TenantChange) -> None:
    """Print the settings that gateways have kept of a lost tenant, and that the new ones replace."""
    kept = lost.missing.tenants.get(tenant)
    if kept is None or changed.before is not None:
        return
    replaced = msgspec.structs.replace(changed, before=kept).changes
    show_line(f"Redis had lost {tenant}; these settings replace those that gateways kept:")
    for change in replaced:
        show_line(f"  {change.field}: {shown(change.was)} -> {shown(change.now)}")
    if not replaced:
        show_line("  they are equal")


def shown(value: object) -> str:
    """Return the value of a setting as a command prints it."""
    if value is None:
        return "not set"
    return (
        " ".join(value) if isinstance(value, list | tuple) else msgspec.json.encode(value).decode().strip('"')
    )
