"""Servers of a measured run on one machine: stub, Redis, gateways, and peers; all on loopback.

The measured server has core 0 for itself; stub, load and Redis share core 1.
"""

import http.client
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gateway.tenants.keyring import key_digest
from loadtest import corpora
from loadtest.corpora import CallFactory
from loadtest.generator import LoadTarget, is_correct
from loadtest.processes import PinnedProcess, ResourceUsage, free_port, listens
from loadtest.stub import StubStats

# The checkout that this harness belongs to.
ROOT = Path(__file__).resolve().parents[1]
MEASURED_CORE, LOAD_CORE = 0, 1
KEY = "sk-loadtest"
NOT_PERSISTENT = ("--save", "", "--appendonly", "no")

# Peers from the package index, each in an environment of its own.
PEERS = {
    "sglang-router": "sglang-router==0.3.2",
    "vllm-router": "vllm-router==0.1.17",
    "litellm": "litellm[proxy]==1.106.2",
}


class RunningServer(msgspec.Struct, frozen=True):
    """A server that accepts calls."""

    name: str
    target: LoadTarget
    process: PinnedProcess

    @property
    def watch(self) -> dict[str, Callable[[], ResourceUsage]]:
        """Usage of its processes, under its name."""
        return {self.name: self.process.usage}


def start_stub(folder: Path, *flags: str, name: str = "stub") -> RunningServer:
    """Start `loadtest.stub` with these flags on the load's core."""
    port = free_port()
    command = [sys.executable, "-m", "loadtest.stub", "--port", str(port), *flags]
    stub = PinnedProcess(command, LOAD_CORE, folder / f"{name}-{port}.log", working_directory=ROOT)
    stub.wait_until(lambda: listens(port))
    return RunningServer(name, LoadTarget(port), stub)


def start_redis(
    folder: Path, port: int | None = None, persistence: Sequence[str] = NOT_PERSISTENT
) -> tuple[PinnedProcess, str]:
    """Start a server; return it and its URL. port: absent, a free one.

    Raises: RuntimeError where none is installed.
    """
    environment_bin = str(Path(sys.executable).parent)
    executable = shutil.which("redis-server") or shutil.which("redis-server", path=environment_bin)
    if executable is None:
        raise RuntimeError("no redis-server on the path")
    port = free_port() if port is None else port
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", *persistence]
    redis = PinnedProcess([*command, "--dir", str(folder)], LOAD_CORE, folder / f"redis-{port}.log")
    redis.wait_until(lambda: listens(port))
    return redis, f"redis://127.0.0.1:{port}/0"


def start_gateway(
    folder: Path, config: str, *, name: str = "gateway", tree: Path = ROOT, cores: str = str(MEASURED_CORE)
) -> RunningServer:
    """Start the gateway of one checkout on the measured core.

    config: router.yaml without `listen`. tree: the checkout whose code runs. cores: as in `taskset`.

    Raises: RuntimeError.
    """
    environment = {"PYTHONPATH": str(tree)}
    _require_code_of(tree, environment)
    port = free_port()
    path = folder / f"{name}-{port}.yaml"
    path.write_text(f"listen: 127.0.0.1:{port}\n{config}")
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(path)]
    # `python -m` looks in the working directory before PYTHONPATH.
    log = path.with_suffix(".log")
    process = PinnedProcess(command, cores, log, environment, working_directory=tree)
    process.wait_until(lambda: answers(port, "/readyz"))
    return RunningServer(name, with_key(port, KEY), process)


def _require_code_of(tree: Path, environment: dict[str, str]) -> None:
    """Raise RuntimeError unless `import gateway` finds the package of this checkout."""
    command = [sys.executable, "-c", "import gateway; print(gateway.__file__)"]
    imported = subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if not imported.stdout.startswith(f"{tree}/"):
        raise RuntimeError(f"{tree} holds no gateway package: {imported.stdout or imported.stderr}")


def with_key(port: int, key: str) -> LoadTarget:
    """Return a target whose calls carry a key."""
    return LoadTarget(port, {"authorization": f"Bearer {key}"})


def tenant(key: str, settings: str = "") -> str:
    """Return a tenant's entry in flow style."""
    return f'{{keys: ["{key_digest(key)}"]{settings}}}'


