"""Pictures by their addresses, in every dialect: fetched where `media.fetch` allows it, else refused."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.http.media import probe_recording
from gateway.api.server.in_flight import HeldBody
from gateway.tenants.keyring import key_digest
from tests.api.test_picture_dialects import CONFIG, message, picture_part, vectors_in
from tests.conftest import KEY, Boots, Running
from tests.fakes.picture_host import PictureHost, reply, serving
from tests.fakes.vllm import FakeVllm
from tests.pictures import encoded, noise

PNG = encoded(noise(9, 7))
VLLM = CONFIG.replace("BACKEND", "vllm").replace("OPTIONS", "")


def config_of(port: int, host: str = "127.0.0.1") -> str:
    fetch = f"hosts: [{host}], schemes: [http], ports: [{port}], private: [127.0.0.1]"
    return f"{VLLM}media: {{fetch: {{{fetch}}}}}\n"


def bodies(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of each dialect with one picture at an address."""
    return [
        ("/v1/embeddings", message(picture_part(url))),
        ("/v1/embeddings", {"input": [{"image": url}]}),
        ("/infinity/embeddings", {"input": [url], "modality": "image"}),
        ("/infinity/embeddings_image", {"input": [url]}),
        ("/v2/embed", {"images": [url], "input_type": "image", "embedding_types": ["float"]}),
        ("/v1/embed", {"images": [url], "input_type": "image"}),
        (
            "/v2/embed",
            {
                "inputs": [{"content": [picture_part(url)]}],
                "input_type": "image",
                "embedding_types": ["float"],
            },
        ),
        ("/v1/multimodalembeddings", {"inputs": [{"content": [{"type": "image_url", "image_url": url}]}]}),
    ]


@asynccontextmanager
async def fetching(
    boot: Boots, content: bytes = PNG, more: str = ""
) -> AsyncIterator[tuple[PictureHost, Running]]:
    """Serve content, and boot a gateway with a model of pictures that may fetch it. more: of the config."""
    server = FakeVllm(images=True)
    async with serving(reply(content)) as host, boot({"one": server}, config_of(host.port) + more) as gateway:
        yield host, gateway


async def test_every_dialect_fetches_and_sends_on_only_bytes(boot: Boots) -> None:
    async with fetching(boot) as (host, gateway):
        url = f"http://127.0.0.1:{host.port}/a.png"
        for path, body in bodies(url):
            answer = await gateway.post(path, body)
            assert 200 == answer.status_code, (path, answer.text)
            assert 1 == len(vectors_in(answer.json()))
    assert len(host.seen) == len(bodies(url))
    assert all(KEY.encode() not in head for head in host.seen)


async def test_a_request_of_many_addresses_fetches_none(boot: Boots) -> None:
    async with fetching(boot) as (host, gateway):
        urls = [f"http://127.0.0.1:{host.port}/{number}.png" for number in range(65)]
        refused = await gateway.post("/v1/embeddings", {"input": [{"image": url} for url in urls]})
        assert [] == host.seen
        # Those that repeat are fetched once.
        repeated = [*urls[:2], *urls[:2] * 40]
        served = await gateway.post("/v1/embeddings", {"input": [{"image": url} for url in repeated]})

    assert (400, 200) == (refused.status_code, served.status_code)
    assert "65 addresses" in refused.text
    assert 2 == len(host.seen)


async def test_recordings_are_fetched_as_pictures_are(boot: Boots) -> None:
    def sent(url: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            ("/v1/embeddings", message({"type": "audio_url", "audio_url": {"url": url}})),
            ("/v1/embeddings", {"input": [{"audio": url}]}),
            ("/infinity/embeddings", {"input": url, "modality": "audio"}),
        ]

    async with (
        serving(reply(probe_recording().data)) as host,
        boot({"one": FakeVllm(sound=True)}, config_of(host.port)) as gateway,
        boot({"one": FakeVllm(images=True)}, config_of(host.port)) as other,
    ):
        for path, body in sent(f"http://127.0.0.1:{host.port}/a.wav"):
            answer = await gateway.post(path, body)
            assert 200 == answer.status_code, (path, answer.text)
            # A model without sound fetches nothing.
            assert (await other.post(path, body)).status_code in {400, 422}
    assert len(host.seen) == len(sent(""))


async def test_one_address_is_fetched_once_for_one_request(boot: Boots) -> None:
    async with fetching(boot) as (host, gateway):
        url = f"http://127.0.0.1:{host.port}/a.png"
        answer = await gateway.post("/v1/embeddings", {"input": [{"image": url}, {"image": url}]})
    assert 200 == answer.status_code, answer.text
    assert len(host.seen) == 1
    assert ["parse", "fetch", "auth"] == re.findall(r"(\w+);", answer.headers["server-timing"])[:3]


