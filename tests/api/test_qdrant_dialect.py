"""Qdrant's inference protocol, with bodies as Qdrant's types write them, and replies read by its rules."""

import asyncio
import base64
import random
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from gateway.events import CallFinished
from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.api.test_picture_dialects import FIRST, PICTURES
from tests.conftest import KEY, Boots, Running, posted
from tests.fakes.hooks import SPLADE, Gate, tei_with_hook, until
from tests.fakes.server import token_rows
from tests.fakes.tei import FakeTei, vector_of, weights_of
from tests.fakes.vllm import FakeVllm

CONFIG = """
upstreams:
  dense: {backend: tei, replicas: ["http://dense"]}
  other: {backend: tei, replicas: ["http://other"]}
  splade: {backend: tei, replicas: ["http://splade"]}
  late: {backend: vllm, replicas: ["http://late"]}
  clip: {backend: vllm, replicas: ["http://clip"]}
models:
  dense: {upstream: dense, prompts: {query: "Q: ", document: "D: "}}
  org/plain: {upstream: other}
  splade: {upstream: splade}
  colbert: {upstream: late}
  clip: {upstream: clip}
"""
NO_KEY = {"authorization": ""}
WORDS = ("panda", "bamboo", "Paris", "France", "forest", "river", "ü", "東京")


def servers() -> dict[str, Any]:
    """Return a server of each kind of vector."""
    return {
        "dense": FakeTei(),
        "other": FakeTei(),
        "splade": FakeTei(model_type=SPLADE),
        "late": FakeVllm(task="token_embed"),
        "clip": FakeVllm(images=True),
    }


class Sparse(msgspec.Struct, forbid_unknown_fields=True):
    """Sparse vector as Qdrant's types have it."""

    indices: list[int]
    values: list[float]


class Usage(msgspec.Struct):
    """Usage as Qdrant's types have it."""

    models: dict[str, dict[str, int]]


class Reply(msgspec.Struct):
    """Reply as Qdrant's types have it: each embedding is of the first kind that fits."""

    embeddings: list[list[float] | Sparse | list[list[float]]] | list[Any]
    usage: Usage | None = None


def sent(*inputs: tuple[str, Any, str, Any], inference: str = "update", token: str | None = None) -> Any:
    """Return a body as Qdrant's serializer writes it: every key is always there."""
    items = [
        {"data": data, "data_type": kind, "model": model, "options": options}
        for kind, data, model, options in inputs
    ]
    return {"inputs": items, "inference": inference, "token": token}


def text(data: str, model: str = "dense", **options: Any) -> tuple[str, Any, str, Any]:
    return "text", data, model, options or None


def embeddings_in(reply: httpx.Response) -> list[Any]:
    """Return the embeddings of a reply, by Qdrant's rules: status 200 exactly, one for each input."""
    assert 200 == reply.status_code, reply.text
    embeddings = reply.json()["embeddings"]
    assert embeddings
    for each in embeddings:
        if isinstance(each, dict):
            sparse = msgspec.convert(each, Sparse)
            assert len(set(sparse.indices)) == len(sparse.indices) == len(sparse.values)
            assert min(sparse.indices) >= 0
    return list(embeddings)


def bad_request_of(reply: httpx.Response) -> str:
    """Return what Qdrant shows of an error: the text of `error`, which is a string."""
    assert {"error"} == reply.json().keys()
    message = reply.json()["error"]
    assert isinstance(message, str)
    return message


async def test_each_model_gives_its_kind_of_vector(boot: Boots) -> None:
    body = sent(text("red"), text("red", "splade"), text("red", "colbert"), ("image", FIRST, "clip", None))
    reply = await posted(boot(servers(), CONFIG), "/qdrant", body)

    dense, sparse, multi, picture = embeddings_in(reply)
    np.testing.assert_allclose(vector_of("D: red"), dense, rtol=1e-5)
    assert weights_of("red") == pytest.approx(dict(zip(sparse["indices"], sparse["values"], strict=True)))
    np.testing.assert_allclose(token_rows("red"), multi, rtol=1e-5)
    np.testing.assert_allclose(vector_of(f"user: {FIRST}"), picture, rtol=1e-5)
    usage = msgspec.convert(reply.json()["usage"], Usage)
    assert {"dense", "splade", "colbert", "clip"} == usage.models.keys()
    assert all(model["tokens"] > 0 for model in usage.models.values())


