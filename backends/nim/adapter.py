"""Adapter of NVIDIA NIM: paths of its embeddings and rankings, on OpenAI's adapter.

Source: NVIDIA's references of the NIMs for embedding 2.2 and reranking 2.4, and langchain-nvidia. A ranking
gives logits. Rule: a NIM on own machines is called directly, one of NVIDIA's through the proxy.
"""

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from backends.contract import NO_PROXY, ReplicaSpec
from backends.http.client import SHORT_IDLE_S, UpstreamClient, open_client
from backends.http.egress import OpenClient, open_egress
from backends.nim.kind import EMBED_ADDRESS, RERANK_ADDRESS, NimSettings
from backends.nim.queue import STATUS_ADDRESS, RequestQueue
from backends.openai.adapter import OpenAIBackend
from backends.openai.settings import ApiSettings
from backends.openai.shapes import origin_of

HOSTS = frozenset({urlsplit(EMBED_ADDRESS).hostname, urlsplit(RERANK_ADDRESS).hostname})


def is_hosted(address: str) -> bool:
    """Return True for the address of one of NVIDIA's own NIMs."""
    return urlsplit(address).hostname in HOSTS


def ranking_path(model: str) -> str:
    """Return the path of a hosted ranking, which has the model without dots."""
    owner, _, name = model.rpartition("/")
    return f"/v1/retrieval/{owner or 'nvidia'}/{name.replace('.', '_')}/reranking"


class NimBackend(OpenAIBackend):
    """Client of one NIM. queue: of one of NVIDIA's own, None for another."""

    def __init__(self, http: UpstreamClient, spec: ReplicaSpec, queue: RequestQueue | None) -> None:
        super().__init__(http, spec, None if queue is None else queue.follow)
        self._queue = queue

    async def aclose(self) -> None:
        """Close the connections, and those to the queue."""
        await super().aclose()
        if self._queue is not None:
            await self._queue.aclose()


def open_replica(spec: ReplicaSpec, open_with: OpenClient | None = None) -> NimBackend:
    """Return a client of the NIM at the spec's base URL."""
    settings = spec.settings if isinstance(spec.settings, NimSettings) else NimSettings()
    hosted, address = settings.hosted or is_hosted(spec.address), origin_of(spec.address)
    reranks = spec.task == "rerank"
    if hosted and reranks and address == EMBED_ADDRESS:
        address = RERANK_ADDRESS
    rerank = ranking_path(spec.model or "") if hosted else "/v1/ranking"
    task: Literal["embed", "rerank"] | None = "rerank" if reranks else "embed"
    if not (hosted or spec.task):
        task = None
    api = ApiSettings("nim", rerank=rerank, task=task, extra_body=spec.extra_body, metered=hosted)
    origin = msgspec.structs.replace(spec, address=address)
    own = msgspec.structs.replace(origin, settings=api)
    open_vendor = open_with or open_egress
    # The key goes to NVIDIA's queue only if it goes to NVIDIA.
    status = msgspec.structs.replace(origin, address=STATUS_ADDRESS)
    queue = RequestQueue(open_vendor(status, None)) if is_hosted(address) else None
    is_direct = open_with is None and not hosted and spec.proxy in {None, NO_PROXY}
    http = open_client(origin, SHORT_IDLE_S) if is_direct else open_vendor(origin, None)
    return NimBackend(http, own, queue)
