"""Replies of NVIDIA's own NIMs that are not ready at once: status 202, then requests for the reply.

Source: langchain-nvidia, and other clients of NVIDIA's cloud functions. The id of a request is in a header.
"""

import asyncio
import re

from backends.contract.errors import AttemptTimedOut
from backends.http.client import UpstreamClient, UpstreamResponse, countdown
from backends.openai.api import ACCEPTED

STATUS_ADDRESS = "https://api.nvcf.nvidia.com"
STATUS_PATH = "/v2/nvcf/pexec/status"
ID_HEADER = "nvcf-reqid"
REQUEST_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
# Pauses between two requests for a reply: they grow from the first to the last.
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 2.0


class RequestQueue:
    """Queue of NVIDIA's cloud functions. http: a client of `STATUS_ADDRESS`."""

    def __init__(self, http: UpstreamClient) -> None:
        self._http = http

    async def follow(
        self, accepted: UpstreamResponse, rows: int, width: int | None, timeout_s: float
    ) -> UpstreamResponse:
        """Return the reply to a request that was accepted; without an id the response itself.

        rows, width: as in `UpstreamClient.post`. Raises: BackendError.
        """
        remaining_s, pause_s = countdown(timeout_s), FIRST_PAUSE_S
        found = REQUEST_ID.fullmatch(accepted.headers.get(ID_HEADER, ""))
        if found is None:
            return accepted
        while remaining_s() > pause_s:
            await asyncio.sleep(pause_s)
            response = await self._http.get(f"{STATUS_PATH}/{found[0]}", remaining_s(), rows, width)
            if response.status != ACCEPTED:
                return response
            pause_s = min(1.5 * pause_s, LAST_PAUSE_S)
        raise AttemptTimedOut(f"the upstream still has the request in its queue after {timeout_s:.1f} s")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
