"""Dashboards and alerts, tested with a real Prometheus that scrapes a gateway under load."""

import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.tenants.keyring import key_digest
from loadtest.processes import free_port, listens
from tests.fakes.otlp_collector import collecting
from tests.processes.conftest import KEY, Served, wait_until
from tests.processes.tls_files import Authority
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

OBSERVABILITY = Path(__file__).parents[2] / "deploy/observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="there is no Prometheus; run: make prometheus"
    ),
]

CONFIG = """
listen: 127.0.0.1:0
currency: EUR
quotas: {{store: "{store}", timeout_ms: 1000}}
tracing: {{endpoint: "{collector}", sample: 1}}
cache: {{bytes: 1000000}}
batches: {{dir: batches}}
upstreams:
  minilm: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}}
  remote: {{backend: tei, replicas: ["http://127.0.0.1:{stub}", "http://127.0.0.1:{dead}"]}}
  second: {{backend: tei, replicas: ["http://127.0.0.1:{stub}"]}}
  secured: {{backend: tei, replicas: ["https://127.0.0.1:{dead}"], tls: {tls}}}
models:
  minilm: {{upstream: minilm, price_per_million_tokens: 0.01, cache: true}}
  remote: {{upstream: remote}}
  both: {{upstreams: [{{name: remote}}, {{name: second}}]}}
  secured: {{upstream: secured}}
defaults: {{embed: minilm}}
tenants:
  acme: {{keys: ["{digest}"], limits: {{requests_per_minute: 1000000, budget_per_month: 5}}}}
  small: {{keys: ["{other}"], limits: {{requests_per_minute: 2}}}}
"""
PROMETHEUS = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: gateway
    static_configs: [{{targets: ["{target}"]}}]
"""


def promtool(*arguments: str, cwd: Path = OBSERVABILITY, given: str = "") -> str:
    """Return the output of promtool, which must succeed."""
    ended = subprocess.run(
        ["promtool", *arguments],
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def expressions(board: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each query of a dashboard, with the title of its panel."""
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]


@contextmanager
def running(*command: str, port: int) -> Iterator[None]:
    """Run a process, and wait until it listens on its port."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: listens(port))
            yield
        finally:
            process.terminate()


def submit_batch(gateway: Served) -> None:
    """Submit a batch of two lines, one of which fails."""
    bodies: list[dict[str, Any]] = [{"input": "a line", "model": "minilm"}, {"input": "", "model": "minilm"}]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body})
        for number, body in enumerate(bodies)
    ]
    with gateway.client() as client:
        files = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        file = client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        job = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        client.post("/v1/batches", json=job).raise_for_status()


@contextmanager
def under_load(gateway: Served) -> Iterator[None]:
    """Send requests to both upstreams, some of them over a quota or for an unknown model."""
    over = threading.Event()

    def call() -> None:
        with gateway.client() as client:
            number = 0
            while not over.is_set():
                number += 1
                texts = [f"text {number} {index}" for index in range(1 + number % 3)]
                body = {"input": texts, "model": ("minilm", "remote", "nowhere", "both")[number % 4]}
                client.post("/v1/embeddings", json=body)
                client.post("/v1/embeddings", json=body, headers={"authorization": "Bearer small-key"})
                client.post("/v1/embeddings", json=body, headers={"authorization": "Bearer unknown"})
                known = {"input": "found in the cache", "model": "minilm"}
                client.post("/v1/embeddings", json=known, headers={"x-priority": "bulk"})

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        submit_batch(gateway)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve an engine, a TEI stub, and replicas that cannot be reached, with Redis, traces and batches."""
    port, folder = free_port(), tmp_path_factory.mktemp("gateway")
    file = folder / "router.yaml"
    certificate, key = Authority(folder / "tls").sign("client")
    values = {
        "digest": key_digest(KEY),
        "other": key_digest("small-key"),
        "tls": f'{{certificate: "{certificate}", private_key: "{key}"}}',
    }
    redis = RedisServer(folder, None, "--maxmemory", "64mb")
    try:
        with (
            collecting() as collector,
            running(sys.executable, "-m", "loadtest.stub", "--port", str(port), port=port),
        ):
            values |= {"store": redis.url, "collector": collector.url}
            file.write_text(CONFIG.format(stub=port, dead=free_port(), **values))
            served = Served(file).wait_until_up()
            yield served
            served.stop()
    finally:
        redis.stop()


