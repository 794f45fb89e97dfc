"""Digest of a configuration: equal for gateways that serve alike, and without a trace of secrets."""

import pytest

from gateway.config.boot import worker_share
from gateway.config.digest import DIGITS, hash_of, section_digests
from gateway.config.schema import Config
from gateway.tenants.keyring import key_digest
from tests.config_texts import parsed

CONFIG = f"""
listen: 127.0.0.1:8080
workers: 2
state_dir: /var/lib/one
currency: EUR
quotas: {{store: "redis://:store-password@redis:6379/0"}}
cache: {{bytes: 1000000}}
upstreams:
  one:
    {{backend: tei, replicas: ["http://a"], api_key: old-secret, queue_tokens: 9,
      headers: {{x-token: old-secret}}}}
models: {{bge: {{upstream: one, price_per_million_tokens: 2, limits: {{tokens_per_minute: 100}}}}}}
tenants: {{acme: {{keys: ["{key_digest("a")}"], limits: {{requests_per_day: 5}}}}}}
"""


def digest_of(config: Config) -> str:
    return hash_of(section_digests(config))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("http://a", "http://c"),
        ("tokens_per_minute: 100", "tokens_per_minute: 101"),
        ("requests_per_day: 5", "requests_per_day: 6"),
        ("price_per_million_tokens: 2", "price_per_million_tokens: 3"),
        (key_digest("a"), key_digest("b")),
        ("api_key: old-secret, ", ""),
        ("currency: EUR", "currency: USD"),
        ("models: {bge:", "models: {bge-2:"),
    ],
)
def test_what_callers_notice_changes_the_digest(old: str, new: str) -> None:
    assert old in CONFIG
    assert digest_of(parsed(CONFIG)) != digest_of(parsed(CONFIG.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("old-secret", "new-secret"),
        ("store-password", "another"),
        ("127.0.0.1:8080", "0.0.0.0:80"),
        ("workers: 2", "workers: 8"),
        ("/var/lib/one", "/var/lib/two"),
        ("bytes: 1000000", "bytes: 2000000"),
        ("queue_tokens: 9", "queue_tokens: 10"),
    ],
)
def test_secrets_and_what_a_host_decides_do_not(old: str, new: str) -> None:
    assert old in CONFIG
    assert digest_of(parsed(CONFIG)) == digest_of(parsed(CONFIG.replace(old, new)))


def test_all_workers_of_a_gateway_have_the_same_digest_which_a_metric_can_hold() -> None:
    config = parsed(CONFIG)
    digest = digest_of(config)

    assert digest == digest_of(worker_share(config))
    assert len(digest) == DIGITS
    assert int(float(int(digest, 16))) == int(digest, 16)
    assert int(float(16**DIGITS - 1)) == 16**DIGITS - 1
