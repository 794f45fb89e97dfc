"""The schema of router.yaml: every setting with its type and default. Reads no files and no environment.

Each key carries its unit, and docs/configuration.md describes it. The structs are frozen, because every
component receives its section whole, at the start and again with each reload.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from ipaddress import ip_address
from typing import Annotated, Any, Literal

import msgspec

from backends.azure.kind import AzureSettings
from backends.bedrock.kind import BedrockSettings
from backends.contract import BackendKind, KindSettings, Operation, TokenizerSettings
from backends.google.kind import GeminiSettings, VertexSettings
from backends.huggingface.kind import HuggingFaceSettings
from backends.kinds import KINDS
from backends.nim.kind import NimSettings
from backends.openai.kind import API_ADDRESSES
from backends.openai.settings import ApiSettings, VendorName
from backends.openai.vendors import VENDORS, vendor_of
from backends.recipe.options import DTypeName, Pooling, RerankFamily, RerankPrompt, Runtime, Task
from backends.torch.kind import ENGINE
from backends.watsonx.kind import WatsonxSettings
from gateway.config.money import PRICE_MAX, budget_of, is_budget
from gateway.config.problems import similar_name

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

COUNTED = ("requests", "tokens", "inputs", "images", "batch_tokens")
PERIODS = ("second", "minute", "hour", "day", "month")
LIMIT_NAME = re.compile(
    rf"({'|'.join(COUNTED)})_per_({'|'.join(PERIODS)})|requests_in_flight|budget_per_(day|month)"
)
LIMITS_ALLOWED = (
    f"<{'|'.join(COUNTED)}>_per_<{'|'.join(PERIODS)}>, requests_in_flight, or budget_per_<day|month>"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
KEY_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

# The last segment of /models/{name}/{operation}. A model's own name may not end in one of these.
OPERATION_SEGMENTS = frozenset(
    {
        "classify",
        "contextualizedembeddings",
        "decode",
        "detokenize",
        "embed",
        "embed_all",
        "embed_sparse",
        "embeddings",
        "feature-extraction",
        "health",
        "info",
        "invocations",
        "meta",
        "multi-vector",
        "multimodalembeddings",
        "pooling",
        "predict",
        "ranking",
        "rerank",
        "score",
        "sentence-similarity",
        "similarity",
        "tokenize",
        "vectorize",
        "vectors",
    }
)

Scope = Literal["embed", "rerank", "classify", "tokenize", "metrics", "admin:read", "admin"]
# Scope that a key needs for each operation. A key for one operation may well do the others of its scope.
SCOPE_OF: Mapping[Operation, Scope] = {
    Operation.EMBED: "embed",
    Operation.EMBED_IMAGE: "embed",
    Operation.EMBED_AUDIO: "embed",
    Operation.ENCODE: "embed",
    Operation.RERANK: "rerank",
    Operation.RERANK_IMAGE: "rerank",
    Operation.CLASSIFY: "classify",
    Operation.TOKENIZE: "tokenize",
    Operation.DETOKENIZE: "tokenize",
}
# Operations for which a key may have a default model. Texts of tokens have that of tokens.
DEFAULTS = (
    "embed",
    "embed_image",
    "embed_audio",
    "encode",
    "rerank",
    "rerank_image",
    "classify",
    "tokenize",
)
Policy = Literal["round_robin", "least_tokens", "two_choices"]
# Roles of inputs, and the type of those whose role is not known.
InputRole = Literal[
    "query", "document", "classification", "clustering", "similarity", "separation", "default"
]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every mapping in the file, which rejects unknown keys."""


class Quotas(Section, frozen=True):
    """The store that counts quotas, the behaviour while it is unavailable, and what replies show of them."""

    store: str = "memory"
    when_unavailable: Literal["local", "refuse", "allow"] = "local"
    timeout_ms: PositiveInt = 50
    gateways: PositiveInt = 1
    key_grace_s: PositiveFloat = 3600.0
    shadow: bool = False
    unlimited_headers: bool = False


