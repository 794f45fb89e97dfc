"""Trial load of a model in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import msgspec

from backends.torch import wire
from gateway.processes.engine_process import child_environment

MODULE = "backends.torch.serving.smoke"
NO_ENGINE = "a model is checked by the built-in engine, which is not installed; `make install` installs it"


def smoke_load(boot: wire.ModelBoot, timeout_s: float, environment: Mapping[str, str]) -> wire.SmokeLoad:
    """Load a model in a process of its own."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return wire.SmokeLoad(NO_ENGINE)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", MODULE],
            input=msgspec.json.encode(boot),
            capture_output=True,
            timeout=timeout_s,
            env={**child_environment(environment), "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return wire.SmokeLoad(f"it was not loaded within {timeout_s:.0f} s; give more with --timeout")
    if ended.returncode:
        reasons = ended.stderr.decode(errors="replace").splitlines() or [f"exit status {ended.returncode}"]
        return wire.SmokeLoad(f"the load ended its process: {reasons[-1]}")
    # Code of a model may print before the result, which is the last line.
    lines = ended.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=wire.SmokeLoad)
    except msgspec.DecodeError:
        return wire.SmokeLoad("the load ended without a result")
