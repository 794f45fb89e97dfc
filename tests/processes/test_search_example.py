"""The search example finds the functions that a person would expect."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import KEY, Served

pytestmark = pytest.mark.slow


def test_ranks_the_expected_functions_first(served: Served, repository: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(repository / "examples/search_docs.py")],
        env={"GATEWAY_URL": served.url, "GATEWAY_API_KEY": KEY, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    first = {
        block.splitlines()[0]: re.findall(r"^  [\d.]+  (\S+)", block, re.MULTILINE)
        for block in ended.stdout.split("\n\n")[1:]
    }

    assert first["how to parse JSON"][0] in {"json.load", "json.loads"}
    assert first["wait for several tasks at once"][0] in {"asyncio.wait", "asyncio.gather"}
    assert "re.split" == first["split a string where a regular expression matches"][0]
