"""The event of a call: who sent it, with which key, and to which path."""

import pytest

from gateway.events import CallFinished
from tests.api.test_quotas import tenants
from tests.conftest import Boots, Running
from tests.fakes.tei import FakeTei


def last_call(gateway: Running) -> CallFinished:
    """Return the event of the latest call."""
    event = [event for event in gateway.events if isinstance(event, CallFinished)][-1]
    assert isinstance(event, CallFinished)
    return event


async def test_has_the_key_and_the_address(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post("/embed", {"inputs": "a"})
        accepted = last_call(gateway)
        await gateway.post("/embed", {"inputs": "a"}, authorization="Bearer wrong")
        refused = last_call(gateway)

    assert ("first", True) == (accepted.key_id, bool(accepted.address))
    assert (None, accepted.address) == (refused.key_id, refused.address)


async def test_has_the_path_that_no_handler_serves(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post("/v1/chat/completions", {})
        unknown = last_call(gateway)
        await gateway.post("/nothing%1B%20here/" + "x" * 1000, {})
        odd = last_call(gateway)
        await gateway.post("/embed", {"inputs": "a"})
        known = last_call(gateway)

    assert "/v1/chat/completions" == unknown.path
    assert odd.path is not None
    assert odd.path.startswith("/nothing%1B%20here/xxx")
    assert len(odd.path) < 200
    assert known.path is None


REFUSALS: list[tuple[str, bytes, int]] = [
    ("/v1/embeddings", b"{", 400),
    ("/v1/embeddings", b'{"input": 5}', 400),
    ("/v1/embeddings", b'{"input": "' + b"a" * 1024 + b'"}', 413),
    ("/embed", b'{"inputs": 5}', 422),
    ("/admin/reload", b"{}", 403),
]


@pytest.mark.parametrize(("path", "body", "status"), REFUSALS)
async def test_a_refused_call_has_the_tenant_of_its_key(
    boot: Boots, path: str, body: bytes, status: int
) -> None:
    config = f"{tenants('requests_per_day: 10')}limits: {{body_bytes: 1024}}\n"
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        assert status == (await gateway.client.post(path, content=body)).status_code
        refused = last_call(gateway)
        await gateway.client.get("/v1/models")
        listed = last_call(gateway)

    assert ("acme", None) == (refused.tenant, refused.model)
    assert ("acme", None) == (listed.tenant, listed.model)


async def test_an_early_refusal_for_a_spent_limit_has_the_tenant(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, tenants("requests_per_day: 1")) as gateway:
        await gateway.post("/embed", {"inputs": "a"})
        replies = [await gateway.post("/embed", {"inputs": "a"}) for _ in range(3)]
        refused = last_call(gateway)

    assert {429} == {reply.status_code for reply in replies}
    assert "acme" == refused.tenant


async def test_a_call_without_an_accepted_key_has_no_tenant(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        await gateway.post("/embed", {"inputs": "a"}, authorization="Bearer wrong")

    assert last_call(gateway).tenant is None
