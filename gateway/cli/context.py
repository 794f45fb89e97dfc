"""The context of commands on keys and tenants: options, config, the store of tenants, and what may be wrong.

A command warns of names that do not exist, of budgets that nothing is spent from, and of keys and tenants
that Redis has lost, as a gateway's snapshot on this host shows them.
"""

import argparse
import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import msgspec

from gateway.audit.records import Actor, command_actor
from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from gateway.cli.operator_options import add_config_option, address_of
from gateway.cli.output import show_line, show_problems
from gateway.config.load import load_config, parse_config
from gateway.config.money import is_budget
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, LimitAmount, limit_problems
from gateway.config.state_folder import state_folder
from gateway.config.yaml_parser import format_yaml
from gateway.declared.store import AdditionsInRedis
from gateway.events import tenants_and_keys
from gateway.quotas.kept_ledger import is_kept
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.keyring import FIRST_KEY_NOTE, NO_PRICE_NOTE
from gateway.tenants.snapshot import FILE_NAME as SNAPSHOT_NAME
from gateway.tenants.snapshot import SnapshotFile, Stored, loss_between, tenants_end_first_key
from gateway.tenants.store import TenantChange, TenantStore

# For a gateway on this machine.
ANSWER_S = 1.0
# Longer than a request's timeout, because a person waits.
TIMEOUT_S = 5.0
# A person at a terminal has the address of the store, but not all variables of the gateway's environment. Of
# other sections only the names are used, which a mistake in an entry does not change.
STORE_SECTIONS = ("quotas",)
MEMORY = "memory"


class Context(msgspec.Struct, frozen=True):
    """Input of one action.

    redis: None if there is none. store: of tenants and keys; None if they are only in router.yaml. file: of
    the store if it is no Redis. folder: where a gateway without Redis would keep the file, if it is known.
    state: folder of a gateway with Redis on this host, if it is known. is_kept: a running gateway keeps the
    file. by: the user who runs the command.
    """

    options: argparse.Namespace
    config: Config
    redis: RedisClient | None
    store: TenantStore | FileTenantStore | None
    file: Path | None = None
    folder: Path | None = None
    state: Path | None = None
    is_kept: bool = False
    by: Actor = msgspec.field(default_factory=command_actor)

    @property
    def no_store(self) -> str:
        """Return why there is no store, and what would make one."""
        if self.folder is None:
            return "there is no Redis, and no folder for keys and tenants is known; set `state_dir`"
        return (
            f"there is no Redis, and no gateway has started with the state folder {self.folder}; start the "
            "gateway first, or give this command its `state_dir`, XDG_STATE_HOME or HOME"
        )

    @property
    def followed(self) -> str:
        """Return who applies a change, and when."""
        if self.file is None:
            return "every gateway follows within a second"
        if not self.is_kept:
            return f"no gateway keeps {self.file} now: the next one that starts with this folder follows"
        return f"the gateway that keeps {self.file} follows within a second"


Action: TypeAlias = Callable[[Context], Awaitable[int]]


def add_store_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that find the store, and return the parser."""
    add_config_option(parser)
    parser.add_argument(
        "--store",
        metavar="URL",
        help="the Redis, without a configuration; '${NAME}' is filled from the environment",
    )
    return parser


def store_config(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the config, of which at least the place of the store is valid. Raises: ConfigError."""
    if options.store is None:
        config = load_config(options.config, environment, STORE_SECTIONS)
        if config.quotas.store == MEMORY:
            return load_config(options.config, environment, (*STORE_SECTIONS, "state_dir"))
        return config
    text = format_yaml({"quotas": {"store": options.store}})
    return parse_config(text, environment, Path.cwd(), STORE_SECTIONS)


def show_config_problems(options: argparse.Namespace, error: ConfigError) -> None:
    """Print the problems of the file or of the option that names the store."""
    show_problems(options.config if options.store is None else Path("--store"), error)


