"""Child process that writes a very long line and a short one, and waits."""

import os
import sys


def main() -> None:
    status_fd = int(sys.stdin.readline())
    line = b"x" * 1_000_000 + b"\n" + b"short\n"
    while line:
        line = line[os.write(status_fd, line) :]
    sys.stdin.read()
