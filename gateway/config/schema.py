"""The typed router.yaml: what an operator may say, with its defaults. Reads no file and no environment.

Units are in the keys. Frozen, because every room is handed its part whole: at start, and anew with a reload.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from ipaddress import ip_address
from typing import Annotated, Literal

import msgspec

from backends.registry import BackendKind
from backends.torch.options import Pooling, Task

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cosine = Annotated[float, msgspec.Meta(gt=0, le=1)]
# Redis counts in doubles, which are exact up to 2^53; a limit's sums stay far below.
LimitAmount = Annotated[int, msgspec.Meta(ge=1, le=10**15)]

LIMIT_NAME = re.compile(r"(requests|tokens|inputs)_per_(second|minute|hour|day|month)|requests_in_flight")
LIMITS_ALLOWED = "<requests|tokens|inputs>_per_<second|minute|hour|day|month>, or requests_in_flight"
KEY_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

# The last segment of /models/{name}/{operation}; a model's own name may not end in one.
OPERATION_SEGMENTS = frozenset(
    {
        "classify",
        "decode",
        "detokenize",
        "embed",
        "embed_all",
        "embed_sparse",
        "embeddings",
        "health",
        "info",
        "pooling",
        "predict",
        "rerank",
        "score",
        "similarity",
        "tokenize",
    }
)

Scope = Literal["embed", "rerank", "tokenize", "metrics", "admin"]
Policy = Literal["round_robin", "least_tokens", "two_choices"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every part of the file has in common."""


class Quotas(Section, frozen=True):
    """Where quotas are counted, and what happens while that is away.

    gateways: how many share the limits, where the store never told. key_grace_s: how long keys that stand
    there stay known while it is away. shadow: count, but never refuse.
    """

    store: str = "memory"
    when_unavailable: Literal["local", "refuse", "allow"] = "local"
    timeout_ms: PositiveInt = 50
    gateways: PositiveInt = 1
    key_grace_s: PositiveFloat = 300.0
    shadow: bool = False


