"""A key's own default models: of requests that name none, in every dialect, within what the key may use."""

from pathlib import Path

import pytest

from gateway.config.schema import Key, ListenerSettings
from gateway.tenants.create_key import InvalidKeySettings, make_key
from gateway.tenants.keyring import FIRST_TENANT, FirstKey, Keyring, key_digest
from tests.config_texts import problems_of
from tests.conftest import KEY, Boots
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import CLASSIFIER, RERANKER
from tests.fakes.infinity import FakeInfinity
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm

SERVED = """
upstreams:
  one: {backend: tei, replicas: [http://tei-0]}
  two: {backend: tei, replicas: [http://tei-1]}
  ranker: {backend: tei, replicas: [http://ranker]}
  classes: {backend: tei, replicas: [http://classes]}
models:
  bge: {upstream: one}
  e5: {upstream: two}
  cross: {upstream: ranker}
  labels: {upstream: classes}
defaults: {embed: bge, rerank: bge}
"""


def config(key: str, tenant: str = "", rest: str = "") -> str:
    """Return a configuration with one tenant. key, tenant: further fields of its key, and of itself."""
    digest = key_digest(KEY)
    return SERVED + f'{rest}tenants: {{acme: {{keys: [{{digest: "{digest}"{key}}}]{tenant}}}}}\n'


def servers() -> dict[str, FakeTei]:
    return {
        "tei-0": FakeTei(),
        "tei-1": FakeTei(),
        "ranker": FakeTei(model_type=RERANKER),
        "classes": FakeTei(model_type=CLASSIFIER),
    }


CALLS = [
    ("/v1/embeddings", {"input": "a"}, "e5"),
    ("/embed", {"inputs": "a"}, "e5"),
    ("/", {"inputs": "a"}, "e5"),
    ("/vertex", {"instances": [{"inputs": "a"}]}, "e5"),
    ("/invocations", {"inputs": "a"}, "e5"),
    ("/tokenize", {"inputs": "a"}, "e5"),
    ("/pooling", {"input": "a"}, "e5"),
    ("/rerank", {"query": "a", "texts": ["b"]}, "cross"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "cross"),
    ("/predict", {"inputs": "a"}, "labels"),
    ("/v1/embeddings", {"model": "bge", "input": "a"}, "bge"),
]


@pytest.mark.parametrize(("path", "body", "model"), CALLS)
async def test_a_request_without_a_model_has_that_of_its_key(
    boot: Boots, path: str, body: dict[str, object], model: str
) -> None:
    text = config(", defaults: {embed: e5, rerank: cross, classify: labels}")
    async with boot(servers(), text) as gateway:
        reply = await gateway.post(path, body)
        event = gateway.events[-1]

    assert (200, model) == (reply.status_code, event.model)  # type: ignore[union-attr]


VARIED = """
upstreams:
  short: {backend: tei, replicas: [http://short]}
  long: {backend: tei, replicas: [http://long]}
  late: {backend: vllm, replicas: [http://late]}
  ranker: {backend: infinity, replicas: [http://ranker], model: fake/model, tokenizer: FOLDER}
  classes: {backend: tei, replicas: [http://classes]}
models:
  short: {upstream: short}
  long: {upstream: long}
  colbert: {upstream: late}
  cross: {upstream: ranker}
  labels: {upstream: classes}
defaults: {embed: short, rerank: short, classify: labels}
"""
# The key's own model, a body that the default of the gateway would be read for, and what the reply shows.
BODIES = [
    ("embed: long", "/api/embed", {"input": "ten bytes.", "options": {"num_ctx": 4}}, 400, "tokenizer"),
    ("embed: long", "/api/embeddings", {"prompt": "ten bytes.", "options": {"num_ctx": 4}}, 400, "tokenizer"),
    ("embed: long", "/api/embed", {"input": "a", "dimensions": 768}, 200, "embeddings"),
    ("embed: colbert", "/infinity/embeddings", {"model": "default/not-specified", "input": "a"}, 200, "[["),
    ("classify: cross", "/predict", {"inputs": [["a", "b"]]}, 200, "LABEL_0"),
]


@pytest.mark.parametrize(("default", "path", "body", "status", "word"), BODIES)
async def test_a_body_is_read_for_the_model_of_its_key(
    boot: Boots,
    tmp_path: Path,
    default: str,
    path: str,
    body: dict[str, object],
    status: int,
    word: str,
) -> None:
    servers = {
        "short": FakeTei(max_input_length=4),
        "long": FakeTei(),
        "late": FakeVllm(task="token_embed"),
        "ranker": FakeInfinity(capability="rerank"),
        "classes": FakeTei(model_type=CLASSIFIER),
    }
    varied = VARIED.replace("FOLDER", str(write_small_files(tmp_path)))
    text = config(f", defaults: {{{default}}}").replace(SERVED, varied)
    async with boot(servers, text) as gateway:
        reply = await gateway.post(path, body)

    assert (status, True) == (reply.status_code, word in reply.text), reply.text


@pytest.mark.parametrize(("default", "is_noted"), [("e5", False), ("bge", True)])
async def test_the_pooling_is_compared_with_that_of_the_keys_model(
    boot: Boots, default: str, is_noted: bool
) -> None:
    pooled = servers() | {"tei-1": FakeTei(model_type={"embedding": {"pooling": "mean"}})}
    async with boot(pooled, config(f", defaults: {{embed: {default}}}")) as gateway:
        reply = await gateway.post("/vectors", {"text": "a", "config": {"pooling_strategy": "masked_mean"}})

    assert is_noted is ("x-ignored-fields" in reply.headers)


