"""Process around a command of an instance: it starts the command and ends its whole group of processes.

Rule: the command lives as long as this process, and this process as long as the parent's pipe. Only the
standard library is imported, because each instance has such a process.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from threading import Thread, Timer

# Time for the command to exit after SIGTERM: longer if the gateway waits for it.
STOP_AFTER_S = 30.0
ORPHAN_STOP_AFTER_S = 5.0
NOT_FOUND = 127
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the command; entry point of the child process."""
    boot = json.loads(sys.stdin.buffer.readline())
    libc = ctypes.CDLL(None)

    def die_with_host() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        # The arguments come from a template of router.yaml; no shell reads them.
        command = subprocess.Popen(
            boot["argv"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_host,  # noqa: PLW1509 - this process has no other thread yet
        )
    except OSError as error:
        os.write(sys.stderr.fileno(), f"{boot['argv'][0]} cannot be started: {error.strerror}\n".encode())
        sys.exit(NOT_FOUND)
    signal.signal(signal.SIGTERM, lambda *_: _stop(command.pid, STOP_AFTER_S))
    Thread(target=_stop_with_parent, args=(command.pid,), daemon=True).start()
    os.write(boot["status_fd"], f"{command.pid}\n".encode())
    os.close(boot["status_fd"])
    code = command.wait()
    _signal_group(command.pid, signal.SIGKILL)
    # Of the command: its signal kills this process too, or its status is this one's.
    if code < 0:
        with contextlib.suppress(OSError):
            # SIGKILL has no handler to remove.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _stop(group: int, patience_s: float) -> None:
    """Send SIGTERM to a group of processes, and SIGKILL if it has not exited in time."""
    _signal_group(group, signal.SIGTERM)
    timer = Timer(patience_s, _signal_group, (group, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _stop_with_parent(group: int) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _stop(group, ORPHAN_STOP_AFTER_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
