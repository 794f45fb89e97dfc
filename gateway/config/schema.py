"""The schema of router.yaml: every setting with its type and default. Reads no files and no environment.

Each key carries its unit. The structs are frozen, because every component receives its section whole, at the
start and again with each reload.
"""

import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from ipaddress import ip_address
from typing import Annotated, Any, Literal

import msgspec

from backends.contract import BackendKind, TokenizerSettings
from backends.openai.kind import API_ADDRESSES, ApiSettings
from backends.recipe.options import DTypeName, Pooling, RerankFamily, RerankPrompt, Runtime, Task
from gateway.config.money import PRICE_MAX, budget_of, is_budget

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cosine = Annotated[float, msgspec.Meta(gt=0, le=1)]
# Redis counts in doubles, which are exact up to 2^53. Sums of limits stay far below that.
LIMIT_MAX = 10**15
# Whole numbers, except for budgets: `limit_problems` checks both, by the name of the limit.
LimitAmount = (
    Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] | Annotated[float, msgspec.Meta(gt=0, le=LIMIT_MAX)]
)

LIMIT_NAME = re.compile(
    r"(requests|tokens|inputs|images|batch_tokens)_per_(second|minute|hour|day|month)|requests_in_flight|"
    r"budget_per_(day|month)"
)
LIMITS_ALLOWED = (
    "<requests|tokens|inputs|images|batch_tokens>_per_<second|minute|hour|day|month>, requests_in_flight, or "
    "budget_per_<day|month>"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
KEY_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

# The last segment of /models/{name}/{operation}. A model's own name may not end in one of these.
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
        "multi-vector",
        "multimodalembeddings",
        "pooling",
        "predict",
        "ranking",
        "rerank",
        "score",
        "similarity",
        "tokenize",
    }
)

Scope = Literal["embed", "rerank", "tokenize", "metrics", "admin"]
Policy = Literal["round_robin", "least_tokens", "two_choices"]
# Roles of inputs, and the type of those whose role is not known.
InputRole = Literal[
    "query", "document", "classification", "clustering", "similarity", "separation", "default"
]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every mapping in the file, which rejects unknown keys."""


class Quotas(Section, frozen=True):
    """The store that counts quotas, and the behaviour while it is unavailable.

    gateways: number of gateways that share the limits, used until the store has reported it. key_grace_s:
    how long keys from Redis stay valid while it is unavailable, or after it has lost them. shadow: count
    requests, but never refuse one.
    """

    store: str = "memory"
    when_unavailable: Literal["local", "refuse", "allow"] = "local"
    timeout_ms: PositiveInt = 50
    gateways: PositiveInt = 1
    key_grace_s: PositiveFloat = 3600.0
    shadow: bool = False


class Key(Section, frozen=True):
    """One API key of a tenant, by the SHA-256 of the whole key. It never permits more than its tenant.

    expires: UTC unless it has a time zone. scopes: operations, `metrics`, `admin`; absent, all operations.
    """

    digest: str
    id: str | None = None
    expires: datetime | None = None
    scopes: tuple[Scope, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: dict[str, LimitAmount] = {}


class ListenerTls(Section, frozen=True):
    """HTTPS for callers, in PEM files. client_ca: authority of client certificates; absent, none needed."""

    certificate: str
    private_key: str
    client_ca: str | None = None


class UpstreamTls(Section, frozen=True):
    """TLS settings for https replicas, in PEM files.

    ca: used in place of the system's authorities. certificate: presented by the gateway to replicas.
    """

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class Cors(Section, frozen=True):
    """Web origins whose pages may call, such as https://app.example.org, or * for all."""

    origins: tuple[str, ...]
    max_age_s: PositiveInt = 600


class GrpcSettings(Section, frozen=True):
    """Listener of TEI's gRPC services, with the certificates of `tls`."""

    listen: str


class RegistrySettings(Section, frozen=True):
    """Models of this host. disk_bytes: bound on the Hub's cache; absent, there is none."""

    disk_bytes: PositiveInt | None = None