async def test_lists_of_models_show_the_defaults_of_the_key(boot: Boots) -> None:
    async with boot(servers(), config(", defaults: {embed: e5, encode: bge}")) as gateway:
        models = (await gateway.client.get("/v1/models")).json()["data"]
        info = (await gateway.client.get("/info")).json()

    assert {"bge": ["rerank", "encode"], "e5": ["embed"], "cross": [], "labels": []} == {
        model["id"]: model["default_for"] for model in models
    }
    assert "e5" == info["served_model_name"]


async def test_a_tenant_that_may_not_use_the_gateways_default_has_its_only_one(boot: Boots) -> None:
    bodies = {"/embed": {"inputs": "a"}, "/rerank": {"query": "a", "texts": ["b"]}}
    replies = []
    for models in ("[e5]", "[cross]"):
        async with boot(servers(), config("", f", models: {models}")) as gateway:
            replies += [(await gateway.post(path, body)).status_code for path, body in bodies.items()]

    # e5 also ranks, by the cosine of its vectors; and cross embeds nothing.
    assert [200, 200, 403, 200] == replies


def test_defaults_of_the_file_are_checked() -> None:
    text = config(
        ", models: [bge, cross], scopes: [embed], defaults: {embed: e5, rerank: cross, encode: nothing}",
        ", models: [bge, cross]",
        "listeners: [{address: '127.0.0.1:1', tenant: acme, defaults: {embed: e5}}]\n"
        f'admin: {{keys: [{{digest: "{key_digest("o")}", defaults: {{embed: bge}}}}]}}\n',
    )
    key = "tenants.acme.keys[0].defaults"
    assert {
        f"{key}.embed": "'e5' is not among the models that this key may use",
        f"{key}.rerank": "needs the scope rerank, which this key has not",
        f"{key}.encode": "there is no model 'nothing'; there are: bge, cross, e5, labels",
        "listeners[0].defaults.embed": "'e5' is not among the models that this key may use",
        "admin.keys[0].defaults.embed": "needs the scope embed, which this key has not",
    } == {problem.path: problem.message for problem in problems_of(text)}
    (problem,) = problems_of(config(", defaults: {embeds: e5}"))
    assert (f"{key}.embeds", True) == (problem.path, problem.message.startswith("there is no such operation"))


def test_a_listener_has_defaults_too() -> None:
    keyring = Keyring({}, FirstKey(key_digest("k")))
    listener = ListenerSettings("127.0.0.1:1", FIRST_TENANT, {"embed": "e5"})

    assert {"embed": "e5"} == keyring.identify_listener(listener).defaults


@pytest.mark.parametrize(
    ("models", "of_tenant", "scopes", "problem"),
    [
        (["bge"], None, None, "'e5' is not among"),
        (None, ["bge"], None, "'e5' is not among"),
        (None, None, ["rerank"], "needs the scope embed"),
        (["e5"], ["bge", "e5"], ["embed"], None),
    ],
)
def test_a_default_that_a_new_key_may_not_use_is_refused(
    models: list[str] | None, of_tenant: list[str] | None, scopes: list[str] | None, problem: str | None
) -> None:
    def make() -> Key:
        key = make_key(
            "acme",
            models=models,
            scopes=scopes,
            limits={},
            defaults={"embed": "e5"},
            tenant_models=of_tenant,
        )
        return Key(key.stored.digest, defaults=key.stored.defaults)

    if problem is None:
        assert {"embed": "e5"} == make().defaults
        return
    with pytest.raises(InvalidKeySettings, match=f"default: embed: {problem}"):
        make()


async def test_operators_create_and_see_keys_with_defaults(boot: Boots, tmp_path: Path) -> None:
    operator = {"authorization": "Bearer operator"}
    text = config("", ", models: [bge, cross]", f'admin: {{keys: ["{key_digest("operator")}"]}}\n')
    async with boot(servers(), text, tenants_file=tmp_path / "tenants.json") as gateway:
        client = gateway.client

        async def create(**fields: object) -> tuple[int, dict[str, object]]:
            reply = await client.post("/admin/keys", json={"tenant": "acme", **fields}, headers=operator)
            return reply.status_code, reply.json()

        created = await create(id="milvus", defaults={"embed": "bge", "rerank": "cross"})
        refused = await create(defaults={"embed": "e5"})
        unknown = await create(defaults={"embeds": "bge"})
        listed = (await client.get("/admin/keys", headers=operator)).json()
        page = (await client.get("/admin/keys?search=milvus", headers=operator)).json()
        audit = (await client.get("/admin/audit", headers=operator)).json()
        headers = {"authorization": f"Bearer {created[1]['key']}"}
        await client.post("/rerank", json={"query": "a", "texts": ["b"]}, headers=headers)
        model = gateway.events[-1].model  # type: ignore[union-attr]

    assert [200, 422, 422] == [created[0], refused[0], unknown[0]]
    assert "default: embed: 'e5' is not among the models" in str(refused[1])
    assert [{"embed": "bge", "rerank": "cross"}] * 2 == [listed[0]["defaults"], page["data"][0]["defaults"]]
    fields = {change["field"]: change["is"] for change in audit["data"][0]["changes"]}
    assert ("bge", "cross") == (fields["defaults.embed"], fields["defaults.rerank"])
    assert "cross" == model
