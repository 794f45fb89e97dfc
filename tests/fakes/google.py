"""Gemini API, Vertex AI and the ranking API as ASGI apps, which refuse fields that are not theirs.

Source: google-genai's requests, and the reference pages of the three APIs. Errors have their form.
"""

from collections.abc import Mapping
from typing import Any

from tests.fakes.server import ErrorReply, FakeServer, Route
from tests.fakes.tei import score_of, tokens_of, vector_of

TOKENS_MAX = 16
TASKS = {
    "RETRIEVAL_QUERY",
    "RETRIEVAL_DOCUMENT",
    "SEMANTIC_SIMILARITY",
    "CLASSIFICATION",
    "CLUSTERING",
    "CODE_RETRIEVAL_QUERY",
}
PROJECT, LOCATION = "a-project", "europe-west4"


def refusal(code: int, status: str, message: str, *details: dict[str, Any]) -> ErrorReply:
    error = {"code": code, "message": message, "status": status, "details": list(details)}
    return ErrorReply(code, {"error": error})


def retry_info(delay: str) -> dict[str, Any]:
    return {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}


def error_info(reason: str) -> dict[str, Any]:
    return {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "domain": "googleapis.com"}


def check_fields(body: dict[str, Any], required: set[str], optional: set[str]) -> None:
    """Check the fields of an object. Raises: ErrorReply."""
    if unknown := body.keys() - required - optional:
        message = f'Invalid JSON payload received. Unknown name "{min(unknown)}"'
        raise refusal(400, "INVALID_ARGUMENT", message)
    if missing := required - body.keys():
        raise refusal(400, "INVALID_ARGUMENT", f"{min(missing)} is required")


def source_of(content: dict[str, Any]) -> str:
    """Return the parts of a content as one text; that of a picture is its base64."""
    check_fields(content, {"parts"}, {"role"})
    for part in content["parts"]:
        check_fields(part, set(), {"text", "inlineData"})
    return " ".join(
        part["text"] if "text" in part else part["inlineData"]["data"] for part in content["parts"]
    )


class FakeGemini(FakeServer):
    """Gemini API with one model."""

    def __init__(self, model: str = "gemini-embedding-001") -> None:
        super().__init__(prefix="/v1beta")
        self.model = model
        self.api_key = "a-google-key"

    def routes(self) -> Mapping[str, Route]:
        return {f"/models/{self.model}:batchEmbedContents": self._batch}

    def check_key(self, path: str, headers: dict[str, str]) -> None:  # noqa: ARG002 - of the base
        """Check the key. Raises: ErrorReply."""
        if headers.get("x-goog-api-key") != self.api_key:
            message = "API key not valid. Please pass a valid API key."
            raise refusal(400, "INVALID_ARGUMENT", message, error_info("API_KEY_INVALID"))

    def _batch(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"requests"}, set())
        if len(body["requests"]) > 100:
            raise refusal(400, "INVALID_ARGUMENT", "at most 100 requests can be in one batch")
        return {"embeddings": [{"values": self._values(request)} for request in body["requests"]]}

    def _values(self, request: dict[str, Any]) -> list[float]:
        check_fields(request, {"model", "content"}, {"taskType", "title", "outputDimensionality"})
        task = request.get("taskType")
        is_new = self.model.startswith("gemini-embedding-2")
        if task is not None and (task not in TASKS or is_new):
            raise refusal(400, "INVALID_ARGUMENT", "task_type is not supported")
        if request["model"] != f"models/{self.model}":
            raise refusal(400, "INVALID_ARGUMENT", "the models of the requests differ")
        source = source_of(request["content"])
        if not is_new and any("inlineData" in part for part in request["content"]["parts"]):
            raise refusal(400, "INVALID_ARGUMENT", "the model reads texts only")
        values: list[float] = vector_of(source).tolist()
        return values


class FakeVertex(FakeServer):
    """Vertex AI and the ranking API of one project, with one model."""

    def __init__(self, model: str, *, location: str = LOCATION) -> None:
        super().__init__()
        self.model = model
        self.root = f"/v1/projects/{PROJECT}/locations/{location}/publishers/google/models/{model}"
        self.api_key = "an-access-token"
        # In place of the true count.
        self.token_count: float | None = None

    def routes(self) -> Mapping[str, Route]:
        ranking = f"/v1/projects/{PROJECT}/locations/global/rankingConfigs/default_ranking_config:rank"
        if self.model.startswith("semantic-ranker"):
            return {ranking: self._rank}
        if "gemini" in self.model:
            return {f"{self.root}:embedContent": self._content}
        return {f"{self.root}:predict": self._predict}

    def check_key(self, path: str, headers: dict[str, str]) -> None:  # noqa: ARG002 - of the base
        """Check the access token. Raises: ErrorReply."""
        if headers.get("authorization") != f"Bearer {self.api_key}":
            message = "Request had invalid authentication credentials."
            raise refusal(401, "UNAUTHENTICATED", message)

    def _predict(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"instances"}, {"parameters"})
        check_fields(body.get("parameters", {}), set(), {"autoTruncate", "outputDimensionality"})
        if len(body["instances"]) > 250:
            raise refusal(400, "INVALID_ARGUMENT", "at most 250 instances")
        return {"predictions": [self._prediction(item, body) for item in body["instances"]]}

    def _prediction(self, item: dict[str, Any], body: dict[str, Any]) -> Any:
        check_fields(item, {"content"}, {"task_type", "title"})
        if item.get("task_type", "CLUSTERING") not in TASKS:
            raise refusal(400, "INVALID_ARGUMENT", "unknown task_type")
        text, is_long = self._cut(item["content"], body.get("parameters", {}).get("autoTruncate", True))
        # The count is a float there.
        statistics = {"token_count": self.token_count or float(tokens_of(text)), "truncated": is_long}
        return {"embeddings": {"values": vector_of(text).tolist(), "statistics": statistics}}

    def _content(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"content"}, {"embedContentConfig"})
        config = body.get("embedContentConfig", {})
        options = {"taskType", "title", "outputDimensionality", "autoTruncate", "documentOcr"}
        check_fields(config, set(), options | {"audioTrackExtraction"})
        text, is_long = self._cut(source_of(body["content"]), config.get("autoTruncate", True))
        usage = {"promptTokenCount": self.token_count or tokens_of(text), "promptTokensDetails": []}
        return {
            "embedding": {"values": vector_of(text).tolist()},
            "usageMetadata": usage,
            "truncated": is_long,
        }

    def _cut(self, text: str, cuts: bool) -> tuple[str, bool]:
        is_long = tokens_of(text) > TOKENS_MAX
        if is_long and not cuts:
            message = f"The input token count is {tokens_of(text)} but the model supports up to {TOKENS_MAX}."
            raise refusal(400, "INVALID_ARGUMENT", message)
        return " ".join(text.split()[: TOKENS_MAX - 2]) if is_long else text, is_long

    def _rank(self, body: dict[str, Any]) -> Any:
        optional = {"model", "query", "topN", "ignoreRecordDetailsInResponse", "userLabels"}
        check_fields(body, {"records"}, optional)
        if len(body["records"]) > 200:
            raise refusal(400, "INVALID_ARGUMENT", "at most 200 records")
        records = []
        for record in body["records"]:
            check_fields(record, {"id"}, {"title", "content", "score"})
            if not record.get("title") and not record.get("content"):
                raise refusal(400, "INVALID_ARGUMENT", "a record needs a title or content")
            records.append(record | {"score": score_of(body["query"], record["content"])})
        return {"records": sorted(records, key=lambda record: -record["score"])[: body.get("topN")]}
