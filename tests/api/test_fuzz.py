"""Replies to generated requests: each matches the OpenAPI document and none is a 5xx.

FUZZ_CASES is the number of cases per operation (`make fuzz`). `make test` runs fewer cases, always the same.
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

from gateway.api.dialects.sie.dialect import SIE
from gateway.api.server.paths import METHOD
from gateway.app import HANDLERS
from gateway.config.load import parse_config
from tests.conftest import Running, running_gateway
from tests.fakes.additions import ReadingParent
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("FUZZ_CASES", "0"))
# Cases per operation in `make test`, and per further path of the same handler, whose bodies are the same.
# An operation without parameters has fewer.
FEW, FEWER = 10, 3
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Almost all generated names are unknown. These models exist, except for the last one.
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
    "unknown",
)
TEXTS = st.lists(
    st.sampled_from(["a", "red", "ü", "w " * 20, "\0", "向量", "{}"]) | st.text(max_size=20),
    min_size=1,
    max_size=70,
)
NAMES = {
    "name": MODELS,
    "model": MODELS,
    "tenant": ("acme", "unknown"),
    "key_id": ("k1", "unknown"),
    "upstream": ("embedder", "bge"),
}
CONFIG = """
# A slow store on a busy machine is not a finding.
quotas: {store: "%s", timeout_ms: 2000}
limits: {inputs: 64}
batches: {dir: "%s"}
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
    """Gateway on fakes that runs for all cases, on its own event loop."""

    def __init__(self, store: str, folder: Path) -> None:
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
        self._stopping = asyncio.Event()
        self._running: asyncio.Future[Running] = self._runner.get_loop().create_future()
        self._task = self._runner.get_loop().create_task(self._serve(servers, CONFIG % (store, folder)))
        self._gateway = self._runner.run(self._wait_until_started())
        self.document = self._runner.run(self._gateway.client.get("/docs/openapi.json")).json()
        self.schema = from_dict(self.document)
        self.sent = 0

    def send(self, case: Case, *, as_msgpack: bool = False) -> httpx.Response:
        """Send a case with a key that has every permission. as_msgpack: encode a JSON body as msgpack."""
        arguments = case.as_transport_kwargs(base_url="http://gateway")
        arguments = {name: value for name, value in arguments.items() if value is not None}
        content, content_type = _content(arguments, as_msgpack=as_msgpack)
        request = httpx.Request(
            arguments["method"],
            arguments["url"],
            params=arguments.get("params"),
            headers=self._headers({**arguments.get("headers", {}), **content_type}),
            cookies=arguments.get("cookies"),
            **content,
        )
        return self._runner.run(self._exchange(request))

    def send_bytes(self, path: str, body: bytes, *, as_msgpack: bool) -> httpx.Response:
        """Send a POST of a body that need not be JSON. as_msgpack: say that it is msgpack."""
        kind = "application/msgpack" if as_msgpack else "application/json"
        url = f"http://gateway{path}"
        headers = self._headers({"content-type": kind})
        return self._runner.run(self._exchange(httpx.Request("POST", url, content=body, headers=headers)))

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        async with asyncio.timeout(PATIENCE_S):
            return await self._gateway.client.send(request)

    def _headers(self, generated: dict[str, Any]) -> dict[str, Any]:
        key = self._gateway.client.headers["authorization"]
        return {**generated, "authorization": key, "host": "127.0.0.1"}

    async def _serve(self, servers: dict[str, Any], config: str) -> None:
        """Run the gateway until it is stopped; a task group must be entered and left in the same task."""
        parent = ReadingParent(parse_config(config, {}, Path.cwd()))
        async with running_gateway(servers, config, adding=parent.adding) as gateway:
            self._running.set_result(gateway)
            await self._stopping.wait()

    async def _wait_until_started(self) -> Running:
        await asyncio.wait(
            {self._task, self._running}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
        )
        return self._running.result()

    async def _stop(self) -> None:
        self._stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    def close(self) -> None:
        """Stop the gateway and its event loop."""
        self._runner.run(self._stop())
        self._runner.close()


