"""Servers of each wire that refuse base64, from the start or later, are asked for numbers and remembered."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract import BackendKind, Embed, EmbedReply
from backends.contract.errors import InvalidWork, ReplicaFailed
from tests.backends.adapters import SERVERS, adapter
from tests.fakes.tei import vector_of

REFUSALS: dict[str, tuple[int, Any]] = {
    "400": (400, {"error": {"message": "unknown encoding_format", "type": "BadRequestError"}}),
    "422": (422, {"detail": [{"msg": "base64 is not a value of encoding_format"}]}),
    "no vectors": (200, {"object": "list", "data": []}),
}  # The path of vectors in base64.
PATHS = {
    "tei": "/v1/embeddings",
    "openai": "/v1/embeddings",
    "infinity": "/embeddings",
    "vllm": "/v1/embeddings",
}


class Refusing:
    """Transport in front of a server. refusal: the reply to base64, None while the server has it.

    forms: path and encoding of each request for vectors.
    """

    def __init__(self, server: Any) -> None:
        self.server = httpx.ASGITransport(server)
        self.refusal: tuple[int, Any] | None = None
        self.forms: list[tuple[str, str]] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        """Reply to one request."""
        body = json.loads(request.content) if request.content else {}
        form = "base64" if body.get("encoding_format") == "base64" else "numbers"
        if "embed" in request.url.path:
            self.forms.append((request.url.path, form))
        if self.refusal is not None and form == "base64":
            status, content = self.refusal
            return httpx.Response(status, json=content)
        return await self.server.handle_async_request(request)


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("joins_first", [True, False])
async def test_server_without_base64_is_asked_for_numbers(
    kind: BackendKind, refusal: tuple[int, Any], small_files: str, *, joins_first: bool
) -> None:
    transport = Refusing(SERVERS[kind]())
    backend = adapter(kind, httpx.MockTransport(transport), small_files)
    if kind == "vllm" and not joins_first:
        pytest.skip("vLLM has base64, and refuses it for models that give several vectors only")
    if joins_first:
        await backend.describe(5.0)
    transport.refusal = refusal
    if not joins_first:
        await backend.describe(5.0)
        assert kind != "openai" or ["base64", "numbers"] == [form for _, form in transport.forms]
    transport.forms.clear()

    for text in ("one", "two"):
        reply = await backend.run(Embed((text,)), 5.0)
        assert isinstance(reply, EmbedReply)
        np.testing.assert_allclose(vector_of(text), reply.vectors[0], atol=1e-6)

    is_known = kind != "tei" and not joins_first
    # Without base64, TEI's native route is the better one.
    numbers = ("/embed" if kind == "tei" else PATHS[kind], "numbers")
    assert ([] if is_known else [(PATHS[kind], "base64")]) + [numbers] * 2 == transport.forms
    if kind == "openai":
        assert "numbers, not base64" in (await backend.describe(5.0)).notes


@pytest.mark.parametrize("kind", SERVERS)
async def test_refusal_of_an_input_is_not_taken_for_that_of_base64(
    kind: BackendKind, small_files: str
) -> None:
    transport = Refusing(SERVERS[kind]())
    is_refused = False

    async def reply(request: httpx.Request) -> httpx.Response:
        if is_refused:
            return httpx.Response(400, json={"error": {"message": "no", "type": "BadRequestError"}})
        return await transport(request)

    backend = adapter(kind, httpx.MockTransport(reply), small_files)
    await backend.describe(5.0)
    is_refused = True
    with pytest.raises(ReplicaFailed if kind == "infinity" else InvalidWork):
        await backend.run(Embed(("one",)), 5.0)
    is_refused = False
    transport.forms.clear()

    await backend.run(Embed(("one",)), 5.0)

    assert [(PATHS[kind], "base64")] == transport.forms
