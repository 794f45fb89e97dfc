"""Checks of `gateway check --live`: what a configuration refers to is asked, and must be as it says.

The store, every replica, issuers and tokenizers are asked at once, each within a timeout. Models of the
built-in engine are not loaded.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

import msgspec

from backends.checkpoints.locations import locate_tokenizer
from backends.contract.errors import BackendError
from backends.kinds import KINDS
from backends.reference_texts import REFERENCE_TEXTS
from gateway.cli.named_models import ServerKey, UnusableModel, is_grpc, models_at, probe_server
from gateway.cli.verify import UpstreamReader
from gateway.config.problems import Problem
from gateway.config.schema import Config, IssuerSettings, UpstreamSettings, UpstreamTls
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.sign_on.issuer_client import IssuerFault, fetch_description, fetch_keys
from gateway.tenants.sign_on.jose import read_keys
from gateway.vector_spaces.comparison import Pair, ReplicaVectors, report_on

# Servers that are asked at the same time, for files with hundreds of replicas.
CONCURRENCY = 16
# Memory from which Redis is about to refuse writes.
FULL_SHARE = 0.9
# Models of a server that a problem names.
MODELS_SHOWN = 10
NO_EVICTION = "noeviction"
# A write as the gateway does it, by a script, on a key of its own.
PROBE_KEY = "gw:{store}:check"
PROBE = "redis.call('SET', KEYS[1], '1', 'PX', 1000) return redis.call('DEL', KEYS[1])"

Result = TypeVar("Result")


class Seen(msgspec.Struct):
    """Answers of replicas. silent: upstream and path of those that work and embed nothing."""

    vectors: list[ReplicaVectors] = []
    silent: list[tuple[str, str]] = []


async def live_problems(
    config: Config, environment: Mapping[str, str], timeout_s: float
) -> tuple[list[Problem], list[Problem]]:
    """Return what is not as the configuration says, and notes. timeout_s: of each server."""
    slots = asyncio.Semaphore(CONCURRENCY)
    seen = Seen()

    async def bounded(path: str, found: AsyncIterator[Problem]) -> list[Problem]:
        problems: list[Problem] = []
        async with slots:
            try:
                async with asyncio.timeout(timeout_s):
                    async for problem in found:
                        problems.append(problem)  # noqa: PERF401 - those before a timeout count
            except TimeoutError:
                problems.append(Problem(path, f"no answer within {timeout_s:g} s"))
        return problems

    checks = _checks(config, environment, timeout_s, seen)
    lists = await asyncio.gather(*(bounded(path, found) for path, found in checks))
    problems = [problem for found in lists for problem in found]
    return [*problems, *_space_problems(config, seen.vectors), *_silent_problems(seen)], list(_notes(config))


def _checks(
    config: Config, environment: Mapping[str, str], timeout_s: float, seen: Seen
) -> Iterator[tuple[str, AsyncIterator[Problem]]]:
    """Yield each check with the path of what it asks. seen: filled by the checks."""
    if config.quotas.store != "memory":
        yield "quotas.store", _store_problems(config.quotas.store, timeout_s)
    for name, upstream in config.upstreams.items():
        for index, url in enumerate(() if upstream.is_local else upstream.replicas):
            path = f"upstreams.{name}.replicas[{index}]"
            yield path, _replica_problems(path, name, upstream, url, environment, seen)
        if upstream.tokenizer:
            path = f"upstreams.{name}.tokenizer"
            yield path, _tokenizer_problems(path, upstream.tokenizer)
    for name, issuer in config.sign_on.items():
        path = f"sign_on.{name}.issuer"
        yield path, _issuer_problems(path, issuer)


def _notes(config: Config) -> Iterator[Problem]:
    for name, upstream in config.upstreams.items():
        if upstream.is_local:
            yield Problem(f"upstreams.{name}", "is not loaded by this check: `gateway verify` does that")


async def _store_problems(url: str, timeout_s: float) -> AsyncIterator[Problem]:
    path, redis = "quotas.store", RedisClient(url, timeout_s)
    try:
        try:
            await redis.execute("EVAL", PROBE, 1, PROBE_KEY)
        except StoreUnavailable as error:
            yield Problem(path, f"cannot be used for writing: {error}")
            return
        try:
            servers = await redis.memory()
        except StoreUnavailable as error:
            yield Problem(path, f"reports no memory (INFO): {error}; its bound and eviction are not known")
            return
        for server in servers:
            for message in memory_problems(server):
                yield Problem(path, message)
    finally:
        await redis.aclose()


def memory_problems(server: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the memory of one Redis, as it reports it."""
    policy, bound = str(server.get("maxmemory_policy", "")), int(server.get("maxmemory", 0))
    used = int(server.get("used_memory", 0))
    if policy and policy != NO_EVICTION:
        yield (
            f"has maxmemory-policy {policy}: it may drop keys, tenants and counters without notice; set "
            f"{NO_EVICTION}"
        )
    if not bound:
        yield "has no maxmemory: it grows until the system ends it; set a bound"
    elif used > FULL_SHARE * bound:
        yield f"uses {used:,} of {bound:,} bytes (maxmemory) and refuses writes when they are full"