class Key(Section, frozen=True):
    """One API key of a tenant, by the SHA-256 of the whole key. It never permits more than its tenant.

    defaults: models of its requests that name none.
    """

    digest: str
    id: str | None = None
    expires: datetime | None = None
    scopes: tuple[Scope, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: dict[str, LimitAmount] = {}
    defaults: dict[str, str] = {}


class ListenerTls(Section, frozen=True):
    """HTTPS for callers, in PEM files. client_certificates: of callers, by the authority `client_ca`."""

    certificate: str
    private_key: str
    client_ca: str | None = None
    client_certificates: Literal["required", "optional"] = "required"


class UpstreamTls(Section, frozen=True):
    """TLS settings for https replicas, in PEM files."""

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class Cors(Section, frozen=True):
    """Web origins whose pages may call, such as https://app.example.org, or * for all."""

    origins: tuple[str, ...]
    max_age_s: PositiveInt = 600


class ListenerSettings(Section, frozen=True):
    """One more listener, where a caller that sends no key is a tenant.

    defaults: models of its requests that name none.
    """

    address: str
    tenant: str
    defaults: dict[str, str] = {}


class GrpcSettings(Section, frozen=True):
    """Listener of TEI's gRPC services, with the certificates of `tls`."""

    listen: str


class RegistrySettings(Section, frozen=True):
    """Models of this host."""

    disk_bytes: PositiveInt | None = None


class AdminSettings(Section, frozen=True):
    """The operators' listener, and their keys and client certificates, which belong to no tenant."""

    listen: str | None = None
    files: str | None = None
    keys: tuple[str | Key, ...] = ()
    certificates: tuple[str, ...] = ()


class CommandTemplate(Section, frozen=True):
    """A command line that instances may start."""

    backend: Literal["tei", "infinity", "vllm", "openai"]
    argv: tuple[str, ...]
    health: str = "/health"
    startup_timeout_s: PositiveFloat = 300.0


class ManagerSettings(Section, frozen=True):
    """Listener of the API for instances, and the commands that it may start."""

    listen: str
    commands: dict[str, CommandTemplate] = {}
    kind: str = "engine"


class VectorSpaceSettings(Section, frozen=True):
    """Minimum similarity of a replica's vectors to its upstream's fingerprint, and the action below it."""

    min_cosine: Cosine | None = None
    on_mismatch: Literal["refuse", "warn"] = "refuse"


# Keys that only some kinds of server have → these kinds. All others are for every kind.
KINDS_OF_KEYS: dict[str, tuple[BackendKind, ...]] = {
    key: tuple(kind.name for kind in KINDS.values() if key in kind.keys)
    for key in sorted(frozenset().union(*(kind.keys for kind in KINDS.values())))
}
# Value of `token_encoding`: callers' token ids are of the model's own vocabulary.
OWN_VOCABULARY = "model"
# Owner of the keys in `admin.keys`, and of operators by single sign-on: no tenant that calls models.
OPERATORS = "operators"
# Tenant of the first key, which is generated or taken from GATEWAY_API_KEY if no tenant is configured.
FIRST_TENANT = "default"


class UpstreamSettings(Section, frozen=True, kw_only=True):
    """A named group of equal replicas: one model, one vector space."""

    backend: BackendKind
    model: str | None = None
    replicas: tuple[str, ...] = ()
    discover: Literal["dns"] | None = None
    drained: tuple[str, ...] = ()
    when_unavailable: Literal["refuse", "wait"] = "refuse"
    api_key: str = ""
    api_key_header: str | None = None
    headers: dict[str, str] = {}
    vendor: VendorName | None = None
    azure: AzureSettings | None = None
    nim: NimSettings | None = None
    watsonx: WatsonxSettings | None = None
    embeddings: str | None = None
    rerank: str | None = None
    input_type: dict[InputRole, str] | None = None
    extra_body: dict[str, Any] = {}
    tls: UpstreamTls = UpstreamTls()
    proxy: str | None = None
    bedrock: BedrockSettings | None = None
    gemini: GeminiSettings | None = None
    vertex: VertexSettings | None = None
    huggingface: HuggingFaceSettings | None = None
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
    limits: dict[str, LimitAmount] = {}
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
        if not self.replicas and (address := self._own_address):
            msgspec.structs.force_setattr(self, "replicas", (address,))

    @property
    def _own_address(self) -> str | None:
        """Base URL of a hosted API, if its kind has one or its settings imply it."""
        if self.vendor is not None:
            return VENDORS[self.vendor].address
        settings = self.kind_settings
        return (settings and settings.address()) or KINDS[self.backend].address

    @property
    def kind_settings(self) -> KindSettings | None:
        """The section of its kind of server; the defaults if there is none, None if the kind has no such."""
        kind = KINDS[self.backend]
        if kind.settings is None:
            return None
        return getattr(self, kind.name) or kind.settings()

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
            self.vendor,
        )

    @property
    def is_vendor(self) -> bool:
        """True if a vendor computes, who is paid by use."""
        settings = self.kind_settings
        if KINDS[self.backend].is_vendor or (settings is not None and settings.is_hosted()):
            return True
        if self.api is None:
            return False
        return any(vendor_of(self.api, url) is not None for url in self.replicas)

    @property
    def calls_vendor(self) -> bool:
        """True if requests go to a vendor, and not to an own server of the same API, or a proxy before it."""
        own = self._own_address
        return self.is_vendor and (own is None or own in self.replicas)

    @property
    def has_credentials(self) -> bool:
        """True if requests carry a key, a header, a certificate or the credentials of this machine."""
        settings = self.kind_settings
        uses_machine = settings is not None and settings.uses_machine
        return bool(self.api_key or self.headers or self.tls.certificate or uses_machine)

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
    def is_local(self) -> bool:
        """True if an engine process of this gateway runs the model, rather than a remote server."""
        return self.backend == ENGINE.name

    @property
    def knows_each_input(self) -> bool:
        """True if the tokens of each input are known, and not only their sum in a reply."""
        return self.is_local or self.tokenizer is not None

    @property
    def tokenizer_settings(self) -> TokenizerSettings:
        """Settings for the model's tokenizer."""
        return TokenizerSettings(self.add_bos_token, self.add_eos_token)