@pytest.fixture(scope="module")
def prometheus(gateway: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Open the API of a Prometheus that scrapes the gateway every second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    file = folder / "prometheus.yaml"
    file.write_text(
        PROMETHEUS.format(rules=OBSERVABILITY / "rules.yaml", target=gateway.url.partition("//")[2])
    )
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
    command.append("--enable-feature=exemplar-storage")
    with (
        running(*command, f"--web.listen-address=127.0.0.1:{port}", port=port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


def answer(prometheus: httpx.Client, expression: str) -> list[float]:
    """Return the finite values of an instant query, with variables filled as Grafana fills them."""
    filled = re.sub(
        r"\$(tenant|upstream|model)\b", ".*", re.sub(r"\$__(rate_interval|range)", "10s", expression)
    )
    reply = prometheus.get("/api/v1/query", params={"query": filled}).json()
    assert "success" == reply["status"], (filled, reply)
    return [v for result in reply["data"]["result"] if math.isfinite(v := float(result["value"][1]))]


def test_every_panel_query_returns_data(gateway: Served, prometheus: httpx.Client) -> None:
    queries = [
        (path.stem, *query) for path in DASHBOARDS for query in expressions(json.loads(path.read_text()))
    ]
    silent = queries
    assert len(queries) > 40
    with under_load(gateway):
        end_s = time.monotonic() + PATIENCE_S
        while silent and time.monotonic() < end_s:
            time.sleep(1)
            silent = [query for query in silent if not answer(prometheus, query[2])]

    assert [] == silent


def test_exemplars_lead_from_a_histogram_to_the_trace_in_the_log(
    gateway: Served, prometheus: httpx.Client
) -> None:
    found: set[str] = set()

    def exemplars(name: str) -> list[dict[str, Any]]:
        now_s = time.time()
        query = {"query": f"gateway_{name}_duration_seconds_bucket", "start": now_s - 600, "end": now_s}
        data = prometheus.get("/api/v1/query_exemplars", params=query).json()["data"]
        return [exemplar for series in data for exemplar in series["exemplars"]]

    def has_all() -> bool:
        found.clear()
        by_name = [exemplars(name) for name in ("call", "model", "tenant", "attempt")]
        found.update(each["labels"]["trace_id"] for each in by_name[0])
        return all(by_name)

    with under_load(gateway):
        assert wait_until(has_all)
    assert wait_until(lambda: any(trace_id in line for line in gateway.log for trace_id in found))


def test_every_alert_is_evaluated_without_error(prometheus: httpx.Client) -> None:
    groups: list[dict[str, Any]] = []

    def evaluated() -> bool:
        groups[:] = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        return all(rule["lastEvaluation"] > "2000" for group in groups for rule in group["rules"])

    assert wait_until(evaluated)
    assert [] == [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]


def test_metrics_pass_the_linter(gateway: Served) -> None:
    with gateway.client() as client:
        promtool("check", "metrics", given=client.get("/metrics").text)


def test_rules_and_scrape_config_are_valid() -> None:
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "rules.test.yaml")
    promtool("check", "config", "--syntax-only", "prometheus.yaml")


def test_every_alert_has_a_reason_and_a_case_that_fires_and_one_that_is_silent() -> None:
    rules = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())["groups"][0]["rules"]
    tests = (OBSERVABILITY / "rules.test.yaml").read_text()

    assert rules
    cases = [case for test in yaml.safe_load(tests)["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules}
    assert names == {case["alertname"] for case in cases if case["exp_alerts"]}
    assert names == {case["alertname"] for case in cases if not case["exp_alerts"]}
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "reason"}
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
