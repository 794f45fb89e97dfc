"""Instances and checkpoints of this host: stored records, requests of operators, and their results.

Requests and results have the fields of TEI Manager. Workers send the requests to the parent process.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from gateway.audit.records import GATEWAY, Actor

CheckpointState = Literal["available", "downloading", "downloaded", "loading", "verified", "failed"]
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


class InstanceRecord(msgspec.Struct, frozen=True):
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


class CheckpointRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One checkpoint as it is stored.

    commit: of its snapshot. error: why the last download or check failed. done_bytes, total_bytes,
    bytes_per_s: of a download. dimensions, tokens_max, load_s: found by a check. at_s: of the last change,
    in seconds since 1970.
    """

    state: CheckpointState
    commit: str | None = None
    error: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    operations: tuple[str, ...] = ()
    dimensions: int | None = None
    tokens_max: int | None = None
    load_s: float | None = None
    at_s: float = 0.0


class ModelInfo(msgspec.Struct, frozen=True):
    """One model as operators see it.

    downloaded: it is in the cache. added_at: of the last change, RFC 3339 in UTC. The fields from
    `stored_bytes` on are this gateway's own. error: why the last download or load failed. done_bytes,
    total_bytes, bytes_per_s: of a download. upstreams: that serve it.
    """

    model_id: str
    status: CheckpointState
    downloaded: bool
    added_at: str | None
    stored_bytes: int = 0
    error: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    dimensions: int | None = None
    load_secs: float | None = None
    upstreams: tuple[str, ...] = ()


class LogSlice(msgspec.Struct, frozen=True):
    """Lines of an instance's log from `start` to `end` of the `total_lines` that are kept."""

    lines: list[str]
    start: int
    end: int
    total_lines: int


class _Command(msgspec.Struct, frozen=True):
    """Request about this host. subject: of its errors. absent: what a gateway without `manager` lacks."""

    subject: ClassVar[str] = "instance"
    absent: ClassVar[str] = "no instances; `manager.listen` in router.yaml adds them"


class _ModelCommand(_Command, frozen=True):
    """Request about checkpoints."""

    subject: ClassVar[str] = "model"
    absent: ClassVar[str] = "no registry; `manager.listen` in router.yaml adds it"


class ListInstances(_Command, frozen=True, tag="list"):
    """Request for all instances, in order of creation."""


class Create(_Command, frozen=True, tag="create"):
    """Request to create an instance and start it."""

    settings: CreateInstance
    by: Actor = GATEWAY


class Act(_Command, frozen=True, tag="act"):
    """Request about one instance."""

    name: str
    action: Literal["get", "start", "stop", "restart", "delete"]
    by: Actor = GATEWAY


class ReadLog(_Command, frozen=True, tag="read_log"):
    """Request for a slice of an instance's log, with the meaning of a slice in Python."""

    name: str
    start: int | None = None
    end: int | None = None


class ListModels(_ModelCommand, frozen=True, tag="list_models"):
    """Request for all models."""


class AddModel(_ModelCommand, frozen=True, tag="add_model"):
    """Request to list a model of the Hub."""

    model_id: str
    by: Actor = GATEWAY


class ActOnModel(_ModelCommand, frozen=True, tag="act_on_model"):
    """Request about one model."""

    model_id: str
    action: Literal["get", "download", "load"]
    by: Actor = GATEWAY


InstanceCommand: TypeAlias = ListInstances | Create | Act | ReadLog
ModelCommand: TypeAlias = ListModels | AddModel | ActOnModel
HostCommand: TypeAlias = InstanceCommand | ModelCommand


RefusalKind = Literal[
    "VALIDATION_ERROR",
    "INSTANCE_NOT_FOUND",
    "ALREADY_RUNNING",
    "MODEL_NOT_FOUND",
    "MODEL_DOWNLOAD_FAILED",
    "MODEL_LOAD_FAILED",
    "UNAVAILABLE",
]


class Refusal(msgspec.Struct, frozen=True):
    """Reason why a request has failed. kind: TEI Manager's code of the error."""

    kind: RefusalKind
    message: str


class HostResult(msgspec.Struct, frozen=True, tag="host"):
    """Result of a request: its refusal, or else what it asked for.

    created, deleted: instances since the gateway's start. is_new: the request has added the model.
    """

    refusal: Refusal | None = None
    instances: tuple[InstanceInfo, ...] = ()
    models: tuple[ModelInfo, ...] = ()
    log: LogSlice | None = None
    created: int = 0
    deleted: int = 0
    is_new: bool = False


class Refused(Exception):
    """A request that cannot be carried out. kind, message: as of its refusal."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.result = HostResult(Refusal(kind, message))


def invalid(message: str) -> Refused:
    """Return the refusal of a request with a wrong value."""
    return Refused("VALIDATION_ERROR", f"Validation error: {message}")


def unknown(name: str) -> Refused:
    """Return the refusal of a request that names no instance."""
    return Refused("INSTANCE_NOT_FOUND", f"Instance '{name}' not found")


def timestamp(seconds: float) -> str:
    """Return a time since 1970 in RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class InstanceTable:
    """Instances in order of creation. The parent process sends them whenever one has changed."""

    def __init__(self, instances: tuple[InstanceInfo, ...] = ()) -> None:
        self._instances = instances

    def update(self, instances: tuple[InstanceInfo, ...]) -> None:
        """Replace all instances."""
        self._instances = instances

    def __len__(self) -> int:
        """Return the number of instances."""
        return len(self._instances)

    def __iter__(self) -> Iterator[InstanceInfo]:
        """Iterate in order of creation."""
        return iter(self._instances)

    def by_name(self, name: str) -> InstanceInfo | None:
        """Return the instance of a name, or None."""
        return next((instance for instance in self._instances if instance.name == name), None)

    def status_of_model(self, name: str) -> str | None:
        """Return the status of an instance that serves a model of that name when it runs, or None."""
        found = [instance.status for instance in self._instances if instance.upstream == name]
        return found[0] if found else None

    def by_index(self, index: int) -> InstanceInfo | None:
        """Return an instance by its place in the order of creation, or None."""
        return self._instances[index] if 0 <= index < len(self._instances) else None