def foreign_keys(upstream: UpstreamSettings) -> Iterator[str]:
    """Yield the keys that are set and for other kinds of server."""
    default = UpstreamSettings(backend=upstream.backend)
    for key, kinds in KINDS_OF_KEYS.items():
        if upstream.backend not in kinds and getattr(upstream, key) != getattr(default, key):
            yield key


class ModelUpstream(Section, frozen=True):
    """One of several upstreams of a model."""

    name: str
    weight: PositiveInt = 1
    priority: NonNegativeInt = 0


class CanarySettings(Section, frozen=True):
    """An upstream on trial, which serves a share of a model's calls."""

    name: str
    share: Share
    min_cosine: Cosine = 0.99


class MirrorSettings(Section, frozen=True):
    """An upstream that receives copies of a share of a model's calls, and whose replies are dropped."""

    name: str
    share: Share


class ModelSettings(Section, frozen=True):
    """A model name that callers use."""

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
    """Cache of vectors, for the models that set `cache: true`."""

    store: str = "memory"
    bytes: PositiveInt = 256 * 1024 * 1024
    ttl_s: PositiveFloat = 86_400.0
    shared: bool = False
    charge: Literal["full", "none"] = "full"
    timeout_ms: PositiveInt = 100


class Defaults(Section, frozen=True):
    """Models for requests that name none, by operation."""

    embed: str | None = None
    rerank: str | None = None
    classify: str | None = None
    any_name: bool = False


class TenantConfig(Section, frozen=True):
    """An account that is billed and limited. certificates: names or fingerprints of client certificates."""

    keys: tuple[str | Key, ...] = ()
    certificates: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    limits: dict[str, LimitAmount] = {}
    model_limits: dict[str, dict[str, LimitAmount]] = {}
    end_user_limits: dict[str, LimitAmount] = {}
    weight: PositiveInt = 1
    priority: Literal["interactive", "bulk"] = "interactive"
    queue_tokens: PositiveInt | None = None
    join: bool = True


class FileTenant(TenantConfig, frozen=True):
    """A tenant of the file. networks: addresses whose callers are this tenant if they send no key."""

    networks: tuple[str, ...] = ()


class EndUsersSettings(Section, frozen=True, rename={"sources": "from"}):
    """Names of end users in requests. Absent, none is read."""

    sources: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    most: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    log: Literal["digest", "plain"] = "digest"


