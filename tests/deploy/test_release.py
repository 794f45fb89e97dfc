"""A release: licenses of all packages, workflows that a forge accepts, and its changelog."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# What the image, and everyone who installs the wheel with its extras, receives.
PINS = ROOT / "requirements/gateway-full.txt"


@pytest.fixture(scope="module")
def components() -> dict[str, Any]:
    """Return the SBOM's components of this environment, by their normalized names."""
    # `make dist` validates the document, which takes 20 times as long as to make it.
    options = ["--gather-license-texts", "--no-validate", "-o", "-"]
    command = [BIN / "cyclonedx-py", "environment", *options, sys.executable]
    made = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S, text=True)
    listed = json.loads(made.stdout)["components"]
    return {normalized(component["name"]): component for component in listed}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Return the versions of the packages that this platform needs."""
    lines = re.findall(r"^([\w.-]+)==([\w.]+)(?: ; (.*))? \\$", PINS.read_text(), re.MULTILINE)
    elsewhere = re.compile(r"sys_platform == '(win32|emscripten)'|python_full_version (>= '3.12'|< '3.11.3')")
    here = {normalized(name): version for name, version, marker in lines if not elsewhere.search(marker)}
    assert len(here) > 50
    return here


def test_every_package_has_a_license_that_allows_to_ship_it(components: dict[str, Any]) -> None:
    for name in pinned():
        licenses = json.dumps(components[name].get("licenses", []))
        assert licenses != "[]", name
        # The LGPL's library is a file of its own, which a user can replace.
        assert not re.search(r"(?<!L)GPL|SSPL|BUSL|Commons Clause", licenses), (name, licenses)


def test_workflows_fit_the_schema_of_the_forge() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    checked = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True, check=False)

    assert 0 == checked.returncode, checked.stdout


def test_the_schema_of_the_forge_detects_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(wrong)]

    assert 0 != subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False).returncode


def test_an_audit_finds_no_weakness_in_the_workflows() -> None:
    command = [BIN / "zizmor", "--offline", "--no-progress", "--format", "plain", "--min-severity", "medium"]
    audited = subprocess.run(
        [*command, ROOT / ".github"], capture_output=True, timeout=PATIENCE_S, text=True, check=False
    )

    assert 0 == audited.returncode, audited.stdout


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()

    assert len(steps(path)) > 5
    for step in steps(path):
        if "uses" in step:
            # The commit and its version, which a reader compares.
            line = rf"uses: {re.escape(step['uses'])} # v\d+\.\d+\.\d+"
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
            assert re.search(line, text), step["uses"]
        assert set(re.findall(r"\bmake (?:--silent )?([a-z-]+)", step.get("run", ""))) <= targets


def test_the_images_of_a_release_are_those_of_the_makefile_and_the_chart() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    matrix = release["jobs"]["images"]["strategy"]["matrix"]["include"]
    published = {(flavour["suffix"], flavour["torch"], flavour["extras"]) for flavour in matrix}
    makefile = (ROOT / "Makefile").read_text()
    schema = json.loads((ROOT / "deploy/helm/embedding-gateway/values.schema.json").read_text())
    flavours = schema["properties"]["image"]["properties"]["flavour"]["enum"]

    assert published == set(re.findall(r"\$\(call image,([\w-]*),(\w+),(\w*)\)", makefile))
    assert {f"-{flavour}" for flavour in flavours} - {"-cpu"} | {""} == {suffix for suffix, *_ in published}


def release_notes(tag: str, changelog: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `make release-notes` in a folder with a changelog."""
    shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
    (folder / "gateway").mkdir()
    shutil.copyfile(ROOT / "gateway/__init__.py", folder / "gateway/__init__.py")
    (folder / "CHANGELOG.md").write_text(changelog)
    command = ["make", "--silent", "release-notes", f"TAG={tag}"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, timeout=PATIENCE_S, text=True, check=False
    )


CHANGELOG = (
    f"# Changelog\n\n## Unreleased\n\n## {__version__} - 2026-12-01\n\n- A.\n\n## 0.0.9 - 2026-11-01\n"
)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on the path")
@pytest.mark.parametrize(
    ("tag", "changelog", "rc", "printed"),
    [
        (f"v{__version__}", CHANGELOG, 0, "- A."),
        ("v9.9.9", CHANGELOG, 2, f"The version of gateway/__init__.py is {__version__}, and TAG is v9.9.9"),
        (
            f"v{__version__}",
            "# Changelog\n\n## Unreleased\n",
            2,
            f"CHANGELOG.md has no section {__version__}",
        ),
    ],
)
def test_a_tag_names_the_version_and_its_changes(
    tag: str, changelog: str, rc: int, printed: str, tmp_path: Path
) -> None:
    made = release_notes(tag, changelog, tmp_path)

    assert (rc, printed) == (made.returncode, made.stdout.strip())


def test_a_release_leaves_no_fragment_of_the_changelog(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on the path")
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes/bell.added.md").write_text("A bell rings.\n")
    made = release_notes(f"v{__version__}", CHANGELOG, tmp_path)

    assert (2, "changes/bell.added.md\nThese changes are not in CHANGELOG.md: run make changelog") == (
        made.returncode,
        made.stdout.strip(),
    )
