"""What the parent and its workers tell each other while they run, as lines of JSON.

A worker's boot message is the first line that it is sent; all others are of these kinds.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from gateway.additions.entries import Edit, Listing
from gateway.config.diff import ReloadOutcome
from gateway.config.schema import Config
from gateway.events import ProcessRestarted


class AppBoot(msgspec.Struct, frozen=True):
    """Settings that one HTTP worker's application is built from.

    first_key_digest: digest of the key that is valid while no tenant is configured. first_key_waits: Redis
    was unavailable at start and may hold tenants, in which case the first key is not valid. engines: upstream
    name → address of its model in an engine. admin_port: port of the operators' listener, if it has its own.
    worker: index of this worker; None if there is only one.
    """

    config: Config
    first_key_digest: str | None = None
    first_key_waits: bool = False
    engines: Mapping[str, str] = {}
    admin_port: int | None = None
    worker: int | None = None


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Serve this from now on. config: the worker's share. engines: as in `AppBoot`."""

    number: int
    config: Config
    engines: Mapping[str, str]


class ReloadReply(msgspec.Struct, frozen=True, tag="answered"):
    """How the reload ended that a worker asked for by that number."""

    number: int
    outcome: ReloadOutcome


class ModelLine(msgspec.Struct, frozen=True):
    """A model as the banner shows it; operations empty: no replica of it was reached."""

    name: str
    backend: str
    operations: tuple[str, ...]
    dtype: str | None = None
    dimensions: int | None = None
    max_input_tokens: int | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Every upstream has settled, and this is what can be called; told once."""

    models: tuple[ModelLine, ...]


class ConfigAck(msgspec.Struct, frozen=True, tag="followed"):
    """New calls go by that config now; problem: or not, and why."""

    number: int
    problem: str | None = None


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No call goes by anything that this config left out."""

    number: int


class ReloadRequest(msgspec.Struct, frozen=True, tag="asked"):
    """An operator wants the file read again, or something added or removed; the number comes back with the
    answer.
    """

    number: int
    edit: Edit | None = None


class AskedListing(msgspec.Struct, frozen=True, tag="asked_listing"):
    """An operator wants to see what was added."""

    number: int


class Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """The worker's event loop turns; told again and again."""


class ListingReply(msgspec.Struct, frozen=True, tag="told"):
    """What was added, for whoever asked by that number."""

    number: int
    listing: Listing


ToWorker: TypeAlias = Follow | ReloadReply | ProcessRestarted | ListingReply
ToParent: TypeAlias = Ready | ConfigAck | Drained | ReloadRequest | AskedListing | Heartbeat
