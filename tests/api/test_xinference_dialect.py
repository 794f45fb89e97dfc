"""Xinference: the path by which its clients learn whether they have to send a key."""

import msgspec

from gateway.api.dialects.xinference.dialect import ClusterAuth
from tests.conftest import Boots
from tests.fakes.tei import FakeTei


async def test_xinferences_client_learns_without_a_key_that_it_has_to_send_one(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.get("/v1/cluster/auth", headers={"authorization": ""})

    assert 200 == reply.status_code
    assert ClusterAuth(auth=True) == msgspec.json.decode(reply.content, type=ClusterAuth)
