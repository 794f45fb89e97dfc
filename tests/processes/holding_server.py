"""A TEI server in a thread that holds some requests until the test releases them."""

import asyncio
import threading
from typing import Any

import uvicorn

from tests.fakes.tei import FakeTei
from tests.processes.conftest import wait_until
from tests.waiting import PATIENCE_S

HELD = "held"


class HoldingServer:
    """A fake TEI server; requests with the text HELD wait until `release`. waiting: their number."""

    def __init__(self) -> None:
        self.waiting = 0
        self._server = FakeTei()
        self._server.hook = self._hold
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        config = uvicorn.Config(self._server, port=0, lifespan="off", log_config=None, access_log=False)
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._http.serve(),))
        self._thread.start()
        assert wait_until(lambda: self._http.started)

    @property
    def url(self) -> str:
        """Base URL of the server."""
        port = self._http.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def release(self) -> None:
        """Let the held requests continue."""
        self._loop.call_soon_threadsafe(self._released.set)

    def stop(self) -> None:
        """Stop the server and its thread."""
        self.release()
        self._http.should_exit = True
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _hold(self, _: str, sent: dict[str, Any]) -> None:
        # The gateway may join requests that arrive together into one.
        if held := str(sent).count(HELD):
            self.waiting += held
            await self._released.wait()