class AdminSettings(Section, frozen=True):
    """The operators' listener and their keys, which belong to no tenant.

    listen: absent, operators use the callers' listener. files: folder whose files an added upstream may
    refer to; absent, it may refer to none.
    """

    listen: str | None = None
    files: str | None = None
    keys: tuple[str | Key, ...] = ()


class CommandTemplate(Section, frozen=True):
    """A command line that instances may start. argv: its arguments, with placeholders such as {model_id}.

    backend: kind of server that it starts. health: path that the server answers with 200 once it is ready.
    startup_timeout_s: time until then, where a request states none.
    """

    backend: Literal["tei", "infinity", "vllm", "openai"]
    argv: tuple[str, ...]
    health: str = "/health"
    startup_timeout_s: PositiveFloat = 300.0


class ManagerSettings(Section, frozen=True):
    """Listener of the API for instances, and the commands that it may start.

    commands: by the kind of instance. kind: of instances whose request states none.
    """

    listen: str
    commands: dict[str, CommandTemplate] = {}
    kind: str = "engine"


class VectorSpaceSettings(Section, frozen=True):
    """Minimum similarity of a replica's vectors to its upstream's fingerprint, and the action below it.

    min_cosine: absent, 0.999 for the fingerprint's own backend kind and dtype, and 0.99 for any other; int8
    and another dtype never match.
    """

    min_cosine: Cosine | None = None
    on_mismatch: Literal["refuse", "warn"] = "refuse"


# Value of `token_encoding`: callers' token ids are of the model's own vocabulary.
OWN_VOCABULARY = "model"
# Owner of the keys in `admin.keys`, and of operators by single sign-on: no tenant that calls models.
OPERATORS = "operators"