def start_peer(name: str, folder: Path, stub_port: int, cache: Path) -> RunningServer:
    """Start one of PEERS, or nginx.

    Raises: RuntimeError, subprocess.CalledProcessError.
    """
    port = free_port()
    match name:
        case "nginx":
            command, ready = _nginx(folder, port, stub_port), "/health"
        case "litellm":
            command, ready = _litellm(folder, port, stub_port, cache), "/health/liveliness"
        case _:
            command, ready = _router(name, port, stub_port, cache), "/health"
    process = PinnedProcess(command, MEASURED_CORE, folder / f"{name}.log")
    process.wait_until(lambda: answers(port, ready) and answers(port, "/v1/embeddings", _single_call(port)))
    return RunningServer(name, with_key(port, KEY), process)


def _single_call(port: int) -> bytes:
    return CallFactory(corpora.texts("queries", port % 1000)).next(b"%d\n").request.partition(b"\n")[2]


def _environment(requirement: str, cache: Path) -> Path:
    """Return the bin folder of a virtual environment with this package, created on first use."""
    package, _, version = requirement.partition("==")
    home = cache / f"{package.partition('[')[0]}-{version}"
    if not (home / "installed").exists():
        print(f"installing {requirement} in {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, requirement], check=True)
        (home / "installed").touch()
    return home / "bin"


def _router(name: str, port: int, stub_port: int, cache: Path) -> list[str]:
    module = name.replace("-", "_")
    command = [str(_environment(PEERS[name], cache) / "python"), "-m", f"{module}.launch_router"]
    listeners = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    workers = ["--worker-urls", f"http://127.0.0.1:{stub_port}"]
    return [*command, *listeners, *workers, "--policy", "round_robin", "--log-level", "error"]


def _litellm(folder: Path, port: int, stub_port: int, cache: Path) -> list[str]:
    config = folder / "litellm.yaml"
    upstream = f"{{model: openai/stub, api_base: 'http://127.0.0.1:{stub_port}/v1', api_key: unused}}"
    config.write_text(
        f"model_list: [{{model_name: stub, litellm_params: {upstream}}}]\n"
        f"general_settings: {{master_key: {KEY}}}\n"
    )
    executable = _environment(PEERS["litellm"], cache) / "litellm"
    return [str(executable), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _nginx(folder: Path, port: int, stub_port: int) -> list[str]:
    executable = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if executable is None:
        raise RuntimeError("no nginx on the path")
    temporary = "".join(
        f"{kind}_temp_path {folder}/nginx-{kind}; "
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; {temporary} keepalive_requests 1000000000;\n"
        f"upstream stub {{ server 127.0.0.1:{stub_port}; keepalive 256; keepalive_requests 1000000000; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://stub; proxy_http_version 1.1;\n"
        'proxy_set_header Connection ""; proxy_buffers 8 64k; } } }\n'
    )
    return [executable, "-c", str(config)]


def answers(port: int, path: str, body: bytes | None = None) -> bool:
    """Return True if a GET, or a POST of this body, gets status 200."""
    try:
        return request(port, path, body)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def request(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Return status and body of one request.

    Raises: OSError, http.client.HTTPException.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    try:
        connection.request("GET" if body is None else "POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def control(stub: RunningServer, **settings: object) -> None:
    """Change how the stub behaves; reset=True clears its counts."""
    status, reply = request(stub.target.port, "/control", msgspec.json.encode(settings))
    if status != 200:
        raise ValueError(reply.decode())


def stats(stub: RunningServer) -> StubStats:
    """Return the stub's counts."""
    return msgspec.json.decode(request(stub.target.port, "/stats")[1], type=StubStats)


def metric(gateway: RunningServer, name: str) -> float:
    """Return a metric of the gateway, summed over all labels."""
    lines = request(gateway.target.port, "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def check_forwards(server: RunningServer, stub: RunningServer) -> None:
    """Verify that one call reaches the stub once and returns with its text's vector.

    Raises: RuntimeError.
    """
    call = CallFactory(corpora.texts("queries", 77)).next(server.target.head())
    before = stats(stub).requests
    body = call.request.partition(b"\r\n\r\n")[2]
    status, reply = request(server.target.port, "/v1/embeddings", body)
    if status != 200 or not is_correct(reply, call.inputs) or stats(stub).requests != before + 1:
        raise RuntimeError(f"{server.name} does not forward: status {status}, {reply[:200]!r}")
