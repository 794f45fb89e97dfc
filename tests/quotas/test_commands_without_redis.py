"""`gateway keys` and `gateway tenants` without Redis: changes of the file that a running gateway follows."""

import json
import os
from pathlib import Path

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.conftest import Commands
from tests.quotas.redis_server import free_port

CONFIG = """
listen: 127.0.0.1:0
state_dir: {folder}
upstreams: {{other: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: other}}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration whose state folder exists, as after a first start."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def status(url: str, key: str) -> int:
    return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


@pytest.mark.slow
def test_a_running_gateway_follows_the_commands(config: Path, command: Commands) -> None:
    served = Served(config).wait_until_up()
    try:
        tenant = command("tenants", "set", "acme", "--limit", "requests_per_minute=1000", "-c", str(config))
        created = command("keys", "create", "acme", "--id", "first", "-c", str(config))
        key = created.out.strip()

        assert (0, 0) == (tenant.status, created.status)
        assert "follows within a second" in created.err
        assert wait_until(lambda: status(served.url, key) == 200)
        # Without Redis the first key outlives tenants, and no note says otherwise.
        assert (200, "") == (status(served.url, KEY), tenant.err)

        assert 0 == command("keys", "revoke", "first", "-c", str(config)).status
        assert wait_until(lambda: status(served.url, key) == 401)
    finally:
        served.stop()


@pytest.mark.slow
def test_a_folder_that_the_running_gateway_does_not_keep_is_refused(config: Path, command: Commands) -> None:
    config.write_text(config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{free_port()}"))
    other = config.parent / "other"
    other.mkdir(mode=0o700)
    mistaken = config.with_name("mistaken.yaml")
    mistaken.write_text(config.read_text().replace(str(config.parent / "state"), str(other)))
    served = Served(config).wait_until_up()
    try:
        refused = command("keys", "create", "acme", "--new-tenant", "-c", str(mistaken))
    finally:
        served.stop()
    assert (1, "", []) == (refused.status, refused.out, list(other.iterdir()))
    assert f"the gateway at {served.url} does not keep them in {other}" in refused.err

    # None answers now: a key may be made before the start.
    created = command("keys", "create", "acme", "--new-tenant", "-c", str(mistaken))
    assert 0 == created.status
    assert "no gateway keeps" in created.err


@pytest.mark.slow
def test_a_started_gateway_with_tenants_in_its_file_is_found(config: Path, command: Commands) -> None:
    folder = config.parent / "state"
    folder.rmdir()
    owner = f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}\n'
    config.write_text(CONFIG.format(folder=folder) + owner)
    served = Served(config).wait_until_up()
    try:
        listed = command("keys", "list", "--json", "-c", str(config))
        tenant = command("tenants", "set", "other", "-c", str(config))
        created = command("keys", "create", "acme", "--id", "loc", "-c", str(config))

        assert (0, 0, 0) == (listed.status, tenant.status, created.status)
        assert created.out.startswith("gw_loc_")
        assert wait_until(lambda: status(served.url, created.out.strip()) == 200)
        assert 0o700 == folder.stat().st_mode & 0o777
    finally:
        served.stop()


def test_a_key_that_nothing_stores_is_reported_as_not_valid(config: Path, command: Commands) -> None:
    (config.parent / "state").rmdir()
    ended = command("keys", "create", "acme", "-c", str(config))

    assert "- {digest:" in ended.out
    assert "THE KEY IS NOT VALID YET: there is no Redis, and no gateway has started with" in ended.err


def test_what_was_stored_is_listed_and_removed(config: Path, command: Commands) -> None:
    file = config.parent / "state/tenants.json"
    command("tenants", "set", "acme", "--weight", "3", "-c", str(config))
    key = command("keys", "create", "acme", "--id", "k", "-c", str(config))
    again = command("keys", "create", "acme", "--id", "k", "-c", str(config))
    keys = json.loads(command("keys", "list", "--json", "-c", str(config)).out)
    tenants = json.loads(command("tenants", "list", "--json", "-c", str(config)).out)

    assert [("k", "acme")] == [(listed["id"], listed["tenant"]) for listed in keys]
    assert {"acme": 3} == {name: settings["weight"] for name, settings in tenants.items()}
    assert str(file) in key.err
    assert key.out.strip() not in file.read_text()
    assert (1, "") == (again.status, again.out)
    assert 0o600 == file.stat().st_mode & 0o777

    removed = command("tenants", "remove", "acme", "-c", str(config))
    missing = command("tenants", "remove", "acme", "-c", str(config))

    assert (0, 1) == (removed.status, missing.status)
    assert [] == json.loads(command("keys", "list", "--json", "-c", str(config)).out)


def test_a_line_for_router_yaml_is_printed_on_demand(config: Path, command: Commands) -> None:
    ended = command("keys", "create", "acme", "--yaml", "-c", str(config))

    assert 0 == ended.status
    assert "- {digest:" in ended.out
    assert "THE KEY IS NOT VALID YET\n" in ended.err
    assert "write the printed line below tenants.acme.keys in router.yaml, and reload it" in ended.err
    assert not (config.parent / "state/tenants.json").exists()


def test_a_folder_that_no_gateway_has_used_is_not_made(config: Path, command: Commands) -> None:
    (config.parent / "state").rmdir()
    ended = command("tenants", "set", "acme", "-c", str(config))

    assert (1, "") == (ended.status, ended.out)
    assert f"no gateway has started with the state folder {config.parent / 'state'}" in ended.err
    assert not (config.parent / "state").exists()


def test_a_state_dir_that_cannot_be_filled_is_reported(config: Path, command: Commands) -> None:
    config.write_text(CONFIG.format(folder="${NOT_SET_ANYWHERE}"))
    ended = command("tenants", "list", "-c", str(config))

    assert 1 == ended.status
    assert "NOT_SET_ANYWHERE" in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_file_of_another_user_is_left_alone(config: Path, command: Commands) -> None:
    os.chown(config.parent / "state", 10001, 10001)
    ended = command("keys", "create", "acme", "-c", str(config))

    assert (1, "") == (ended.status, ended.out)
    assert "belongs to another user" in ended.err
    assert not (config.parent / "state/tenants.json").exists()


@pytest.mark.slow
def test_a_spent_day_stays_spent_after_a_restart(config: Path) -> None:
    owner = f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"], limits: {{requests_per_day: 2}}}}}}\n'
    config.write_text(CONFIG.format(folder=config.parent / "state") + owner)

    def statuses(times: int) -> list[int]:
        served = Served(config).wait_until_up()
        try:
            with served.client() as client:
                # A request that is refused for its content costs one request.
                return [client.post("/embed", content=b"{").status_code for _ in range(times)]
        finally:
            served.stop()

    assert [400, 400, 429] == statuses(3)
    assert [429] == statuses(1)
