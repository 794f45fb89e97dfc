"""Servers that do not compute as they should, or serve another model, are kept out with a reason."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from backends.contract import Embed, Reply, Work
from backends.contract.errors import ReplicaFailed
from backends.reference_texts import REFERENCE_TEXTS, SCORED
from gateway.routing.prober import ProbeIntervals
from gateway.upstreams import factory
from gateway.vector_spaces.zero_vectors import WORDLESS
from tests.conftest import Boots, Running
from tests.fakes.engines import FakeEngine
from tests.fakes.hooks import RERANKER
from tests.fakes.hosted_api import FakeHostedApi
from tests.fakes.hostile_replica import HostileReplica
from tests.fakes.openai import FakeOpenAI
from tests.fakes.proxies import KINDS, program_of, running_proxy
from tests.fakes.tei import FakeTei, vector_of
from tests.waiting import PATIENCE_S

CONFIG = """
upstreams: {{u: {{backend: {kind}, replicas: [{replicas}]{more}}}}}
models: {{m: {{upstream: u}}}}
"""
Answer = Callable[[str, dict[str, Any]], "tuple[int, Any] | None"]


@pytest.fixture(autouse=True)
def frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe replicas that are down all the time."""
    monkeypatch.setattr(factory, "REMOTE_PROBES", ProbeIntervals(0.005, 0.01, stall_timeout_s=30.0))


class Odd:
    """ASGI app in front of a fake server. answer: of a body, None if the server answers."""

    def __init__(self, server: Any, answer: Answer) -> None:
        self.server = server
        self.answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI request."""
        message = await receive()
        body = json.loads(message["body"]) if message["body"] else {}
        answer = self.answer(scope["path"], body)
        if answer is None:

            async def replay() -> Any:
                return message

            await self.server(scope, replay, send)
            return
        status, content = answer
        headers = [(b"x-compute-tokens", b"8")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        await send({"type": "http.response.body", "body": raw})


@asynccontextmanager
async def gateway_over(
    boot: Boots, *apps: Any, kind: str = "tei", more: str = "", wait: bool = True
) -> AsyncIterator[Running]:
    """Boot a gateway in front of servers on real sockets."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(HostileReplica(app)) for app in apps]
        addresses = ", ".join(f'"{replica.address}"' for replica in replicas)
        config = CONFIG.format(kind=kind, replicas=addresses, more=more)
        yield await stack.enter_async_context(boot({}, config, sockets=True, wait=wait))


async def replicas_of(gateway: Running) -> list[dict[str, Any]]:
    """Return the replicas of the status."""
    found: list[dict[str, Any]] = (await gateway.client.get("/admin/status")).json()["replicas"]
    return found


async def until_states(gateway: Running, *states: str) -> list[dict[str, Any]]:
    """Wait until the replicas have these states."""
    found = await replicas_of(gateway)
    async with asyncio.timeout(PATIENCE_S):
        while [replica["state"] for replica in found] != list(states):
            await asyncio.sleep(0.01)
            found = await replicas_of(gateway)
    return found


def texts_in(body: dict[str, Any]) -> list[str]:
    """Return the texts of a request for vectors."""
    texts = body.get("inputs", body.get("input", []))
    return [texts] if isinstance(texts, str) else texts


def vectors(texts: list[str], zero: Callable[[str], bool]) -> Any:
    """Return a reply of /v1/embeddings with zeros for some texts."""
    rows = [np.zeros(8) if zero(text) else vector_of(text) for text in texts]
    data = [{"index": index, "embedding": row.tolist()} for index, row in enumerate(rows)]
    return {"data": data, "usage": {"prompt_tokens": 3 * len(texts)}}


