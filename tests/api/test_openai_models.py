"""GET /v1/models and /v1/models/{id}."""

import openai
import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei

TENANTS = f"""
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], models: [org/bge, cross]}}
"""


async def test_lists_the_configs_models_in_its_order(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        body = (await gateway.client.get("/v1/models")).json()

    assert "list" == body["object"]
    assert ["bge", "org/bge", "strict", "no-rerank", "cross"] == [item["id"] for item in body["data"]]
    assert all("model" == item["object"] for item in body["data"])
    assert all(isinstance(item["created"], int) and item["owned_by"] for item in body["data"])


async def test_each_model_lists_its_operations(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        items = (await gateway.client.get("/v1/models")).json()["data"]

    operations = {item["id"]: set(item["operations"]) for item in items}
    both = {"tokenize", "detokenize"}
    assert {"embed", "encode", "rerank"} | both == operations["bge"]
    assert {"embed", "encode"} | both == operations["no-rerank"]
    assert {"rerank", "classify"} | both == operations["cross"]


async def test_models_have_the_fields_of_mistrals_and_xinferences_clients(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        items = {item["id"]: item for item in (await gateway.client.get("/v1/models")).json()["data"]}

    assert {"base"} == {item["type"] for item in items.values()}
    assert {"bge": "embedding", "no-rerank": "embedding", "cross": "rerank"} == {
        name: items[name]["model_type"] for name in ("bge", "no-rerank", "cross")
    }
    assert items["bge"]["max_model_len"] == items["bge"]["max_context_length"]
    kinds = ("vision", "audio", "classification", "completion_chat")
    assert [False, False, True, False] == [items["cross"]["capabilities"][kind] for kind in kinds]


async def test_a_model_of_unknown_length_leaves_it_out(boot: Boots) -> None:
    """Mistral's client in JavaScript takes no null there."""
    async with boot({}) as gateway:
        items = (await gateway.client.get("/v1/models")).json()["data"]

    assert all("max_context_length" not in item and item["max_model_len"] is None for item in items)


async def test_lists_models_without_a_version_in_the_path(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get("/models", headers={"authorization": "", "api-key": KEY})
        unknown = await gateway.client.get("/models", headers={"authorization": "", "api-key": "wrong"})
        listed = await gateway.client.get("/v1/models")

    assert listed.json() == reply.json()
    assert (401, "invalid_api_key") == (unknown.status_code, unknown.json()["error"]["code"])


async def test_the_default_models_are_marked(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        items = (await gateway.client.get("/v1/models")).json()["data"]

    assert {"bge": ["embed"], "cross": ["rerank"]} == {
        item["id"]: item["default_for"] for item in items if item["default_for"]
    }


@pytest.mark.parametrize("name", ["bge", "org/bge", "org%2Fbge"])
@pytest.mark.parametrize("base", ["/v1", "", "/openai/v1", "/openai"])
async def test_a_single_model_equals_its_item_in_the_list(boot: Boots, base: str, name: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(f"{base}/models/{name}")
        items = (await gateway.client.get("/v1/models")).json()["data"]

    assert 200 == reply.status_code
    assert [reply.json()] == [item for item in items if item["id"] == name.replace("%2F", "/")]


@pytest.mark.parametrize("name", ["nowhere", "org", "org/nowhere", "bge/x", "BGE"])
async def test_an_unknown_model_is_404(boot: Boots, name: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(f"/v1/models/{name}")

    assert (404, "model_not_found") == (reply.status_code, reply.json()["error"]["code"])


async def test_an_operation_below_a_model_is_not_read(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        replies = [await gateway.client.get(f"/models/{path}") for path in ("nowhere", "bge/embed")]

    assert [404, 405] == [reply.status_code for reply in replies]


async def test_a_tenant_sees_only_what_it_may_use(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG + TENANTS) as gateway:
        items = (await gateway.client.get("/v1/models")).json()["data"]
        hidden = await gateway.client.get("/v1/models/bge")
        seen = await gateway.client.get("/v1/models/org/bge")

    assert ["org/bge", "cross"] == [item["id"] for item in items]
    # The reply does not reveal that a hidden model exists.
    assert (404, 200) == (hidden.status_code, seen.status_code)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/bge", "/v1/models/nowhere", "/info"])
async def test_reveals_nothing_without_a_key(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(path, headers={"authorization": ""})

    assert (401, "Bearer") == (reply.status_code, reply.headers["www-authenticate"])
    assert "bge" not in reply.text


async def test_lists_models_while_every_replica_is_down(boot: Boots) -> None:
    async with boot({}) as gateway:
        reply = await gateway.client.get("/v1/models")

    assert (200, 5) == (reply.status_code, len(reply.json()["data"]))


async def test_official_client_lists_and_retrieves_models(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        client = openai.AsyncOpenAI(api_key=KEY, base_url="http://gateway/v1", http_client=gateway.client)
        names = [model.id async for model in client.models.list()]
        model = await client.models.retrieve("org/bge")

    assert "org/bge" in names
    assert "org/bge" == model.id


async def test_a_priced_model_shows_its_price(boot: Boots) -> None:
    priced = CONFIG.replace("bge: {", "bge: {price_per_million_tokens: 0.02, ", 1)
    async with boot({"tei-0": FakeTei()}, "currency: EUR\n" + priced) as gateway:
        items = {item["id"]: item for item in (await gateway.client.get("/v1/models")).json()["data"]}

    assert (items["bge"]["price_per_million_tokens"], items["bge"]["currency"]) == (0.02, "EUR")
    assert not {"price_per_million_tokens", "currency"} & items["cross"].keys()
