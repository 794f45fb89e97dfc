"""The commands of docs/restore.md, as they stand there, on an emptied Redis with a running gateway."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway.tenants.snapshot import FILE_NAME, Snapshot
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.quotas.conftest import Commands, Ended
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "restore.md"
CONFIG = """
listen: 127.0.0.1:0
state_dir: {folder}
currency: EUR
quotas: {{store: "{store}", key_grace_s: 600}}
upstreams: {{one: {{backend: tei, replicas: ["{tei}"]}}}}
models: {{bge: {{upstream: one, price_per_million_tokens: 10000}}}}
"""


def commands_below(heading: str) -> list[list[str]]:
    """Return the commands of a section of the page, in order."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in re.findall(r"^\$ (gateway .*)$", section, re.MULTILINE)]


class Shop:
    """Two tenants of a gateway on a real Redis, and an operator on its host."""

    def __init__(self, folder: Path, command: Commands) -> None:
        self.state, self.config = folder / "state", folder / "router.yaml"
        self._command = command
        self.keys: dict[str, str] = {}

    def run(self, *words: str) -> Ended:
        """Run a command of the page."""
        assert "gateway" == words[0]
        ended = self._command(*words[1:])
        assert 0 == ended.status, ended
        return ended

    def create(self, tenant: str, id_: str) -> None:
        """Create a key."""
        self.keys[id_] = self.run("gateway", "keys", "create", tenant, "--id", id_).out.strip()

    def settings(self, tenant: str) -> dict[str, Any]:
        """Return the stored settings of a tenant."""
        settings: dict[str, Any] = json.loads(self.run("gateway", "tenants", "list", "--json").out)[tenant]
        return settings

    def kept(self) -> set[str]:
        """Return the keys of the snapshot."""
        try:
            content = (self.state / FILE_NAME).read_bytes()
        except FileNotFoundError:
            return set()
        return {key.id for key in msgspec.json.decode(content, type=Snapshot).keys}

    def is_as(self, served: Served, **expected: int) -> bool:
        """Wait until calls with these keys are answered so."""
        return wait_until(lambda: {id_: called(served.url, self.keys[id_]) for id_ in expected} == expected)

    def lose(self, redis: RedisServer, served: Served) -> None:
        """Empty Redis, and wait until the gateway has noticed."""
        redis.command("FLUSHALL")
        assert wait_until(lambda: "store_lost" in "".join(served.log))
        # An export of what is left would replace that of what there was.
        assert 1 == self._command("export", "backup.jsonl").status


def called(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"input": "a", "model": "bge"}
    return httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=PATIENCE_S).status_code


@pytest.mark.slow
def test_the_page_restores_an_emptied_redis(
    own_redis: RedisServer, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shop = Shop(tmp_path, command)
    [back_up] = commands_below("Back up")
    *steps, without_file = commands_below("After an emptied Redis")
    with serve_in_thread(FakeTei()) as tei:
        shop.config.write_text(CONFIG.format(folder=shop.state, store=own_redis.url, tei=tei))
        shop.run("gateway", "tenants", "set", "acme", "--limit", "budget_per_month=0.31")
        shop.run("gateway", "tenants", "set", "calm", "--limit", "budget_per_month=100")
        for tenant, id_ in (("acme", "spent"), ("calm", "calm"), ("calm", "old")):
            shop.create(tenant, id_)
        served = Served(shop.config).wait_until_up()
        try:
            assert shop.is_as(served, calm=200, old=200, spent=429)
            shop.run(*back_up)
            change_after_the_export(shop, served)
            shop.lose(own_redis, served)
            # Keys go on working, and budgets begin again.
            assert shop.is_as(served, calm=200, new=200, old=401, spent=200)
            printed = [shop.run(*step) for step in steps]
            assert shop.is_as(served, calm=200, new=200, old=401, spent=429)
            assert {"weight": 7, "limits": {"budget_per_month": 100}}.items() <= shop.settings("calm").items()
        finally:
            served.stop()
        check_restart(shop, own_redis, without_file)
    lost, dry, restored, keys, audit = printed
    assert "Redis has lost 2 tenants and 3 keys" in lost.err
    assert "would restore: 2 tenants, 3 keys" in dry.out
    assert "! key old of calm: removed since the file was written" in restored.out
    assert "restored: 2 tenants, 3 keys" in restored.out.splitlines()[-2]
    assert {"spent", "calm", "new"} <= set(keys.out.split())
    assert ("", True) == (keys.err, "usage/acme" in audit.out)


def change_after_the_export(shop: Shop, served: Served) -> None:
    """Make changes that the file lacks, and wait until the gateway's snapshot has them."""
    shop.run("gateway", "keys", "revoke", "old")
    shop.run("gateway", "tenants", "set", "calm", "--weight", "7")
    shop.create("calm", "new")
    assert shop.is_as(served, old=401, new=200)
    assert wait_until(lambda: shop.kept() == {"spent", "calm", "new"})


def check_restart(shop: Shop, redis: RedisServer, without_file: list[str]) -> None:
    """Check that nothing was only in the memory of a gateway, and restore from its snapshot alone."""
    again = Served(shop.config).wait_until_up()
    try:
        assert shop.is_as(again, calm=200, new=200, old=401, spent=429)
        shop.lose(redis, again)
        shop.run(*without_file)
        assert not shop.run("gateway", "keys", "list").err
        assert shop.is_as(again, calm=200, new=200, old=401)
    finally:
        again.stop()
