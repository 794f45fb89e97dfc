"""Router of Hugging Face's inference as an ASGI app, with the fields of its tasks, which are those of TEI."""

from collections.abc import Mapping
from typing import Any

from tests.fakes.server import ErrorReply, FakeServer, Route
from tests.fakes.tei import score_of, tokens_of, vector_of

TOKENS_MAX = 16
MODEL = "BAAI/bge-small-en-v1.5"


class FakeRouter(FakeServer):
    """Router with one model."""

    def __init__(self) -> None:
        super().__init__(prefix=f"/hf-inference/models/{MODEL}")

    def routes(self) -> Mapping[str, Route]:
        return {"/pipeline/feature-extraction": self._embed, "/rerank": self._rerank}

    def check_key(self, path: str, headers: dict[str, str]) -> None:  # noqa: ARG002 - of the base
        """Check the token. Raises: ErrorReply."""
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            raise ErrorReply(401, {"error": "Invalid credentials in Authorization header"})

    def _embed(self, body: dict[str, Any]) -> Any:
        optional = {"normalize", "prompt_name", "truncate", "truncation_direction"}
        self._check(body, {"inputs"}, optional)
        self._check_lengths(body, body["inputs"])
        scale = 1 if body.get("normalize", True) else 2
        return [(scale * vector_of(text)).tolist() for text in body["inputs"]]

    def _rerank(self, body: dict[str, Any]) -> Any:
        optional = {"raw_scores", "truncate", "truncation_direction", "return_text", "top_n"}
        self._check(body, {"query", "texts"}, optional)
        self._check_lengths(body, body["texts"])
        scores = [
            {"index": i, "score": score_of(body["query"], text)} for i, text in enumerate(body["texts"])
        ]
        return sorted(scores, key=lambda item: -item["score"])

    def _check(self, body: dict[str, Any], required: set[str], optional: set[str]) -> None:
        if required - body.keys() or body.keys() - required - optional:
            raise ErrorReply(422, {"error": f"fields: {sorted(body)}"})
        if body.get("truncation_direction", "Right") not in {"Left", "Right"}:
            raise ErrorReply(422, {"error": "truncation_direction"})

    def _check_lengths(self, body: dict[str, Any], texts: list[str]) -> None:
        longest = max(map(tokens_of, texts))
        if not body.get("truncate", False) and longest > TOKENS_MAX:
            message = (
                f"Input validation error: `inputs` must have less than {TOKENS_MAX} tokens. Given: {longest}"
            )
            raise ErrorReply(413, {"error": message, "error_type": "Validation"})
