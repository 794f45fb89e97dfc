"""Real proxies for hosted upstreams: tinyproxy and squid on loopback, with or without credentials."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tests.quotas.redis_server import free_port
from tests.waiting import PATIENCE_S

ProxyKind = Literal["tinyproxy", "squid"]
KINDS: tuple[ProxyKind, ...] = ("tinyproxy", "squid")
USER, PASSWORD = "gateway", "proxypassword-5f1"
TINYPROXY = """
Port {port}
Listen 127.0.0.1
Timeout 60
Allow 127.0.0.1
LogFile "{folder}/log"
LogLevel Connect
MaxClients 20
{auth}
"""
SQUID = """
http_port 127.0.0.1:{port}
pid_filename none
cache deny all
cache_log stdio:{folder}/cache.log
access_log stdio:{folder}/log
coredump_dir {folder}
visible_hostname proxy.test
shutdown_lifetime 0 seconds
{auth}
"""
SQUID_AUTH = """
auth_param basic program /usr/lib/squid/basic_ncsa_auth {folder}/passwd
acl known proxy_auth REQUIRED
http_access allow known
http_access deny all
"""


def program_of(kind: ProxyKind) -> str | None:
    """Return the path of a proxy's program, None if it is not installed."""
    return shutil.which(kind) or shutil.which(kind, path="/usr/sbin:/usr/local/sbin")


@contextmanager
def running_proxy(kind: ProxyKind, *, has_users: bool = False) -> Iterator[tuple[str, Path]]:
    """Run a proxy, and yield its URL without credentials and the path of its log.

    has_users: it requires `USER` and `PASSWORD`.
    """
    program, port = program_of(kind), free_port()
    assert program is not None
    # Not a folder of pytest's: squid gives up the rights of root, and could not read it.
    folder = Path(tempfile.mkdtemp(prefix="proxy-"))
    folder.chmod(0o777)
    file = folder / "proxy.conf"
    if kind == "tinyproxy":
        auth = f"BasicAuth {USER} {PASSWORD}" if has_users else ""
        file.write_text(TINYPROXY.format(port=port, folder=folder, auth=auth))
        command = [program, "-d", "-c", str(file)]
    else:
        digest = subprocess.run(
            ["openssl", "passwd", "-apr1", PASSWORD], check=True, capture_output=True, text=True
        ).stdout.strip()
        (folder / "passwd").write_text(f"{USER}:{digest}\n")
        auth = SQUID_AUTH.format(folder=folder) if has_users else "http_access allow all"
        file.write_text(SQUID.format(port=port, folder=folder, auth=auth))
        command = [program, "-N", "-f", str(file)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}", folder / "log"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        shutil.rmtree(folder)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program accepts connections."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, "it ended at its start"
        assert time.monotonic() < end_s, "it did not start"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
