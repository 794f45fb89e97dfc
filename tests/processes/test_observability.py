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
from tests.processes.conftest import KEY, Served, wait_until
from tests.waiting import PATIENCE_S

OBSERVABILITY = Path(__file__).parents[2] / "deploy/observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed"),
]

CONFIG = """
listen: 127.0.0.1:0
currency: EUR
upstreams:
  minilm: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}}
  remote: {{backend: tei, replicas: ["http://127.0.0.1:{stub}", "http://127.0.0.1:{dead}"]}}
models:
  minilm: {{upstream: minilm, price_per_million_tokens: 0.01}}
  remote: {{upstream: remote}}
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
                body = {"input": texts, "model": ("minilm", "remote", "nowhere")[number % 3]}
                client.post("/v1/embeddings", json=body)
                client.post("/v1/embeddings", json=body, headers={"authorization": "Bearer small-key"})

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve an engine, a TEI stub, and a replica that cannot be reached."""
    port = free_port()
    file = tmp_path_factory.mktemp("gateway") / "router.yaml"
    digests = {"digest": key_digest(KEY), "other": key_digest("small-key")}
    file.write_text(CONFIG.format(stub=port, dead=free_port(), **digests))
    with running(sys.executable, "-m", "loadtest.stub", "--port", str(port), port=port):
        served = Served(file).wait_until_up()
        yield served
        served.stop()


@pytest.fixture(scope="module")
def prometheus(gateway: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Open the API of a Prometheus that scrapes the gateway every second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    file = folder / "prometheus.yaml"
    file.write_text(
        PROMETHEUS.format(rules=OBSERVABILITY / "rules.yaml", target=gateway.url.partition("//")[2])
    )
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
    with (
        running(*command, f"--web.listen-address=127.0.0.1:{port}", port=port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


def answer(prometheus: httpx.Client, expression: str) -> list[float]:
    """Return the finite values of an instant query, with variables filled as Grafana fills them."""
    filled = re.sub(r"\$(tenant|upstream)", ".*", expression.replace("$__rate_interval", "10s"))
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
        end_s = time.monotonic() + 60
        while silent and time.monotonic() < end_s:
            time.sleep(1)
            silent = [query for query in silent if not answer(prometheus, query[2])]

    assert [] == silent


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


def test_every_alert_has_a_reason_and_a_test() -> None:
    rules = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())["groups"][0]["rules"]
    tests = (OBSERVABILITY / "rules.test.yaml").read_text()

    assert rules
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "reason"}
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert f"alertname: {rule['alert']}\n" in tests
