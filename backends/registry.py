"""Backend kinds and their adapter modules; an adapter is imported when a configuration uses its kind."""

from importlib import import_module
from typing import Protocol, cast

from backends.contract import Backend, BackendKind, ReplicaSpec

# Kind → adapter module with a function `open_replica`.
BACKENDS: dict[BackendKind, str] = {
    "tei": "backends.tei.adapter",
    "infinity": "backends.infinity.adapter",
    "vllm": "backends.vllm.adapter",
    "openai": "backends.openai.adapter",
    "cohere": "backends.openai.adapter",
    "jina": "backends.openai.adapter",
    "voyage": "backends.openai.adapter",
    "torch": "backends.torch.serving.client",
}


class Adapter(Protocol):
    """Interface of every adapter module."""

    def open_replica(self, spec: ReplicaSpec) -> Backend:
        """Return a backend that has not connected yet."""


def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
    """Return the backend of one replica; it sends nothing before its first method call."""
    # The contract tests check each module against the protocol; the type checker cannot.
    return cast("Adapter", import_module(BACKENDS[kind])).open_replica(spec)
