"""Run the tests of each client library in its own environment.

`python -m tests.clients.environments [name …]` creates missing environments below `.clients` and runs the
tests of all clients, or of the named ones. A client is a file `requirements/<name>.txt`, made by `make lock`
from `<name>.in`, plus a file `test_<name>_client.py`. A client in JavaScript also has a folder `<name>` with
`package.json` and `package-lock.json`, whose packages npm installs. The requirements pin all packages without
the hashes of every platform's wheels, because nothing of them runs where a gateway does.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = ROOT / ".clients"
# Clients with packages that are published as source only: those of IBM, and PySpark.
BUILT = frozenset({"clouds", "spark"})
# Programs that clients need from the system.
PROGRAMS = {"spark": ("java", "a Java runtime, 17 or newer")}


def names() -> list[str]:
    """Return the names of all clients."""
    return sorted(path.stem for path in (HERE / "requirements").glob("*.txt"))


def environment(name: str) -> Path:
    """Return the Python of a client's environment, created again if its requirements have changed."""
    target = HOME / name
    requirements = HERE / "requirements" / f"{name}.txt"
    packages = HERE / name / "package-lock.json"
    pinned = requirements.read_bytes() + (packages.read_bytes() if packages.exists() else b"")
    digest = hashlib.sha256(pinned).hexdigest()
    stamp = target / "made"
    python = target / "bin" / "python"
    if packages.exists() and target.exists():
        # Node finds packages beside the scripts only.
        shutil.copytree(packages.parent, target / name, dirs_exist_ok=True)
    if stamp.exists() and stamp.read_text() == digest:
        return python
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    _install(python, requirements)
    if packages.exists():
        shutil.copytree(packages.parent, target / name)
        npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(npm, check=True, cwd=target / name)
    stamp.write_text(digest)
    return python


def _install(python: Path, requirements: Path) -> None:
    wheels = ["--quiet", "--no-deps", "-r", requirements]
    if requirements.stem not in BUILT:
        # Wheels only: no package runs code of its own while it is installed.
        wheels += ["--only-binary", ":all:"]
    # uv links packages that another environment has already; pip installs each again.
    uv = Path(sys.executable).with_name("uv")
    settings = {**os.environ, "UV_HTTP_TIMEOUT": "60", "UV_HTTP_RETRIES": "1"}
    if (
        uv.exists()
        and subprocess.run(
            [uv, "pip", "install", "--python", python, *wheels], check=False, env=settings
        ).returncode
        == 0
    ):
        return
    # sie-sdk requires Python 3.12 but runs on 3.11: only pip can leave that out.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--ignore-requires-python"]
    subprocess.run([*pip, *wheels], check=True)


def passes(name: str) -> bool:
    """Return whether a client's tests pass in its environment, without the project's settings."""
    needs_node = (HERE / name / "package-lock.json").exists()
    program, words = ("npm", "Node.js with npm") if needs_node else PROGRAMS.get(name, ("", ""))
    if program and shutil.which(program) is None:
        print(f"== {name} is left out: it needs {words}", flush=True)  # noqa: T201
        return True
    tests = HERE / f"test_{name}_client.py"
    settings = ["-c", HERE / "pytest.ini", "--rootdir", HERE, "--confcutdir", HERE]
    print(f"== {name}", flush=True)  # noqa: T201 - the only output of this tool
    command = [environment(name), "-m", "pytest", *settings, tests]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def main(clients: Sequence[str]) -> int:
    """Return the number of clients whose tests fail."""
    failed = [name for name in clients or names() if not passes(name)]
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