@pytest.mark.parametrize(("inference", "prompt"), [("update", "D: "), ("search", "Q: "), (None, "")])
async def test_inference_is_the_role(boot: Boots, inference: Any, prompt: str) -> None:
    reply = await posted(boot(servers(), CONFIG), "/qdrant", sent(text("red"), inference=inference))

    np.testing.assert_allclose([vector_of(f"{prompt}red")], embeddings_in(reply), rtol=1e-5)


OBJECTS: list[tuple[Any, str]] = [
    ({"text": "a b"}, "a b"),
    ({"image": FIRST.partition(",")[2]}, f"user: {FIRST}"),
    ({"content": [{"type": "image_url", "image_url": {"url": FIRST}}]}, f"user: {FIRST}"),
    ({"content": [{"type": "text", "text": "a b"}]}, "a b"),
]


@pytest.mark.parametrize(("data", "seen"), OBJECTS)
async def test_objects_are_one_input(boot: Boots, data: Any, seen: str) -> None:
    reply = await posted(boot(servers(), CONFIG), "/qdrant", sent(("object", data, "clip", {})))

    np.testing.assert_allclose([vector_of(seen)], embeddings_in(reply), rtol=1e-5)


async def test_options_are_fields_of_the_gateway(boot: Boots) -> None:
    long = " ".join(["w"] * 40)
    body = sent(
        text("red", "org/plain", dimensions=4),
        text(long, "org/plain", truncate=True, truncation_direction="left"),
        text("red", "colbert", output_type="multivector", dimensions=4),
        text("red", "org/plain", normalize=False),
    )
    reply = await posted(boot(servers(), CONFIG), "/qdrant", body)

    cut, truncated, multi, raw = embeddings_in(reply)
    np.testing.assert_allclose(vector_of("red")[:4] / np.linalg.norm(vector_of("red")[:4]), cut, rtol=1e-5)
    assert 8 == len(truncated)
    # vLLM does not report the cuts of multi-vectors.
    assert "unknown" == reply.headers["x-truncated-inputs"]
    assert {4} == {len(row) for row in multi}
    assert not np.allclose(vector_of("red"), raw)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (sent(), 400, "`inputs` is an empty list"),
        (sent(text("")), 400, "`inputs[0].data` is empty"),
        (sent(text("a"), text("", "splade")), 400, "`inputs[1].data` is empty"),
        (sent(text("a", dimension=4)), 400, "unknown field `dimension`; allowed: output_type, dimensions"),
        (sent(text("a", dimensions=0)), 400, "inputs[0].options.dimensions"),
        (sent(text("a", "splade", dimensions=4)), 400, "`dimensions`"),
        (sent(text("a", "colbert", normalize=False)), 400, "`normalize`"),
        (sent(text("a", "nowhere")), 404, "'nowhere'"),
        (sent(text("a"), text("a", "nowhere")), 404, "'nowhere'"),
        (sent(text("a", output_type="sparse")), 400, "no sparse output"),
        (sent(text("a", instruction="find")), 400, "instruction"),
        (sent(("image", FIRST, "dense", None)), 400, "'dense' does not embed images"),
        (sent(("image", FIRST, "splade", {"output_type": "sparse"})), 400, "sparse"),
        (sent(("image", "§", "clip", None)), 400, "`inputs` 0"),
        (sent(text("a", "clip"), ("image", "§", "clip", None)), 400, "`inputs` 1"),
        (
            sent(("image", {"image": FIRST}, "clip", None)),
            400,
            "`inputs[0].data` of the type image is a",
        ),
        (sent(("object", "a", "clip", None)), 400, "`inputs[0].data` of the type object is an object"),
        (
            sent(("object", {"video": "x"}, "clip", None)),
            400,
            "`video`; allowed: text, image, audio",
        ),
        (sent(("object", {}, "clip", None)), 400, "`inputs[0].data` is empty"),
        (sent(("object", {"text": "a", "content": []}, "clip", None)), 400, "not both"),
        (sent(("video", "a", "clip", None)), 400, "image, object, text"),
        (sent(text("a"), inference="train"), 400, "search, update"),
        ({"inputs": [{"data": "a", "data_type": "text"}]}, 400, "`model`"),
        ({"inputs": "a"}, 400, "inputs"),
        ([1], 400, "array"),
    ],
)
async def test_refusals_name_their_cause_in_one_string(
    boot: Boots, body: Any, status: int, reason: str
) -> None:
    reply = await posted(boot(servers(), CONFIG), "/qdrant", body)

    assert status == reply.status_code, reply.text
    assert reason in bad_request_of(reply)


