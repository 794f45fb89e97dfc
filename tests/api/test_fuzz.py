"""Every reply to a generated request is one that the OpenAPI document describes, and no 5xx.

FUZZ_CASES says how many cases each operation gets (`make fuzz`); fewer of them, always the same, are part of
`make test`.
"""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.api.server.error_bodies import SIE
from gateway.app import HANDLERS
from gateway.config.load import parse_config
from tests.conftest import Running, running_gateway
from tests.fakes.additions import ReadingParent
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm
from tests.quotas.redis_server import RedisServer

CASES = int(os.environ.get("FUZZ_CASES", "0"))
# Of each operation in `make test`; one that has nothing to choose has fewer.
FEW = 20
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Most names that chance makes up name nothing: these do, and one is refused.
MODELS = (
    "bge",
    "org/bge",
    "strict",
    "cross",
    "plain",
    "vector",
    "pairs",
    "moods",
    "late",
    "labels",
    "nobody",
)
TEXTS = st.lists(
    st.sampled_from(["a", "red", "ü", "w " * 20, "\0", "向量", "{}"]) | st.text(max_size=20),
    min_size=1,
    max_size=70,
)
NAMED = {
    "name": MODELS,
    "model": MODELS,
    "tenant": ("acme", "nobody"),
    "key_id": ("k1", "nobody"),
    "upstream": ("embedder", "bge"),
}
CONFIG = """
# A machine that does other things too is no finding.
quotas: {store: "%s", timeout_ms: 2000}
limits: {inputs: 64}
upstreams:
  embedder: {backend: tei, replicas: ["http://tei-0", "http://tei-1"]}
  reranker: {backend: tei, replicas: ["http://rerank-0"]}
  plain: {backend: openai, replicas: ["http://openai-0"]}
  vector: {backend: vllm, replicas: ["http://vllm-embed"]}
  pairs: {backend: vllm, replicas: ["http://vllm-score"]}
  moods: {backend: vllm, replicas: ["http://vllm-classify"]}
  late: {backend: vllm, replicas: ["http://vllm-late"]}
  labels: {backend: tei, replicas: ["http://labels-0"]}
models:
  bge: {upstream: embedder}
  org/bge: {upstream: embedder}
  strict: {upstream: embedder, truncate: error}
  cross: {upstream: reranker}
  plain: {upstream: plain}
  vector: {upstream: vector}
  pairs: {upstream: pairs}
  moods: {upstream: moods}
  late: {upstream: late}
  labels: {upstream: labels}
defaults: {embed: bge, rerank: cross, classify: moods}
"""


