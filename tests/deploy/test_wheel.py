"""The wheel: complete, without anything else, and able to serve outside of the repository."""

import os
import socket
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

from gateway import __version__
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, wait_until

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "backends")
START_S = 50.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as a release does: from the sdist, hence without the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, sdist], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_it_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert names == {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_its_metadata_name_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(place).decode())

    assert ("embedding-gateway", __version__) == (metadata["name"], metadata["version"])
    extras = set(metadata.get_all("provides-extra"))
    assert {"torch", "grpc", "lance", "media", "oidc", "openvino", "otlp", "s3"} == extras
    # Users of other engines do not download PyTorch.
    needed = [line for line in metadata.get_all("requires-dist") if "extra ==" not in line]
    assert not any(line.startswith(("torch", "transformers")) for line in needed)


@pytest.mark.slow
def test_it_serves_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = "from gateway.__main__ import main; main()"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GATEWAY_API_KEY": KEY,
    }
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with serve_in_thread(FakeTei()) as upstream, (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-P", "-c", program, "serve", upstream, "--port", str(port)]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            assert wait_until(lambda: _is_ready(url), START_S), (tmp_path / "log").read_text()
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client:
                reply = client.post("/v1/embeddings", json={"input": ["a", "b"]})
                pages = [client.get(path).status_code for path in ("/ui", "/ui/page.js", "/docs")]
        finally:
            process.terminate()
            process.wait(START_S)

    assert (200, 2) == (reply.status_code, len(reply.json()["data"]))
    assert [200] * 3 == pages
    assert str(ROOT) not in (tmp_path / "log").read_text()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False
