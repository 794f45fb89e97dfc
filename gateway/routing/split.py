"""Choice between the upstreams of one model: weights, stickiness, priority, and a breaker of each. Pure.

- Upstreams of the lowest priority share the calls by weight. Those of the next one follow them.
- By request, the choice follows a sequence whose points are spread evenly: any run of calls is divided
  closely by the weights, and callers that alternate between large and small calls do not meet its rhythm.
- By tenant, the choice follows hashes of tenant and upstream. An upstream that is added or removed moves only
  its own share of the tenants.
- Pools do not eject their last replica for failures, because the callers' inputs may cause them. Where
  another upstream serves the same model, calls need not find out one by one: after failures in a row the
  upstream is the last choice, and single calls try it from time to time.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import msgspec

# Fractional part of the golden ratio: multiples of no other number are spread more evenly over 0 to 1.
STEP = (math.sqrt(5) - 1) / 2
# The same for a second sequence whose points do not follow those of the first.
SECOND_STEP = math.sqrt(2) - 1
BELOW_ONE = math.nextafter(1.0, 0.0)
# Failures in a row, without a success between them, that open the breaker.
FAILURES_MAX = 3
PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 30.0

# ready: it has a usable replica. failing: it has one, and its last calls failed. expected: calls may wait
# for a replica. out: none of these.
Health = Literal["ready", "failing", "expected", "out"]
RANKS: dict[Health, int] = {"ready": 0, "failing": 1, "expected": 2}


class Member(msgspec.Struct, frozen=True):
    """One of the upstreams that share a model's calls. weight, priority: as in `ModelUpstream`."""

    name: str
    weight: int = 1
    priority: int = 0


class Trial(msgspec.Struct, frozen=True):
    """An upstream that takes a share of the calls, whatever the weights of the others."""

    name: str
    share: float


class Split(msgspec.Struct, frozen=True):
    """Division of the calls of a model. members: in the order of the configuration."""

    members: tuple[Member, ...]
    by_tenant: bool = False


def next_point(point: float, step: float = STEP) -> float:
    """Return the point from 0 to 1 that follows another in an even sequence."""
    return (point + step) % 1.0


def preference(split: Split, trial: Trial | None, tenant: str, point: float) -> list[str]:
    """Return the upstreams for one call, the first choice first.

    trial: None without one. point: from 0 to 1, of this call; it decides if the split is by request.
    """
    if trial is not None and split.by_tenant:
        if _tenant_point(tenant, f"trial {trial.name}") < trial.share:
            return [trial.name, *_by_tenant(split.members, tenant)]
    elif trial is not None:
        if point < trial.share:
            # Scaled back to 0 to 1, so that the next choices follow the weights too.
            return [trial.name, *_by_point(split.members, point / trial.share)]
        point = (point - trial.share) / (1 - trial.share)
    if split.by_tenant:
        return list(_by_tenant(split.members, tenant))
    return _by_point(split.members, point)


def by_health(names: Iterable[str], health: Callable[[str], Health]) -> list[str]:
    """Return those that can serve, in their order: the ready ones first, those that are expected last."""
    found = [(RANKS[state], name) for name in names if (state := health(name)) != "out"]
    return [name for _, name in sorted(found, key=_rank)]


def _rank(ranked: tuple[int, str]) -> int:
    return ranked[0]


def _by_point(members: Sequence[Member], point: float) -> list[str]:
    names: list[str] = []
    for priority in _priorities(members):
        names += _weighted([each for each in members if each.priority == priority], point)
    return names


def _weighted(members: list[Member], point: float) -> list[str]:
    """Return members in an order in which each stage follows the weights of those that are left."""
    names = []
    while len(members) > 1:
        mark = point * sum(member.weight for member in members)
        for member in members[:-1]:
            if mark < member.weight:
                break
            mark -= member.weight
        else:
            member = members[-1]
        names.append(member.name)
        members = [other for other in members if other is not member]
        # The place within the chosen part is spread as evenly as the point itself.
        point = min(mark / member.weight, BELOW_ONE)
    return names + [member.name for member in members]


@lru_cache(maxsize=4096)
def _by_tenant(members: tuple[Member, ...], tenant: str) -> tuple[str, ...]:
    """Return members by priority, then by a hash that is weighted so that each gets its share of tenants."""

    def rank(member: Member) -> tuple[int, float]:
        return member.priority, math.log(_tenant_point(tenant, member.name)) / member.weight

    # The logarithm is negative: the greatest quotient is the one closest to 0.
    ranked = sorted(members, key=lambda member: (rank(member)[0], -rank(member)[1]))
    return tuple(member.name for member in ranked)


@lru_cache(maxsize=16_384)
def _tenant_point(tenant: str, name: str) -> float:
    """Return a number above 0 and below 1 that depends on tenant and name only."""
    text = msgspec.msgpack.encode((tenant, name))
    return (int.from_bytes(blake2b(text, digest_size=6).digest(), "big") + 0.5) / 2**48


def _priorities(members: Sequence[Member]) -> list[int]:
    return sorted({member.priority for member in members})


class Breaker:
    """Breaker of one upstream; open, its upstream is the last choice. Times are in seconds on one clock."""

    __slots__ = ("_failures", "_is_tried", "_open_until_s", "_pause_s")

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = 0.0
        self._pause_s = PAUSE_MIN_S
        # Whether a call was let through since it opened.
        self._is_tried = False

    def admits(self, now_s: float) -> bool:
        """Return whether a call may choose the upstream; open, one call per pause may."""
        if self._failures < FAILURES_MAX:
            return True
        if now_s < self._open_until_s:
            return False
        self._open_until_s, self._is_tried = now_s + self._pause_s, True
        return True

    def record_success(self) -> None:
        """Close the breaker: the upstream has computed a call."""
        self._failures, self._pause_s, self._is_tried = 0, PAUSE_MIN_S, False

    def record_failure(self, now_s: float) -> None:
        """Count a failure. The pause doubles with each one that a call on trial meets."""
        self._failures += 1
        if self._failures == FAILURES_MAX or self._is_tried:
            # Other calls that were on their way when it opened change nothing.
            self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S) if self._is_tried else PAUSE_MIN_S
            self._open_until_s, self._is_tried = now_s + self._pause_s, False
