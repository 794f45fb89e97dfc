"""GET / in a browser, and the path of TEI's OpenAPI document."""

import pytest

from tests.conftest import CONFIG, Boots, posted
from tests.fakes.tei import FakeTei

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "authorization": ""}


@pytest.mark.parametrize(("config", "page"), [("", "/ui"), ('admin: {listen: "127.0.0.1:9000"}\n', "/docs")])
async def test_a_browser_gets_a_page_that_this_address_serves(boot: Boots, config: str, page: str) -> None:
    async with boot({"tei-0": FakeTei()}, config + CONFIG) as gateway:
        reply = await gateway.client.get("/", headers=BROWSER)

    assert (303, page) == (reply.status_code, reply.headers["location"])


async def test_a_post_to_the_same_path_embeds(boot: Boots) -> None:
    reply = await posted(boot({"tei-0": FakeTei()}), "/", {"inputs": "one"})

    assert 200 == reply.status_code
    assert 1 == len(reply.json())


async def test_the_openapi_path_of_tei_returns_the_document(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        document = await gateway.client.get("/docs/openapi.json")
        reply = await gateway.client.get("/api-doc/openapi.json", headers={"authorization": ""})

    assert (200, "application/json") == (reply.status_code, reply.headers["content-type"])
    assert document.json() == reply.json()
