"""Every route of operators that changes something leaves one record, in Redis and in the file."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.api.server.paths import options_of
from gateway.app import HANDLERS
from gateway.audit.records import command_actor
from gateway.tenants.keyring import key_digest
from tests.processes.conftest import KEY, SERVE, Served, wait_until
from tests.processes.test_admin_listener import free_port
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

A, B = "http://127.0.0.1:9", "http://127.0.0.1:10"
CONFIG = """
listen: 127.0.0.1:0
reload: {{watch: true}}
end_users: {{from: [user]}}
quotas: {{store: "{store}"}}
admin: {{keys: [{{digest: "{ops}", id: ops}}]}}
batches: {{dir: "{folder}"}}
manager:
  listen: 127.0.0.1:{port}
  kind: fake
  commands:
    fake:
      backend: tei
      argv: ["{python}", -m, tests.fakes.tei_server, --model-id, "{{model_id}}", --port, "{{port}}"]
upstreams: {{one: {{backend: tei, replicas: ["{a}", "{b}"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{of-file: {{keys: ["{caller}"]}}}}
"""
TEI = {"backend": "tei", "replicas": ["http://127.0.0.1:11"], "api_key": "Bearer ${UPSTREAM_SECRET}"}
REPLICA = {"upstream": "one", "replica": A}
FORGOTTEN = {"tenant": "of-file", "end_user": "jo@acme.example"}
SECRET = "a-secret-of-an-upstream"


class Change(NamedTuple):
    """A request that changes something, and its record. path: declared. names: in it."""

    method: str
    path: str
    record: tuple[str, str]
    body: Any = None
    names: tuple[str, ...] = ()
    field: tuple[str, Any, Any] | None = None


# In an order in which each succeeds.
CHANGES = [
    Change("PUT", "/admin/tenants/{name:str}", ("create", "tenant/acme"), {"weight": 2}, ("acme",)),
    Change(
        "PUT",
        "/admin/tenants/{name:str}",
        ("change", "tenant/acme"),
        {"limits": {"tokens_per_day": 9}},
        ("acme",),
        ("limits.tokens_per_day", None, 9),
    ),
    Change(
        "PATCH",
        "/admin/tenants/{name:str}",
        ("change", "tenant/acme"),
        {"limits": {"tokens_per_day": None}},
        ("acme",),
        ("limits.tokens_per_day", 9, None),
    ),
    Change("POST", "/admin/keys", ("create", "key/k1"), {"tenant": "acme", "id": "k1"}),
    Change(
        "POST",
        "/admin/keys/{key_id:str}/rotate",
        ("create", "key/k2"),
        {"id": "k2", "overlap": "1h"},
        ("k1",),
    ),
    Change(
        "DELETE", "/admin/keys/{key_id:str}", ("revoke", "key/k1"), None, ("k1",), ("tenant", "acme", None)
    ),
    Change("DELETE", "/admin/tenants/{name:str}", ("remove", "tenant/acme"), None, ("acme",)),
    Change("PUT", "/admin/upstreams/{name:str}", ("create", "upstream/two"), TEI, ("two",)),
    Change("PUT", "/admin/models/{name:str}", ("create", "model/m/2"), {"upstream": "two"}, ("m/2",)),
    Change("DELETE", "/admin/models/{name:str}", ("remove", "model/m/2"), None, ("m/2",)),
    Change("DELETE", "/admin/upstreams/{name:str}", ("remove", "upstream/two"), None, ("two",)),
    Change(
        "POST", "/admin/replicas/drain", ("drain", f"replica/one/{A}"), REPLICA, (), ("drained", False, True)
    ),
    Change("POST", "/admin/replicas/undrain", ("undrain", f"replica/one/{A}"), REPLICA),
    Change("POST", "/admin/reload", ("reload", "configuration")),
    Change("POST", "/admin/instances", ("create", "instance/i"), {"name": "i", "model_id": "org/x"}),
    Change("POST", "/admin/instances/{name:str}/stop", ("stop", "instance/i"), None, ("i",)),
    Change("POST", "/admin/instances/{name:str}/start", ("start", "instance/i"), None, ("i",)),
    Change("POST", "/admin/instances/{name:str}/restart", ("restart", "instance/i"), None, ("i",)),
    Change("DELETE", "/admin/instances/{name:str}", ("delete", "instance/i"), None, ("i",)),
    Change("POST", "/admin/registry", ("create", "checkpoint/org/y"), {"model_id": "org/y"}),
    Change("POST", "/admin/drain", ("drain", "gateway/")),
    Change("POST", "/admin/undrain", ("undrain", "gateway/")),
    Change("POST", "/admin/usage/forget", ("forget", "tenant/of-file"), FORGOTTEN),
    Change("POST", "/admin/batches/{batch_id:str}/cancel", ("cancel", "batch/"), None, ("",)),
]
# It compares vectors, and changes nothing.
CHANGES_NOTHING = {("POST", "/admin/replicas/verify")}
# They need a checkpoint of the Hub; tests/unit/test_host_records.py has their records.
NEED_THE_HUB = {
    ("POST", "/admin/registry/{name:str}/download"),
    ("POST", "/admin/registry/{name:str}/load"),
}


class Audited:
    """A gateway and its records."""

    def __init__(self, gateway: Served, folder: Path, redis: RedisServer | None) -> None:
        self.gateway = gateway
        self.folder = folder
        self.redis = redis
        self.client = gateway.client()

    def records(self, query: str = "limit=1000") -> list[Any]:
        """Return the records, the newest first."""
        reply = self.client.get(f"/admin/audit?{query}")
        assert 200 == reply.status_code, reply.text
        found: list[Any] = reply.json()["data"]
        return found

    def logged(self) -> list[Any]:
        """Return the log lines of records."""
        return [json.loads(line) for line in self.gateway.log if '"event":"audit"' in line]

    def key(self, id_: str) -> Any:
        """Return a key as it is listed."""
        return next(key for key in self.client.get("/admin/keys").json() if key["id"] == id_)

    def run(self, *words: str) -> str:
        """Run a command and return what it prints."""
        command = [*SERVE[:-1], *words, "-c", str(self.folder / "router.yaml")]
        variables = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state")}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=variables
        )
        assert 0 == ended.returncode, ended.stderr
        return ended.stdout

    def command_json(self, *words: str) -> Any:
        """Run a command and return what it prints for scripts."""
        return json.loads(self.run(*words, "--json"))

    def batch(self) -> str:
        """Submit a batch whose replicas cannot be reached, and return its id."""
        body = {"model": "bge", "input": "a text"}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": body}
        headers = {"authorization": "Bearer caller"}
        files = {"file": ("lines.jsonl", json.dumps(line))}
        file = self.client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers).json()
        request = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        id_: str = self.client.post("/v1/batches", json=request, headers=headers).json()["id"]
        return id_


@pytest.fixture(scope="module", params=["file", "redis"])
def audited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> Iterator[Audited]:
    """Serve a gateway with instances and batches, with Redis or without."""
    folder = tmp_path_factory.mktemp("audited")
    redis = RedisServer(folder) if request.param == "redis" else None
    file = folder / "router.yaml"
    file.write_text(
        CONFIG.format(
            store="memory" if redis is None else redis.url,
            ops=key_digest(KEY),
            caller=key_digest("caller"),
            folder=folder / "batches",
            port=free_port(),
            python=sys.executable,
            a=A,
            b=B,
        )
    )
    variables = {"PYTHONPATH": str(repository), "UPSTREAM_SECRET": SECRET}
    gateway = Served(file, variables).wait_until_up()
    audited = Audited(gateway, folder, redis)
    yield audited
    audited.client.close()
    gateway.stop()
    if redis is not None:
        redis.stop()


def test_the_table_has_every_route_that_changes_something() -> None:
    changing = {
        (method, path)
        for handler in HANDLERS
        for path in handler.paths
        for method in handler.http_methods
        if options_of(handler).needs_admin and method not in ("GET", "HEAD", "OPTIONS")
    }
    tested = {(change.method, change.path) for change in CHANGES}
    assert changing == tested | CHANGES_NOTHING | NEED_THE_HUB


def test_every_change_has_one_record_without_secrets(audited: Audited) -> None:
    secrets = [KEY, SECRET, "sha256", "caller", FORGOTTEN["end_user"]]
    for number, change in enumerate(CHANGES):
        names = iter([audited.batch()] if change.names == ("",) else change.names)
        parts = [
            next(names).replace("/", "%2F") if part.startswith("{") else part
            for part in change.path.split("/")
        ]
        before = len(audited.records())
        reply = audited.client.request(
            change.method, "/".join(parts), json=change.body, headers={"x-request-id": f"change-{number}"}
        )
        assert reply.is_success, (change, reply.text)
        if "key" in (reply.json() if reply.content else {}):
            secrets.append(reply.json()["key"])
        newest = audited.records()
        # A rotation is the end of one key and the creation of another.
        assert (2 if change.path.endswith("/rotate") else 1) == len(newest) - before, change
        record = newest[0]
        assert change.record[0] == record["action"]
        assert record["object"].startswith(change.record[1])
        assert ("ops", "key", "127.0.0.1", f"change-{number}") == (
            record["actor"],
            record["actor_kind"],
            record["address"],
            record["request_id"],
        )
        if change.field is not None:
            assert change.field in [
                (field["field"], field["was"], field["is"]) for field in record["changes"]
            ]

    records = audited.records()
    assert ["key/k2", "key/k1", "key/k1"] == [
        record["object"] for record in audited.records("object=key") if record["action"] != "revoke"
    ]
    text = json.dumps(records)
    assert [] == [secret for secret in secrets if secret in text]
    assert sorted(record["id"] for record in records) == sorted(line["record"] for line in audited.logged())


def test_the_command_line_acts_as_user_and_host_and_shows_the_records(audited: Audited) -> None:
    audited.run("tenants", "set", "by-command", "--limit", "tokens_per_day=5")
    key = audited.run("keys", "create", "by-command", "--id", "c1").strip()
    with audited.gateway.client() as client:
        assert wait_until(
            lambda: client.get("/usage", headers={"authorization": f"Bearer {key}"}).status_code == 200
        )
    successor = audited.run("keys", "rotate", "c1", "--overlap", "2h", "--new-id", "c2").strip()
    assert successor.startswith("gw_c2_")
    assert wait_until(lambda: audited.key("c1")["last_used"] is not None)
    listed = audited.key("c1")
    user = command_actor().name
    assert (user, "c2", 3) == (listed["created_by"], listed["successor"], listed["last_used"].count("-") + 1)
    assert 7200 == pytest.approx(listed["expires"] - time.time(), abs=600)
    [own] = [key for key in audited.command_json("keys", "list") if key["id"] == "c1"]
    assert (listed["last_used"], user) == (own["last_used"], own["created_by"])

    lines = audited.run("audit", "--since", "1h", "--object", "key", "--actor", user, "--json").splitlines()
    assert [("create", "key/c2"), ("rotate", "key/c1"), ("create", "key/c1")] == [
        (record["action"], record["object"]) for record in map(json.loads, lines)
    ]
    # The gateway logs what commands have done, once.
    ids = {json.loads(line)["id"] for line in lines}
    assert wait_until(lambda: ids <= {line["record"] for line in audited.logged()})
    logged = [line["record"] for line in audited.logged()]
    assert len(logged) == len(set(logged))
    table = audited.run("audit", "--limit", "4")
    assert "limits.tokens_per_day: not set -> 5" in table
    for secret in (key, successor):
        assert secret not in table


def test_reloads_by_a_signal_and_by_the_file_are_recorded(audited: Audited) -> None:
    audited.gateway.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: audited.records("actor=SIGHUP&object=configuration"))
    file = audited.folder / "router.yaml"
    file.write_text(file.read_text() + "currency: EUR\n")
    assert wait_until(lambda: audited.records("actor=file%20watch"))
    [record] = audited.records("actor=file%20watch")
    assert ("gateway", ["currency"]) == (
        record["actor_kind"],
        [change["field"] for change in record["changes"]],
    )


def test_changes_while_redis_is_away_are_copied_once(audited: Audited) -> None:
    if audited.redis is None:
        pytest.skip("there is no Redis that could be away")
    waiting = audited.folder / "state" / "embedding-gateway" / "audit-waiting.jsonl"
    audited.redis.kill()
    assert 200 == audited.client.post("/admin/reload").status_code
    assert wait_until(waiting.exists)
    audited.redis.restart()
    assert wait_until(lambda: not waiting.exists())
    assert ["reload"] == [record["action"] for record in audited.records()]