@pytest.mark.parametrize(("path", "body"), bodies("http://127.0.0.1:PORT/a.png"))
async def test_nothing_is_fetched_without_the_key(boot: Boots, path: str, body: dict[str, Any]) -> None:
    async with serving(reply(PNG)) as host, boot({"one": FakeVllm(images=True)}, VLLM) as gateway:
        answer = await gateway.post(path, _with_port(body, host.port))
    assert answer.status_code in {400, 422}
    assert "media.fetch" in answer.text
    assert host.seen == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost:PORT/", "media.fetch.hosts"),
        ("http://169.254.169.254:PORT/latest/meta-data/", "media.fetch.hosts"),
        ("http://[::1]:PORT/", "media.fetch.hosts"),
        ("http://[::ffff:127.0.0.1]:PORT/", "media.fetch.hosts"),
        ("http://2130706433:PORT/", "unusual form"),
        ("http://0177.0.0.1:PORT/", "unusual form"),
        ("http://x@127.0.0.1:PORT/", "user name"),
        ("http://127.0.0.1:1/", "media.fetch.ports"),
        ("https://127.0.0.1:PORT/", "media.fetch.schemes"),
        ("file:///etc/passwd", "of this scheme are not read"),
        ("gopher://127.0.0.1:PORT/_x", "no base64"),
    ],
)
async def test_an_address_that_is_not_allowed_is_not_reached(boot: Boots, url: str, reason: str) -> None:
    async with fetching(boot) as (host, gateway):
        answer = await gateway.post(
            "/v1/embeddings", message(picture_part(url.replace("PORT", str(host.port))))
        )
    assert answer.status_code == 400
    assert reason in answer.text
    assert host.seen == []


async def test_a_listed_name_of_a_private_address_is_not_reached(boot: Boots) -> None:
    async with serving(reply(PNG)) as host:
        config = config_of(host.port, "localhost").replace(", private: [127.0.0.1]", "")
        async with boot({"one": FakeVllm(images=True)}, config) as gateway:
            body = message(picture_part(f"http://localhost:{host.port}/"))
            answer = await gateway.post("/v1/embeddings", body)
    assert answer.status_code == 400
    assert "media.fetch.private" in answer.text
    assert host.seen == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG"),
        (b"%PDF-1.7", "a PDF"),
        (b"<html>169.254</html>", "an HTML page"),
        (b"secret of an internal service", "none of these formats"),
        (b"", "it is empty"),
        (PNG[:30], "none of these formats"),
    ],
)
async def test_what_is_no_picture_is_not_sent_on(boot: Boots, content: bytes, reason: str) -> None:
    async with fetching(boot, content) as (host, gateway):
        url = f"http://127.0.0.1:{host.port}/a.png"
        answer = await gateway.post("/v1/embeddings", message(picture_part(url)))
    assert answer.status_code == 400
    assert reason in answer.text
    assert "secret" not in answer.text


async def test_a_model_of_texts_fetches_nothing(boot: Boots) -> None:
    async with serving(reply(PNG)) as host, boot({"one": FakeVllm()}, config_of(host.port)) as gateway:
        url = f"http://127.0.0.1:{host.port}/a.png"
        answer = await gateway.post("/v1/embeddings", message(picture_part(url)))
    assert answer.status_code == 400
    assert host.seen == []


async def test_a_spent_tenant_fetches_nothing(boot: Boots) -> None:
    tenants = f'tenants: {{t: {{keys: ["{key_digest(KEY)}"], limits: {{inputs_per_day: 1}}}}}}\n'
    async with fetching(boot, more=tenants) as (host, gateway):
        body = message(picture_part(f"http://127.0.0.1:{host.port}/a.png"))
        answers = [await gateway.post("/v1/embeddings", body) for _ in range(3)]
    assert [200, 429, 429] == [answer.status_code for answer in answers]
    assert len(host.seen) <= 2


async def test_fetched_bytes_count_as_a_body_does(boot: Boots) -> None:
    async with serving(reply(bytes(200_000))) as host:
        config = config_of(host.port) + "limits: {in_flight_bytes: 100000}\n"
        async with boot({"one": FakeVllm(images=True)}, config) as gateway:
            in_flight = gateway.application.in_flight
            # A single body always fits.
            other = HeldBody(in_flight, "other")
            other.hold(1000)
            body = message(picture_part(f"http://127.0.0.1:{host.port}/a.png"))
            answer = await gateway.post("/v1/embeddings", body)
            other.release()
            assert 0 == in_flight.bytes
    assert answer.status_code == 503, answer.text
    assert "limits.in_flight_bytes" in answer.text


def _with_port(body: Any, port: int) -> Any:
    """Return a body whose addresses have a port."""
    if isinstance(body, str):
        return body.replace("PORT", str(port))
    if isinstance(body, list):
        return [_with_port(item, port) for item in body]
    if isinstance(body, dict):
        return {name: _with_port(value, port) for name, value in body.items()}
    return body
