"""Comparison of the vectors that replicas return now, next to the calls that they serve."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from backends.contract.errors import BackendError
from backends.reference_texts import REFERENCE_TEXTS
from gateway.config.schema import ModelSettings
from gateway.routing.health import State
from gateway.routing.replica import Replica
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.comparison import (
    Pair,
    ReplicaReport,
    ReplicaVectors,
    findings,
    read_vectors,
    report_on,
)

REPLICA_TIMEOUT_S = 60.0


class Verification(msgspec.Struct, frozen=True):
    """Result of a comparison, as of `gateway verify --json`.

    texts: number of reference texts. findings: sentences. unread: replicas that returned no vectors, with
    reasons.
    """

    agrees: bool
    texts: int
    members: tuple[ReplicaReport, ...]
    pairs: tuple[Pair, ...]
    findings: tuple[str, ...]
    unread: tuple[str, ...]


async def verify(upstreams: Sequence[Upstream], models: Mapping[str, ModelSettings]) -> Verification:
    """Compare the replicas of these upstreams, of any state, with each other and with their fingerprints.

    models: of the configuration; upstreams of one model have to agree.
    """
    replicas = [(upstream, replica) for upstream in upstreams for replica in comparable_replicas(upstream)]
    found = await asyncio.gather(*(_read(upstream, replica) for upstream, replica in replicas))
    return _verification(upstreams, [model.serving_names for model in models.values()], found)


def comparable_replicas(upstream: Upstream) -> list[Replica]:
    """Return the replicas of an upstream that still belong to it."""
    return [replica for replica in upstream.pool.replicas if replica.state is not State.GONE]


async def _read(upstream: Upstream, replica: Replica) -> ReplicaVectors | str | None:
    """Return a replica's vectors, the reason why there are none, or None if it embeds nothing."""
    name, settings = f"{upstream.name} {replica.name}", upstream.settings
    try:
        async with asyncio.timeout(REPLICA_TIMEOUT_S):
            if not (await replica.backend.describe(settings.attempt_timeout_s)).loaded:
                return f"{name}: its model is not in memory"
            return await read_vectors(name, upstream.name, replica.backend, settings, REFERENCE_TEXTS)
    except BackendError as error:
        return f"{name}: {error.message}"
    except TimeoutError:
        return f"{name}: no answer within {REPLICA_TIMEOUT_S:.0f} s"


def _verification(
    upstreams: Iterable[Upstream],
    groups: Collection[Collection[str]],
    found: Sequence[ReplicaVectors | str | None],
) -> Verification:
    vectors = [each for each in found if isinstance(each, ReplicaVectors)]
    unread = tuple(each for each in found if isinstance(each, str))
    references = {upstream.name: upstream.space.reference for upstream in upstreams}
    stored = {name: reference for name, reference in references.items() if reference is not None}
    report = report_on(vectors, stored, groups)
    return Verification(
        agrees=report.agrees and not unread,
        texts=len(REFERENCE_TEXTS),
        members=report.members,
        pairs=report.pairs,
        findings=tuple(findings(report)) if vectors else (),
        unread=unread,
    )