class UpstreamSettings(Section, frozen=True, kw_only=True):
    """A named group of equal replicas: one model, one vector space.

    model: a hub id or local path for torch. For the others it is the served name, learned from a server that
    has only one model.
    discover: every address of a replica's host name becomes a replica. drained: replicas that get no work.
    when_unavailable: treatment of requests while no replica is available. Requests to torch always wait.
    replicas: a hosted API has a default. api_key_header: header of the key; absent, a bearer token.
    embeddings, rerank, input_type, extra_body: as in `ApiSettings`.
    tokenizer: location of the checkpoint's small files, for facts that the backend's protocol does not
    report. token_encoding: location of the tokenizer.json that turns token ids sent by callers back into
    text, or `OWN_VOCABULARY`. add_bos_token, add_eos_token: add the token, or do not; absent, as the
    checkpoint's files say.
    request_inputs, request_tokens: size of one upstream request, where the replica does not report it.
    request_bytes: most bytes of inputs in one upstream request, in place of what its backend assumes.
    in_flight_batches: window of batches in flight to one replica; absent, it is learned. queue_tokens: most
    tokens that may wait in front of all replicas. retry_share, hedge_share: extra attempts, as a share of
    those that callers cause. task, pooling, rerank_template: override the checkpoint's own files.
    adapter: name of the checkpoint's adapter (LoRA) that is merged into the weights.
    trust_remote_code: permission to run code that the checkpoint brings along. code_revision: commit of that
    code, if it lies in another repository. prompts: name → text put in front of an input. They extend and
    override the checkpoint's own. instruction_template: form in which an embedding model reads the
    instruction of a call. process: upstreams that name the same engine process share it. preload: load the
    model before the first request. when_loading: treatment of requests that arrive earlier.
    """

    backend: BackendKind
    model: str | None = None
    replicas: tuple[str, ...] = ()
    discover: Literal["dns"] | None = None
    drained: tuple[str, ...] = ()
    when_unavailable: Literal["refuse", "wait"] = "refuse"
    api_key: str = ""
    api_key_header: str | None = None
    headers: dict[str, str] = {}
    embeddings: str | None = None
    rerank: str | None = None
    input_type: dict[InputRole, str] | None = None
    extra_body: dict[str, Any] = {}
    tls: UpstreamTls = UpstreamTls()
    tokenizer: str | None = None
    token_encoding: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    policy: Policy = "least_tokens"
    request_inputs: PositiveInt | None = None
    request_tokens: PositiveInt | None = None
    request_bytes: PositiveInt | None = None
    in_flight_batches: PositiveInt | None = None
    queue_tokens: PositiveInt = 4_000_000
    attempt_timeout_s: PositiveFloat = 30.0
    retry_share: Share = 0.2
    hedge_share: Share = 0.05
    vector_space: VectorSpaceSettings = VectorSpaceSettings()
    revision: str | None = None
    dtype: DTypeName | None = None
    device: str | tuple[str, ...] | None = None
    compile: bool = False
    runtime: Runtime = "torch"
    task: Task | None = None
    pooling: Pooling | None = None
    rerank_template: RerankFamily | RerankPrompt | None = None
    adapter: str | None = None
    trust_remote_code: bool = False
    code_revision: str | None = None
    prompts: dict[str, str] = {}
    instruction_template: str | None = None
    process: str = "engine"
    preload: bool = True
    when_loading: Literal["wait", "refuse"] = "wait"

    def __post_init__(self) -> None:
        """Fill in the base URL of a hosted API, so that every reader finds it among the replicas."""
        if not self.replicas and (api := self.api) is not None and (address := API_ADDRESSES[api.kind]):
            msgspec.structs.force_setattr(self, "replicas", (address,))

    @property
    def api(self) -> ApiSettings | None:
        """Settings for OpenAI's API and its relatives; None for other backends."""
        if self.backend not in API_ADDRESSES:
            return None
        types = self.input_type
        return ApiSettings(
            self.backend,
            self.embeddings,
            self.rerank,
            None if types is None else {str(role): word for role, word in types.items()},
            self.extra_body,
            self.task,
        )

    @property
    def devices(self) -> dict[str, str | None]:
        """Device of each engine process, by what distinguishes the processes; "" if there is only one."""
        if not isinstance(self.device, tuple):
            return {"": self.device}
        counts: Counter[str] = Counter()
        places: dict[str, str | None] = {}
        for device in self.device:
            counts[device] += 1
            places[device if counts[device] == 1 else f"{device} {counts[device]}"] = device
        return places

    @property
    def first_device(self) -> str | None:
        """Device of a process that serves alone, None for the engine's own choice."""
        return next(iter(self.devices.values()))

    @property
    def is_hosted(self) -> bool:
        """True if an engine process of this gateway runs the model, rather than a remote server."""
        return self.backend == "torch"

    @property
    def knows_each_input(self) -> bool:
        """True if the tokens of each input are known, and not only their sum in a reply."""
        return self.is_hosted or self.tokenizer is not None

    @property
    def tokenizer_settings(self) -> TokenizerSettings:
        """Settings for the model's tokenizer."""
        return TokenizerSettings(self.add_bos_token, self.add_eos_token)


class ModelUpstream(Section, frozen=True):
    """One of several upstreams of a model.

    weight: its share of the calls, relative to the others of its priority. priority: upstreams of a higher
    number are used only while none of a lower number can serve.
    """

    name: str
    weight: PositiveInt = 1
    priority: NonNegativeInt = 0


class CanarySettings(Section, frozen=True):
    """An upstream on trial, which serves a share of a model's calls.

    min_cosine: to the vectors of the model's upstreams for the same inputs; below it, the canary serves no
    call any more.
    """

    name: str
    share: Share
    min_cosine: Cosine = 0.99


class MirrorSettings(Section, frozen=True):
    """An upstream that receives copies of a share of a model's calls, and whose replies are dropped."""

    name: str
    share: Share


