"""Vendors in OpenAI's form, each a row: address, bounds, rerank and numbers, against stubs of their wire."""

from typing import get_args
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest

from backends.contract import Embed, EmbedReply, ReplicaSpec, Rerank, RerankReply
from backends.http.client import UpstreamClient
from backends.openai.adapter import OpenAIBackend
from backends.openai.settings import ApiSettings, VendorName
from backends.openai.shapes import origin_of
from backends.openai.vendors import VENDORS, vendor_at
from gateway.config.schema import UpstreamSettings
from tests.fakes.openai_vendors import RERANKS, FakeVendor
from tests.fakes.tei import vector_of

NAMES: tuple[VendorName, ...] = get_args(VendorName)


async def joined(server: FakeVendor, model: str = "m/embedder") -> OpenAIBackend:
    """Return a backend of the vendor that has joined."""
    settings = msgspec.convert({"backend": "openai", "vendor": server.name, "model": model}, UpstreamSettings)
    (address,) = settings.replicas
    spec = ReplicaSpec(address, model, settings=settings.api)
    client = UpstreamClient(origin_of(address), transport=httpx.ASGITransport(server))
    backend = OpenAIBackend(client, spec)
    found = await backend.describe(5.0)
    assert found.metered
    assert VENDORS[server.name].shape.request_tokens == found.request_tokens
    return backend


def test_every_name_has_a_row() -> None:
    assert set(NAMES) == set(VENDORS)


@pytest.mark.parametrize("name", NAMES)
async def test_a_vendor_embeds(name: VendorName) -> None:
    server = FakeVendor(name)
    backend = await joined(server)
    reply = await backend.run(Embed(("a", "b c")), 5.0)

    assert isinstance(reply, EmbedReply)
    # Eight bits for a number are not exact.
    worst = 0.02 if name == "perplexity" else 1e-6
    assert np.abs(reply.vectors - [vector_of("a"), vector_of("b c")]).max() < worst
    assert 7 == reply.tokens


@pytest.mark.parametrize("name", sorted(RERANKS))
async def test_a_vendor_reranks(name: VendorName) -> None:
    server = FakeVendor(name, reranks=True)
    backend = await joined(server, "m/ranker")
    reply = await backend.run(Rerank("a", ("a", "b", "c")), 5.0)
    other = FakeVendor("together", reranks=True)
    expected = await (await joined(other, "m/ranker")).run(Rerank("a", ("a", "b", "c")), 5.0)

    assert isinstance(reply, RerankReply)
    assert isinstance(expected, RerankReply)
    assert expected.scores.tolist() == reply.scores.tolist()
    assert expected.tokens == reply.tokens > 0


async def test_a_known_model_of_a_vendor_is_not_asked_again() -> None:
    server = FakeVendor("openai")
    backend = await joined(server)
    asked = len(server.requests)
    await backend.describe(5.0)

    assert asked == len(server.requests)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://api.mistral.ai/v1", "mistral"),
        ("https://api.together.xyz/v1", "together"),
        ("https://api.siliconflow.com/v1", "siliconflow"),
        ("https://api.tokenfactory.nebius.com/v1", "nebius"),
        ("https://mistral.ai.example.org/v1", None),
        ("http://llama:8080", None),
    ],
)
def test_a_vendor_is_known_by_its_host(address: str, name: VendorName | None) -> None:
    assert (None if name is None else VENDORS[name]) is vendor_at(address)


def test_a_vendor_of_the_settings_comes_before_that_of_the_host() -> None:
    upstream = msgspec.convert(
        {"backend": "openai", "vendor": "mistral", "model": "m", "replicas": ["http://proxy:1/v1"]},
        UpstreamSettings,
    )
    assert ("http://proxy:1/v1",) == upstream.replicas
    assert upstream.is_vendor
    assert ApiSettings(task=None, vendor="mistral") == upstream.api


def test_addresses_are_of_one_vendor_each() -> None:
    hosts = [
        host for vendor in VENDORS.values() for host in (urlsplit(vendor.address).hostname, *vendor.hosts)
    ]
    assert len(set(hosts)) == len(hosts)
