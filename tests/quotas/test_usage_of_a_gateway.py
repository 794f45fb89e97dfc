"""`gateway usage` asks a running gateway: of the address that is named, and where there is no Redis."""

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.tei import FakeTei
from tests.quotas.conftest import Commands, Ended
from tests.socket_gateway import socket_gateway

CONFIG = f"""
listen: "LISTEN"
currency: EUR
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one, price_per_million_tokens: 10000}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""


async def test_usage_of_a_gateway_without_redis(
    command: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no router.yaml.
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    file, month = tmp_path / "router.yaml", f"{datetime.now(UTC):%Y-%m}"
    async with socket_gateway(FakeTei(), CONFIG.replace("LISTEN", "127.0.0.1:0")) as gateway:
        assert 200 == (await gateway.call()).status_code
        file.write_text(CONFIG.replace("LISTEN", f"127.0.0.1:{gateway.port}"))
        url = f"http://127.0.0.1:{gateway.port}"

        async def ask(*words: str) -> Ended:
            return await asyncio.to_thread(command, "usage", *words)

        rows = await ask("-c", str(file), "--json")
        by_flag = await ask("--url", url, "--json")
        monkeypatch.setenv("GATEWAY_URL", url)
        by_environment = await ask("--json")
        sheet = await ask("--month", month, "--csv")
        table = await ask("--month", month)
        forgotten = await ask("forget", "--tenant", "acme", "--end-user", "ann")
        refused = await ask("--url", url, "--month", "2026-99")
        monkeypatch.setenv("GATEWAY_URL", "http://127.0.0.1:1")
        away = await ask()

    assert [("acme", "bge", 3, 0.03)] == [
        (row["tenant"], row["model"], row["tokens"], row["cost"]) for row in json.loads(rows.out)
    ]
    assert rows == by_flag == by_environment
    [row, tenant, every] = csv.DictReader(io.StringIO(sheet.out))
    assert [("", "acme"), ("tenant", "acme"), ("all", "")] == [
        (each["total"], each["tenant"]) for each in (row, tenant, every)
    ]
    assert ("0.03", "EUR", month) == (every["cost"], every["currency"], every["month"])
    assert "cost (EUR)" in table.out
    assert (1, "'2026-99' is no month such as 2027-01") == (refused.status, refused.err.strip())
    assert (0, "deleted the usage of 0 days") == (forgotten.status, forgotten.out.partition(";")[0])
    assert 1 == away.status
    assert "http://127.0.0.1:1" in away.err
