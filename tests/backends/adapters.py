"""Fake servers and adapters by their kind, for tests of what all wires share."""

from collections.abc import Callable
from typing import Any

import httpx

from backends.contract import Backend, BackendKind, ReplicaSpec, TokenizerSource
from tests.conftest import remote_backend
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm

SERVERS: dict[BackendKind, Callable[..., Any]] = {
    "tei": FakeTei,
    "infinity": FakeInfinity,
    "vllm": FakeVllm,
    "openai": FakeOpenAI,
}


def adapter(kind: BackendKind, transport: Any, small_files: str, **headers: str) -> Backend:
    """Return the adapter of a server or transport, not joined; only Infinity's needs a tokenizer to join."""
    source = TokenizerSource(small_files) if kind == "infinity" else None
    spec = ReplicaSpec("http://one", headers=headers, tokenizer=source)
    is_transport = isinstance(transport, httpx.AsyncBaseTransport)
    return remote_backend(kind, spec, transport if is_transport else httpx.ASGITransport(transport))