async def refuse_poison(path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
    """Fail for one text, as a hook of a fake server."""
    del path
    return (500, b"{}") if "D: poison" in str(body.get("input") or body.get("inputs")) else None


async def test_a_failing_model_fails_the_request_and_is_named(boot: Boots) -> None:
    """An input at fault has its place in the request, not in the call of its model."""
    failing = servers() | {"dense": tei_with_hook(refuse_poison)}
    del failing["splade"]
    async with boot(failing, CONFIG) as gateway:
        absent = await gateway.post("/qdrant", sent(text("a"), text("b", "splade")))
        poison = sent(text("a", "org/plain"), text("b"), text("poison"), text("c", "org/plain"), text("d"))
        refused = await gateway.post("/qdrant", poison)
        calls = [event for event in gateway.events if isinstance(event, CallFinished)]

    assert (503, True) == (absent.status_code, "retry-after" in absent.headers)
    assert "'splade'" in bad_request_of(absent)
    assert 400 == refused.status_code
    assert bad_request_of(refused).startswith("model 'dense': input 2: ")
    failures = [event.model for event in calls if event.method == "POST" and event.status > 200]
    assert ["splade", "dense"] == failures


def limited(limits: str, more: str = "") -> str:
    return f'{CONFIG}tenants:\n  acme: {{keys: ["{key_digest(KEY)}"], limits: {limits}{more}}}\n'


async def test_each_model_counts_as_one_request_in_quotas_and_usage(boot: Boots) -> None:
    ledger = MemoryLedger(lambda: 1_700_000_000_000_000)
    body = sent(*[text(word, model) for word in WORDS for model in ("dense", "splade", "org/plain")])
    async with boot(servers(), limited("{requests_per_minute: 3}"), ledger=ledger) as gateway:
        served = await gateway.post("/qdrant", body)
        refused = await gateway.post("/qdrant", body)
        usage = (await gateway.client.get("/usage?since=2023-11-14&until=2023-11-14")).json()
        calls = [event for event in gateway.events if isinstance(event, CallFinished)]

    assert (200, 429) == (served.status_code, refused.status_code)
    assert "0" == served.headers["x-ratelimit-remaining-requests"]
    assert "60" == refused.headers["retry-after"]
    assert "requests_per_minute" in bad_request_of(refused)
    tokens = {model: use["tokens"] for model, use in served.json()["usage"]["models"].items()}
    served_calls = [event for event in calls if event.status == 200 and event.inputs]
    counted = {event.model: (event.inputs, event.tokens) for event in served_calls}
    assert 3 == len(served_calls)
    assert {model: (len(WORDS), count) for model, count in tokens.items()} == counted
    assert tokens == {row["model"]: row["tokens"] for row in usage["data"]}


def option_sets(count: int, words: str = "a") -> Any:
    """Return a body of so many calls of one model."""
    return sent(*[text(words, "org/plain", dimensions=1 + index) for index in range(count)])


@pytest.mark.parametrize(
    ("limits", "words", "cost"),
    [
        ("{requests_per_minute: 10}", "a", "costs 12 requests, and requests_per_minute is 10"),
        ("{inputs_per_day: 11, requests_per_day: 100}", "a", "costs 12 inputs, and inputs_per_day is 11"),
        (
            "{tokens_per_minute: 50}",
            "a b c",
            "may cost up to 108 tokens, by its length, and tokens_per_minute is 50",
        ),
    ],
)
@pytest.mark.parametrize("of_model", [False, True])
async def test_calls_that_together_can_never_pass_are_refused_before_the_first(
    boot: Boots, limits: str, words: str, cost: str, of_model: bool
) -> None:
    own = limited(limits)
    if of_model:
        own = limited("{}", f", model_limits: {{org/plain: {limits}}}")
        cost = cost.replace(", and ", ", and model org/plain ")
    fakes = servers()
    async with boot(fakes, own) as gateway:
        before = len(fakes["other"].requests)
        refused = await gateway.post("/qdrant", option_sets(12, words))
        sent_on = len(fakes["other"].requests) - before
        lone = await gateway.post("/qdrant", option_sets(1, words))

    assert 400 == refused.status_code, refused.text
    assert cost in bad_request_of(refused)
    assert bad_request_of(refused).startswith("this request of 12 calls ")
    assert "it can never pass" in bad_request_of(refused)
    assert 0 == sent_on
    assert 1 == len(embeddings_in(lone))


async def test_calls_that_together_do_not_fit_now_take_nothing(boot: Boots) -> None:
    ledger = MemoryLedger(lambda: 1_700_000_000_000_000)
    fakes = servers()
    async with boot(fakes, limited("{requests_per_minute: 6}"), ledger=ledger) as gateway:
        first = await gateway.post("/qdrant", option_sets(4))
        before = len(fakes["other"].requests)
        refused = [await gateway.post("/qdrant", option_sets(3)) for _ in range(2)]
        sent_on = len(fakes["other"].requests) - before
        last = await gateway.post("/qdrant", option_sets(2))

    assert [200, 429, 429, 200] == [each.status_code for each in (first, *refused, last)]
    assert ["10", "10"] == [each.headers["retry-after"] for each in refused]
    assert ["2", "2"] == [each.headers["x-ratelimit-remaining-requests"] for each in refused]
    assert "this request of 3 calls costs 3 requests" in bad_request_of(refused[0])
    assert 0 == sent_on
    assert "0" == last.headers["x-ratelimit-remaining-requests"]


async def test_each_models_own_limit_has_room_for_its_calls_alone(boot: Boots) -> None:
    limits = ", model_limits: {org/plain: {requests_per_minute: 2}, dense: {requests_per_minute: 1}}"
    body = sent(text("a"), text("a", "org/plain"), text("b", "org/plain", dimensions=2))
    async with boot(servers(), limited("{requests_per_minute: 3}", limits)) as gateway:
        served = await gateway.post("/qdrant", body)

    assert 3 == len(embeddings_in(served))


async def test_one_call_in_flight_is_enough_for_several_models(boot: Boots) -> None:
    body = sent(text("a"), text("a", "splade"), text("a", "colbert"), text("a", "org/plain"))
    reply = await posted(boot(servers(), limited("{requests_in_flight: 1}")), "/qdrant", body)

    assert 4 == len(embeddings_in(reply))


async def test_models_are_asked_at_once(boot: Boots) -> None:
    gates = [Gate(), Gate()]
    held = servers() | {
        "dense": tei_with_hook(gates[0]),
        "splade": tei_with_hook(gates[1], model_type=SPLADE),
    }
    for gate in gates:
        gate.opened.set()
    async with boot(held, CONFIG) as gateway:
        for gate in gates:
            gate.opened.clear()
        request = asyncio.create_task(gateway.post("/qdrant", sent(text("a"), text("a", "splade"))))
        await until(lambda: all(gate.waiting for gate in gates))
        for gate in gates:
            gate.opened.set()
        reply = await request

    assert 2 == len(embeddings_in(reply))


async def test_an_upsert_larger_than_a_call_is_cut_into_several(boot: Boots) -> None:
    config = f"{CONFIG}limits: {{inputs: 10}}\n"
    texts = [f"text {index}" for index in range(57)]
    async with boot(servers(), config) as gateway:
        served = await gateway.post("/qdrant", sent(*[text(each, "org/plain") for each in texts]))
        most = [text("a", "org/plain")] * 161
        refused = await gateway.post("/qdrant", sent(*most))
        large = [text("w " * 30, "org/plain")] * 2000
        early = await gateway.post("/qdrant", sent(*large))

    np.testing.assert_allclose([vector_of(each) for each in texts], embeddings_in(served), rtol=1e-5)
    assert [400, 400] == [refused.status_code, early.status_code]
    assert "161 inputs; this gateway takes 160 in a call" == bad_request_of(refused)
    assert "this gateway takes 160 inputs in a call" in bad_request_of(early)


async def test_too_many_kinds_of_calls_are_refused(boot: Boots) -> None:
    body = sent(*[text("a", "org/plain", prompt_name=f"p{index}") for index in range(33)])
    reply = await posted(boot(servers(), CONFIG), "/qdrant", body)

    assert 400 == reply.status_code
    assert "more than 32 different" in bad_request_of(reply)


# --- the key ------------------------------------------------------------------------------------------------


async def test_the_token_is_the_key(boot: Boots) -> None:
    async with boot(servers(), CONFIG) as gateway:
        served = await gateway.client.post("/qdrant", json=sent(text("red"), token=KEY), headers=NO_KEY)
        wrong = await gateway.client.post("/qdrant", json=sent(text("red"), token="sk-no"), headers=NO_KEY)
        none = await gateway.client.post("/qdrant", json=sent(text("red")), headers=NO_KEY)
        broken = await gateway.client.post("/qdrant", content=b'{"token": ', headers=NO_KEY)
        number = await gateway.client.post("/qdrant", json={"token": 1}, headers=NO_KEY)
        held = gateway.application.in_flight.bytes

    assert 1 == len(embeddings_in(served))
    assert [401] * 4 == [reply.status_code for reply in (wrong, none, broken, number)]
    assert "`token`" in bad_request_of(none)
    assert "sk-no" not in wrong.text
    assert 0 == held


PLACE = """
  place: {networks: [127.0.0.1], limits: {requests_per_day: %d}}
"""


@pytest.mark.parametrize("repeats", [1, 4000], ids=["small", "large"])
async def test_a_token_counts_where_callers_need_no_key(boot: Boots, repeats: int) -> None:
    inputs = [text("w " * repeats)] * (1 if repeats == 1 else 10)
    async with boot(servers(), limited("{requests_per_day: 9}") + PLACE % 9) as gateway:
        replies = [
            await gateway.client.post("/qdrant", json=sent(*inputs, token=token), headers=NO_KEY)
            for token in (KEY, "sk-no", None)
        ]
        held = gateway.application.in_flight.bytes
        posts = [event for event in gateway.events if isinstance(event, CallFinished)]

    assert [200, 401, 200] == [reply.status_code for reply in replies], [each.text[:99] for each in replies]
    assert ["acme", None, "place"] == [event.tenant for event in posts if event.route == "/qdrant"]
    assert 0 == held


async def test_a_token_counts_where_the_limits_of_callers_without_a_key_are_spent(boot: Boots) -> None:
    async with boot(servers(), limited("{requests_per_day: 9}") + PLACE % 1) as gateway:
        replies = [
            await gateway.client.post("/qdrant", json=sent(text("a"), token=token), headers=NO_KEY)
            for token in (None, None, KEY)
        ]

    assert [200, 429, 200] == [reply.status_code for reply in replies]


async def test_authorization_takes_precedence_over_the_token(boot: Boots) -> None:
    """The token may be the subject of a JWT, which is no key."""
    userinfo = {"authorization": "Basic " + base64.b64encode(f"qdrant:{KEY}".encode()).decode()}
    body = sent(text("red"), token="some user")
    async with boot(servers(), CONFIG) as gateway:
        served = await gateway.client.post("/qdrant", json=body, headers=userinfo)
        wrong = await gateway.client.post(
            "/qdrant", json=sent(text("red"), token=KEY), headers={"authorization": "Bearer sk-no"}
        )

    assert (200, 401) == (served.status_code, wrong.status_code)


@pytest.mark.parametrize("announced", [True, False])
async def test_without_a_key_in_the_head_only_a_small_body_is_read(boot: Boots, announced: bool) -> None:
    body = msgspec.json.encode(sent(*[text("w " * 1000)] * 40, token=KEY))
    taken = 0

    async def pieces() -> Any:
        nonlocal taken
        for start in range(0, len(body), 8192):
            taken = start
            yield body[start : start + 8192]

    async with boot(servers(), CONFIG) as gateway:
        refused = await gateway.client.post(
            "/qdrant", content=body if announced else pieces(), headers=NO_KEY
        )
        served = await gateway.client.post("/qdrant", content=body)
        held = gateway.application.in_flight.bytes

    assert len(body) > 64 * 1024
    assert 413 == refused.status_code
    assert "65536 bytes" in bad_request_of(refused)
    assert "http://:<key>@" in bad_request_of(refused)
    assert announced or taken <= 72 * 1024
    assert 40 == len(embeddings_in(served))
    assert 0 == held


@pytest.mark.parametrize("header", ["openai-api-key", "x-goog-api-key", "jina-api-key"])
async def test_keys_of_other_services_are_neither_read_nor_passed_on(
    boot: Boots, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[dict[str, str]] = []

    class Watched(FakeTei):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
            await super().__call__(scope, receive, send)

    async with boot(servers() | {"dense": Watched()}, CONFIG) as gateway:
        reply = await gateway.client.post(
            "/qdrant", json=sent(text("red"), token=KEY), headers=NO_KEY | {header: "secret-of-theirs"}
        )
        events = repr(gateway.events)

    assert 1 == len(embeddings_in(reply))
    assert seen
    assert "secret-of-theirs" not in repr(seen) + events + caplog.text
    assert KEY not in repr(seen) + events + caplog.text


# --- random mixtures ----------------------------------------------------------------------------------------

MIXTURES = 200
SENTENCES = [" ".join(random.Random(seed).choices(WORDS, k=1 + seed % 6)) for seed in range(24)]


def drawn_inputs(draw: random.Random) -> list[tuple[str, Any, str, Any]]:
    """Return up to 24 inputs of any models and types, each different, in any order, as Qdrant sends them."""
    makers: list[Callable[[str], tuple[str, Any, str, Any]]] = [
        lambda words: text(words, "dense"),
        lambda words: text(words, "org/plain"),
        lambda words: text(words, "org/plain", dimensions=draw.choice([2, 4, 8])),
        lambda words: text(words, "splade"),
        lambda words: text(words, "splade", output_type="sparse"),
        lambda words: text(words, "colbert"),
        lambda words: text(words, "colbert", output_type="multivector"),
        lambda words: text(words, "clip"),
        lambda words: ("object", {"text": words}, "clip", None),
        lambda _: ("image", draw.choice(PICTURES), "clip", None),
        lambda _: ("image", draw.choice(PICTURES).partition(",")[2], "clip", {}),
    ]
    found: dict[str, tuple[str, Any, str, Any]] = {}
    for _ in range(draw.randint(1, 24)):
        item = draw.choice(makers)(draw.choice(SENTENCES))
        found[repr(item)] = item
    inputs = list(found.values())
    draw.shuffle(inputs)
    return inputs


async def alone(gateway: Running, item: tuple[str, Any, str, Any], role: str) -> Any:
    """Return the vector of one input, from the endpoint of its kind of vector."""
    kind, data, model, options = item
    if model == "splade":
        reply = await gateway.post("/models/splade/embed_sparse", {"inputs": [data]})
        return {term["index"]: term["value"] for term in reply.json()[0]}
    source = {"image": data} if kind == "image" else data
    body = {"model": model, "input": [source], "input_type": role, **(options or {})}
    body.pop("output_type", None)
    if model == "colbert":
        reply = await gateway.post("/v1/multi-vector", body)
        return reply.json()["data"][0]["embeddings"]
    reply = await gateway.post("/v1/embeddings", body)
    return reply.json()["data"][0]["embedding"]


async def test_random_mixtures_equal_the_endpoints_of_each_kind(boot: Boots) -> None:
    draw = random.Random(20_261_128)
    known: dict[str, Any] = {}
    compared = 0
    async with boot(servers(), f"{CONFIG}limits: {{inputs: 7}}\n") as gateway:
        for _ in range(MIXTURES):
            inputs = drawn_inputs(draw)
            inference, role = draw.choice([("update", "document"), ("search", "query")])
            reply = await gateway.post("/qdrant", sent(*inputs, inference=inference))
            vectors = embeddings_in(reply)
            assert len(inputs) == len(vectors)
            assert {model for _, _, model, _ in inputs} == reply.json()["usage"]["models"].keys()
            for item, vector in zip(inputs, vectors, strict=True):
                place = repr((item, role))
                if place not in known:
                    known[place] = await alone(gateway, item, role)
                if isinstance(vector, dict):
                    found = dict(zip(vector["indices"], vector["values"], strict=True))
                    assert pytest.approx(known[place]) == found
                else:
                    np.testing.assert_allclose(known[place], vector, rtol=1e-5)
                compared += 1

    assert compared > 5 * MIXTURES
