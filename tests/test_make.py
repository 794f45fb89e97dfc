"""The Makefile's commands, as `make --dry-run` shows them."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def recipe(target: str) -> str:
    """Return all commands of a target, as if nothing had been made yet."""
    if shutil.which("make") is None:
        pytest.skip("no make on the path")
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout


def test_example_installs_only_what_it_needs() -> None:
    commands = recipe("example")

    assert "requirements/example.txt" in commands
    assert "requirements/dev.txt" not in commands


def test_install_shows_the_progress_of_its_largest_download() -> None:
    (torch,) = [line for line in recipe("install").splitlines() if "requirements/torch.txt" in line]

    assert "--quiet" not in torch


def test_messages_name_no_package_that_is_not_published() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("gateway/**/*.py")]

    assert [] == [path for path in texts if "install 'embedding-gateway" in path.read_text(encoding="utf-8")]
