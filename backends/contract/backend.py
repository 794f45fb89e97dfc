"""Interface of every backend adapter: the address of a replica, and its client."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import msgspec

from backends.contract.capabilities import Capabilities, Operation
from backends.contract.chunks import EmbedChunks, EmbedChunksReply
from backends.contract.classify import Classify, ClassifyReply
from backends.contract.embed import Embed, EmbedReply
from backends.contract.encode import Encode, EncodeReply
from backends.contract.media import EmbedParts
from backends.contract.rerank import Rerank, RerankReply, Score
from backends.contract.rerank_parts import ScoreParts
from backends.contract.tokens import Detokenize, DetokenizeReply, Tokenize, TokenizeReply

# Work that is computed by the model and costs tokens.
ModelWork: TypeAlias = Embed | Encode | Rerank | Score | Classify
Work: TypeAlias = (
    Embed | EmbedChunks | Encode | EmbedParts | Rerank | Score | ScoreParts | Classify | Tokenize | Detokenize
)
Reply: TypeAlias = (
    EmbedReply
    | EmbedChunksReply
    | EncodeReply
    | RerankReply
    | ClassifyReply
    | TokenizeReply
    | DetokenizeReply
)

# Operations that cost no tokens. Every model has them, so that they do not show its kind.
FREE_OPERATIONS: frozenset[Operation] = frozenset(work.kind for work in get_args(Work) if work.is_free)

# Values of `upstreams.<name>.backend`. Each kind is listed in `backends.kinds`.
BackendKind: TypeAlias = Literal[
    "tei",
    "infinity",
    "vllm",
    "openai",
    "cohere",
    "jina",
    "voyage",
    "perplexity",
    "azure",
    "bedrock",
    "gemini",
    "vertex",
    "huggingface",
    "nim",
    "watsonx",
    "torch",
]


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files.

    ca: trusted authorities, replacing the system's. certificate, private_key: the gateway's own.
    """

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class QueueDepth(msgspec.Struct, frozen=True):
    """Queue length of a replica. waiting_inputs: texts or pairs in its own queue, not started yet."""

    waiting_inputs: int


ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "failed"]
# room: memory was needed for a different model. idle: no request used the model. out_of_memory: a batch of
# a different model did not fit into memory.
UnloadReason: TypeAlias = Literal["room", "idle", "out_of_memory"]


class Residence(msgspec.Struct, frozen=True):
    """Memory state of a model, with counters since its process started.

    error: the reason that the last load failed. memory_bytes: memory in use. loads: successful loads.
    out_of_memory: batches that did not fit into memory in one piece.
    """

    state: ModelState
    error: str | None = None
    memory_bytes: int = 0
    loads: int = 0
    failed_loads: int = 0
    unloads: dict[UnloadReason, int] = {}
    out_of_memory: int = 0


# stale: a kept-alive connection broke as a request was sent, which was sent again. idle_error: the server
# closed an idle connection with an error reply. unsolicited: the server sent data that no request asked for.
ConnectionFaultKind: TypeAlias = Literal["stale", "idle_error", "unsolicited"]


class ConnectionFault(msgspec.Struct, frozen=True):
    """Fault of one connection that cost no request.

    pause_s: for this long from now no connection to the server is reused; 0 if nothing changes.
    """

    kind: ConnectionFaultKind
    pause_s: float = 0.0


ReportFault: TypeAlias = Callable[[ConnectionFault], None]


def ignore_fault(fault: ConnectionFault) -> None:
    """Ignore the fault of a connection."""


class TokenizerSettings(msgspec.Struct, frozen=True):
    """Tokens around each text; None leaves the choice to the checkpoint's files."""

    add_bos_token: bool | None = None
    add_eos_token: bool | None = None


