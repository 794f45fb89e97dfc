"""Which backend kinds there are; an adapter is imported only when a config names its kind."""

from importlib import import_module
from typing import Literal, Protocol, cast

from backends.contract import Backend, ReplicaSpec

BackendKind = Literal["tei", "infinity", "vllm", "openai", "torch"]

# One line each: the module that adapts the kind; it has a function `open_replica`.
BACKENDS: dict[BackendKind, str] = {
    "tei": "backends.tei",
    "infinity": "backends.infinity",
    "vllm": "backends.vllm",
    "openai": "backends.openai",
    "torch": "backends.torch.client",
}


class Adapter(Protocol):
    """What every adapter module offers."""

    def open_replica(self, spec: ReplicaSpec) -> Backend:
        """A backend that has not connected yet."""


def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
    """The backend for one replica of a kind; nothing is sent before it is asked something."""
    # A module is checked against the protocol by the contract suite, not by the type checker.
    return cast("Adapter", import_module(BACKENDS[kind])).open_replica(spec)
