"""The Makefile's commands, as `make --dry-run` shows them."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.lowest import PINNED_ONLY, SURFACES
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]


def recipe(target: str, *variables: str) -> str:
    """Return all commands of a target, as if nothing had been made yet."""
    if shutil.which("make") is None:
        pytest.skip("no make on the path")
    command = ["make", "--dry-run", "--always-make", target, *variables]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout


def test_example_installs_only_what_it_needs() -> None:
    commands = recipe("example")

    assert "requirements/example.txt" in commands
    assert "requirements/dev.txt" not in commands


@pytest.mark.parametrize(
    ("build", "begins"),
    [
        ((), ".venv/bin/uv pip install --python .venv/bin/python --torch-backend=auto "),
        (("TORCH=cpu",), ".venv/bin/uv pip install --python .venv/bin/python --torch-backend=cpu "),
        (("TORCH=cuda",), ".venv/bin/python -m pip --disable-pip-version-check install "),
        (
            ("TORCH_INDEX=https://h/whl",),
            ".venv/bin/python -m pip --disable-pip-version-check install --index-url ",
        ),
    ],
)
def test_install_chooses_the_build_and_shows_the_progress_of_its_download(
    build: tuple[str, ...], begins: str
) -> None:
    (line,) = [line for line in recipe("install", *build).splitlines() if "requirements/torch.txt" in line]
    torch = line[line.index(begins) :].partition("requirements/torch.txt")[0]

    assert "--quiet" not in torch


def test_dist_builds_the_wheel_from_the_sdist_and_lists_what_a_clean_environment_has() -> None:
    commands = recipe("dist")
    order = [
        "--target sdist",
        "pip wheel",
        "dist/*.tar.gz",
        "-m venv .venv-dist",
        "pip check",
        "cyclonedx-py",
    ]
    places = [commands.replace("--disable-pip-version-check ", "").rindex(part) for part in order]

    assert sorted(places) == places
    assert 3 == commands.count("SOURCE_DATE_EPOCH=")


def test_messages_name_no_package_that_is_not_published() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("gateway/**/*.py")]

    assert [] == [path for path in texts if "install 'embedding-gateway" in path.read_text(encoding="utf-8")]


def test_hooks_of_commits_run_what_make_check_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    recipes = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0].splitlines()[1:]

    assert "local" == local["repo"]
    assert {line.strip().replace("$(BIN)", ".venv/bin") for line in recipes} == {
        hook["entry"] for hook in local["hooks"]
    }


def test_the_lowest_versions_are_tested_by_files_of_each_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    floors = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[^\w-]", line)[0] for line in floors}
    files = {file for found in SURFACES.values() for file in found}

    assert names == SURFACES.keys() | PINNED_ONLY
    assert [] == sorted(file for file in files if not (ROOT / "tests" / file).is_file())
    assert "pytest --lowest tests/unit tests/api tests/backends tests/quotas " in recipe("test-lowest")