def zeros_for(zero: Callable[[str], bool]) -> Answer:
    """Return an answer with zeros for some texts."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        return (200, vectors(texts_in(body), zero)) if path == "/v1/embeddings" else None

    return answer


async def test_server_that_gives_only_zeros_is_kept_out(boot: Boots) -> None:
    async with gateway_over(boot, Odd(FakeTei(), zeros_for(lambda _: True))) as gateway:
        (replica,) = await until_states(gateway, "down")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert "zeros" in replica["reason"]
    assert 503 == reply.status_code
    assert "do not compute as they should" in reply.text


async def test_server_that_turns_to_zeros_fails_the_calls_and_not_silently(boot: Boots) -> None:
    broken = False
    server = Odd(FakeTei(), zeros_for(lambda _: broken))
    async with gateway_over(boot, server) as gateway:
        fine = await gateway.post("/v1/embeddings", {"input": "a"})
        broken = True
        failed = await gateway.post("/v1/embeddings", {"input": ["b", "c"]})

    assert 200 == fine.status_code
    assert failed.status_code >= 400
    assert "zeros" in failed.text


async def test_zeros_of_one_text_of_a_network_are_refused(boot: Boots) -> None:
    async with gateway_over(boot, Odd(FakeTei(), zeros_for(lambda text: text == "poison"))) as gateway:
        assert 400 <= (await gateway.post("/v1/embeddings", {"input": "poison"})).status_code
        assert 200 == (await gateway.post("/v1/embeddings", {"input": "fine"})).status_code


async def test_static_model_may_give_zeros_for_a_text_without_known_words(boot: Boots) -> None:
    unknown = {REFERENCE_TEXTS[3], WORDLESS, "未知"}
    async with gateway_over(boot, Odd(FakeTei(), zeros_for(unknown.__contains__))) as gateway:
        await until_states(gateway, "up")
        reply = await gateway.post("/v1/embeddings", {"input": "未知"})

    assert 200 == reply.status_code
    assert not any(reply.json()["data"][0]["embedding"])


def reranks(scores: Callable[[list[str]], list[float]]) -> Answer:
    """Return an answer with these scores."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if path != "/rerank":
            return None
        found = scores(body["texts"])
        return 200, [{"index": index, "score": score} for index, score in enumerate(found)]

    return answer


@pytest.mark.parametrize("score", [0.5, 0.4494])
async def test_reranker_that_scores_every_pair_alike_is_kept_out(boot: Boots, score: float) -> None:
    server = Odd(FakeTei(model_type=RERANKER), reranks(lambda texts: [score] * len(texts)))
    async with gateway_over(boot, server) as gateway:
        (replica,) = await until_states(gateway, "down")
        reply = await gateway.post("/rerank", {"query": "q", "texts": ["a", "b"]})

    assert f"alike ({score:g})" in replica["reason"]
    assert 503 == reply.status_code


@pytest.mark.parametrize(
    ("model_id", "state"), [("BAAI/bge-reranker-v2-m3", "down"), ("our/own-reranker", "up")]
)
async def test_published_reranker_with_a_wrong_order_is_kept_out(
    boot: Boots, model_id: str, state: str
) -> None:
    tei = FakeTei(model_type=RERANKER, model_id=model_id)
    answer = reranks(
        lambda texts: [0.1 if text == SCORED.documents[0] else 0.9 - len(text) / 999 for text in texts]
    )
    async with gateway_over(boot, Odd(tei, answer)) as gateway:
        (replica,) = await until_states(gateway, state)

    expected = "unrelated texts above" if state == "down" else "unrelated text above"
    assert f"{expected} the answer to a question" in replica["reason"]


async def test_replica_of_another_kind_of_model_is_kept_out(boot: Boots) -> None:
    other = FakeTei(model_type=RERANKER, model_id="org/reranker")
    async with gateway_over(boot, FakeTei(), other) as gateway:
        found = await until_states(gateway, "up", "down")
        replies = [await gateway.post("/v1/embeddings", {"input": str(number)}) for number in range(8)]

    assert {200} == {reply.status_code for reply in replies}
    assert "it serves org/reranker, and the upstream fake/model" in found[1]["reason"]
    assert not [path for path, _ in other.requests if path == "/v1/embeddings"]