async def _replica_problems(
    path: str,
    name: str,
    upstream: UpstreamSettings,
    url: str,
    environment: Mapping[str, str],
    seen: Seen,
) -> AsyncIterator[Problem]:
    """Yield the problems of a replica, and add its vectors of the reference texts to `seen`."""
    one = msgspec.structs.replace(upstream, replicas=[url])
    reader = UpstreamReader(name, one, REFERENCE_TEXTS, environment)
    found = await reader.read()
    message = await in_thread(lambda: kind_problem(upstream, url))
    if message is not None:
        yield Problem(path, message)
        return
    for problem in reader.problems:
        yield Problem(path, problem.removeprefix(f"{name}: "))
    if not (found or reader.problems):
        seen.silent.append((name, path))
    # Each of several replicas is known by its address.
    seen.vectors += [
        msgspec.structs.replace(each, name=f"{name} {url}" if each.name == name else each.name)
        for each in found
    ]


def kind_problem(upstream: UpstreamSettings, url: str) -> str | None:
    """Return why a server is not of its upstream's kind, or lacks its model; None if neither is known."""
    kind = KINDS[upstream.backend]
    has_own_way = upstream.tls != UpstreamTls() or upstream.headers or upstream.api_key_header
    if kind.recognize is None or kind.address is not None or is_grpc(url) or has_own_way:
        return None
    key = ServerKey("api_key", upstream.api_key) if upstream.api_key else None
    try:
        found = models_at(url, upstream.backend, key)
        if found.models is None and not found.refusals:
            other = probe_server(url, key).backend
            return f"`backend` is {upstream.backend}, and a server of kind {other} answers"
    except UnusableModel:
        # The adapter reports it too.
        return None
    models = found.models or ()
    if kind.is_multiple and upstream.model and models and upstream.model not in models:
        return f"has no model {upstream.model!r}; it has: {', '.join(models[:MODELS_SHOWN])}"
    return None


def _space_problems(config: Config, vectors: list[ReplicaVectors]) -> Iterator[Problem]:
    """Yield a problem for every two replicas that should give the same vectors and do not."""
    groups = [model.serving_names for model in config.models.values()]
    upstream_of = {replica.name: replica.upstream for replica in vectors}
    for pair in report_on(vectors, {}, groups).pairs:
        if not pair.fits:
            yield Problem(f"upstreams.{upstream_of[pair.other]}", _difference(pair))


def _silent_problems(seen: Seen) -> Iterator[Problem]:
    """Yield a problem for each replica that embeds nothing, while others of its upstream do."""
    embedding = {replica.upstream for replica in seen.vectors}
    for upstream, path in seen.silent:
        if upstream in embedding:
            yield Problem(path, "is of another kind of model: it embeds nothing, and other replicas do")


def _difference(pair: Pair) -> str:
    if pair.cosine is None:
        reason = "their lengths differ"
    else:
        reason = f"cosine {pair.cosine:.4f}, needed {pair.needed or 0:.4f}"
    return f"{pair.one} and {pair.other} give different vectors of the reference texts ({reason})"


async def _issuer_problems(path: str, issuer: IssuerSettings) -> AsyncIterator[Problem]:
    try:
        description = await fetch_description(issuer)
        read_keys(await fetch_keys(description.jwks_uri, issuer), issuer.algorithms)
    except (IssuerFault, ValueError) as error:
        yield Problem(path, str(error))


async def _tokenizer_problems(path: str, tokenizer: str) -> AsyncIterator[Problem]:
    try:
        await in_thread(lambda: locate_tokenizer(tokenizer))
    except (BackendError, OSError) as error:
        yield Problem(path, f"cannot be found: {error}")


async def in_thread(function: Callable[[], Result]) -> Result:
    """Return the result of a function in a thread, which is given up when the caller is cancelled."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001 - it is raised again in the caller
            done.set_exception(error)

    # Threads of asyncio's own pool are waited for at the end of the command.
    Thread(target=run, name="check", daemon=True).start()
    return await asyncio.wrap_future(done)
