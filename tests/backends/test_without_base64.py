"""Servers of each wire that refuse base64, from the start or later, are asked for numbers and remembered."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract import BackendKind, Embed, EmbedReply, ReplicaSpec, TokenizerSource
from backends.contract.errors import BackendError
from tests.conftest import remote_backend
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

REFUSALS: dict[str, tuple[int, Any]] = {
    "400": (400, {"error": {"message": "unknown encoding_format", "type": "BadRequestError"}}),
    "422": (422, {"detail": [{"msg": "base64 is not a value of encoding_format"}]}),
    "no vectors": (200, {"object": "list", "data": []}),
}
SERVERS: dict[BackendKind, Any] = {
    "tei": FakeTei,
    "openai": FakeOpenAI,
    "infinity": FakeInfinity,
    "vllm": FakeVllm,
}


class Refusing:
    """Transport in front of a server. refusal: the reply to base64, None while the server has it."""

    def __init__(self, server: Any) -> None:
        self.server = httpx.ASGITransport(server)
        self.refusal: tuple[int, Any] | None = None
        self.forms: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        """Reply to one request."""
        body = json.loads(request.content) if request.content else {}
        form = "base64" if body.get("encoding_format") == "base64" else "numbers"
        if "embed" in request.url.path:
            self.forms.append(form)
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
    spec = ReplicaSpec("http://up", tokenizer=TokenizerSource(small_files) if kind == "infinity" else None)
    backend = remote_backend(kind, spec, httpx.MockTransport(transport))
    if kind == "vllm" and not joins_first:
        pytest.skip("vLLM has base64, and refuses it for models that give several vectors only")
    if joins_first:
        await backend.describe(5.0)
    transport.refusal = refusal
    if not joins_first:
        await backend.describe(5.0)
    transport.forms.clear()

    for text in ("one", "two"):
        reply = await backend.run(Embed((text,)), 5.0)
        assert isinstance(reply, EmbedReply)
        np.testing.assert_allclose(vector_of(text), reply.vectors[0], atol=1e-6)

    is_known = kind != "tei" and not joins_first
    assert (["numbers"] if is_known else ["base64", "numbers"]) + ["numbers"] == transport.forms


@pytest.mark.parametrize("kind", SERVERS)
async def test_refusal_of_an_input_is_not_taken_for_that_of_base64(
    kind: BackendKind, small_files: str
) -> None:
    transport = Refusing(SERVERS[kind]())
    spec = ReplicaSpec("http://up", tokenizer=TokenizerSource(small_files) if kind == "infinity" else None)
    is_refused = False

    async def reply(request: httpx.Request) -> httpx.Response:
        if is_refused:
            return httpx.Response(400, json={"error": {"message": "no", "type": "BadRequestError"}})
        return await transport(request)

    backend = remote_backend(kind, spec, httpx.MockTransport(reply))
    await backend.describe(5.0)
    is_refused = True
    with pytest.raises(BackendError):
        await backend.run(Embed(("one",)), 5.0)
    is_refused = False
    transport.forms.clear()

    await backend.run(Embed(("one",)), 5.0)

    assert ["base64"] == transport.forms
