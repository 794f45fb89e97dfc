"""Request and reply headers: ids, timings, limits, retries, truncation and timeouts."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.contract import EmbedReply, Operation, Truncate
from gateway.api.server.error_bodies import ErrorFormat, render_error
from gateway.api.server.inference_api import reply_headers
from gateway.app import HANDLERS, ROUTES
from gateway.errors import FACTS, GatewayError
from gateway.quotas.ledger import MemoryLedger
from gateway.routing.routes import Route
from gateway.serve import Served
from gateway.tenants.keyring import Tenant, key_digest
from tests.conftest import CONFIG, KEY, Boots, Running, posted
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei
from tests.socket_gateway import socket_gateway
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
NATIVE: Sequence[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": "one two"}),
    ("/models/org/bge/embed", {"inputs": "one two"}),
    ("/rerank", {"query": "one", "texts": ["two"]}),
    ("/models/bge/rerank", {"query": "one", "texts": ["two"]}),
    ("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["two"]}}),
]
COMPUTE = {
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-compute-tokens",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
}
LIMITED = f"""
tenants:
  acme:
    keys: ["{key_digest(KEY)}"]
    limits: {{requests_per_minute: 2, requests_per_day: 100, tokens_per_minute: 1000}}
"""


async def drain(gateway: Running) -> None:
    """Make the gateway behave as it does after SIGTERM."""
    await gateway.application.in_flight.drain(0)


async def test_every_reply_while_draining_closes_its_connection(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        before = await gateway.client.get("/livez")
        await drain(gateway)
        refused = await gateway.post(OPENAI, {"input": "a"})
        probed = await gateway.client.get("/livez")

    assert "connection" not in before.headers
    assert (503, "close") == (refused.status_code, refused.headers["connection"])
    assert (200, "close") == (probed.status_code, probed.headers["connection"])


async def test_a_lame_duck_serves_on_and_asks_clients_to_leave_in_the_second_half(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        in_flight = gateway.application.in_flight
        serving = asyncio.create_task(in_flight.serve_on(1.0))
        await until(lambda: in_flight.leaving)
        first = [await gateway.client.get("/readyz"), await gateway.post(OPENAI, {"input": "a"})]
        await until(lambda: in_flight.closes_connections)
        assert not serving.done()
        second = [await gateway.client.get("/readyz"), await gateway.post(OPENAI, {"input": "a"})]
        alive = await gateway.client.get("/livez")
        await serving
        await drain(gateway)
        refused = await gateway.post(OPENAI, {"input": "a"})

    assert [503, 200, 503, 200] == [reply.status_code for reply in (*first, *second)]
    assert [None, None, "close", "close"] == [reply.headers.get("connection") for reply in (*first, *second)]
    assert (200, 503) == (alive.status_code, refused.status_code)


@pytest.mark.parametrize("request_id", ["a", "trace-1/2:3", "x" * 128])
async def test_a_request_id_is_echoed(boot: Boots, request_id: str) -> None:
    reply = await posted(boot(fakes()), OPENAI, {"input": "a"}, x_request_id=request_id)

    assert [request_id] == reply.headers.get_list("x-request-id")


@pytest.mark.parametrize("request_id", [b"", b"x" * 129, b"a\tb", b"caf\xe9", b"\x7f", b"\xff"])
async def test_a_malformed_request_id_is_replaced(boot: Boots, request_id: bytes) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(
            OPENAI, json={"input": "a"}, headers=[(b"x-request-id", request_id)]
        )

    (generated,) = reply.headers.get_list("x-request-id")
    assert request_id.decode("latin-1") != generated
    assert 32 == len(generated)


async def test_each_request_gets_its_own_id(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        replies = [await gateway.post(OPENAI, {"input": "a"}) for _ in range(3)]

    assert 3 == len({reply.headers["x-request-id"] for reply in replies})


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/nowhere", {}),
        ("GET", "/embed", {}),
        ("GET", "/livez", {}),
        ("GET", "/docs/openapi.json", {}),
        ("POST", OPENAI, {}),
        ("POST", OPENAI, {"content-encoding": "gzip"}),
        ("POST", OPENAI, {"authorization": "Bearer wrong"}),
        ("POST", OPENAI, {"content-length": "99000000"}),
    ],
)
async def test_every_reply_carries_the_request_id(
    boot: Boots, method: str, path: str, headers: dict[str, str]
) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.request(method, path, headers={"x-request-id": "mine", **headers})

    assert "mine" == reply.headers["x-request-id"]


@pytest.mark.parametrize(("path", "body"), NATIVE)
async def test_tei_routes_carry_compute_headers(boot: Boots, path: str, body: dict[str, Any]) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert COMPUTE <= reply.headers.keys()
    assert all(reply.headers[name].isdecimal() for name in COMPUTE - {"x-compute-type"})


async def test_compute_headers_count_characters_and_tokens(boot: Boots) -> None:
    headers = (await posted(boot(fakes()), "/embed", {"inputs": ["one two", "größe"] * 3})).headers

    assert (str(12 * 3), str(7 * 3)) == (headers["x-compute-characters"], headers["x-compute-tokens"])


async def test_openai_route_carries_no_compute_headers(boot: Boots) -> None:
    reply = await posted(boot(fakes()), OPENAI, {"input": "a"})

    assert not COMPUTE & reply.headers.keys()


async def test_rate_limit_headers_show_the_tightest_limit_of_each_unit(boot: Boots) -> None:
    ledger = MemoryLedger(lambda: 1_700_000_000_000_000)
    reply = await posted(boot(fakes(), CONFIG + LIMITED, ledger=ledger), OPENAI, {"input": "one two"})

    limits = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit-")}
    expected = {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "996",
        "x-ratelimit-reset-tokens": "240ms",
    }
    assert expected == limits


async def test_quota_refusals_show_the_limits(boot: Boots) -> None:
    ledger = MemoryLedger(lambda: 1_700_000_000_000_000)
    async with boot(fakes(), CONFIG + LIMITED, ledger=ledger) as gateway:
        for _ in range(2):
            await gateway.post(OPENAI, {"input": "a"})
        reply = await gateway.post(OPENAI, {"input": "a"})

    assert (429, "30") == (reply.status_code, reply.headers["retry-after"])
    assert ("2", "0", "1m0s") == tuple(
        reply.headers[f"x-ratelimit-{field}-requests"] for field in ("limit", "remaining", "reset")
    )


async def test_replies_show_no_limits_to_a_tenant_without_any(boot: Boots) -> None:
    reply = await posted(boot(fakes()), OPENAI, {"input": "a"})

    assert not [name for name in reply.headers if name.startswith("x-ratelimit-")]


@pytest.mark.parametrize(
    "limits", ["", LIMITED.replace("requests_per_minute: 2, requests_per_day: 100, ", "")]
)
async def test_replies_show_unlimited_amounts_if_configured(boot: Boots, limits: str) -> None:
    config = f"{CONFIG}{limits}\nquotas: {{unlimited_headers: true}}\n"
    async with boot(fakes(), config) as gateway:
        replies = [
            await gateway.post(path, body) for path, body in ((OPENAI, {"input": "one two"}), *NATIVE[2:3])
        ]

    for reply in replies:
        assert 200 == reply.status_code
        assert "1000000000" == reply.headers["x-ratelimit-limit-requests"]
        assert ("1000" if limits else "1000000000") == reply.headers["x-ratelimit-limit-tokens"]


@pytest.mark.parametrize("path", [OPENAI, "/embed", "/readyz", "/v1/models"])
async def test_a_draining_gateway_sends_retry_after(boot: Boots, path: str) -> None:
    async with boot(fakes()) as gateway:
        await drain(gateway)
        reply = await gateway.client.get(path)

    assert 503 == reply.status_code
    assert 1 <= int(reply.headers["retry-after"]) <= 60


@pytest.mark.parametrize("path", ["/livez", "/health", "/models/bge/health", "/metrics"])
async def test_probes_are_answered_while_draining(boot: Boots, path: str) -> None:
    async with boot(fakes()) as gateway:
        await drain(gateway)

        assert 200 == (await gateway.client.get(path)).status_code


async def test_readyz_fails_until_a_replica_has_been_tried(boot: Boots) -> None:
    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    async with boot({"tei-0": silent}, wait=False) as gateway:
        reply = await gateway.client.get("/readyz")

    assert 503 == reply.status_code
    assert "embedder" in reply.json()["error"]
    assert 1 <= int(reply.headers["retry-after"]) <= 60


@pytest.mark.parametrize("dialect", ROUTES.dialects, ids=lambda dialect: dialect.name)
def test_every_429_and_503_sends_retry_after(dialect: ErrorFormat) -> None:
    for kind in FACTS:
        reply = render_error(type("Any", (GatewayError,), {"kind": kind})("why"), dialect)

        assert (reply.status in (429, 503)) is ("retry-after" in reply.headers), kind
        assert (reply.status == 401) is ("www-authenticate" in reply.headers), kind


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (OPENAI, {"input": ["a", "b"]}),
        ("/embed", {"inputs": "a"}),
        ("/embed", {"inputs": "w " * 20, "truncate": True, "dimensions": 8}),
        ("/rerank", {"query": "q", "texts": ["w " * 20]}),
        ("/similarity", {"inputs": {"source_sentence": "w " * 20, "sentences": ["a"]}}),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_unreported_truncation_is_unknown(boot: Boots, path: str, body: dict[str, Any]) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert 200 == reply.status_code
    expected = "unknown" if "w w" in str(body) else None
    assert expected == reply.headers.get("x-truncated-inputs")


async def test_unknown_truncation_of_one_batch_makes_the_reply_unknown(boot: Boots) -> None:
    reply = await posted(boot(fakes()), OPENAI, {"input": ["a"] * 9 + ["w " * 20]})

    assert "unknown" == reply.headers["x-truncated-inputs"]


async def test_a_model_that_never_truncates_sends_no_truncation_header(boot: Boots) -> None:
    reply = await posted(boot(fakes()), "/embed", {"inputs": ["w " * 14] * 4, "model": "strict"})

    assert 200 == reply.status_code
    assert "x-truncated-inputs" not in reply.headers


def served(truncated: tuple[int, ...] | None) -> Served:
    """Return a reply of which some inputs were truncated."""
    route = Route("m", "u", Operation.EMBED, Truncate.RIGHT, 1.0)
    reply = EmbedReply(np.ones((1, 1), np.float32), 1, truncated)
    return Served(reply, Tenant("t"), route, ())


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        ((), None),
        (None, "unknown"),
        ((0,), "0"),
        ((0, 1), "0-1"),
        ((0, 2, 4), "0,2,4"),
        ((0, 1, 2, 3, 7), "0-3,7"),
        ((5, 8, 9, 10, 2047), "5,8-10,2047"),
        (tuple(range(2048)), "0-2047"),
        # More than a header holds.
        (tuple(range(0, 32_768, 2)), "unknown"),
    ],
)
def test_truncated_inputs_are_written_as_ranges(
    truncated: tuple[int, ...] | None, expected: str | None
) -> None:
    assert expected == reply_headers(served(truncated)).get("x-truncated-inputs")


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 2047), min_size=1))
@example({index for index in range(2048) if index % 3})
def test_ranges_read_back_as_the_same_inputs(indices: set[int]) -> None:
    header = reply_headers(served(tuple(sorted(indices))))["x-truncated-inputs"]

    bounds = [(run.split("-")[0], run.split("-")[-1]) for run in header.split(",")]
    assert sorted(indices) == [i for first, last in bounds for i in range(int(first), int(last) + 1)]


@pytest.mark.parametrize("timeout_s", ["0", "-1", "nan", "inf", "soon", "", "1e400"])
async def test_a_malformed_timeout_is_refused(boot: Boots, timeout_s: str) -> None:
    async with boot(fakes()) as gateway:
        openai = await gateway.post(OPENAI, {"input": "a"}, x_timeout_s=timeout_s)
        tei = await gateway.post("/embed", {"inputs": "a"}, x_timeout_s=timeout_s)

    assert (400, "x-timeout-s") == (openai.status_code, openai.json()["error"]["param"])
    assert (422, "Validation") == (tei.status_code, tei.json()["error_type"])


@pytest.mark.parametrize("timeout_s", ["30", "0.5", "1e3", " 5 "])
async def test_a_timeout_in_seconds_is_accepted(boot: Boots, timeout_s: str) -> None:
    reply = await posted(boot(fakes()), OPENAI, {"input": "a"}, x_timeout_s=timeout_s)

    assert 200 == reply.status_code


async def test_the_callers_timeout_ends_a_waiting_call(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}) as gateway:
        openai = await gateway.post(OPENAI, {"input": "a"}, x_timeout_s="0.05")
        tei = await gateway.post("/embed", {"inputs": "a"}, x_timeout_s="0.05")
        await until(lambda: gate.waiting == 0)

    assert (504, "deadline_exceeded") == (openai.status_code, openai.json()["error"]["code"])
    assert (424, "Backend") == (tei.status_code, tei.json()["error_type"])
    assert "your x-timeout-s of 0.05 s passed" == openai.json()["error"]["message"]


async def test_the_callers_timeout_cannot_exceed_the_models_deadline(boot: Boots) -> None:
    config = CONFIG.replace("strict: {", "strict: {deadline_s: 0.05, ")
    reply = await posted(
        boot({"tei-0": tei_with_hook(Gate())}, config),
        OPENAI,
        {"input": "a", "model": "strict"},
        x_timeout_s="600",
    )

    assert 504 == reply.status_code
    message = reply.json()["error"]["message"]
    assert "the model's deadline of 0.05 s passed; send fewer inputs" == message


def test_every_error_kind_has_facts() -> None:
    kinds = {error.kind for error in _subclasses(GatewayError)}

    assert kinds <= FACTS.keys()
    assert all(isinstance(row, msgspec.Struct) for row in FACTS.values())


def _subclasses(kind: type[GatewayError]) -> set[type[GatewayError]]:
    direct = {
        subclass for subclass in kind.__subclasses__() if subclass.__module__ == GatewayError.__module__
    }
    return direct | {indirect for subclass in direct for indirect in _subclasses(subclass)}


async def test_the_internal_slash_character_is_refused_in_urls(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        for path in ("/models/a%1Fb/embed", "/v1/encode/a%1Fb", "/admin/models/a%1Fb"):
            assert 404 == (await gateway.client.post(path, json={"inputs": "a"})).status_code


# Counters, rates and times in their replies change from one request to the next.
CHANGING = {"/metrics", "/admin/status", "/admin/fleet", "/load", "/usage", "/infinity/health"}
GET_PATHS = sorted(
    path for handler in HANDLERS if "GET" in handler.http_methods for path in handler.paths if "{" not in path
)
NAMED_PATHS = [
    "/models/org/bge/info",
    "/models/bge/health",
    "/v1/models/bge",
    "/v1beta/models/bge",
    "/v1/models/none",
    "/admin/batches/none",
]
# Of each reply anew.
VOLATILE = {"x-request-id", "content-length", "date"}


@pytest.mark.parametrize("path", [*GET_PATHS, *NAMED_PATHS])
async def test_head_is_answered_as_get_without_a_body(boot: Boots, path: str) -> None:
    async with boot(fakes()) as gateway:
        got = await gateway.client.get(path)
        asked = await gateway.client.head(path)

    assert got.status_code == asked.status_code != 405
    assert b"" == asked.content
    assert ("content-length" in got.headers) is ("content-length" in asked.headers)
    sizes = {reply.headers.get("content-length") for reply in (got, asked)}
    assert 1 == len(sizes) or path in CHANGING
    assert {name: value for name, value in got.headers.items() if name not in VOLATILE} == {
        name: value for name, value in asked.headers.items() if name not in VOLATILE
    }


async def test_head_of_a_path_without_get_is_405_without_a_body(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        asked = await gateway.client.head("/v1/embeddings")

    assert (405, b"") == (asked.status_code, asked.content)


async def test_a_connection_goes_on_after_a_head() -> None:
    config = (
        LIMITED
        + 'upstreams: {up: {backend: tei, replicas: ["http://tei-0"]}}\nmodels: {bge: {upstream: up}}\n'
    )
    paths = (b"/", b"/info", b"/v1/models", b"/metrics", b"/api/tags", b"/none")
    async with socket_gateway(FakeTei(), config) as gateway, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for path in paths:
            request = b"HEAD %b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"
            writer.write(request % (path, KEY.encode()))
            head = await reader.readuntil(b"\r\n\r\n")
            assert (b"404" if path == b"/none" else b"200") == head.split(b" ")[1], path
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        rest = await reader.read()
        writer.close()

    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rest.endswith(b"\r\n\r\n")
