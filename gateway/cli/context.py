"""The context of commands on keys and tenants: options, config, and the store of tenants."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from gateway.cli.check import show_problems
from gateway.cli.operator_options import add_config_option
from gateway.cli.output import show_line
from gateway.config.load import load_config, parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.config.state_folder import state_folder
from gateway.config.yaml_parser import format_yaml
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.store import TenantStore

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
    state: folder of a gateway with Redis on this host, if it is known.
    """

    options: argparse.Namespace
    config: Config
    redis: RedisClient | None
    store: TenantStore | FileTenantStore | None
    file: Path | None = None
    folder: Path | None = None
    state: Path | None = None

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
        store = None if file is None else FileTenantStore(file)
        return await action(Context(options, config, None, store, file, folder))
    redis = RedisClient(config.quotas.store, TIMEOUT_S)
    shared = TenantStore(redis)
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