def _content(arguments: dict[str, Any], *, as_msgpack: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body, and a content-type header if httpx does not set it."""
    if "json" in arguments and as_msgpack:
        content_type = {"content-type": "application/msgpack"}
        return {"content": msgspec.msgpack.encode(_packable(arguments["json"]))}, content_type
    if "json" in arguments:
        return {"json": arguments["json"]}, {}
    return ({"content": arguments["data"]} if isinstance(arguments.get("data"), str | bytes) else {}), {}


def _packable(value: Any) -> Any:
    """Replace integers and strings that msgpack cannot encode."""
    if isinstance(value, dict):
        return {_packable(name): _packable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_packable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    target = Target(server.url, tmp_path_factory.mktemp("batches"))
    yield target
    target.close()
    server.stop()


def operations() -> dict[str, int]:
    """Return the cases of every operation of the handlers, by method and path, such as `GET /livez`."""
    return {
        f"{method} {re.sub(r':[a-z]+}', '}', path).replace(METHOD, ':')}": FEWER if place else FEW
        for handler in HANDLERS
        for place, path in enumerate(sorted(handler.paths, key=len))
        for method in handler.http_methods
    }


def with_known_names(draw: st.DrawFn, case: Case) -> Case:
    """Replace most names in a case by names that exist."""
    for part in (case.path_parameters, case.query, case.body):
        for name, values in NAMES.items():
            if isinstance(part, dict) and name in part and draw(st.integers(0, 3)):
                part[name] = draw(st.sampled_from(values))
    return case


def with_texts(draw: st.DrawFn, case: Case) -> Case:
    """Replace most inputs in a case, because generated inputs are mostly invalid or empty."""
    if isinstance(case.body, dict):
        for name in ("input", "inputs", "texts", "documents", "queries"):
            if isinstance(case.body.get(name), str | list) and draw(st.integers(0, 3)):
                case.body[name] = draw(TEXTS)
    return case


@st.composite
def cases(draw: st.DrawFn, operation: Any) -> Case:
    mode = draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    return with_texts(draw, with_known_names(draw, draw(operation.as_strategy(mode))))


@pytest.mark.timeout(3600 if CASES else 300)
@pytest.mark.parametrize(("label", "cases_max"), sorted(operations().items()))
def test_every_reply_matches_the_document(target: Target, label: str, cases_max: int) -> None:
    method, _, path = label.partition(" ")
    operation = target.schema[path][method]

    @settings(
        max_examples=CASES or cases_max,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(operation), st.booleans() if path.startswith(SIE.prefixes) else st.just(value=False))
    def check(case: Case, as_msgpack: bool) -> None:
        case.validate_response(target.send(case, as_msgpack=as_msgpack), checks=CHECKS)
        target.sent += 1

    check()


# More values than a body may have, in each shape, and as many as it may. The bodies are up to 3 MB.
WIDE = (b"[],", b"{},", b'{"a":[1]},', b'"",', b"9,", b"1.5,", b'"\\"[",', b"[9,9,9],")
FIELDS = ("input", "inputs", "texts", "documents", "messages", "items", "ids", "tokens", "unknown")


@st.composite
def wide_bodies(draw: st.DrawFn) -> bytes:
    """Return a body with a wide or deep array, which may be cut off."""
    size = draw(st.sampled_from([100, 2_000, 70_000, 700_000, 3_000_000]))
    part = draw(st.sampled_from(WIDE))
    array = b"[" + part * (size // len(part)) + part[:-1] + b"]"
    depth = draw(st.sampled_from([0, 1, 1500, 100_000]))
    array = b"[" * depth + array + b"]" * depth
    names = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True))
    body = b"{" + b",".join(b'"%b":%b' % (name.encode(), array) for name in names) + b',"query":"q"}'
    return body[: draw(st.sampled_from([len(body), len(body) - 2, len(body) // 2]))]


@pytest.mark.timeout(3600 if CASES else 300)
@pytest.mark.parametrize("path", sorted({label.split()[1] for label in operations() if label[:4] == "POST"}))
def test_wide_and_deep_bodies_match_the_document(target: Target, path: str) -> None:
    operation = target.schema[path]["post"]

    @settings(
        max_examples=CASES or 3,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(wide_bodies(), st.booleans() if path.startswith(SIE.prefixes) else st.just(value=False))
    def check(body: bytes, as_msgpack: bool) -> None:
        reply = target.send_bytes(
            path.format(name="bge", key_id="k1", upstream="embedder", batch_id="batch_1"),
            body,
            as_msgpack=as_msgpack,
        )
        operation.validate_response(reply)
        assert reply.status_code < 500
        target.sent += 1

    check()


def test_operations_equal_those_of_the_document(target: Target) -> None:
    documented = {
        f"{method.upper()} {path}" for path, item in target.document["paths"].items() for method in item
    }

    assert documented == set(operations())


def test_no_operation_was_skipped(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    """Report the number of cases. This test must be the last of the file."""
    if CASES:
        with capsys.disabled():
            sys.stdout.write(f"\n{target.sent} cases, every reply matches the document\n")
    assert target.sent > len(operations())