class Limits(Section, frozen=True):
    """Bounds on the size of one request, on the bytes of all requests in flight, and on connections."""

    body_bytes: PositiveInt = 32 * 1024 * 1024
    inputs: PositiveInt = 2048
    in_flight_bytes: PositiveInt = 512 * 1024 * 1024
    connections: PositiveInt = 4096
    unknown_fields: Literal["report", "refuse"] = "report"


class Tracing(Section, frozen=True):
    """Export of spans. link: address of a trace for operators, with `{trace_id}` in it."""

    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample: Share = 0.01
    headers: dict[str, str] = {}
    service_name: str = "embedding-gateway"
    link: str | None = None


class OtlpMetrics(Section, frozen=True):
    """Export of metrics to an OpenTelemetry collector. interval_s: between two exports."""

    endpoint: str = "http://127.0.0.1:4318/v1/metrics"
    headers: dict[str, str] = {}
    service_name: str = "embedding-gateway"
    interval_s: PositiveFloat = 30.0


class Logs(Section, frozen=True):
    """Format of log lines."""

    format: Literal["auto", "json", "text"] = "auto"
    access: bool = True


# What a webhook can be called on.
NotifyKind = Literal["budget", "store_loss", "replica_slow"]


class NotifySettings(Section, frozen=True):
    """Webhook that is called on events, for operators without Prometheus.

    slow_factor, slow_for_s: a replica is slow if its batches take so many times as long as alike ones at the
    fastest replica of its upstream, for so long.
    """

    url: str
    secret: Annotated[str, msgspec.Meta(min_length=16)]
    on: Annotated[tuple[NotifyKind, ...], msgspec.Meta(min_length=1)] = (
        "budget",
        "store_loss",
        "replica_slow",
    )
    slow_factor: Annotated[float, msgspec.Meta(ge=2)] = 3.0
    slow_for_s: PositiveFloat = 60.0


class ReloadSettings(Section, frozen=True):
    """Triggers of a reload besides SIGHUP and the admin API."""

    watch: bool = False


class EngineSettings(Section, frozen=True):
    """Memory bound of all models in one engine process, and the idle time after which one is unloaded."""

    memory_bytes: PositiveInt | None = None
    idle_s: PositiveFloat | None = None


class FetchSettings(Section, frozen=True):
    """Addresses of pictures and recordings that the gateway fetches. Absent, it fetches none."""

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
    """Claim that decides the tenant."""

    claim: ClaimPath
    values: dict[str, str] | None = None


class ScopesClaim(Section, frozen=True):
    """Claim that decides the scopes."""

    claim: ClaimPath
    values: dict[str, tuple[Scope, ...]] | None = None


class ModelsClaim(Section, frozen=True):
    """Claim that decides the models."""

    claim: ClaimPath
    values: dict[str, tuple[str, ...]] | None = None


class LimitsClaim(Section, frozen=True):
    """Claim that decides the limits of one user."""

    claim: ClaimPath
    values: dict[str, dict[str, LimitAmount]]


class ClaimMapping(Section, frozen=True):
    """Meaning of the claims of an issuer's tokens.

    In the tables of its parts the first entry that a token has applies, and `*` is for tokens that have none.
    """

    tenant: TenantClaim
    key: ClaimPath = "sub"
    scopes: ScopesClaim | None = None
    models: ModelsClaim | None = None
    limits: LimitsClaim | None = None


class ConsoleClient(Section, frozen=True):
    """Public client as which the console signs its users in."""

    client_id: str
    scopes: tuple[str, ...] = ("openid",)


class IssuerSettings(Section, frozen=True, kw_only=True):
    """Issuer of tokens, by OpenID Connect."""

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
    """S3-compatible bucket of `batches`, and the prefix below which the gateway may do everything."""

    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    timeout_s: PositiveFloat = 30.0


class BatchesSettings(Section, frozen=True):
    """Jobs of OpenAI's /v1/files and /v1/batches. Absent, there are none."""

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


