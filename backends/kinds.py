"""Kinds of server; an adapter is imported when a configuration uses its kind."""

from importlib import import_module
from typing import Protocol, cast

from backends.azure.kind import AZURE
from backends.bedrock.kind import BEDROCK
from backends.contract import Backend, BackendKind, ReplicaSpec, ServerKind
from backends.google.kind import GEMINI, VERTEX
from backends.huggingface.kind import HUGGINGFACE
from backends.infinity.kind import INFINITY
from backends.nim.kind import NIM
from backends.openai.kind import COHERE, JINA, OPENAI, VOYAGE
from backends.tei.kind import TEI
from backends.torch.kind import ENGINE
from backends.vllm.kind import VLLM
from backends.watsonx.kind import WATSONX

# In the order in which a server is recognized: others answer some of OpenAI's paths, too.
KINDS: dict[BackendKind, ServerKind] = {
    kind.name: kind
    for kind in (
        TEI,
        VLLM,
        INFINITY,
        NIM,
        OPENAI,
        COHERE,
        JINA,
        VOYAGE,
        AZURE,
        BEDROCK,
        GEMINI,
        VERTEX,
        HUGGINGFACE,
        WATSONX,
        ENGINE,
    )
}


class Adapter(Protocol):
    """Interface of every adapter module."""

    def open_replica(self, spec: ReplicaSpec) -> Backend:
        """Return a backend that has not connected yet."""


def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
    """Return the backend of one replica; it sends nothing before its first method call."""
    # The contract tests check each module against the protocol; the type checker cannot.
    return cast("Adapter", import_module(KINDS[kind].adapter)).open_replica(spec)