class ModelSettings(Section, frozen=True):
    """A model name that callers use.

    upstream: serves it; of several, the first of the lowest priority. upstreams: several that share the
    calls. split_by: what the choice between them depends on. limits: upper bound for each tenant. prompts:
    override the upstream's prompts of the same name. cache: keep its vectors in the cache of the gateway.
    price_per_million_tokens: in `currency`; absent, its tokens cost nothing.
    """

    upstream: str = ""
    truncate: Literal["error", "left", "right"] | None = None
    rerank: bool = True
    deadline_s: PositiveFloat = 60.0
    limits: dict[str, LimitAmount] = {}
    prompts: dict[str, str] = {}
    cache: bool = False
    price_per_million_tokens: Annotated[float, msgspec.Meta(ge=0, le=PRICE_MAX)] | None = None
    upstreams: tuple[ModelUpstream, ...] = ()
    split_by: Literal["tenant", "request"] = "request"
    canary: CanarySettings | None = None
    mirror: MirrorSettings | None = None

    def __post_init__(self) -> None:
        """Fill in the main one of several upstreams, so that every reader finds it."""
        if not self.upstream and self.upstreams:
            main = min(self.upstreams, key=lambda member: member.priority)
            msgspec.structs.force_setattr(self, "upstream", main.name)

    @property
    def members(self) -> tuple[ModelUpstream, ...]:
        """The upstreams that share the calls, also if it is only one."""
        return self.upstreams or (ModelUpstream(self.upstream),)

    @property
    def is_group(self) -> bool:
        """True if a call has a choice of upstreams, or is copied."""
        return len(self.members) > 1 or self.canary is not None or self.mirror is not None

    @property
    def serving_names(self) -> tuple[str, ...]:
        """Names of all upstreams whose replies callers receive."""
        canary = () if self.canary is None else (self.canary.name,)
        return (*(member.name for member in self.members), *canary)

    @property
    def upstream_names(self) -> tuple[str, ...]:
        """Names of all upstreams that receive its calls or copies of them."""
        return self.serving_names if self.mirror is None else (*self.serving_names, self.mirror.name)


class CacheSettings(Section, frozen=True):
    """Cache of vectors, for the models that set `cache: true`.

    store: `memory`, `redis` for the one of `quotas.store`, or the URL of another Redis. bytes: of all
    entries; in memory it is divided by the number of workers. shared: a tenant may find what others have
    put there. charge: whether limits and usage count texts that were found. timeout_ms: of a lookup in Redis.
    """

    store: str = "memory"
    bytes: PositiveInt = 256 * 1024 * 1024
    ttl_s: PositiveFloat = 86_400.0
    shared: bool = False
    charge: Literal["full", "none"] = "full"
    timeout_ms: PositiveInt = 100


class Defaults(Section, frozen=True):
    """Models for requests that name none, by operation.

    any_name: the only model also serves requests that name a model which does not exist. A file with several
    models may not set it, and with it no model is added.
    """

    embed: str | None = None
    rerank: str | None = None
    classify: str | None = None
    any_name: bool = False


