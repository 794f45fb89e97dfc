"""Members of a fleet: gateways that share a Redis, as each of them describes itself. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.config.digest import hash_of
from gateway.config.identity import Identity

# A member renews its record every few seconds. One that is silent for longer than this has a problem.
SILENT_AFTER_S = 10.0
# Replicas that a member names.
DRAINED_SHOWN = 16

State = Literal["ready", "not_ready", "drained", "stopping", "silent"]


class Load(msgspec.Struct, frozen=True):
    """Load of one gateway, over its workers. calls_per_s: since its record before, None in the first one."""

    calls_in_flight: int = 0
    calls_per_s: float | None = None
    queued_inputs: int = 0
    queued_tokens: int = 0


class Member(msgspec.Struct, frozen=True):
    """Record of one gateway, which it renews.

    configuration: digest of each section that is not the default. reasons: why it is not ready.
    drained_since_s: when an operator took it out. drained_replicas: of its upstreams, the first of them.
    """

    gateway: Identity
    version: str
    workers: int
    configuration: Mapping[str, str] = {}
    is_stopping: bool = False
    reasons: tuple[str, ...] = ()
    drained_since_s: float | None = None
    drained_replicas: tuple[str, ...] = ()
    load: Load = Load()

    @property
    def configuration_hash(self) -> str:
        """Digest of the whole configuration."""
        return hash_of(self.configuration)

    def state(self, age_s: float) -> State:
        """Return the state of a member whose record has this age."""
        if age_s > SILENT_AFTER_S:
            return "silent"
        if self.is_stopping:
            return "stopping"
        if self.drained_since_s is not None:
            return "drained"
        return "not_ready" if self.reasons else "ready"


class SeenMember(msgspec.Struct, frozen=True):
    """Member with the age of its record."""

    member: Member
    age_s: float


class FleetMember(msgspec.Struct, frozen=True):
    """One gateway of the fleet.

    name: host and port, for people. uptime_s: by the clock of the gateway that answers. age_s: of the record.
    configuration: hash, equal for gateways with the same configuration. differs: what most gateways have
    otherwise, which is `version` or a section of the configuration. reasons: why it is not ready. load: as of
    the record. is_this: it is the gateway that answers.
    """

    id: str
    name: str
    host: str
    pid: int
    address: str
    state: State
    version: str
    workers: int
    configuration: str
    differs: tuple[str, ...]
    reasons: tuple[str, ...]
    started_s: float
    uptime_s: float
    age_s: float
    drained_since_s: float | None
    drained_replicas: tuple[str, ...]
    load: Load
    is_this: bool


class FleetReport(msgspec.Struct, frozen=True):
    """All gateways that share a store, by name.

    shared: there is a Redis; without one the fleet is one gateway. problem: why members are missing here,
    nothing if none are. versions, configurations: how many different ones there are.
    """

    shared: bool
    problem: str
    versions: int
    configurations: int
    members: tuple[FleetMember, ...]


def report_of(
    seen: Sequence[SeenMember], this: str, now_s: float, problem: str = "", *, shared: bool
) -> FleetReport:
    """Return the report on members. this: id of the gateway that answers."""
    # A gateway that is gone, or goes, says nothing about what the fleet should have.
    lasting = [each.member for each in seen if each.member.state(each.age_s) not in ("silent", "stopping")]
    own = next((each.member for each in seen if each.member.gateway.id == this), None)
    version = _most_common([member.version for member in lasting], None if own is None else own.version)
    sections = {name for member in lasting for name in member.configuration}
    usual = {
        name: _most_common(
            [member.configuration.get(name) for member in lasting],
            None if own is None else own.configuration.get(name),
        )
        for name in sections
    }
    members = tuple(
        _describe(each, this, now_s, _differences(each.member, version, usual))
        for each in sorted(seen, key=lambda each: (each.member.gateway.name, each.member.gateway.started_s))
    )
    return FleetReport(
        shared,
        problem,
        len({member.version for member in lasting}),
        len({member.configuration_hash for member in lasting}),
        members,
    )


def _most_common(values: Iterable[str | None], own: str | None) -> str | None:
    """Return the value that most members have; of equally frequent ones that of the member that answers."""
    counts = Counter(values)
    if not counts:
        return own
    most = max(counts.values())
    return own if counts[own] == most else next(value for value, count in counts.items() if count == most)


def _differences(member: Member, version: str | None, usual: Mapping[str, str | None]) -> tuple[str, ...]:
    found = [] if member.version == version else ["version"]
    names = usual.keys() | member.configuration.keys()
    return (*found, *(name for name in sorted(names) if member.configuration.get(name) != usual.get(name)))


def _describe(seen: SeenMember, this: str, now_s: float, differs: tuple[str, ...]) -> FleetMember:
    member, gateway = seen.member, seen.member.gateway
    return FleetMember(
        id=gateway.id,
        name=gateway.name,
        host=gateway.host,
        pid=gateway.pid,
        address=gateway.address,
        state=member.state(seen.age_s),
        version=member.version,
        workers=member.workers,
        configuration=member.configuration_hash,
        differs=differs,
        reasons=member.reasons,
        started_s=gateway.started_s,
        uptime_s=round(max(0.0, now_s - gateway.started_s), 3),
        age_s=round(seen.age_s, 3),
        drained_since_s=member.drained_since_s,
        drained_replicas=member.drained_replicas,
        load=member.load,
        is_this=gateway.id == this,
    )