def run_action(action: Action, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action with an open store; return its status, or 1 if the config or the store is unusable."""
    try:
        config = store_config(options, environment)
    except ConfigError as error:
        show_config_problems(options, error)
        return 1
    try:
        return asyncio.run(_run(action, options, config, environment))
    except StoreUnavailable as error:
        show_line(f"the store of tenants and keys is unavailable: {error}")
        return 1


async def _run(
    action: Action, options: argparse.Namespace, config: Config, environment: Mapping[str, str]
) -> int:
    folder = state_folder(config.state_dir, environment)
    if config.quotas.store == MEMORY:
        file = _tenants_file(folder)
        store = None if file is None else FileTenantStore(file, config.audit)
        has_gateway = file is not None and await asyncio.to_thread(_has_gateway, file.parent, config)
        return await action(Context(options, config, None, store, file, folder, is_kept=has_gateway))
    redis = RedisClient(config.quotas.store, TIMEOUT_S)
    shared = TenantStore(redis, config.audit)
    try:
        return await action(Context(options, config, redis, shared, state=folder))
    finally:
        await shared.aclose()


def _tenants_file(folder: Path | None) -> Path | None:
    """Return the file of a gateway without Redis, or None if none has started with this state folder.

    Every change replaces the file, which another user's gateway could then not read.
    Raises: StoreUnavailable.
    """
    if folder is None or not folder.is_dir():
        return None
    if folder.stat().st_uid != os.geteuid():
        raise StoreUnavailable(f"{folder} belongs to another user: run the command as the gateway's user")
    return folder / FILE_NAME


def _has_gateway(folder: Path, config: Config) -> bool:
    """Return whether a running gateway keeps its state in a folder.

    Raises: StoreUnavailable if none does, and one answers at the address in the file: it has another folder,
    and would never follow.
    """
    if is_kept(folder):
        return True
    with suppress(RequestRefused, GatewayUnavailable, ValueError):
        url = address_of(config, for_operators=False)
        with closing(GatewayClient(url, None, timeout_s=ANSWER_S)) as client:
            client.send("GET", "/livez")
        raise StoreUnavailable(
            f"the gateway at {url} does not keep them in {folder}: run the command as its user, with its "
            "`state_dir`, STATE_DIRECTORY, XDG_STATE_HOME or HOME"
        )
    return False


AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


def parse_limits(options: Sequence[str]) -> dict[str, LimitAmount]:
    """Return the amounts by name. Raises: ValueError with the problem."""
    limits = {}
    for option in options:
        name, _, amount = option.partition("=")
        if not AMOUNT.fullmatch(amount):
            raise ValueError(f"{option}: expected NAME=AMOUNT, such as tokens_per_minute=100000")
        try:
            limits[name] = msgspec.convert(float(amount) if "." in amount else int(amount), LimitAmount)
        except msgspec.ValidationError as error:
            raise ValueError(f"{option}: {error}") from error
    for name, problem in limit_problems(limits).items():
        raise ValueError(f"{name}: {problem}")
    return limits


def format_limits(limits: Mapping[str, LimitAmount], prefix: str = "") -> list[str]:
    """Return the limits in the form of the options. prefix: put in front of each name."""
    return [f"{prefix}{name}={amount}" for name, amount in limits.items()]


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
    path = None if context.state is None else context.state / SNAPSHOT_NAME
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
    if isinstance(value, float):
        return shown_number(value)
    return (
        " ".join(value) if isinstance(value, list | tuple) else msgspec.json.encode(value).decode().strip('"')
    )


def shown_number(number: float) -> str:
    """Return an amount in digits, without an exponent: money has up to nine decimal places."""
    text = f"{number:.9f}"
    return text.rstrip("0").rstrip(".")


def warn_of_first_key_end(context: Context, *, is_first: bool) -> None:
    """Warn if a change ends the first key, which outlives tenants where there is no Redis.

    is_first: there was no tenant in the store before.
    """
    if is_first and context.file is None and not context.config.tenants:
        show_line(FIRST_KEY_NOTE)


def warn_of_idle_budgets(context: Context, *limits: Iterable[str]) -> None:
    """Warn if limits contain a budget and no model can have a price. Without a file nothing is known."""
    if context.options.store is not None or context.config.currency is not None:
        return
    if any(is_budget(name) for names in limits for name in names):
        show_line(NO_PRICE_NOTE)


async def warn_of_unknown_models(context: Context, names: Iterable[str]) -> None:
    """Warn of each model that is defined nowhere.

    Additions in a gateway's own memory cannot be seen from here. Without Redis, only the file counts; without
    a file, nothing is known.
    """
    if context.options.store is not None:
        return
    missing = [name for name in dict.fromkeys(names) if name not in context.config.models]
    if not missing:
        return
    added = await _added_models(context)
    where = "not in router.yaml" if context.redis is None else "neither in router.yaml nor added"
    for name in missing:
        if name not in added:
            show_line(f"model {name} is {where}: there may be nothing to call by that name")


async def _added_models(context: Context) -> Collection[str]:
    """Return the models that operators added in Redis, or none if they cannot be read."""
    if context.redis is None:
        return ()
    try:
        return (await AdditionsInRedis(context.redis).load()).additions.models
    except StoreUnavailable:
        return ()
