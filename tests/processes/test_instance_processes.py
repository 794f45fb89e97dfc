"""Instances as a running gateway runs them: start, restart, stop, failure, and the death of the gateway."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.conftest import ON_A_MACHINE_OF_ONE, TLS_CONTEXT, Served, alive, wait_until
from tests.processes.test_admin_listener import free_port
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
manager:
  listen: 127.0.0.1:{port}
  kind: fake
  commands:
    fake:
      backend: tei
      argv: ["{python}", -m, tests.fakes.tei_server, --model-id, "{{model_id}}", --port, "{{port}}"]
upstreams: {{}}
models: {{}}
"""


class Manager:
    """Client of one gateway's instances."""

    def __init__(self, gateway: Served, port: int) -> None:
        self.gateway = gateway
        self._url = f"http://127.0.0.1:{port}/instances"

    def send(self, method: str, path: str = "", **body: Any) -> httpx.Response:
        """Send a request of an operator of this machine."""
        return httpx.request(
            method,
            self._url + path,
            json=body or None,
            timeout=PATIENCE_S,
            trust_env=False,
            verify=TLS_CONTEXT,
        )

    def wait_for(self, name: str, *, pid_other_than: int | None = None) -> int:
        """Wait until an instance runs in another process, and return its id."""

        def runs() -> bool:
            info = self.send("GET", f"/{name}").json()
            return info["status"] == "running" and info["pid"] != pid_other_than

        assert wait_until(runs), self.send("GET", f"/{name}/logs").text
        pid: int = self.send("GET", f"/{name}").json()["pid"]
        return pid

    def run(self, *words: str) -> str:
        """Run `gateway instances` and return what it prints."""
        command = [sys.executable, "-m", "gateway", "instances", *words, "--url", self.gateway.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def embed(self, model: str) -> int:
        """Return the status of a call."""
        with self.gateway.client() as client:
            return client.post("/v1/embeddings", json={"model": model, "input": "a text"}).status_code


@pytest.fixture
def manager(tmp_path: Path, repository: Path) -> Iterator[Manager]:
    """Serve a gateway without upstreams, whose instances are fake TEI servers."""
    port = free_port()
    file = tmp_path / "router.yaml"
    file.write_text(CONFIG.format(port=port, python=sys.executable))
    gateway = Served(file, {"PYTHONPATH": str(repository)}).wait_until_up()
    yield Manager(gateway, port)
    gateway.stop()


@ON_A_MACHINE_OF_ONE
def test_instances_start_restart_stop_and_fail(manager: Manager) -> None:
    # It takes seconds to look for the model, and ends with the test.
    assert 201 == manager.send("POST", name="e", model_id="does-not-exist", kind="engine").status_code
    created = manager.send("POST", name="a", model_id="org/x")
    assert (201, "starting") == (created.status_code, created.json()["status"])
    pid = manager.wait_for("a")
    assert 200 == manager.embed("a")

    os.kill(pid, signal.SIGKILL)
    # The call waits for the restart.
    assert 200 == manager.embed("a")
    second = manager.wait_for("a", pid_other_than=pid)
    assert 200 == manager.embed("a")
    info = manager.send("GET", "/a").json()
    assert (1, True) == (info["restarts"], info["joined"])
    assert ["serving org/x", "the process exited (signal SIGKILL)", "serving org/x"] == [
        line for line in manager.send("GET", "/a/logs").json()["lines"] if "INFO" not in line
    ]

    assert "running" in manager.run("list")
    assert "serving org/x" == manager.run("logs", "a", "--lines", "1").strip()
    assert "stopped" in manager.run("stop", "a")
    assert not alive(second)
    assert 503 == manager.embed("a")
    assert 200 == manager.send("POST", "/a/start").status_code
    third = manager.wait_for("a")
    assert wait_until(lambda: manager.send("GET", "/e").json()["status"] == "failed")
    assert "does-not-exist" in manager.send("GET", "/e").json()["reason"]
    assert "failed: " in manager.send("GET", "/e/logs?start=-1").json()["lines"][0]
    assert 204 == manager.send("DELETE", "/e").status_code
    assert ["a"] == [info["name"] for info in manager.send("GET").json()]
    # A gateway that is killed leaves no command behind.
    manager.gateway.process.kill()
    assert wait_until(lambda: not alive(third))
