"""The event of a call: who sent it, with which key, and to which path."""

from gateway.events import CallFinished
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
