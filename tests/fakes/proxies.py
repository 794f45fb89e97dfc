"""Real proxies for hosted upstreams on loopback, with or without credentials: over HTTP, HTTPS and SOCKS."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from tests.processes.tls_files import Authority
from tests.quotas.redis_server import free_port
from tests.waiting import PATIENCE_S

ProxyKind = Literal["tinyproxy", "squid", "squid-tls", "microsocks"]
KINDS: tuple[ProxyKind, ...] = get_args(ProxyKind)
SCHEMES: dict[ProxyKind, str] = {
    "tinyproxy": "http",
    "squid": "http",
    "squid-tls": "https",
    "microsocks": "socks5",
}
# What each logs of a tunnel, CONNECT unless it is here.
TUNNEL_WORDS: dict[ProxyKind, str] = {"microsocks": "connected to"}
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
{listen} 127.0.0.1:{port} {tls}
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
    name = kind.removesuffix("-tls")
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if program is not None and kind == "squid-tls":
        # Not every squid is built with TLS.
        built = subprocess.run([program, "-v"], check=True, capture_output=True, text=True).stdout
        return program if "gnutls" in built or "openssl" in built else None
    return program


def _command(
    kind: ProxyKind, folder: Path, port: int, authority: Authority | None, *, has_users: bool
) -> list[str]:
    """Return the command of a proxy, whose files are written into a folder."""
    program, file = program_of(kind), folder / "proxy.conf"
    assert program is not None
    if kind == "microsocks":
        users = ["-u", USER, "-P", PASSWORD] if has_users else []
        return [program, "-i", "127.0.0.1", "-p", str(port), *users]
    if kind == "tinyproxy":
        auth = f"BasicAuth {USER} {PASSWORD}" if has_users else ""
        file.write_text(TINYPROXY.format(port=port, folder=folder, auth=auth))
        return [program, "-d", "-c", str(file)]
    digest = subprocess.run(
        ["openssl", "passwd", "-apr1", PASSWORD], check=True, capture_output=True, text=True
    ).stdout.strip()
    (folder / "passwd").write_text(f"{USER}:{digest}\n")
    auth = SQUID_AUTH.format(folder=folder) if has_users else "http_access allow all"
    tls = ""
    if kind == "squid-tls":
        assert authority is not None
        certificate, key = (shutil.copy(path, folder) for path in authority.sign("proxy"))
        Path(key).chmod(0o644)
        tls = f"tls-cert={certificate} tls-key={key}"
    listen = f"{SCHEMES[kind]}_port"
    file.write_text(SQUID.format(listen=listen, port=port, tls=tls, folder=folder, auth=auth))
    return [program, "-N", "-f", str(file)]


@contextmanager
def running_proxy(
    kind: ProxyKind, *, has_users: bool = False, authority: Authority | None = None
) -> Iterator[tuple[str, Path]]:
    """Run a proxy, and yield its URL without credentials and the path of its log.

    has_users: it requires `USER` and `PASSWORD`. authority: signs the certificate of a proxy of HTTPS.
    """
    port = free_port()
    # Not a folder of pytest's: squid gives up the rights of root, and could not read it.
    folder = Path(tempfile.mkdtemp(prefix="proxy-"))
    folder.chmod(0o777)
    command = _command(kind, folder, port, authority, has_users=has_users)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for_port(port, process)
        yield f"{SCHEMES[kind]}://127.0.0.1:{port}", folder / ("output" if kind == "microsocks" else "log")
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
