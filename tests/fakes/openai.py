"""Server of OpenAI's embeddings API as an ASGI app, as strict as OpenAI's own, with options for others.

Source: OpenAI OpenAPI document 2.3.0. Unknown fields are refused, and no input is ever truncated.
"""

from collections.abc import Mapping
from typing import Any

from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector
from tests.fakes.tei import DIMENSIONS, tokens_of, vector_of

FIELDS = {"model", "input", "encoding_format", "dimensions", "user"}


class FakeOpenAI(FakeServer):
    """Server of the embeddings API.

    models: the model list; None if the server has none. base64: it accepts that encoding_format. usage: its
    replies contain usage. cuts: it truncates long inputs silently.
    """

    def __init__(
        self,
        *,
        models: tuple[str, ...] | None = ("fake-model",),
        prefix: str = "/v1",
        max_tokens: int = 16,
        base64: bool = True,
        usage: bool = True,
        cuts: bool = False,
    ) -> None:
        super().__init__(prefix=prefix)
        self.models = models
        self.max_tokens = max_tokens
        self.base64 = base64
        self.usage = usage
        self.cuts = cuts

    def routes(self) -> Mapping[str, Route]:
        """Return the routes; some servers have no model list."""
        embeddings: dict[str, Route] = {"/embeddings": self._embeddings}
        return embeddings if self.models is None else embeddings | {"/models": self._models}

    def _models(self, _: dict[str, Any]) -> Any:
        data = [{"id": name, "object": "model", "created": 1, "owned_by": "o"} for name in self.models or ()]
        return {"object": "list", "data": data}

    def _embeddings(self, body: dict[str, Any]) -> Any:
        if body.keys() - FIELDS:
            raise _error(400, f"Unrecognized request arguments: {body.keys() - FIELDS}")
        if self.models is not None and body.get("model") not in self.models:
            raise _error(404, "The model does not exist.", code="model_not_found")
        form = body.get("encoding_format", "float")
        if form not in (("float", "base64") if self.base64 else ("float",)):
            raise _error(400, "encoding_format: unknown")
        texts = self._texts(body.get("input"))
        rows = [vector_of(" ".join(text.split()[: self.max_tokens - 2])) for text in texts]
        if "dimensions" in body and not 1 <= body["dimensions"] <= DIMENSIONS:
            raise _error(400, "dimensions: out of range")
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(r, form)}
            for i, r in enumerate(rows)
        ]
        tokens = sum(tokens_of(text, self.max_tokens) for text in texts)
        usage = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}} if self.usage else {}
        return {"object": "list", "data": data, "model": "fake-model"} | usage

    def _texts(self, texts: Any) -> list[str]:
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not 1 <= len(texts) <= 2048:
            raise _error(400, "'$.input' is invalid.", param="input")
        if not all(isinstance(text, str) and text for text in texts):
            raise _error(400, "'$.input' is invalid.", param="input")
        longest = max(map(tokens_of, texts))
        if longest > self.max_tokens and not self.cuts:
            raise _error(
                400,
                f"This model's maximum context length is {self.max_tokens} tokens, however you requested "
                f"{longest} tokens.",
            )
        return texts


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorReply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return ErrorReply(status, {"error": error})
