"""Start, stop and kill of a gateway, as seen by callers and by the operating system."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from backends.checkpoints.locations import DEFAULT_MODEL
from tests.processes.conftest import KEY, Served, alive, run_serve, wait_until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ENGINE = """
listen: 127.0.0.1:{port}
drain_s: 10
upstreams: {{minilm: {{backend: torch, model: {model}, dtype: float32}}}}
models:
  minilm: {{upstream: minilm, deadline_s: 40}}
  hasty: {{upstream: minilm, deadline_s: 1}}
defaults: {{embed: minilm}}
"""
REMOTE = """
listen: 127.0.0.1:0
upstreams: {{other: {{backend: tei, replicas: ["{url}"], api_key: "{key}"}}}}
models: {{remote/minilm: {{upstream: other}}}}
"""


def write_config(folder: Path, port: int = 0, model: str = DEFAULT_MODEL) -> Path:
    path = folder / "router.yaml"
    path.write_text(ENGINE.format(port=port, model=model))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve an engine to tests that run in order; the last one kills the gateway."""
    gateway = Served(write_config(tmp_path_factory.mktemp("shared"))).wait_until_up()
    yield gateway
    gateway.stop()


def embed(url: str, texts: list[str]) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(
        f"{url}/embed", json={"inputs": texts}, headers=headers, timeout=PATIENCE_S, trust_env=False
    )


def test_gateway_is_a_tei_upstream_of_another_without_torch(shared: Served, tmp_path: Path) -> None:
    path = tmp_path / "remote.yaml"
    path.write_text(REMOTE.format(url=f"{shared.url}/models/minilm", key=KEY))
    front = Served(path).wait_until_up()
    try:
        direct = embed(shared.url, ["a", "b"]).json()
        through = embed(front.url, ["a", "b"]).json()
        pids = [front.process.pid, *front.children()]
        mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)

        assert direct == through
        assert "libtorch" not in mapped
    finally:
        front.stop()


def test_a_lame_duck_is_not_ready_and_serves_new_calls(shared: Served, tmp_path: Path) -> None:
    path = tmp_path / "remote.yaml"
    path.write_text("lame_duck_s: 3\n" + REMOTE.format(url=f"{shared.url}/models/minilm", key=KEY))
    front = Served(path).wait_until_up()
    try:
        front.process.send_signal(signal.SIGTERM)
        ready = lambda: httpx.get(f"{front.url}/readyz", trust_env=False).status_code  # noqa: E731
        assert wait_until(lambda: ready() == 503)
        # On a new connection.
        assert 200 == embed(front.url, ["a"]).status_code
        assert 0 == front.process.wait(PATIENCE_S)
    finally:
        front.stop()


def test_killed_engine_delays_twenty_callers_without_an_error(shared: Served) -> None:
    engine = shared.child("backends.torch.serving.server")
    texts = [[f"some words of a text {n} {i} " * 12 for i in range(8)] for n in range(20)]
    with ThreadPoolExecutor(20) as callers:
        waiting = [callers.submit(embed, shared.url, own) for own in texts]
        assert wait_until(lambda: any(future.done() for future in waiting))
        os.kill(engine, signal.SIGKILL)
        statuses = [future.result().status_code for future in waiting]

    assert statuses == [200] * 20
    assert engine != shared.child("backends.torch.serving.server")


def test_engine_not_restarted_by_the_deadline_is_503_with_retry_after(shared: Served) -> None:
    os.kill(shared.child("backends.torch.serving.server"), signal.SIGKILL)
    reply = embed(f"{shared.url}/models/hasty", ["a"])

    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1


def test_killing_the_parent_leaves_no_child(shared: Served) -> None:
    # Until then the engine that the previous test killed may be missing.
    assert embed(shared.url, ["a"]).status_code == 200
    children = shared.children()

    shared.process.kill()

    assert len(children) >= 2
    assert wait_until(lambda: not any(alive(pid) for pid in children))


def test_sigterm_finishes_requests_in_flight_and_refuses_new_ones(tmp_path: Path) -> None:
    gateway = Served(write_config(tmp_path)).wait_until_up()
    children = gateway.children()
    with ThreadPoolExecutor(2) as callers, gateway.client() as late:
        assert late.get("/readyz").status_code == 200
        long_call = callers.submit(embed, gateway.url, ["some words of a text " * 40] * 96)
        assert wait_until(lambda: in_flight_at_engine(late))
        gateway.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: late.get("/readyz").status_code == 503)
        refused = late.post("/embed", json={"inputs": ["new"]})
        done = long_call.result()

    assert done.status_code == 200
    assert len(done.json()) == 96
    assert (refused.status_code, refused.json()["error_type"]) == (503, "Unhealthy")
    assert "retry-after" in refused.headers
    assert gateway.stop() == 0
    assert not any(alive(pid) for pid in children)


def in_flight_at_engine(client: httpx.Client) -> bool:
    """Return True once the long request has been admitted; its cost is counted before it is sent."""
    text = client.get("/metrics").text
    return 'gateway_quota_decisions_total{decision="admitted",tenant="default"}' in text


def test_a_refused_model_that_is_not_preloaded_stops_no_start(tmp_path: Path) -> None:
    folder = tmp_path / "refused"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nonsense", "architectures": ["X"]}')
    path = write_config(tmp_path)
    refused = f"refused: {{backend: torch, model: {folder}, preload: false}}"
    text = path.read_text().replace("upstreams: {minilm:", f"upstreams: {{{refused}, minilm:")
    path.write_text(text.replace("models:", "models:\n  refused: {upstream: refused}"))
    gateway = Served(path).wait_until_up()
    try:
        with gateway.client() as client:
            ready = client.get("/readyz").status_code
            replicas = {
                replica["upstream"]: (replica["state"], replica["reason"])
                for replica in client.get("/admin/status").json()["replicas"]
            }
            called = client.post("/v1/embeddings", json={"model": "refused", "input": "a"})
        assert 200 == embed(gateway.url, ["a"]).status_code
    finally:
        gateway.stop()

    assert (200, 503) == (ready, called.status_code)
    assert "cannot be loaded" in called.json()["error"]["message"]
    assert "up" == replicas["minilm"][0]
    assert "down" == replicas["refused"][0]
    assert "how many tokens the model takes" in replicas["refused"][1]
    assert any("upstream refused: its model cannot be loaded" in line for line in gateway.log)


def test_reports_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        ended = run_serve(write_config(tmp_path, port=port))

    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("model", ["./no-such-folder", "nobody/no-such-model"])
def test_reports_missing_checkpoint_and_the_way_out(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = run_serve(write_config(tmp_path, model=model))

    assert ended.returncode == 1
    assert re.search(r"upstreams\.minilm(\.model)?: .*(there is no folder|fetched)", ended.stderr)
    assert '"event":"ready"' not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_reports_every_config_mistake_at_once(repository: Path) -> None:
    config = repository / "tests/configs/invalid/five_mistakes.yaml"
    ended = run_serve(config)

    assert ended.returncode == 1
    assert "has 5 problems" in ended.stderr
