"""Ten thousand tenants, put straight into a store, as a large installation has them."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
from redis import Redis

from gateway.config.schema import TenantConfig
from gateway.quotas.kept_ledger import USAGE_FOLDER, UsageCount
from gateway.quotas.operations import KEY_END, usage_key
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import KEY_DAYS, KEYS, TENANTS, VERSION

MANY = 10_000
LIMITS = {"tokens_per_day": 1_000_000, "requests_per_minute": 600}


def name_of(number: int) -> str:
    """Return the name of a tenant."""
    return f"Tenant-{number:05}"


def key_of(number: int) -> StoredKey:
    """Return the key of a tenant."""
    return StoredKey(
        f"key-{number:05}", key_digest(f"secret-{number}"), name_of(number), created_s=number + 1.0
    )


def today() -> str:
    """Return the day in UTC."""
    return datetime.now(UTC).date().isoformat()


def fill_redis(url: str, number: int = MANY) -> None:
    """Put tenants, each with a key, and with usage of today that grows with its number, into Redis."""
    settings = msgspec.json.encode(TenantConfig(limits=LIMITS))
    with Redis.from_url(url) as client, client.pipeline(transaction=False) as pipeline:
        for at in range(number):
            pipeline.hset(TENANTS, name_of(at), settings)
            pipeline.hset(KEYS, key_of(at).id, msgspec.json.encode(key_of(at)))
            pipeline.hset(KEY_DAYS, key_of(at).id, f"2026-11-{1 + at % 28:02}")
            field = f"{key_of(at).id}{KEY_END}bge"
            pipeline.hset(
                usage_key(name_of(at), today()),
                mapping={f"{field}|requests": 1, f"{field}|tokens": at, f"{field}|budget": at * 10**6},
            )
        pipeline.set(VERSION, "abc.1.abc")
        pipeline.execute()


def fill_folder(folder: Path, number: int = MANY) -> None:
    """Put the same tenants, keys and usage into the files of a gateway without Redis."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "keys": {key_of(at).id: key_of(at) for at in range(number)},
        "tenants": {name_of(at): {"limits": LIMITS} for at in range(number)},
    }
    (folder / "tenants.json").write_bytes(msgspec.json.encode(content))
    days = {key_of(at).id: f"2026-11-{1 + at % 28:02}" for at in range(number)}
    (folder / "key-days.json").write_bytes(msgspec.json.encode(days))
    usage = [
        UsageCount(name_of(at), "bge", key_of(at).id, {"requests": 1, "tokens": at, "budget": at * 10**6})
        for at in range(number)
    ]
    (folder / USAGE_FOLDER).mkdir(exist_ok=True)
    (folder / USAGE_FOLDER / f"{today()}.json").write_bytes(msgspec.json.encode(usage))
