"""`gateway verify`: check that upstreams return the same vectors as each other and as their fingerprints.

The command opens the upstreams itself, engines included, and needs no running gateway. It opens one after the
other, so that it never adds a second model to the memory.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.table import Table

from backends.contract.errors import BackendError
from backends.kinds import open_replica
from backends.reference_texts import REFERENCE_TEXTS
from gateway.cli.context import TIMEOUT_S
from gateway.cli.operator_options import add_config_option, seconds
from gateway.cli.output import PIPE_WIDTH, CleanConsole, print_json, show_line, show_problems
from gateway.config.load import load_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, UpstreamSettings
from gateway.declared.composition import compose
from gateway.declared.store import AdditionsInRedis
from gateway.processes.engine_process import EngineFailed, running_engine
from gateway.routing.discovery import resolve
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.upstreams.factory import ReplicaAddress, ReplicaOpener, create_replica
from gateway.vector_spaces.comparison import ReplicaVectors, Report, findings, read_vectors, report_on
from gateway.vector_spaces.fingerprint import Fingerprint
from gateway.vector_spaces.store import FingerprintStore

TEXTS_MAX = 10_000
SECTIONS = ("upstreams", "models", "defaults", "quotas")
COLUMNS = ("upstream", "backend", "model", "dtype", "dims", "norms", "tokens", "fingerprint", "stored")


class CannotVerify(Exception):
    """There is nothing to report; the message gives the reason, for a person."""


class UpstreamReader:
    """Reader of the vectors of one upstream's replicas for some texts."""

    def __init__(
        self, name: str, settings: UpstreamSettings, texts: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._settings = settings
        self._texts = texts
        self._environment = environment
        # Of replicas that could not be read.
        self.problems: list[str] = []

    async def read(self) -> list[ReplicaVectors]:
        """Return the vectors of each replica that embeds; the problems of others are added to `problems`."""
        try:
            async with self._addresses() as addresses:
                vectors = [await self._embed_or_note(address) for address in addresses]
        except CannotVerify as error:
            self.problems.append(str(error))
            return []
        return [replica for replica in vectors if replica is not None]

    async def _embed_or_note(self, address: ReplicaAddress) -> ReplicaVectors | None:
        try:
            return await self._embed(address)
        except CannotVerify as error:
            self.problems.append(str(error))
            return None

    @asynccontextmanager
    async def _addresses(self) -> AsyncIterator[list[ReplicaAddress]]:
        if self._settings.is_local:
            try:
                async with running_engine(self._name, self._settings, self._environment) as address:
                    yield [ReplicaAddress(self._name, address)]
            except EngineFailed as error:
                raise CannotVerify(f"{self._name}: {error}") from error
            return
        addresses = [address for url in self._settings.replicas for address in await self._resolve(url)]
        if len(addresses) == 1:
            # An upstream with a single replica needs no URL to identify them.
            addresses = [msgspec.structs.replace(addresses[0], name=self._name)]
        yield addresses

    async def _resolve(self, url: str) -> list[ReplicaAddress]:
        label = f"{self._name} {url}"
        if self._settings.discover is None:
            return [ReplicaAddress(label, url)]
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            ips = await resolve(parts.hostname or "", port)
        except OSError as error:
            raise CannotVerify(f"{label}: the name has no address") from error
        return [ReplicaAddress(f"{label} {ip}", url, ip) for ip in ips]

    async def _embed(self, replica: ReplicaAddress) -> ReplicaVectors | None:
        settings = self._settings
        backend = create_replica(settings, replica, ReplicaOpener(self._name, open_replica)).backend
        try:
            return await read_vectors(replica.name, self._name, backend, settings, self._texts)
        except BackendError as error:
            raise CannotVerify(f"{replica.name}: {error.message}") from error
        finally:
            await backend.aclose()


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway verify` to its parser."""
    add_config_option(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="upstreams (default: all that embed)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="additional texts, one per line")
    parser.add_argument(
        "--min-cosine",
        type=_cosine,
        help="minimum for every two replicas (default: 0.999 for those of one model)",
    )
    parser.add_argument(
        "--accept", action="store_true", help="replace the stored fingerprints of these upstreams"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="timeout for one upstream (default: 300)"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")


def _cosine(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("a number above 0, and at most 1")
    return value


def run_verify(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print the comparison; return 1 if vectors differ that should agree, or an upstream cannot be read."""
    try:
        config = load_config(options.config, environment, SECTIONS)
        return asyncio.run(_verify(config, options, environment))
    except ConfigError as error:
        show_problems(options.config, error)
    except CannotVerify as error:
        show_line(str(error))
    except StoreUnavailable as error:
        show_line(f"the store of fingerprints is unavailable: {error}")
    return 1


async def _verify(file: Config, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    config = await _with_additions(file, environment)
    names = _selected_upstreams(config, options.names)
    if options.accept:
        _check_acceptable(config, options.names)
    texts = (*REFERENCE_TEXTS, *_read_texts(options.texts))
    replicas: list[ReplicaVectors] = []
    problems: list[str] = []
    for name in names:
        reader = UpstreamReader(name, config.upstreams[name], texts, environment)
        vectors = await _read(reader, name, options.timeout)
        if not vectors and not reader.problems and options.names:
            raise CannotVerify(f"{name}: it embeds nothing")
        replicas += vectors
        problems += reader.problems
    if problems and (options.accept or not replicas):
        raise CannotVerify("\n".join(problems))
    if not replicas:
        raise CannotVerify("no upstream here embeds anything")
    return await _compare(config, replicas, problems, options)


async def _read(reader: UpstreamReader, name: str, timeout_s: float) -> list[ReplicaVectors]:
    try:
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    except TimeoutError:
        reader.problems.append(f"{name}: no answer within {timeout_s:.0f} s")
        return []


async def _with_additions(file: Config, environment: Mapping[str, str]) -> Config:
    """Return the config with the additions in Redis. Raises: StoreUnavailable."""
    if file.quotas.store == "memory":
        return file
    store = AdditionsInRedis(RedisClient(file.quotas.store, TIMEOUT_S))
    try:
        additions = (await store.load()).additions
    finally:
        await store.aclose()
    composed = await asyncio.to_thread(compose, file, additions, environment, {})
    for part, name in composed.rejected:
        if part == "upstreams" and name not in file.upstreams:
            for problem in composed.rejected[part, name]:
                show_line(f"{problem.path}: addition is not served: {problem.message}")
    return composed.config


def _selected_upstreams(config: Config, names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in config.upstreams:
            raise CannotVerify(f"there is no upstream {name!r}; there are: {', '.join(config.upstreams)}")
    return tuple(dict.fromkeys(names)) or tuple(config.upstreams)


def _check_acceptable(config: Config, names: Sequence[str]) -> None:
    """Check the conditions of `--accept`. Raises: CannotVerify."""
    if not names:
        raise CannotVerify("--accept: list the upstreams whose fingerprints are to be replaced")
    if config.quotas.store == "memory":
        raise CannotVerify(
            "--accept: fingerprints are kept in the gateway's memory here, and computed again at start; "
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


async def _compare(
    config: Config, replicas: Sequence[ReplicaVectors], problems: Sequence[str], options: argparse.Namespace
) -> int:
    """Print the report, and the problems of replicas that are not in it.

    With `--accept`, replace the stored fingerprints first.
    """
    store = None
    if config.quotas.store != "memory":
        store = FingerprintStore(RedisClient(config.quotas.store, TIMEOUT_S))
    try:
        if options.accept and store is not None:
            await _accept(store, replicas)
        stored = await _load_fingerprints(store, {replica.upstream for replica in replicas})
    finally:
        if store is not None:
            await store.aclose()
    groups = [model.serving_names for model in config.models.values()]
    report = report_on(replicas, stored, groups, options.min_cosine)
    if options.json:
        fields = {"agrees": report.agrees, **msgspec.to_builtins(report), "unread": problems}
        print_json(fields)
    else:
        show_report(report)
    for problem in problems:
        show_line(problem)
    return 0 if report.agrees and not problems else 1


async def _load_fingerprints(store: FingerprintStore | None, upstreams: set[str]) -> dict[str, Fingerprint]:
    found = {} if store is None else {name: await store.load(name) for name in sorted(upstreams)}
    return {name: fingerprint for name, fingerprint in found.items() if fingerprint is not None}


async def _accept(store: FingerprintStore, replicas: Sequence[ReplicaVectors]) -> None:
    """Replace the stored fingerprints. Raises: CannotVerify if the replicas of one upstream differ."""
    pairs = report_on(replicas, {}).pairs
    upstream_of = {replica.name: replica.upstream for replica in replicas}
    for pair in pairs:
        if not pair.fits and upstream_of[pair.one] == upstream_of[pair.other]:
            raise CannotVerify(f"--accept: {pair.one} and {pair.other} differ; nothing was changed")
    # Reversed, so that the first replica of each upstream is the one that counts.
    for name, replica in {replica.upstream: replica for replica in reversed(replicas)}.items():
        await store.replace(name, replica.fingerprint)


def show_report(report: Report) -> None:
    """Print the replicas, the cosine of every two, and the findings."""
    console = CleanConsole(width=PIPE_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(_replica_table(report))
    if report.pairs:
        console.print(f"\nleast cosine of {report.texts} texts, in the order above")
        console.print(_cosine_matrix(report))
    for line in findings(report):
        console.print(line)


def _replica_table(report: Report) -> Table:
    table = Table("", *COLUMNS, box=None)
    for number, member in enumerate(report.members, 1):
        stored = "–" if member.stored is None else f"{member.stored.id} {member.stored.cosine:.5f}"
        table.add_row(
            str(number),
            member.name,
            member.backend,
            member.model_id,
            member.dtype or "–",
            str(member.dimensions),
            f"{member.least_norm:.3f}–{member.greatest_norm:.3f}",
            str(member.tokens),
            member.fingerprint,
            stored,
        )
    return table


def _cosine_matrix(report: Report) -> Table:
    cosines = {(pair.one, pair.other): pair.cosine for pair in report.pairs}
    names = [member.name for member in report.members]
    table = Table("", *(str(number) for number in range(1, len(names) + 1)), box=None)
    for number, row in enumerate(names, 1):
        cells = [_cosine_cell(cosines, row, column) for column in names]
        table.add_row(str(number), *cells)
    return table


def _cosine_cell(cosines: Mapping[tuple[str, str], float | None], row: str, column: str) -> str:
    if row == column:
        return "1"
    cosine = cosines[row, column] if (row, column) in cosines else cosines[column, row]
    return "–" if cosine is None else f"{cosine:.5f}"
