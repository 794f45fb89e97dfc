"""The page at /docs without a browser: its files and headers, and what it needs of the OpenAPI document."""

import gzip
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from gateway.api.document.errors import MEANINGS
from gateway.api.document.replies import MEANINGS as REPLY_MEANINGS
from gateway.api.server.error_bodies import render_error
from gateway.app import ROUTES
from gateway.errors import FACTS, InvalidInput
from tests.conftest import CONFIG, Boots
from tests.fakes.tei import FakeTei

FILES = ("/docs/docs.js", "/docs/docs.css", "/docs/openapi.json")


class Markup(HTMLParser):
    """Addresses in a page, its inline code, and the data of its place for the script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.data: dict[str, str | None] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one tag."""
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action"}]
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.data |= {name: value for name, value in attrs if name.startswith("data-")}
        if tag == "style" or (tag == "script" and not dict(attrs).get("src")):
            self.inline.append(tag)


@pytest.mark.parametrize(("path", "files"), [("/docs", "docs/"), ("/docs/", ""), ("/docs/reference", "")])
async def test_the_page_has_own_files_only_relative_to_itself(boot: Boots, path: str, files: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        page = await gateway.client.get(path, headers={"authorization": ""})
    markup = Markup(page.text)
    icon, *others = sorted(markup.addresses, key=lambda address: not address.startswith("data:"))

    assert (200, "text/html; charset=utf-8") == (page.status_code, page.headers["content-type"])
    assert icon.startswith("data:image/svg+xml,")
    assert {f"{files}{name}" for name in ("docs.css", "docs.js", "openapi.json")} == set(others)
    assert [] == markup.inline


@pytest.mark.parametrize(
    "path", ["//docs", "/docs//", "//docs/reference", "/docs//reference", "/docs/reference//"]
)
async def test_an_address_from_which_no_file_is_found_has_no_page(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(f"http://gateway{path}", headers={"authorization": ""})
    assert 404 == reply.status_code, reply.text


async def test_a_slash_at_the_end_of_the_older_address_is_redirected_below_any_path(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get("/docs/reference/", headers={"authorization": ""})
    assert (308, "../reference") == (reply.status_code, reply.headers["location"])


@pytest.mark.parametrize("path", ["/docs", *FILES])
async def test_files_need_no_key_and_carry_the_policy(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get(path, headers={"authorization": ""})
        head = await gateway.client.head(path, headers={"authorization": ""})

    policy = set(reply.headers["content-security-policy"].split("; "))
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= policy
    assert {"trusted-types 'none'", "frame-ancestors 'none'", "form-action 'none'"} <= policy
    assert "nosniff" == reply.headers["x-content-type-options"]
    assert (200, b"") == (head.status_code, head.content)
    assert reply.headers["etag"] == head.headers["etag"]


@pytest.mark.parametrize("path", ["/docs", *FILES])
async def test_files_are_packed_and_not_sent_twice(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        plain = await gateway.client.get(path, headers={"accept-encoding": "identity"})
        packed = await gateway.client.get(path, headers={"accept-encoding": "br, gzip"})
        again = await gateway.client.get(path, headers={"if-none-match": packed.headers["etag"]})
        other = await gateway.client.get(path, headers={"if-none-match": '"other"'})

    assert "content-encoding" not in plain.headers
    assert ("gzip", "accept-encoding") == (packed.headers["content-encoding"], packed.headers["vary"])
    assert plain.content == packed.content
    assert (304, b"") == (again.status_code, again.content)
    assert 200 == other.status_code


async def test_the_whole_page_is_small(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        replies = [await gateway.client.get(path) for path in ("/docs", *FILES)]

    assert sum(len(gzip.compress(reply.content)) for reply in replies) <= 250_000


@pytest.mark.parametrize(
    ("config", "page"), [("", "ui"), ('admin: {listen: "127.0.0.1:9000"}\n', "")], ids=["one", "two"]
)
async def test_links_to_the_console_where_it_is_served(boot: Boots, config: str, page: str) -> None:
    async with boot({"tei-0": FakeTei()}, config + CONFIG) as gateway:
        reply = await gateway.client.get("/docs")

    assert {"data-files": "docs/", "data-console": page} == Markup(reply.text).data


async def test_no_other_path_is_below_the_page(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        assert 404 == (await gateway.client.get("/docs/page.js")).status_code


@pytest.fixture
async def document(boot: Boots) -> Any:
    """Return the OpenAPI document."""
    async with boot({"tei-0": FakeTei()}) as gateway:
        return (await gateway.client.get("/openapi.json")).json()


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all operations of a document."""
    return [operation for item in document["paths"].values() for operation in item.values()]


def test_every_kind_of_error_has_a_meaning() -> None:
    assert FACTS.keys() == MEANINGS.keys()


async def test_error_bodies_are_those_that_are_sent(document: dict[str, Any]) -> None:
    error = InvalidInput(MEANINGS["invalid_input"])
    for dialect in ROUTES.dialects:
        sent = msgspec.json.decode(render_error(error, dialect).body)
        name = type(dialect.envelope_of(error)).__name__
        expected = document["x-error-bodies"][name]["invalid_input"]
        # Of TEI Manager's, the time is that of the reply.
        assert {**sent, "timestamp": 0} == {**expected, "timestamp": 0}, dialect.name


async def test_a_status_stays_where_one_of_its_kinds_can_occur(document: dict[str, Any]) -> None:
    paths = document["paths"]

    assert not {"409", "412", "507"} & paths["/v1/embeddings"]["post"]["responses"].keys()
    assert "507" in paths["/v1/files"]["post"]["responses"]
    assert (
        "Precondition Failed: `precondition_failed`"
        == (paths["/admin/tenants/{name}"]["put"]["responses"]["412"]["description"])
    )
    assert (
        "Too Many Requests: `auth_throttled`, `quota_exceeded`, `overloaded`"
        == (paths["/embed"]["post"]["responses"]["429"]["description"])
    )
    for operation in operations(document):
        for status, response in operation["responses"].items():
            assert status < "4" or "`" in response["description"], operation["operationId"]


async def test_replies_of_callers_describe_their_fields(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    fields = {name for schema in schemas.values() for name in schema.get("properties", {})}
    places = {f"{name}.{field}" for name, schema in schemas.items() for field in schema.get("properties", {})}

    assert REPLY_MEANINGS.keys() <= fields | places
    for name in ("OpenAIEmbeddingItem", "OpenAIErrorDetail", "RankedDocument"):
        missing = [
            field for field, member in schemas[name]["properties"].items() if "description" not in member
        ]
        assert [] == missing, name