class AuditSettings(Section, frozen=True):
    """Bounds of the records of changes: their number and their age."""

    records: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    keep_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] = 400


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    listen: str = "127.0.0.1:8080"
    workers: PositiveInt = 1
    drain_s: PositiveFloat = 15.0
    lame_duck_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    trusted_proxies: tuple[str, ...] = ()
    key_in_query: bool = False
    state_dir: str | None = None
    currency: Annotated[str, msgspec.Meta(min_length=1, max_length=16)] | None = None
    listeners: tuple[ListenerSettings, ...] = ()
    tls: ListenerTls | None = None
    cors: Cors | None = None
    grpc: GrpcSettings | None = None
    admin: AdminSettings = AdminSettings()
    manager: ManagerSettings | None = None
    reload: ReloadSettings = ReloadSettings()
    logs: Logs = Logs()
    tracing: Tracing | None = None
    notify: NotifySettings | None = None
    metrics: OtlpMetrics | None = None
    quotas: Quotas = Quotas()
    end_users: EndUsersSettings | None = None
    audit: AuditSettings = AuditSettings()
    limits: Limits = Limits()
    engine: EngineSettings = EngineSettings()
    registry: RegistrySettings = RegistrySettings()
    media: MediaSettings = MediaSettings()
    cache: CacheSettings | None = None
    batches: BatchesSettings | None = None
    upstreams: dict[str, UpstreamSettings]
    models: dict[str, ModelSettings]
    defaults: Defaults = Defaults()
    tenants: dict[str, FileTenant] = {}
    sign_on: dict[str, IssuerSettings] = {}

    @property
    def networks(self) -> dict[str, str]:
        """Tenants whose callers need no key, by the networks of these."""
        return {network: name for name, tenant in self.tenants.items() for network in tenant.networks}

    @property
    def verifies_clients(self) -> bool:
        """True if certificates of clients are verified."""
        return self.tls is not None and self.tls.client_ca is not None


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


def end_user_limit_problems(limits: Mapping[str, LimitAmount]) -> dict[str, str]:
    """Return a message for each limit that is unknown, has a wrong amount, or is none of end users."""
    return limit_problems(limits) | shared_limit_problems(limits, "end users")


def shared_limit_problems(limits: Iterable[str], owner: str) -> dict[str, str]:
    """Return a message for each limit that only tenants, keys and models can have, by its name."""
    return {
        name: f"{owner} have no such limit: it counts slots of calls, or lines of batches"
        for name in limits
        if name == "requests_in_flight" or name.startswith("batch_")
    }


def _limit_problem(name: str, amount: LimitAmount) -> str | None:
    if not LIMIT_NAME.fullmatch(name):
        return f"unknown limit; {_limit_meant(name)}allowed: {LIMITS_ALLOWED}"
    if not is_budget(name):
        return None if float(amount).is_integer() else "expected a whole number"
    try:
        budget_of(amount)
    except ValueError as error:
        return str(error)
    return None


def _limit_meant(name: str) -> str:
    """Return a question about the limit that was most likely meant, or nothing."""
    known = [f"{counted}_per_{period}" for counted in COUNTED for period in PERIODS]
    similar = similar_name(name, [*known, "requests_in_flight", "budget_per_day", "budget_per_month"])
    if similar is None:
        return ""
    counted, _, period = similar.partition("_per_")
    # The periods next to one that does not exist, rather than one of similar letters.
    wanted = name.rpartition("_per_")[2]
    if period and similar_name(wanted, PERIODS) is None:
        return f"there is none per {wanted!r}: did you mean '{counted}_per_day' or '{counted}_per_month'? "
    return f"did you mean {similar!r}? "


def default_problems(
    defaults: Mapping[str, str], scopes: Collection[str] | None, *models: Collection[str] | None
) -> Iterator[tuple[str, str]]:
    """Yield each operation that has no default model, or one that a key may not use, with the reason.

    scopes: of the key. models: of the key, and of its tenant. None means all.
    """
    for operation, model in defaults.items():
        if operation not in DEFAULTS:
            yield operation, f"there is no such operation; there are: {', '.join(DEFAULTS)}"
            continue
        scope = SCOPE_OF[Operation(operation)]
        if any(names is not None and model not in names for names in models):
            yield operation, f"{model!r} is not among the models that this key may use"
        elif scopes is not None and scope not in scopes:
            yield operation, f"needs the scope {scope}, which this key has not"


def digest_of(key: str | Key) -> str:
    """Return the digest of a listed key, in either of its two written forms."""
    return key if isinstance(key, str) else key.digest