async def test_replica_that_is_listed_first_decides_although_another_answered_first(boot: Boots) -> None:
    is_starting = True

    def start(path: str, _: dict[str, Any]) -> tuple[int, Any] | None:
        return (503, b"") if is_starting else None

    first = Odd(FakeTei(model_type=RERANKER, model_id="org/reranker"), start)
    async with gateway_over(boot, first, FakeTei()) as gateway:
        await until_states(gateway, "down", "up")
        is_starting = False
        await until_states(gateway, "probation", "down")
        found = await replicas_of(gateway)

    assert "it serves fake/model, and the upstream org/reranker" in found[1]["reason"]


async def test_rerankers_of_other_names_and_scores_are_two_models(boot: Boots) -> None:
    def scored(name: str, high: float) -> Odd:
        tei = FakeTei(model_type=RERANKER, model_id=name)
        return Odd(tei, reranks(lambda texts: [high, *(0.1 + index / 100 for index in range(1, len(texts)))]))

    servers = scored("org/one", 0.9), scored("/models/same", 0.89), scored("org/two", 0.5)
    async with gateway_over(boot, *servers) as gateway:
        found = await until_states(gateway, "up", "up", "down")

    assert "their scores of a pair differ by 0.4" in found[2]["reason"]


async def test_reference_text_that_fails_does_not_keep_the_others_from_joining(boot: Boots) -> None:
    def poison(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        return (
            (500, {"error": "bad word", "error_type": "Backend"})
            if REFERENCE_TEXTS[2] in texts_in(body)
            else None
        )

    async with gateway_over(boot, Odd(FakeTei(), poison)) as gateway:
        (replica,) = await until_states(gateway, "up")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert 200 == reply.status_code
    assert "1 of 6 reference texts fail there" in replica["reason"]
    assert "bad word" in replica["reason"]


async def test_key_that_the_upstream_refuses_is_named_to_operators_and_callers(boot: Boots) -> None:
    server = FakeOpenAI()
    server.api_key = "right"
    async with gateway_over(boot, server, kind="openai", more=", api_key: wrong-secret-key") as gateway:
        (replica,) = await until_states(gateway, "down")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})
        ready = await gateway.client.get("/readyz?verbose")

    assert "refused the gateway's credential" in replica["reason"]
    assert 503 == reply.status_code
    assert "refuses the gateway's key" in reply.text
    assert "wrong-secret" not in reply.text + replica["reason"] + ready.text
    (upstream,) = ready.json()["upstreams"]
    assert "u" == upstream["name"]
    assert not upstream["ok"]
    assert "refused: the upstream of this model refuses the gateway's key" in upstream["reason"]


@pytest.mark.parametrize(
    ("server", "kind", "more"),
    [(FakeOpenAI(), "openai", ", model: misspelt"), (FakeOpenAI(), "tei", "")],
    ids=["model", "path"],
)
async def test_callers_learn_that_the_upstream_does_not_have_the_model(
    boot: Boots, server: FakeOpenAI, kind: str, more: str
) -> None:
    async with gateway_over(boot, server, kind=kind, more=more) as gateway:
        await until_states(gateway, "down")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert 503 == reply.status_code
    assert "the upstream does not have this model" in reply.text


async def test_callers_learn_that_the_proxy_refuses_the_gateway(boot: Boots) -> None:
    kind = next((kind for kind in KINDS if program_of(kind) is not None), None)
    if kind is None:
        pytest.skip("no proxy here")
    with running_proxy(kind, has_users=True) as (url, _):
        async with gateway_over(boot, FakeOpenAI(), kind="openai", more=f', proxy: "{url}"') as gateway:
            await until_states(gateway, "down")
            reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert 503 == reply.status_code
    assert "the proxy in front of this model's upstream refuses the gateway" in reply.text
    assert url not in reply.text


async def test_server_that_fails_at_everything_has_its_own_words_in_the_status(boot: Boots) -> None:
    def fail(path: str, _: dict[str, Any]) -> tuple[int, Any] | None:
        words = "CUDA error: out of memory"
        return None if path == "/info" else (500, {"error": words, "error_type": "Backend"})

    async with gateway_over(boot, Odd(FakeTei(), fail)) as gateway:
        (replica,) = await until_states(gateway, "down")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert "status 500: CUDA error: out of memory" in replica["reason"]
    assert 503 == reply.status_code
    assert "CUDA" not in reply.text


