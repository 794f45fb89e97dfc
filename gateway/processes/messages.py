"""Messages between the parent and its HTTP workers, as lines of JSON.

The first line that a worker receives is a `WorkerBoot`. Every later line, in either direction, is one of the
tagged messages.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from gateway.audit.records import Actor
from gateway.config.boot import AppBoot
from gateway.config.diff import ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import Config, NotifyKind
from gateway.declared.additions import Edit, Listing
from gateway.declared.host import HostCommand, HostResult, InstanceInfo
from gateway.events import GatewayDrained, ModelSummary, ProcessRestarted


class WorkerBoot(msgspec.Struct, frozen=True):
    """Settings that a worker process starts with.

    listen_fd, admin_fd, manager_fd, more_fds: sockets that the parent has bound. grpc_address: host:port that
    it has reserved for gRPC. status_fd: pipe to the parent. metrics_folder: folder of the counters that
    several workers share. restarts, instances, withdrawn, drained: at this worker's start.
    """

    app: AppBoot
    listen_fd: int
    status_fd: int
    admin_fd: int | None = None
    manager_fd: int | None = None
    grpc_address: str | None = None
    metrics_folder: str | None = None
    restarts: tuple[ProcessRestarted, ...] = ()
    instances: tuple[InstanceInfo, ...] = ()
    withdrawn: tuple["CanaryWithdrawn", ...] = ()
    drained: GatewayDrained = GatewayDrained()
    more_fds: tuple[int, ...] = ()


class ConfigUpdate(msgspec.Struct, frozen=True, tag="config_update"):
    """Command to serve a new config.

    config: the worker's share. configuration: digests of the whole one. restored: models whose withdrawn
    canary is put back; None, all of them. The rest is as in `AppBoot`.
    """

    number: int
    config: Config
    engines: Mapping[str, Mapping[str, str]]
    added_models: frozenset[str]
    configuration: Mapping[str, str]
    restored: frozenset[str] | None = None


class SpaceRequest(msgspec.Struct, frozen=True, tag="space_request"):
    """Question whether the upstreams of a config's models are known to be of different vector spaces."""

    number: int
    config: Config


class SpaceReply(msgspec.Struct, frozen=True, tag="space_reply"):
    """Models whose upstreams are known to differ, for the `SpaceRequest` with the same number."""

    number: int
    problems: tuple[Problem, ...]


class CanaryWithdrawn(msgspec.Struct, frozen=True, tag="canary_withdrawn"):
    """Notice that a worker has withdrawn a model's canary, which every worker follows."""

    model: str
    upstream: str
    reason: str


class ConfigAck(msgspec.Struct, frozen=True, tag="config_ack"):
    """Confirmation that new requests use an update; problem: the reason, if they do not."""

    number: int
    problem: str | None = None


class ConfigDrained(msgspec.Struct, frozen=True, tag="config_drained"):
    """Notice that no request uses anything that an update has removed any longer."""

    number: int


class ReadFile(msgspec.Struct, frozen=True, tag="read_file"):
    """Operator's request to read the file again."""

    by: Actor


class ListAdditions(msgspec.Struct, frozen=True, tag="list_additions"):
    """Operator's request to list the additions."""


class SetDrain(msgspec.Struct, frozen=True, tag="set_drain"):
    """Operator's request to take this gateway out of its load balancers, or to put it back."""

    is_drained: bool


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Event that a webhook is called on, which needs no reply.

    key: equal for what several workers report of the same event. text: in words. data: names and numbers, no
    inputs and no secrets.
    """

    kind: NotifyKind
    key: str
    text: str
    data: Mapping[str, str | int | float]


class Request(msgspec.Struct, frozen=True, tag="request"):
    """Operator's request, which the parent carries out, or a notice. number: repeated in the reply."""

    number: int
    body: ReadFile | ListAdditions | SetDrain | Edit | HostCommand | Notice


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Result of a worker's `Request` with the same number."""

    number: int
    body: ReloadOutcome | Listing | HostResult | GatewayDrained


class InstancesUpdate(msgspec.Struct, frozen=True, tag="instances_update"):
    """All instances, sent whenever one has changed."""

    instances: tuple[InstanceInfo, ...]


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """Notice, sent once, that every upstream has loaded or has been tried.

    models: those that it serves. problems: models of the file whose upstreams are of different vector spaces.
    """

    models: tuple[ModelSummary, ...]
    problems: tuple[Problem, ...] = ()


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Notice, sent every few seconds until the worker is ready. waiting: upstreams that are not ready yet."""

    waiting: tuple[str, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Periodic sign that the worker's event loop is running."""


ToWorker: TypeAlias = (
    ConfigUpdate
    | Reply
    | InstancesUpdate
    | ProcessRestarted
    | SpaceRequest
    | CanaryWithdrawn
    | GatewayDrained
)
ToParent: TypeAlias = (
    WorkerReady | Starting | ConfigAck | ConfigDrained | Request | Heartbeat | SpaceReply | CanaryWithdrawn
)
