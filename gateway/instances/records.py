"""Structs of instances: requests, stored records, and what operators see of them."""

from datetime import UTC, datetime
from typing import Annotated, Literal, TypeAlias

import msgspec

Status = Literal["starting", "running", "stopping", "stopped", "failed"]
# Kind of an instance that the built-in engine runs. Other kinds are names of command templates.
ENGINE = "engine"

Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Position = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class CreateInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance to create, in TEI Manager's fields.

    The fields `kind`, `upstream` and `device` are this gateway's own. kind: `engine`, or a name among
    `manager.commands`; absent, `manager.kind`. upstream: the upstream that the instance joins; absent, one of
    its own name.
    """

    name: Name
    model_id: Name
    port: Number | None = None
    max_batch_tokens: Number | None = None
    max_concurrent_requests: Number | None = None
    pooling: Text | None = None
    gpu_id: Number | None = None
    prometheus_port: Number | None = None
    startup_timeout_secs: Number | None = None
    extra_args: Annotated[list[Text], msgspec.Meta(max_length=64)] | None = None
    kind: Name | None = None
    upstream: Name | None = None
    device: Name | None = None


class Record(msgspec.Struct, frozen=True):
    """One instance as it is stored. created_at_s: seconds since 1970. started: it runs unless it fails."""

    settings: CreateInstance
    kind: str
    created_at_s: float
    started: bool = True

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.settings.name

    @property
    def upstream(self) -> str:
        """Name of the upstream that it joins."""
        return self.settings.upstream or self.settings.name


class InstanceInfo(msgspec.Struct, frozen=True):
    """One instance as operators see it, in TEI Manager's fields and six more.

    port: of a command's server; for an engine, the gateway's own. restarts: since it was created. The fields
    from `kind` on are this gateway's own. reason: why it failed. joined: calls are sent to it.
    """

    name: str
    model_id: str
    port: int
    status: Status
    pid: int | None
    created_at: str
    uptime_secs: int
    restarts: int
    health_check_failures: int
    last_health_check: str | None
    gpu_id: int | None
    prometheus_port: int | None
    kind: str
    upstream: str
    device: str | None
    reason: str | None
    joined: bool


class LogSlice(msgspec.Struct, frozen=True):
    """Lines of an instance's log from `start` to `end` of the `total_lines` that are kept."""

    lines: list[str]
    start: int
    end: int
    total_lines: int


class ListInstances(msgspec.Struct, frozen=True, tag="list"):
    """Request for all instances, in order of creation."""


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Request to create an instance and start it."""

    settings: CreateInstance


class Act(msgspec.Struct, frozen=True, tag="act"):
    """Request about one instance."""

    name: str
    action: Literal["get", "start", "stop", "restart", "delete"]


class ReadLog(msgspec.Struct, frozen=True, tag="read_log"):
    """Request for a slice of an instance's log, with the meaning of a slice in Python."""

    name: str
    start: int | None = None
    end: int | None = None


Command: TypeAlias = ListInstances | Create | Act | ReadLog


class Problem(msgspec.Struct, frozen=True):
    """Reason why a request has changed nothing. kind: TEI Manager's code of the error."""

    kind: Literal["VALIDATION_ERROR", "INSTANCE_NOT_FOUND", "ALREADY_RUNNING", "UNAVAILABLE"]
    message: str


class Result(msgspec.Struct, frozen=True, tag="instances"):
    """Result of a request: its problem, or else what it asked for.

    created, deleted: instances since the gateway's start.
    """

    problem: Problem | None = None
    instances: tuple[InstanceInfo, ...] = ()
    log: LogSlice | None = None
    created: int = 0
    deleted: int = 0


class Refused(Exception):
    """A request that cannot be carried out."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def invalid(message: str) -> Refused:
    """Return the refusal of a request with a wrong value."""
    return Refused(Problem("VALIDATION_ERROR", f"Validation error: {message}"))


def unknown(name: str) -> Refused:
    """Return the refusal of a request that names no instance."""
    return Refused(Problem("INSTANCE_NOT_FOUND", f"Instance '{name}' not found"))


def timestamp(seconds: float) -> str:
    """Return a time since 1970 in RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