class TenantConfig(Section, frozen=True):
    """An account that is billed and limited.

    models: permitted models; absent, all. model_limits: by model, in place of the model's own `limits`.
    queue_tokens: most tokens that may wait for one model. join: permit its texts to share an upstream request
    with texts of other tenants.
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
    """Bounds on the size of one request, on the bytes of all requests in flight, and on connections.

    connections: most connections of callers to one worker.
    """

    body_bytes: PositiveInt = 32 * 1024 * 1024
    inputs: PositiveInt = 2048
    in_flight_bytes: PositiveInt = 512 * 1024 * 1024
    connections: PositiveInt = 4096


class Tracing(Section, frozen=True):
    """Export of spans. endpoint: whole URL of OTLP over HTTP.

    sample: recorded share of the requests whose callers send no sampling decision of their own.
    """

    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample: Share = 0.01
    headers: dict[str, str] = {}
    service_name: str = "embedding-gateway"


class Logs(Section, frozen=True):
    """Format of log lines. auto: text on a terminal, else JSON. access: log one line per request."""

    format: Literal["auto", "json", "text"] = "auto"
    access: bool = True


class ReloadSettings(Section, frozen=True):
    """Triggers of a reload besides SIGHUP and the admin API. watch: reload when the file has changed."""

    watch: bool = False


class EngineSettings(Section, frozen=True):
    """Memory bound of all models in one engine process, and the idle time after which one is unloaded."""

    memory_bytes: PositiveInt | None = None
    idle_s: PositiveFloat | None = None


class FetchSettings(Section, frozen=True):
    """Addresses of pictures and recordings that the gateway fetches. Absent, it fetches none.

    hosts: names, IP addresses, or *.example.org. ports: absent, those of the schemes. private: networks that
    are not public and may be reached nevertheless. item_bytes, request_bytes: bounds on the bytes of
    one and of all that one request fetches. request_addresses: most addresses of one request. timeout_s: for
    one, with its redirects. in_flight: concurrent fetches of one worker. ca: trusted authorities, replacing
    the system's.
    """

    hosts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    schemes: Annotated[tuple[Literal["https", "http"], ...], msgspec.Meta(min_length=1)] = ("https",)
    ports: tuple[Annotated[int, msgspec.Meta(ge=1, le=65535)], ...] = ()
    private: tuple[str, ...] = ()
    item_bytes: PositiveInt = 16 * 1024 * 1024
    request_bytes: PositiveInt = 32 * 1024 * 1024
    request_addresses: PositiveInt = 64
    timeout_s: PositiveFloat = 10.0
    in_flight: PositiveInt = 16
    in_flight_per_tenant: PositiveInt = 4
    ca: str | None = None


class MediaSettings(Section, frozen=True):
    """Pictures and recordings in requests."""

    fetch: FetchSettings | None = None


# All are asymmetric: who can check a token must not be able to make one.
SignatureAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
# Name of a claim, or the names on the way to one inside another.
ClaimPath = str | tuple[str, ...]


class TenantClaim(Section, frozen=True):
    """Claim that decides the tenant. values: of the claim → tenant; absent, the claim is the tenant's name.

    In all such tables the first entry that a token has applies, and `*` is for tokens that have none.
    """

    claim: ClaimPath
    values: dict[str, str] | None = None


class ScopesClaim(Section, frozen=True):
    """Claim that decides the scopes. values: of the claim → scopes, which add up.

    Absent, the claim's words are the scopes, but never `admin` or `metrics`.
    """

    claim: ClaimPath
    values: dict[str, tuple[Scope, ...]] | None = None


class ModelsClaim(Section, frozen=True):
    """Claim that decides the models. values: of the claim → models, which add up.

    Absent, the claim lists the models.
    """

    claim: ClaimPath
    values: dict[str, tuple[str, ...]] | None = None


class LimitsClaim(Section, frozen=True):
    """Claim that decides the limits of one user. values: of the claim → limits."""

    claim: ClaimPath
    values: dict[str, dict[str, LimitAmount]]


class ClaimMapping(Section, frozen=True):
    """Meaning of the claims of an issuer's tokens.

    key: claim that identifies the user. scopes: absent, all operations. models, limits: absent, the tenant's.
    """

    tenant: TenantClaim
    key: ClaimPath = "sub"
    scopes: ScopesClaim | None = None
    models: ModelsClaim | None = None
    limits: LimitsClaim | None = None


class ConsoleClient(Section, frozen=True):
    """Public client as which the console signs its users in. scopes: that it asks for."""

    client_id: str
    scopes: tuple[str, ...] = ("openid",)


class IssuerSettings(Section, frozen=True, kw_only=True):
    """Issuer of tokens, by OpenID Connect.

    audience: of the tokens that are meant for this gateway. refresh_s: interval at which its keys are read
    again. keys_grace_s: how long they stay valid while it cannot be reached. ca: trusted authorities,
    replacing the system's. console: absent, the console offers no sign-in by it.
    """

    issuer: str
    audience: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    claims: ClaimMapping
    algorithms: Annotated[tuple[SignatureAlgorithm, ...], msgspec.Meta(min_length=1)] = ("RS256", "ES256")
    clock_skew_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 60.0
    refresh_s: Annotated[float, msgspec.Meta(ge=10)] = 600.0
    keys_grace_s: PositiveFloat = 86_400.0
    ca: str | None = None
    console: ConsoleClient | None = None


class BucketSettings(Section, frozen=True):
    """S3-compatible bucket of `batches`, and the prefix below which the gateway may do everything.

    access_key, secret_key: absent, from the environment, as Amazon's tools find them. timeout_s: of each
    request.
    """

    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    timeout_s: PositiveFloat = 30.0


class BatchesSettings(Section, frozen=True):
    """Jobs of OpenAI's /v1/files and /v1/batches. Absent, there are none.

    dir: folder of files and results, shared by the gateways of one Redis; with a `bucket`, only of results
    that are not complete. file_bytes, tenant_bytes, bytes: of one file, of a tenant, of all. line_bytes,
    lines: of an input. files_per_tenant: with which a tenant may upload another. jobs_per_tenant: unfinished
    ones. kept_jobs_per_tenant: ended ones too. keep_s: time after which files and ended jobs are removed.
    lines_in_flight: lines that one worker runs at a time.
    """

    dir: str
    bucket: BucketSettings | None = None
    file_bytes: PositiveInt = 512 * 1024 * 1024
    tenant_bytes: PositiveInt = 10 * 1024 * 1024 * 1024
    bytes: PositiveInt = 100 * 1024 * 1024 * 1024
    line_bytes: PositiveInt = 4 * 1024 * 1024
    lines: PositiveInt = 200_000
    files_per_tenant: PositiveInt = 10_000
    jobs_per_tenant: PositiveInt = 100
    kept_jobs_per_tenant: PositiveInt = 1000
    keep_s: PositiveFloat = 30 * 86_400.0
    lines_in_flight: PositiveInt = 32


class Config(Section, frozen=True, kw_only=True):
    """The whole file. trusted_proxies: networks whose x-forwarded-for header is trusted.

    lame_duck_s: time for which a stopping gateway is not ready and serves on, before `drain_s` begins.
    state_dir: folder of the first key and of the instances; absent, the place that the system has for such
    files. currency: name of the money in which prices and budgets are written.
    """

    listen: str = "127.0.0.1:8080"
    workers: PositiveInt = 1
    drain_s: PositiveFloat = 15.0
    lame_duck_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    trusted_proxies: tuple[str, ...] = ()
    state_dir: str | None = None
    currency: Annotated[str, msgspec.Meta(min_length=1, max_length=16)] | None = None
    tls: ListenerTls | None = None
    cors: Cors | None = None
    grpc: GrpcSettings | None = None
    admin: AdminSettings = AdminSettings()
    manager: ManagerSettings | None = None
    reload: ReloadSettings = ReloadSettings()
    logs: Logs = Logs()
    tracing: Tracing | None = None
    quotas: Quotas = Quotas()
    limits: Limits = Limits()
    engine: EngineSettings = EngineSettings()
    registry: RegistrySettings = RegistrySettings()
    media: MediaSettings = MediaSettings()
    cache: CacheSettings | None = None
    batches: BatchesSettings | None = None
    upstreams: dict[str, UpstreamSettings]
    models: dict[str, ModelSettings]
    defaults: Defaults = Defaults()
    tenants: dict[str, TenantConfig] = {}
    sign_on: dict[str, IssuerSettings] = {}


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
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - an empty host means every interface


def is_loopback(host: str) -> bool:
    """Return True if a host's name or address can only mean this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def limit_problems(limits: Mapping[str, LimitAmount]) -> dict[str, str]:
    """Return a message for each limit that is unknown or has a wrong amount, by its name."""
    problems = {name: _limit_problem(name, amount) for name, amount in limits.items()}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _limit_problem(name: str, amount: LimitAmount) -> str | None:
    if not LIMIT_NAME.fullmatch(name):
        return f"unknown limit; allowed: {LIMITS_ALLOWED}"
    if not is_budget(name):
        return None if float(amount).is_integer() else "expected a whole number"
    try:
        budget_of(amount)
    except ValueError as error:
        return str(error)
    return None


def digest_of(key: str | Key) -> str:
    """Return the digest of a listed key, in either of its two written forms."""
    return key if isinstance(key, str) else key.digest
