"""Servers on real sockets that one text makes refuse, fail, break or hang: only its own caller sees that."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gateway.cli.embed import add_embed_options, run_embed
from gateway.events import ReplicaChanged
from gateway.tenants.keyring import key_digest
from tests.backends.invalid_replies import body_of, packed
from tests.batches import results, run
from tests.conftest import KEY, Running, running_gateway
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import RERANKER
from tests.fakes.hostile_replica import HostileReplica
from tests.fakes.tei import FakeTei, assert_vectors, vector_of
from tests.waiting import PATIENCE_S

BAD = "poison"
KINDS = ("400", "413", "500", "null", "nan", "width", "lost", "hang", "503", "401", "403")
# Refusals for a while, with and without a pause.
LATER = {"paused-503": 503, "429": 429, "paused-429": 429}
OPENAI = "/v1/embeddings"
WORDS = json.dumps({"error": "no such word", "error_type": "Validation"}).encode()
CONFIG = """
upstreams:
  embedder:
    backend: tei
    replicas: {replicas}
    tokenizer: {folder}
    attempt_timeout_s: 0.5
    in_flight_batches: 2
models: {{m: {{upstream: embedder}}}}
tenants:
  acme: {{keys: ["{acme}"]}}
  other: {{keys: ["{other}"]}}
{more}
"""


class PausedError(Exception):
    """Answer of a status with a pause. status: of the answer."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Poisoned(FakeTei):
    """A server on which one text has an effect."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind
        self.hook = self._hook

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except PausedError as error:
            headers = [(b"retry-after", b"30")]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": b"{}"})

    async def _hook(self, path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:  # noqa: ARG002
        texts = body.get("input") or body.get("inputs") or body.get("texts") or ()
        # Callers come while others are served, so that their texts travel together.
        await asyncio.sleep(0.005)
        if not any(BAD in str(text) for text in texts):
            return None
        return await self._effect(len(texts))

    async def _effect(self, count: int) -> tuple[int, bytes]:
        rows = [[float(number) for number in vector_of("a")]] * count
        match self.kind:
            case "paused-503" | "paused-429":
                raise PausedError(int(self.kind.removeprefix("paused-")))
            case "400" | "413" | "500" | "503" | "401" | "403" | "429":
                return int(self.kind), WORDS
            case "null":
                return 200, body_of({"data": [None] * count, "object": "list", "model": "m"})
            case "nan":
                return 200, body_of(packed(*[[float("nan")] * 8] * count))
            case "width":
                return 200, body_of(packed(*[row[:-1] for row in rows]))
            case "lost":
                raise ConnectionResetError
        await asyncio.sleep(10)
        return 500, b""


def config_for(addresses: list[str], folder: Path, more: str = "") -> str:
    """Return the configuration of one upstream and two tenants. more: further lines."""
    return CONFIG.format(
        replicas=json.dumps(addresses),
        folder=write_small_files(folder),
        acme=key_digest(KEY),
        other=key_digest("other"),
        more=more,
    )


@asynccontextmanager
async def poisoned_gateway(
    folder: Path, kind: str, replicas: int, *, more: str = "", **options: Any
) -> AsyncIterator[tuple[Running, list[Poisoned]]]:
    """Run a gateway in front of such servers."""
    servers = [Poisoned(kind, **options) for _ in range(replicas)]
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(HostileReplica(server)) for server in servers]
        config = config_for([host.address for host in hosts], folder, more)
        yield await stack.enter_async_context(running_gateway({}, config, sockets=True)), servers


def downs(gateway: Running) -> list[ReplicaChanged]:
    """Return the changes of replicas that went down."""
    return [event for event in gateway.events if isinstance(event, ReplicaChanged) and event.state == "down"]


@pytest.mark.parametrize("kind", [*KINDS, *LATER])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_callers_of_two_tenants_are_neither_hurt_nor_delayed(
    tmp_path: Path, kind: str, replicas: int
) -> None:
    async with poisoned_gateway(tmp_path, kind, replicas) as (gateway, servers):

        async def call(number: int) -> Any:
            text = f"{BAD} {number // 40}" if number % 20 == 7 else f"text {number}"
            key = "other" if number % 3 else KEY
            return text, await gateway.post(OPENAI, {"input": [text]}, authorization=f"Bearer {key}")

        # A pause is 30 s.
        async with asyncio.timeout(PATIENCE_S):
            replies = await asyncio.gather(*(call(number) for number in range(120)))

    for text, reply in replies:
        if BAD in text:
            assert LATER.get(kind, 400) == reply.status_code, reply.text
            assert (kind in LATER) is ("retry-after" in reply.headers)
            assert (kind in LATER) is (reply.json()["error"]["type"] != "invalid_request_error")
        else:
            assert_vectors(reply, text)
    assert [] == downs(gateway)
    sent = [body["input"] for server in servers for _, body in server.requests if "input" in body]
    assert any(len(texts) > 1 for texts in sent), "no texts were joined"


@pytest.mark.parametrize(("status", "pause"), [(429, b"30"), (503, b"30"), (503, b"")])
async def test_a_server_that_refuses_all_work_gets_none(tmp_path: Path, status: int, pause: bytes) -> None:
    async with poisoned_gateway(tmp_path, "400", 2) as (gateway, servers):
        refused = servers[0]

        async def refuse(_: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
            if pause:
                raise PausedError(status)
            return status, WORDS

        refused.hook = refuse
        gateway.client.headers["authorization"] = f"Bearer {KEY}"
        for number in range(20):
            assert_vectors(await gateway.post(OPENAI, {"input": f"text {number}"}), f"text {number}")

    assert len(refused.requests) <= 4
    assert (1 if status == 503 else 0) == len(downs(gateway))


async def test_a_server_that_refuses_the_key_for_all_work_is_taken_out(tmp_path: Path) -> None:
    async with poisoned_gateway(tmp_path, "400", 2) as (gateway, servers):
        # Of the join checks, too, which do not pass the hook.
        servers[0].api_key = "another"
        gateway.client.headers["authorization"] = f"Bearer {KEY}"
        for number in range(20):
            assert_vectors(await gateway.post(OPENAI, {"input": f"text {number}"}), f"text {number}")

    (down,) = downs(gateway)
    assert "credential" in down.reason


@pytest.mark.parametrize("kind", ["400", "500", "503", "401"])
async def test_a_call_of_many_bad_texts_costs_few_requests(tmp_path: Path, kind: str) -> None:
    texts = [f"{BAD} {number}" for number in range(2048)]
    async with poisoned_gateway(tmp_path, kind, 2) as (gateway, servers):
        reply = await gateway.post(OPENAI, {"input": texts}, authorization=f"Bearer {KEY}")

    assert 400 == reply.status_code, reply.text
    # 64 slices, and the search in two of them.
    assert sum(len(server.requests) for server in servers) <= 200


@pytest.mark.parametrize("kind", KINDS)
async def test_names_text_137_of_200(tmp_path: Path, kind: str) -> None:
    texts = [BAD if number == 137 else f"text {number}" for number in range(200)]
    async with poisoned_gateway(tmp_path, kind, 2) as (gateway, _):
        reply = await gateway.post(OPENAI, {"input": texts}, authorization=f"Bearer {KEY}")
        native = await gateway.post("/embed", {"inputs": texts}, authorization=f"Bearer {KEY}")

    assert 400 == reply.status_code, reply.text
    assert reply.json()["error"]["message"].startswith("input 137: ")
    assert 422 == native.status_code
    assert native.json()["error"].startswith("input 137: ")
    assert [] == downs(gateway)


@pytest.mark.parametrize("kind", ["400", "500", "lost"])
async def test_names_document_137_of_a_rerank(tmp_path: Path, kind: str) -> None:
    texts = [BAD if number == 137 else f"text {number}" for number in range(200)]
    async with poisoned_gateway(tmp_path, kind, 1, model_type=RERANKER) as (gateway, _):
        body = {"query": "q", "texts": texts}
        reply = await gateway.post("/rerank", body, authorization=f"Bearer {KEY}")

    assert 422 == reply.status_code, reply.text
    assert reply.json()["error"].startswith("input 137: ")


@pytest.mark.parametrize("kind", ["500", "lost"])
async def test_a_batch_ends_with_the_error_of_one_line(tmp_path: Path, kind: str) -> None:
    texts = {"c0": "alpha", "c1": "beta", "c2": f"this is {BAD}", "c3": "gamma"}
    lines = [
        {"custom_id": name, "method": "POST", "url": OPENAI, "body": {"model": "m", "input": text}}
        for name, text in texts.items()
    ]
    more = f"batches: {{dir: {json.dumps(str(tmp_path / 'batches'))}}}"
    async with poisoned_gateway(tmp_path, kind, 1, more=more) as (gateway, _):
        gateway.client.headers["authorization"] = f"Bearer {KEY}"
        content = "".join(json.dumps(line) + "\n" for line in lines)
        shown = await run(gateway, content)
        good = await results(gateway, shown["output_file_id"])
        bad = await results(gateway, shown["error_file_id"])

    assert ("completed", {"total": 4, "completed": 3, "failed": 1}) == (
        shown["status"],
        shown["request_counts"],
    )
    assert {"c0", "c1", "c3"} == {line["custom_id"] for line in good}
    assert [("c2", 400)] == [(line["custom_id"], line["response"]["status_code"]) for line in bad]


async def test_calls_of_several_texts_get_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    servers = [Poisoned("hang") for _ in range(2)]
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(HostileReplica(server)) for server in servers]
        config = config_for([host.address for host in hosts], tmp_path)
        config = config.replace("attempt_timeout_s: 0.5", "attempt_timeout_s: 2")
        config = config.replace("{upstream: embedder}", "{upstream: embedder, deadline_s: 6}")
        gateway = await stack.enter_async_context(running_gateway({}, config, sockets=True))

        async def call(number: int) -> Any:
            texts = [f"text {number} {place}" for place in range(6)]
            if number % 10 == 7:
                texts[4] = f"{BAD} {number}"
            return await gateway.post(OPENAI, {"input": texts}, authorization=f"Bearer {KEY}")

        replies = await asyncio.gather(*(call(number) for number in range(20)))

    statuses = [reply.status_code for reply in replies]
    assert [400 if number % 10 == 7 else 200 for number in range(20)] == statuses
    assert all(replies[number].json()["error"]["message"].startswith("input 4: ") for number in (7, 17))
    assert [] == downs(gateway)


@pytest.mark.parametrize("kind", ["500", "lost"])
async def test_embed_skips_the_row_that_a_server_fails(tmp_path: Path, kind: str) -> None:
    rows = [{"text": BAD if number == 137 else f"text {number}"} for number in range(300)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with poisoned_gateway(tmp_path, kind, 2) as (gateway, _):
        server = uvicorn.Server(
            uvicorn.Config(gateway.application.asgi, port=0, lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        parser = argparse.ArgumentParser()
        add_embed_options(parser)
        options = parser.parse_args(
            [
                str(source),
                "--to",
                str(target),
                "--url",
                f"http://127.0.0.1:{port}",
                "--on-bad",
                "skip",
                "--json",
            ]
        )
        status = await asyncio.to_thread(run_embed, options, {"GATEWAY_API_KEY": KEY})
        server.should_exit = True
        await serving

    assert 0 == status
    written = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert [row["text"] for row in rows if row["text"] != BAD] == written


class Crashing(FakeTei):
    """A server that one text breaks: it drops all its connections, and those that come for a while."""

    def __init__(self, down_s: float) -> None:
        super().__init__()
        self.crashes = 0
        self.host: HostileReplica
        self._down_s = down_s
        self._down_until_s = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        now_s = asyncio.get_running_loop().time()
        body = (await receive())["body"]
        if BAD.encode() in body and now_s >= self._down_until_s:
            self.crashes += 1
            self._down_until_s = now_s + self._down_s
            for writer in self.host.writers:
                writer.transport.abort()
        if now_s < self._down_until_s:
            raise ConnectionResetError

        async def received() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        await super().__call__(scope, received, send)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_tenant_whose_texts_break_the_servers_fails_no_call_of_another(
    tmp_path: Path, replicas: int
) -> None:
    servers = [Crashing(0.2) for _ in range(replicas)]
    served: list[int] = []
    async with AsyncExitStack() as stack:
        for server in servers:
            server.host = await stack.enter_async_context(HostileReplica(server))
        config = config_for([server.host.address for server in servers], tmp_path)
        gateway = await stack.enter_async_context(running_gateway({}, config, sockets=True))

        async def break_servers(number: int) -> None:
            for turn in range(1000):
                await gateway.post(OPENAI, {"input": f"{BAD} {number} {turn}"})

        gateway.client.headers["authorization"] = f"Bearer {KEY}"
        breaking = [asyncio.create_task(break_servers(number)) for number in range(4)]
        for number in range(30):
            text = f"fine {number}"
            reply = await gateway.post(OPENAI, {"input": text}, authorization="Bearer other")
            served.append(reply.status_code)
            assert_vectors(reply, text)
            await asyncio.sleep(0.05)
        for task in breaking:
            task.cancel()
        await asyncio.gather(*breaking, return_exceptions=True)

    assert [200] * 30 == served
    assert 2 <= sum(server.crashes for server in servers) <= 15
