"""Works, replies and capabilities: the interface that every backend adapter implements.

The contract knows nothing of HTTP, tenants, quotas or batching. Every message is frozen. A further operation
is one module here, an entry in the table of each adapter that serves it, and a dialect.
"""

from backends.contract.backend import (
    FREE_OPERATIONS,
    NO_PROXY,
    PROXY_SCHEMES,
    REMOTE_KEYS,
    VENDOR_KEYS,
    Ask,
    Backend,
    BackendKind,
    ConnectionFault,
    ConnectionFaultKind,
    DropsConnections,
    KindSettings,
    LiteLLMProvider,
    ModelState,
    ModelWork,
    QueueDepth,
    ReplicaSpec,
    Reply,
    ReportFault,
    ReportsQueueDepth,
    ReportsResidence,
    Residence,
    ServerKind,
    TlsFiles,
    TokenizerSettings,
    TokenizerSource,
    UnloadReason,
    Work,
    ignore_fault,
    listed_models,
)
from backends.contract.capabilities import (
    NUMBER_MAX,
    Capabilities,
    Operation,
    Output,
    ScoreKind,
    Truncate,
)
from backends.contract.chunks import (
    ChunkRange,
    ChunkSize,
    EmbedChunks,
    EmbedChunksReply,
)
from backends.contract.classify import (
    Classify,
    ClassifyReply,
)
from backends.contract.embed import (
    Embed,
    EmbedReply,
)
from backends.contract.encode import (
    Encode,
    EncodeReply,
    PatchGrid,
    TermWeights,
)
from backends.contract.media import (
    EmbedParts,
    Turn,
    Turns,
)
from backends.contract.rerank import (
    Rerank,
    RerankReply,
    Score,
)
from backends.contract.rerank_parts import (
    PartsPair,
    ScoreParts,
)
from backends.contract.texts import (
    ModelInput,
)
from backends.contract.tokens import (
    Detokenize,
    DetokenizeReply,
    Token,
    Tokenize,
    TokenizeReply,
)
from backends.contract.vectors import (
    Vectors,
)
from backends.contract.work import (
    Audio,
    BaseReply,
    BaseWork,
    Chat,
    Image,
    Lengths,
    Part,
    Places,
    WorkInput,
)
