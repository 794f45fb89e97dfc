"""Fake server on its own port in a thread, for clients outside the test's process or event loop."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.waiting import PATIENCE_S


@contextmanager
def serve_in_thread(server: Any, tls: tuple[Path, Path] | None = None) -> Iterator[str]:
    """Serve an ASGI app and yield its base URL. tls: certificate and private key, for HTTPS."""
    files = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    config = uvicorn.Config(server, port=0, lifespan="off", log_config=None, access_log=False, **files)
    http = uvicorn.Server(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(http.serve(),))
    thread.start()
    try:
        end_s = time.monotonic() + PATIENCE_S
        while not http.started:
            assert time.monotonic() < end_s, "the fake server did not start"
            time.sleep(0.005)
        port = http.servers[0].sockets[0].getsockname()[1]
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}"
    finally:
        http.should_exit = True
        thread.join(PATIENCE_S)
        loop.close()
