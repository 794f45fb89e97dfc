"""The images that `make images` built: each starts, serves, and is as small as its flavour promises.

Skipped for a flavour whose image is not there, as on a machine without Docker.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway import __version__
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, wait_until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

REPOSITORY = "embedding-gateway"
BASE = "python:3.11-slim-bookworm"
WITHOUT_ENGINE = ("-gateway", "-gateway-full")
FLAVOURS = ("", "-cuda", *WITHOUT_ENGINE)
START_S = 60.0
MB = 1e6


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, timeout=PATIENCE_S, text=True, check=check
    )


def image(suffix: str) -> str:
    """Return the name of a flavour's image, or skip the test."""
    name = f"{REPOSITORY}:{__version__}{suffix}"
    if shutil.which("docker") is None or docker("image", "inspect", name, check=False).returncode:
        pytest.skip(f"no image {name}")
    return name


def size(name: str) -> int:
    """Return the bytes of an image's layers."""
    return int(json.loads(docker("image", "inspect", name).stdout)[0]["Size"])


@contextmanager
def running(name: str, config: Path) -> Iterator[str]:
    """Run the image on a configuration, in this machine's network; yield the container's id."""
    hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "host")
    mount = f"{config}:/etc/gateway/router.yaml:ro"
    started = docker("run", "-d", *hardened, "-e", f"GATEWAY_API_KEY={KEY}", "-v", mount, name)
    container = started.stdout.strip()
    try:
        yield container
    finally:
        docker("rm", "--force", container)


def written(folder: Path, upstream: str, more: str = "") -> tuple[Path, str]:
    """Write a configuration for a free port; return its path and the gateway's address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = folder / "router.yaml"
    path.write_text(
        f"listen: 127.0.0.1:{port}\n{more}"
        f"upstreams: {{tei: {{backend: tei, replicas: ['{upstream}']}}}}\n"
        "models: {m: {upstream: tei}}\ndefaults: {embed: m}\n"
    )
    path.chmod(0o644)
    return path, f"http://127.0.0.1:{port}"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("suffix", FLAVOURS)
def test_it_serves(suffix: str, tmp_path: Path) -> None:
    name = image(suffix)
    with serve_in_thread(FakeTei()) as upstream:
        config, url = written(tmp_path, upstream)
        with running(name, config) as container:
            assert wait_until(lambda: is_ready(url), START_S), docker("logs", container)
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client:
                reply = client.post("/v1/embeddings", json={"input": ["a", "b"]})
                arrow = {"accept": "application/vnd.apache.arrow.stream"}
                in_arrow = client.post("/v1/embeddings", json={"input": ["a"]}, headers=arrow)
                pages = [client.get(path).status_code for path in ("/ui", "/docs", "/openapi.json")]

    assert (200, 2) == (reply.status_code, len(reply.json()["data"]))
    assert [200] * 3 == pages
    if suffix == "-gateway":
        assert 415 == in_arrow.status_code
        assert "without Arrow" in in_arrow.text
    else:
        assert (200, arrow["accept"]) == (in_arrow.status_code, in_arrow.headers["content-type"])


@pytest.mark.parametrize("suffix", FLAVOURS)
def test_grpc_is_checked_before_the_start(suffix: str, tmp_path: Path) -> None:
    name = image(suffix)
    config, _ = written(tmp_path, "http://tei", more="grpc: {listen: 127.0.0.1:50051}\n")
    mount = f"{config}:/etc/gateway/router.yaml:ro"
    checked = docker("run", "--rm", "-v", mount, name, "check", check=False)

    assert ("needs the extra `grpc`" in checked.stdout + checked.stderr) is (suffix == "-gateway")
    assert (checked.returncode != 0) is (suffix == "-gateway")


def test_the_flavour_without_an_engine_is_small() -> None:
    name = image("-gateway")

    assert (size(name) - size(BASE)) / MB < 200