class TokenizerSource(msgspec.Struct, frozen=True):
    """Location of a checkpoint's tokenizer, a hub id or path, and the settings for it."""

    location: str
    settings: TokenizerSettings = TokenizerSettings()


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Address and connection settings of one replica.

    address: a base URL, for TEI also grpc://host:port; for torch, the form that
    `backends.torch.wire.address_of` writes.
    model: name of the served model, if the wire carries one.
    tokenizer: of the model's checkpoint, for wires that report no tokens or no prompts.
    ip: the address to connect to if the host of `address` has several. Host header and SNI keep the name.
    report: called with each fault of its connections. settings: of the kind, as its folder defines them.
    task: the only operation that the model is asked for, None for all that it may have. extra_body: fields of
    every request.
    proxy: URL of the proxy to send through, `none` for none; None for that of the environment, if the kind is
    a vendor's.
    """

    address: str
    model: str | None = None
    headers: Mapping[str, str] = {}
    tls: TlsFiles = TlsFiles()
    tokenizer: TokenizerSource | None = None
    ip: str | None = None
    report: ReportFault = ignore_fault
    settings: object = None
    task: str | None = None
    extra_body: Mapping[str, Any] = {}
    proxy: str | None = None


# Value of `upstreams.<name>.proxy` for a direct connection, whatever the environment says.
NO_PROXY = "none"
PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")
LISTED_MODELS_MAX = 64
# Returns the JSON at a path of a server, None if there is none.
Ask: TypeAlias = Callable[[str], Any]


class LiteLLMProvider(msgspec.Struct, frozen=True):
    """Provider of LiteLLM whose models a kind serves.

    address: base URL, None if each entry has its own. key_variable: from which LiteLLM takes the key.
    suffix: end of LiteLLM's base URL that the kind's own does not have.
    """

    address: str | None = None
    key_variable: str | None = None
    suffix: str = ""


# Settings of an upstream whose server runs elsewhere.
REMOTE_KEYS = frozenset(
    {"replicas", "discover", "drained", "when_unavailable", "api_key", "api_key_header", "headers", "tls"}
)
# The same for an API of a vendor, whose name stands for all its servers.
VENDOR_KEYS = REMOTE_KEYS - {"discover"} | {"proxy"}


class KindSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the settings that only one kind of server has, in the upstream's section of the kind's name."""

    @property
    def uses_machine(self) -> bool:
        """True if requests without a key carry credentials that belong to this machine."""
        return False

    def address(self) -> str | None:
        """Return the base URL that the settings imply, None if they do not."""
        return None

    def is_hosted(self) -> bool:
        """Return True if a vendor computes, where the kind has servers on own machines, too."""
        return False

    def extra(self) -> str | None:
        """Return the optional packages that the settings need, besides those of the kind."""
        return None

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the path of each file that the settings name."""
        yield from ()

    def accounts(self) -> Iterator[str]:
        """Yield the key of each setting that chooses among the accounts of this machine."""
        yield from ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each problem that its type does not show."""
        yield from ()


class ServerKind(msgspec.Struct, frozen=True):
    """Facts about a kind of server that are known without its adapter.

    adapter: module with a function `open_replica`. address: base URL of a hosted API. is_vendor: it is the
    API of a vendor, which has many models, is paid by use, and is called through the environment's proxy.
    settings: type of its section of an upstream. extra: optional packages that it needs. provider:
    OpenTelemetry's name, if it differs. key_header: that of the bare key, None for a bearer token. recognize:
    returns the names of a server's models, None if it is of another kind. litellm: LiteLLM's names of the
    kind. is_multiple: a server may have several models, of which a request names one. needs_tokenizer: tokens
    are counted by the gateway. cuts_inputs: it cuts an input at fewer tokens than its model reads, if a
    request asks for it. window: number of batches in flight to start with. small_batch_slots: places in the
    window that one small batch takes at most. keys: settings of an upstream that not every kind has.
    variables: beginnings of the names of variables that its credentials come from. hosts: domains of the
    vendor, whose hosts alone may get credentials of this machine by an upstream that was added. address_key:
    the setting that its address is written in. address_hint, model_hint: the end of the problem where it, or
    the model of a vendor's API, is missing.
    """

    name: BackendKind
    adapter: str
    address: str | None = None
    is_vendor: bool = False
    settings: type[KindSettings] | None = None
    extra: str | None = None
    provider: str | None = None
    key_header: str | None = None
    variables: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    recognize: Callable[[Ask], tuple[str, ...] | None] | None = None
    litellm: Mapping[str, LiteLLMProvider] = {}
    is_multiple: bool = True
    needs_tokenizer: bool = False
    cuts_inputs: bool = False
    window: int | None = None
    small_batch_slots: int = 1
    keys: frozenset[str] = REMOTE_KEYS
    address_key: str = "replicas"
    address_hint: str = "a list of base URLs, http://host:port"
    model_hint: str = "the API serves many models"


def listed_models(answer: Any) -> tuple[str, ...]:
    """Return the names in a list of models in OpenAI's form, none if an answer is no such list."""
    items = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) and "id" in item for item in items):
        return ()
    return tuple([str(item["id"]) for item in items[:LISTED_MODELS_MAX]])


class Backend(Protocol):
    """Client of one replica, independent of its wire."""

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query the replica's capabilities, when it joins.

        Raises: BackendError.
        """

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work within timeout_s.

        Raises: BackendError; its facts are the source of the fault and whether to retry elsewhere.
        """

    async def aclose(self) -> None:
        """Close all connections."""


@runtime_checkable
class ReportsQueueDepth(Protocol):
    """Optional interface of backends whose wire reports the length of the server's own queue."""

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Return the current queue depth, or None if this server does not report it.

        Raises: BackendError.
        """


@runtime_checkable
class DropsConnections(Protocol):
    """Optional interface of backends whose connections could hold the reply to a different request."""

    def drop_connections(self) -> None:
        """Close the idle connections; the next request opens a new one."""


@runtime_checkable
class ReportsResidence(Protocol):
    """Optional interface of backends whose model can be out of memory."""

    async def residence(self, timeout_s: float) -> Residence:
        """Return the current memory state of the model.

        Raises: BackendError.
        """
