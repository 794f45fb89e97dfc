"""A worker of remote upstreams imports no heavy library."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, sys
from pathlib import Path
import gateway.processes.worker
from gateway.app import build
from gateway.config.load import parse_config
from gateway.config.boot import AppBoot

CONFIG = "upstreams: {u: {backend: tei, replicas: ['http://tei']}}\\nmodels: {m: {upstream: u}}"

async def main():
    build(AppBoot(parse_config(CONFIG, {}, Path.cwd()), None))

asyncio.run(main())
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_worker_of_remote_upstreams_imports_nothing_heavy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    loaded = set(ended.stdout.split())
    assert {"gateway", "litestar", "numpy"} <= loaded
    assert not {"torch", "transformers", "tokenizers", "pydantic", "attr"} & loaded
