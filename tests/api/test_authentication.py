"""Authentication: wrong keys are throttled by address, a valid key passes, proxies are configured."""

import base64

import pytest

from gateway.api.server.authentication import Authenticator
from gateway.tenants.guess_throttle import ADDRESSES_MAX, GUESSES_MAX, RECENT_MAX, REFILL_S, GuessThrottle
from gateway.tenants.keyring import FirstKey, Keyring, key_digest
from tests.conftest import CONFIG, KEY, Boots, request_with
from tests.fakes.tei import FakeTei

WRONG = {"authorization": "Bearer wrong"}


async def test_wrong_keys_are_throttled_and_a_valid_key_passes(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        tried = [await gateway.client.get("/v1/models", headers=WRONG) for _ in range(GUESSES_MAX + 3)]
        posted = await gateway.client.post("/embed", json={"inputs": "a"}, headers=WRONG)
        valid = await gateway.post("/embed", {"inputs": "a"})

    assert [401] * GUESSES_MAX + [429] * 3 == [reply.status_code for reply in tried]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in tried[GUESSES_MAX:])
    assert (429, 200) == (posted.status_code, valid.status_code)
    # A client that repeats shows only its last error.
    words = tried[0].json()["error"]["message"]
    assert tried[-1].json()["error"]["message"].startswith(f"{words}; too many wrong keys from this address")
    assert posted.json()["error"].startswith(words)


async def test_a_missing_key_is_no_guess(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        tried = [
            await gateway.client.get("/v1/models", headers={"authorization": value})
            for value in ["", "Bearer ", "Basic ????"] * GUESSES_MAX
        ]
        wrong = await gateway.client.get("/v1/models", headers=WRONG)

    assert {401} == {reply.status_code for reply in tried}
    assert all("Authorization: Bearer <key>" in reply.text for reply in tried)
    assert 401 == wrong.status_code


def test_each_address_has_its_own_bucket_which_refills() -> None:
    guesses = GuessThrottle()
    for _ in range(GUESSES_MAX):
        assert 0 == guesses.wait_s("a", 100.0)
        guesses.record_failure("a", "digest", 100.0)

    assert REFILL_S == pytest.approx(guesses.wait_s("a", 100.0))
    assert 0 == guesses.wait_s("b", 100.0)
    assert 0 == guesses.wait_s("a", 100.0 + REFILL_S)


def test_addresses_of_one_network_share_a_bucket() -> None:
    guesses = GuessThrottle()
    for number in range(GUESSES_MAX):
        guesses.record_failure(f"2001:db8::{number:x}", "digest", 100.0)
        guesses.record_failure(f"::ffff:192.0.2.{number}", "digest", 100.0)

    assert guesses.wait_s("2001:db8::ffff", 100.0) > 0
    assert 0 == guesses.wait_s("2001:db8:0:1::1", 100.0)
    assert 0 == guesses.wait_s("::ffff:192.0.2.1", 100.0)


def test_the_number_of_addresses_in_memory_is_bounded() -> None:
    guesses = GuessThrottle()
    for number in range(ADDRESSES_MAX + 500):
        guesses.record_failure(str(number), str(number), 0.0)

    assert ADDRESSES_MAX == len(guesses._empty_at_s)
    assert RECENT_MAX == len(guesses._recent)


def test_failures_with_a_key_that_becomes_known_are_forgiven() -> None:
    guesses = GuessThrottle()
    for digest in ("new", "wrong"):
        for _ in range(GUESSES_MAX // 2):
            guesses.record_failure("a", digest, 100.0)
    assert REFILL_S == pytest.approx(guesses.wait_s("a", 100.0))

    guesses.forgive({"new"}.__contains__)
    for _ in range(GUESSES_MAX // 2):
        assert 0 == guesses.wait_s("a", 100.0)
        guesses.record_failure("a", "wrong", 100.0)
    guesses.forgive({"new"}.__contains__)

    assert REFILL_S == pytest.approx(guesses.wait_s("a", 100.0))


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("Bearer k", "k"),
        ("bearer  k ", "k"),
        ("k", "k"),
        (basic(":k"), "k"),
        (basic("anybody:k:1"), "k:1"),
        (basic("k"), None),
        ("Basic ????", None),
        (f"Basic {base64.b64encode(bytes([255, 254])).decode()}", None),
        ("", None),
    ],
)
def test_a_key_is_read_from_every_form_of_authorization(sent: str, key: str | None) -> None:
    identity = Authenticator(Keyring({}, FirstKey(key_digest("k"))))

    assert key == identity.key_of(request_with(b"authorization", sent))


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", "6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", "203.0.113.7, 10.0.0.2", "203.0.113.7"),
        ("203.0.113.9", "1.2.3.4", "203.0.113.9"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "nonsense", "nonsense"),
        ("10.0.0.1", "203.0.113.7:50123", "203.0.113.7"),
        ("10.0.0.1", "203.0.113.7, 10.0.0.2:443", "203.0.113.7"),
        ("10.0.0.1", "[2001:db8::7]:50123", "2001:db8::7"),
        ("10.0.0.1", "[2001:db8::7]", "2001:db8::7"),
        ("10.0.0.1", "2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", "nonsense:1", "nonsense:1"),
    ],
)
def test_a_forwarded_address_counts_behind_a_trusted_proxy(peer: str, forwarded: str, address: str) -> None:
    identity = Authenticator(Keyring({}, FirstKey(key_digest("k"))), ["10.0.0.0/8"])

    assert address == identity.address_of(peer, [(b"x-forwarded-for", forwarded.encode())])


GEMINI = ["/v1beta/models/bge:embedContent", "/v1/models/bge:embedContent"]
CONTENT = {"content": {"parts": [{"text": "a"}]}}


@pytest.mark.parametrize("path", GEMINI)
async def test_geminis_paths_read_the_key_of_a_query_if_the_configuration_permits_it(
    boot: Boots, path: str
) -> None:
    async def statuses(text: str) -> list[int]:
        async with boot({"tei-0": FakeTei()}, text) as gateway:
            gateway.client.headers.pop("authorization")
            queries = [f"key={KEY}", "key=wrong", f"key={KEY}&key=other", "key=", f"alt=json&key={KEY}"]
            replies = [await gateway.post(f"{path}?{query}", CONTENT) for query in queries]
            replies.append(await gateway.client.get(f"/v1beta/models?key={KEY}"))
            replies.append(await gateway.post(f"/v1/embeddings?key={KEY}", {"input": "a"}))
            header = {"x_goog_api_key": KEY}
            replies.append(await gateway.post(f"{path}?key=wrong", CONTENT, **header))
        assert not any(KEY in reply.text or "wrong" in reply.text for reply in replies)
        assert KEY not in repr(gateway.events)
        return [reply.status_code for reply in replies]

    assert [401, 401, 401, 401, 401, 401, 401, 200] == await statuses(CONFIG)
    assert [200, 401, 401, 401, 200, 200, 401, 200] == await statuses(CONFIG + "key_in_query: true\n")


async def test_wrong_keys_of_a_query_are_guesses(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG + "key_in_query: true\n") as gateway:
        gateway.client.headers.pop("authorization")
        replies = [await gateway.post(f"{GEMINI[0]}?key={n}", CONTENT) for n in range(GUESSES_MAX + 1)]

    assert [401] * GUESSES_MAX + [429] == [reply.status_code for reply in replies]