async def test_call_that_waits_for_a_model_that_is_refused_does_not_wait_until_its_deadline(
    boot: Boots,
) -> None:
    def fail(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        return (200, {"data": None}) if texts_in(body) else None

    more = ", when_unavailable: wait"
    async with gateway_over(boot, Odd(FakeTei(), fail), more=more, wait=False) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            reply = await gateway.post("/v1/embeddings", {"input": "a"}, x_timeout_s="60")
        (replica,) = await until_states(gateway, "down")

    assert 503 == reply.status_code
    assert "`data`: null" in replica["reason"]


async def test_hosted_reranker_is_asked_for_the_scores_of_known_pairs_once(boot: Boots) -> None:
    server = FakeHostedApi("jina", embeds=False)
    asked = 0
    is_down = False

    def count(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        nonlocal asked
        asked += body.get("query") == SCORED.query
        return (503, b"") if is_down and body.get("query") != SCORED.query else None

    more = ", api_key: k, model: jina-reranker-v3, task: rerank"
    async with gateway_over(boot, Odd(server, count), kind="jina", more=more) as gateway:
        await until_states(gateway, "up")
        is_down = True
        await gateway.post("/v1/rerank", {"query": "q", "documents": ["a"], "model": "m"})
        is_down = False
        await until_states(gateway, "probation")

    assert 1 == asked


class PoisonedEngine(FakeEngine):
    """Engine that fails at the reference texts in `poison`."""

    def __init__(self, poison: Collection[str]) -> None:
        super().__init__()
        self.poison = poison

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Fail at texts in `poison`, and embed all others. Raises: ReplicaFailed."""
        if isinstance(work, Embed) and not set(self.poison).isdisjoint(work.inputs):
            raise ReplicaFailed("the vector of an input is not finite")
        return await super().run(work, timeout_s)


ENGINE = """
upstreams: {u: {backend: torch, model: org/m}}
models: {m: {upstream: u}}
"""


async def test_engine_that_fails_at_one_reference_text_joins_with_a_note(boot: Boots) -> None:
    engine = PoisonedEngine({REFERENCE_TEXTS[1]})
    async with boot({}, ENGINE, engines={"u": engine}) as gateway:
        (replica,) = await until_states(gateway, "up")
        reply = await gateway.post("/v1/embeddings", {"input": "a"})

    assert 200 == reply.status_code
    assert "1 of 6 reference texts fail there: the vector of an input is not finite" in replica["reason"]


async def test_calls_do_not_wait_for_an_engine_that_fails_at_all_reference_texts(boot: Boots) -> None:
    async with boot({}, ENGINE, engines={"u": PoisonedEngine(REFERENCE_TEXTS)}, wait=False) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            reply = await gateway.post("/v1/embeddings", {"input": "a"}, x_timeout_s="60")
        (replica,) = await until_states(gateway, "down")
        (model,) = (await gateway.client.get("/admin/status")).json()["models"]

    assert (503, "no_replica") == (reply.status_code, reply.json()["error"]["code"])
    assert "refused" == model["state"]
    assert "not finite" in replica["reason"]


async def test_server_that_asks_for_a_pause_when_it_is_probed_is_not_asked_before_its_end(
    boot: Boots,
) -> None:
    requests = 0

    class Pausing(Odd):
        """Server that is full, and asks for a pause of half a minute."""

        async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
            nonlocal requests
            requests += 1
            await send({"type": "http.response.start", "status": 429, "headers": [(b"retry-after", b"30")]})
            await send({"type": "http.response.body", "body": b""})

    async with gateway_over(boot, Pausing(FakeTei(), lambda _path, _body: None)) as gateway:
        await until_states(gateway, "down")
        # Longer than many probes of a server that asks for nothing.
        await asyncio.sleep(0.2)

    assert 1 == requests
