"""The wheel: equal byte for byte, complete, and able to serve outside of the repository."""

import hashlib
import os
import shutil
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
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "backends")
START_S = 50.0


def build(tree: Path, folder: Path) -> Path:
    """Build the archives of a tree as a release does: the wheel from the sdist, without the repository."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1767225600"}
    sdist = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(sdist, cwd=tree, env=environment, check=True, capture_output=True, timeout=PATIENCE_S)
    (built,) = folder.glob("*.tar.gz")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*wheel, "--wheel-dir", str(folder), str(built)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=PATIENCE_S)
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the archives of the repository."""
    return build(ROOT, tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (built,) = archives.glob("*.whl")
    return built


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_two_builds_give_the_same_bytes(archives: Path, tmp_path: Path) -> None:
    # Another place, other times and other rights of the files.
    copy = tmp_path / "copy"
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copyfile(ROOT / name, copy / name)
    (copy / "README.md").chmod(0o600)
    os.utime(copy / "LICENSE", (0, 0))

    built = digests(archives)

    assert built == digests(build(copy, tmp_path / "second"))
    stem = f"embedding_gateway-{__version__}"
    assert {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"} == set(built)


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
    clouds = {"aws", "azure", "egress", "google"}
    assert {"torch", "grpc", "lance", "media", "oidc", "openvino", "otlp", "s3"} | clouds == extras
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