class Key(Section, frozen=True):
    """One API key of a tenant, by the SHA-256 of the whole key; what it may is never more than its tenant.

    expires: without a time zone it is UTC. scopes: operations, `metrics`, `admin`; absent is all operations.
    """

    digest: str
    id: str | None = None
    expires: datetime | None = None
    scopes: tuple[Scope, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: dict[str, LimitAmount] = {}


class ListenerTls(Section, frozen=True):
    """HTTPS for callers, in PEM files. client_ca: who must have signed a caller's own, if one is asked."""

    certificate: str
    private_key: str
    client_ca: str | None = None


class UpstreamTls(Section, frozen=True):
    """How replicas with https are met; PEM files. ca: instead of the system's; certificate: our own."""

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class Cors(Section, frozen=True):
    """Which web pages may call; origins such as https://app.example.org, or * for all."""

    origins: tuple[str, ...]
    max_age_s: PositiveInt = 600


class AdminSettings(Section, frozen=True):
    """Where operators call, if not where callers do, and whose keys are none of a tenant's.

    files: the folder whose files what they add may name; absent, there is none.
    """

    listen: str | None = None
    files: str | None = None
    keys: tuple[str | Key, ...] = ()


class VectorSpace(Section, frozen=True):
    """How like its upstream's fingerprint a replica's vectors must be, and what happens where they are not.

    min_cosine: absent, 0.999 from the same kind and dtype as the fingerprint, 0.99 from another.
    """

    min_cosine: Cosine | None = None
    on_mismatch: Literal["refuse", "warn"] = "refuse"


class Upstream(Section, frozen=True, kw_only=True):
    """A named group of equal replicas: one model, one vector space.

    model: a hub id or a local path for torch; the served name for the others, learnt where a server has
    but one. discover: each address of the replicas' names is a replica. when_unavailable: what becomes of
    calls while no replica is there; those for torch always wait. tokenizer: where the checkpoint's small
    files are, for what a wire does not tell. token_encoding: whose tokenizer.json turns token ids that
    callers send back into text. batch_inputs, batch_tokens: what one upstream request may hold, where the
    replica does not say. in_flight_batches: the window, batches in flight to one replica; absent, it is
    learnt. queue_tokens: the most that may wait in front of all of them. retry_share, hedge_share:
    attempts that may be added to those that callers cause. task, pooling: instead of what a checkpoint's
    own files say it is for. trust_remote_code: whether code that lies beside its weights may run.
    prompts: name → text put before an input, beside and before the checkpoint's own. process: engines of
    one name share a process. preload: whether the model is loaded before anybody asks; when_loading:
    whether who asks earlier waits.
    """

    backend: BackendKind
    model: str | None = None
    replicas: tuple[str, ...] = ()
    discover: Literal["dns"] | None = None
    when_unavailable: Literal["refuse", "wait"] = "refuse"
    api_key: str = ""
    headers: dict[str, str] = {}
    tls: UpstreamTls = UpstreamTls()
    tokenizer: str | None = None
    token_encoding: str | None = None
    policy: Policy = "least_tokens"
    batch_inputs: PositiveInt | None = None
    batch_tokens: PositiveInt | None = None
    in_flight_batches: PositiveInt | None = None
    queue_tokens: PositiveInt = 4_000_000
    attempt_timeout_s: PositiveFloat = 30.0
    retry_share: Share = 0.2
    hedge_share: Share = 0.05
    vector_space: VectorSpace = VectorSpace()
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    compile: bool = False
    task: Task | None = None
    pooling: Pooling | None = None
    trust_remote_code: bool = False
    prompts: dict[str, str] = {}
    process: str = "engine"
    preload: bool = True
    when_loading: Literal["wait", "refuse"] = "wait"

    @property
    def is_hosted(self) -> bool:
        """True if an engine process of this gateway runs the model, rather than a remote server."""
        return self.backend == "torch"


class Model(Section, frozen=True):
    """A name that callers use. limits: the most that each tenant may use of it. prompts: as an upstream's,
    and before them.
    """

    upstream: str
    truncate: Literal["error", "left", "right"] = "right"
    rerank: bool = True
    deadline_s: PositiveFloat = 60.0
    limits: dict[str, LimitAmount] = {}
    prompts: dict[str, str] = {}


class Defaults(Section, frozen=True):
    """Which model serves a request that names none."""

    embed: str | None = None
    rerank: str | None = None
    classify: str | None = None


class Tenant(Section, frozen=True):
    """Who pays and is limited.

    models: absent means all. model_limits: by model, instead of the model's own `limits`. queue_tokens:
    most that waits for a model. join: whether its texts may share an upstream request with others'.
    """

    keys: tuple[str | Key, ...] = ()
    models: tuple[str, ...] | None = None
    limits: dict[str, LimitAmount] = {}
    model_limits: dict[str, dict[str, LimitAmount]] = {}
    weight: PositiveInt = 1
    priority: Literal["interactive", "bulk"] = "interactive"
    queue_tokens: PositiveInt | None = None
    join: bool = True


class Limits(Section, frozen=True):
    """Bounds on what one call and all calls together may hold."""

    body_bytes: PositiveInt = 32 * 1024 * 1024
    inputs: PositiveInt = 2048
    in_flight_bytes: PositiveInt = 512 * 1024 * 1024


class Tracing(Section, frozen=True):
    """Where spans go. endpoint: OTLP over HTTP, the whole URL. sample: the share of calls that is recorded of
    those whose callers do not say it themselves.
    """

    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample: Share = 0.01
    headers: dict[str, str] = {}
    service_name: str = "embedding-gateway"


class Logs(Section, frozen=True):
    """How lines are written. auto: text on a terminal, else JSON. access: whether each call has a line."""

    format: Literal["auto", "json", "text"] = "auto"
    access: bool = True


class Reload(Section, frozen=True):
    """When the file is read again, beside SIGHUP and the admin API. watch: as soon as it has changed."""

    watch: bool = False


class EngineSettings(Section, frozen=True):
    """What the models of one engine process may hold of memory together, and how long without work."""

    memory_bytes: PositiveInt | None = None
    idle_s: PositiveFloat | None = None


class Config(Section, frozen=True, kw_only=True):
    """The whole file. trusted_proxies: networks whose x-forwarded-for is believed."""

    listen: str = "127.0.0.1:8080"
    workers: PositiveInt = 1
    drain_s: PositiveFloat = 15.0
    trusted_proxies: tuple[str, ...] = ()
    tls: ListenerTls | None = None
    cors: Cors | None = None
    admin: AdminSettings = AdminSettings()
    reload: Reload = Reload()
    logs: Logs = Logs()
    tracing: Tracing | None = None
    quotas: Quotas = Quotas()
    limits: Limits = Limits()
    engine: EngineSettings = EngineSettings()
    upstreams: dict[str, Upstream]
    models: dict[str, Model]
    defaults: Defaults = Defaults()
    tenants: dict[str, Tenant] = {}


def host_and_port(listen: str) -> tuple[str, int]:
    """Split "host:port", "[v6]:port" or ":port".

    Raises: ValueError.
    """
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError("expected host:port, such as 127.0.0.1:8080")
    if int(port) > 65535:
        raise ValueError("the port is too large; the highest is 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("an IPv6 address goes in brackets: [::1]:8080")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - an empty host asks for all


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant by a host's name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def limit_problems(limits: Iterable[str]) -> dict[str, str]:
    """What is wrong with the names of limits, by name."""
    return {
        name: f"unknown limit; allowed: {LIMITS_ALLOWED}" for name in limits if not LIMIT_NAME.fullmatch(name)
    }


def digest_of(key: str | Key) -> str:
    """The digest of a listed key, however it is written."""
    return key if isinstance(key, str) else key.digest
