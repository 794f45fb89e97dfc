"""Run the tests of each client library in its own environment.

`python -m tests.clients.environments [name …]` creates missing environments below `.clients` and runs the
tests of all clients, or of the named ones. A client is a file `requirements/<name>.txt`, made by `make lock`
from `<name>.in`, plus a file `test_<name>_client.py`.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = ROOT / ".clients"


def names() -> list[str]:
    """Return the names of all clients."""
    return sorted(path.stem for path in (HERE / "requirements").glob("*.txt"))


def environment(name: str) -> Path:
    """Return the Python of a client's environment, created again if its requirements have changed."""
    target = HOME / name
    requirements = HERE / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = target / "made"
    python = target / "bin" / "python"
    if stamp.exists() and stamp.read_text() == digest:
        return python
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    # sie-sdk requires Python 3.12 but runs on 3.11. All other packages are pinned to versions for both.
    flags = ["--require-hashes", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*pip, *flags, "-r", requirements], check=True)
    stamp.write_text(digest)
    return python


def passes(name: str) -> bool:
    """Return whether a client's tests pass in its environment, without the project's settings."""
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