class Target:
    """A gateway on fakes that lives for all cases, on an event loop of its own."""

    def __init__(self, store: str) -> None:
        self._runner = asyncio.Runner()
        servers = {
            "tei-0": FakeTei(),
            "tei-1": FakeTei(),
            "rerank-0": FakeTei(model_type=RERANKER),
            "openai-0": FakeOpenAI(),
            "vllm-embed": FakeVllm(),
            "vllm-score": FakeVllm(task="classify"),
            "vllm-classify": FakeVllm(task="classify", classes=len(LABELS)),
            "vllm-late": FakeVllm(task="token_embed"),
            "labels-0": FakeTei(model_type=CLASSIFIER),
        }
        self._leaves = asyncio.Event()
        self._running: asyncio.Future[Running] = self._runner.get_loop().create_future()
        self._life = self._runner.get_loop().create_task(self._live(servers, CONFIG % store))
        self._gateway = self._runner.run(self._entered())
        self.document = self._runner.run(self._gateway.client.get("/docs/openapi.json")).json()
        self.schema = from_dict(self.document)
        self.sent = 0

    def send(self, case: Case, *, packs: bool = False) -> httpx.Response:
        """What a case says, with a key that may do everything; packs: as msgpack, where it is JSON."""
        words = case.as_transport_kwargs(base_url="http://gateway")
        words = {name: value for name, value in words.items() if value is not None}
        content, kind = _content(words, packs=packs)
        sent = httpx.Request(
            words["method"],
            words["url"],
            params=words.get("params"),
            headers=self._headers({**words.get("headers", {}), **kind}),
            cookies=words.get("cookies"),
            **content,
        )
        return self._runner.run(self._answer(sent))

    async def _answer(self, sent: httpx.Request) -> httpx.Response:
        async with asyncio.timeout(10):
            return await self._gateway.client.send(sent)

    def _headers(self, made: dict[str, Any]) -> dict[str, Any]:
        return {**made, "authorization": self._gateway.client.headers["authorization"], "host": "127.0.0.1"}

    async def _live(self, servers: dict[str, Any], config: str) -> None:
        """What is entered and left in one task."""
        parent = ReadingParent(parse_config(config, {}, Path.cwd()))
        async with running_gateway(servers, config, adding=parent.adding) as gateway:
            self._running.set_result(gateway)
            await self._leaves.wait()

    async def _entered(self) -> Running:
        await asyncio.wait({self._life, self._running}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        return self._running.result()

    async def _left(self) -> None:
        self._leaves.set()
        async with asyncio.timeout(20):
            await self._life

    def close(self) -> None:
        """End it."""
        self._runner.run(self._left())
        self._runner.close()


def _content(words: dict[str, Any], *, packs: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The body, and the header that tells its kind where httpx does not."""
    if "json" in words and packs:
        kind = {"content-type": "application/msgpack"}
        return {"content": msgspec.msgpack.encode(_packable(words["json"]))}, kind
    if "json" in words:
        return {"json": words["json"]}, {}
    return ({"content": words["data"]} if isinstance(words.get("data"), str | bytes) else {}), {}


def _packable(value: Any) -> Any:
    """The same without integers that msgpack has no room for."""
    if isinstance(value, dict):
        return {_packable(name): _packable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_packable(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    target = Target(server.url)
    yield target
    target.close()
    server.stop()


def operations() -> list[str]:
    """Every method and path that is documented, from the handlers themselves, such as `GET /livez`."""
    return sorted(
        f"{method} {re.sub(r':[a-z]+}', '}', path)}"
        for handler in HANDLERS
        for path in handler.paths
        for method in handler.http_methods
    )


def with_names(draw: st.DrawFn, case: Case) -> Case:
    """A case that mostly speaks of what is there."""
    for place in (case.path_parameters, case.query, case.body):
        for name, known in NAMED.items():
            if isinstance(place, dict) and name in place and draw(st.integers(0, 3)):
                place[name] = draw(st.sampled_from(known))
    return case


def with_texts(draw: st.DrawFn, case: Case) -> Case:
    """A case whose inputs are mostly some: made up, they are mostly none, or empty."""
    if isinstance(case.body, dict):
        for name in ("input", "inputs", "texts", "documents", "queries"):
            if isinstance(case.body.get(name), str | list) and draw(st.integers(0, 3)):
                case.body[name] = draw(TEXTS)
    return case


@st.composite
def cases(draw: st.DrawFn, operation: Any) -> Case:
    mode = draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    return with_texts(draw, with_names(draw, draw(operation.as_strategy(mode))))


@pytest.mark.timeout(3600 if CASES else 60)
@pytest.mark.parametrize("label", operations())
def test_every_reply_is_as_documented(target: Target, label: str) -> None:
    method, _, path = label.partition(" ")
    operation = target.schema[path][method]

    @settings(
        max_examples=CASES or FEW,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(operation), st.booleans() if path.startswith(SIE.prefixes) else st.just(value=False))
    def holds(case: Case, packs: bool) -> None:
        case.validate_response(target.send(case, packs=packs), checks=CHECKS)
        target.sent += 1

    holds()


def test_operations_equal_those_of_the_document(target: Target) -> None:
    documented = {
        f"{method.upper()} {path}" for path, item in target.document["paths"].items() for method in item
    }

    assert documented == set(operations())


def test_no_operation_was_skipped(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    """Last in this file: how many cases there were, for who waited for all of them."""
    if CASES:
        with capsys.disabled():
            sys.stdout.write(f"\n{target.sent} cases, every answer as documented\n")
    assert target.sent > len(operations())
