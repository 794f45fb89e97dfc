"""`gateway verify`: whether upstreams give the same vectors, each other's and those of their fingerprints.

It opens the upstreams itself, engines too, and needs no running gateway; one after the other, so that never
two models are in memory because of it.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table

from backends.canaries import CANARIES, embed_in_batches, max_inputs_per_request
from backends.contract import Operation
from backends.errors import BackendError
from backends.registry import open_replica
from gateway.additions.composing import compose
from gateway.additions.store import AdditionsInRedis
from gateway.cli.check import show_problems
from gateway.cli.store import TIMEOUT_S, show_line
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, UpstreamSettings
from gateway.processes.engine_process import EngineFailed, running_engine
from gateway.routing.discovery import resolve
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.upstreams.factory import create_replica
from gateway.vector_spaces.comparison import Pair, ReplicaVectors, Report, StoredMatch, report_on
from gateway.vector_spaces.fingerprint import Fingerprint, fingerprint_of
from gateway.vector_spaces.store import FingerprintStore

REQUEST_TIMEOUT_S = 30.0
TEXTS_MAX = 10_000
COLUMNS = ("upstream", "backend", "model", "dtype", "dims", "norms", "tokens", "fingerprint", "stored")
# A cell that is cut tells nothing, and what reads a pipe has no width.
WIDTH = 1000


class CannotVerify(Exception):
    """Why there is nothing to report; the message is for a person."""


class Place(msgspec.Struct, frozen=True):
    """Where one replica is, and what it is called in a report."""

    name: str
    address: str
    ip: str | None = None


def verify(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """0 where all that should agree does; 1 where not, or where something cannot be asked."""
    try:
        config = load_config(arguments.config, environment)
        return asyncio.run(_verify(config, arguments, environment))
    except ConfigError as error:
        show_problems(arguments.config, error)
    except CannotVerify as error:
        show_line(str(error))
    except StoreUnavailable as error:
        show_line(f"the store of fingerprints is away: {error}")
    return 1


async def _verify(file: Config, arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    config = await _with_additions(file, environment)
    names = _named(config, arguments.names)
    if arguments.accept:
        _check_acceptable(config, arguments.names)
    texts = (*CANARIES, *_read_texts(arguments.texts))
    given: list[ReplicaVectors] = []
    for name in names:
        asking = _Asking(name, config.upstreams[name], texts, environment)
        try:
            async with asyncio.timeout(arguments.timeout):
                found = await asking.all()
        except TimeoutError as error:
            raise CannotVerify(f"{name}: no answer within {arguments.timeout:.0f} s") from error
        if not found and arguments.names:
            raise CannotVerify(f"{name}: it embeds nothing")
        given += found
    if not given:
        raise CannotVerify("no upstream here embeds anything")
    return await _tell(config, given, arguments)


async def _with_additions(file: Config, environment: Mapping[str, str]) -> Config:
    """With what operators have added in Redis. Raises: StoreUnavailable."""
    if file.quotas.store == "memory":
        return file
    store = AdditionsInRedis(RedisClient(file.quotas.store, TIMEOUT_S))
    try:
        additions = (await store.load()).additions
    finally:
        await store.aclose()
    found = await asyncio.to_thread(compose, file, additions, environment, {})
    for part, name in found.rejected:
        if part == "upstreams" and name not in file.upstreams:
            for one in found.rejected[part, name]:
                show_line(f"{one.path}: left out of what was added: {one.message}")
    return found.config


def _named(config: Config, asked: Sequence[str]) -> Sequence[str]:
    for name in asked:
        if name not in config.upstreams:
            raise CannotVerify(f"there is no upstream {name!r}; there are: {', '.join(config.upstreams)}")
    return tuple(dict.fromkeys(asked)) or tuple(config.upstreams)


def _check_acceptable(config: Config, names: Sequence[str]) -> None:
    if not names:
        raise CannotVerify("--accept: name the upstreams whose fingerprints are to be made anew")
    if config.quotas.store == "memory":
        raise CannotVerify(
            "--accept: fingerprints are kept in the gateway's memory here, and made anew when it starts; "
            "a Redis in `quotas.store` would keep them"
        )


def _read_texts(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        texts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CannotVerify(f"{path} cannot be read: {reason}") from error
    if len(texts) > TEXTS_MAX:
        raise CannotVerify(f"{path} has {len(texts)} lines; at most {TEXTS_MAX} are compared")
    return texts


class _Asking:
    """What the replicas of one upstream make of some texts."""

    def __init__(
        self, name: str, settings: UpstreamSettings, texts: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._settings = settings
        self._texts = texts
        self._environment = environment

    async def all(self) -> list[ReplicaVectors]:
        """One for each replica; none where the upstream does not embed. Raises: CannotVerify."""
        async with self._places() as places:
            asked = [await self._ask(place) for place in places]
        return [one for one in asked if one is not None]

    @asynccontextmanager
    async def _places(self) -> AsyncIterator[list[Place]]:
        if self._settings.is_hosted:
            try:
                async with running_engine(self._name, self._settings, self._environment) as path:
                    yield [Place(self._name, path)]
            except EngineFailed as error:
                raise CannotVerify(f"{self._name}: {error}") from error
            return
        places = [one for url in self._settings.replicas for one in await self._behind(url)]
        is_lone = len(places) == 1
        yield [msgspec.structs.replace(one, name=self._name) for one in places] if is_lone else places

    async def _behind(self, url: str) -> list[Place]:
        label = f"{self._name} {url}"
        if self._settings.discover is None:
            return [Place(label, url)]
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await resolve(parts.hostname or "", port)
        except OSError as error:
            raise CannotVerify(f"{label}: the name has no address") from error
        return [Place(f"{label} {ip}", url, ip) for ip in found]

    async def _ask(self, place: Place) -> ReplicaVectors | None:
        settings = self._settings
        backend = create_replica(settings, place.name, place.address, place.ip, open_replica).backend
        try:
            told = await backend.describe(REQUEST_TIMEOUT_S)
            if Operation.EMBED not in told.operations:
                return None
            most = max_inputs_per_request(told, settings.batch_inputs)
            reply = await embed_in_batches(backend, self._texts, most, REQUEST_TIMEOUT_S)
        except BackendError as error:
            raise CannotVerify(f"{place.name}: {error.message}") from error
        finally:
            await backend.aclose()
        made = fingerprint_of(reply.vectors[: len(CANARIES)], settings.backend, told)
        needed = settings.vector_space.min_cosine
        return ReplicaVectors(place.name, self._name, made, reply.vectors, reply.tokens, needed)


async def _tell(config: Config, given: Sequence[ReplicaVectors], arguments: argparse.Namespace) -> int:
    """The report, held against what is stored; or what is stored made anew, and the report then."""
    store = None
    if config.quotas.store != "memory":
        store = FingerprintStore(RedisClient(config.quotas.store, TIMEOUT_S))
    try:
        if arguments.accept and store is not None:
            await _accept(store, given)
        stored = await _stored(store, {one.upstream for one in given})
    finally:
        if store is not None:
            await store.aclose()
    report = report_on(given, stored, arguments.min_cosine)
    if arguments.json:
        print(msgspec.json.encode({"agrees": report.agrees, **msgspec.to_builtins(report)}).decode())
    else:
        _show(report)
    return 0 if report.agrees else 1


async def _stored(store: FingerprintStore | None, upstreams: set[str]) -> dict[str, Fingerprint]:
    found = {} if store is None else {name: await store.load(name) for name in sorted(upstreams)}
    return {name: one for name, one in found.items() if one is not None}


async def _accept(store: FingerprintStore, given: Sequence[ReplicaVectors]) -> None:
    """Raises: CannotVerify where the replicas of one upstream differ."""
    pairs = report_on(given, {}).pairs
    upstream_of = {one.name: one.upstream for one in given}
    for pair in pairs:
        if not pair.fits and upstream_of[pair.one] == upstream_of[pair.other]:
            raise CannotVerify(f"--accept: {pair.one} and {pair.other} differ; nothing was changed")
    for name, one in {one.upstream: one for one in reversed(given)}.items():
        await store.replace(name, one.fingerprint)


def _show(report: Report) -> None:
    console = Console(width=WIDTH, highlight=False)
    console.print(_members(report))
    if report.pairs:
        console.print(f"\nleast cosine of {report.texts} texts, in the order above")
        console.print(_matrix(report))
    for line in _findings(report):
        console.print(line, markup=False)


def _members(report: Report) -> Table:
    table = Table("", *COLUMNS, box=None)
    for number, one in enumerate(report.members, 1):
        stored = "–" if one.stored is None else f"{one.stored.id} {one.stored.cosine:.5f}"
        norms = f"{one.least_norm:.3f}–{one.greatest_norm:.3f}"
        told = (one.name, one.backend, one.model_id, one.dtype or "–", str(one.dimensions), norms)
        table.add_row(str(number), *told, str(one.tokens), one.fingerprint, stored)
    return table


def _matrix(report: Report) -> Table:
    cosines = {(one.one, one.other): one.cosine for one in report.pairs}
    names = [one.name for one in report.members]
    table = Table("", *(str(number) for number in range(1, len(names) + 1)), box=None)
    for number, row in enumerate(names, 1):
        cells = [_cell(cosines, row, column) for column in names]
        table.add_row(str(number), *cells)
    return table


def _cell(cosines: Mapping[tuple[str, str], float | None], row: str, column: str) -> str:
    if row == column:
        return "1"
    cosine = cosines[row, column] if (row, column) in cosines else cosines[column, row]
    return "–" if cosine is None else f"{cosine:.5f}"


def _findings(report: Report) -> list[str]:
    """What is not as it should be, in words."""
    is_foreign = [_stray(one.name, one.upstream, one.stored) for one in report.members if one.stored]
    lines = [line for line in is_foreign if line]
    lines += [_difference(pair) for pair in report.pairs if not pair.fits]
    lines += [
        f"{pair.one} and {pair.other} count tokens differently"
        for pair in report.pairs
        if pair.needed is not None and not pair.same_tokens
    ]
    return lines or ["all that should agree does"]


def _stray(name: str, upstream: str, stored: StoredMatch) -> str:
    if stored.fits:
        return ""
    return (
        f"{name} does not give the vectors of its stored fingerprint: {stored.cosine:.5f}, {stored.needed} "
        f"needed; `gateway verify {upstream} --accept` makes it anew"
    )


def _difference(pair: Pair) -> str:
    told = "other dimensions" if pair.cosine is None else f"{pair.cosine:.5f}"
    return f"{pair.one} and {pair.other} differ: {told}, {pair.needed} needed"
