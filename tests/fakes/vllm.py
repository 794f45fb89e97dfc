"""vLLM pooling server as an ASGI app, as strict as the real one, in several releases.

Source: vLLM 0.32.0, observed running; 0.20.2, 0.11.2 and 0.8.5 as cited in `backends/vllm/adapter.py`.
Raw vectors have twice the length of normalized ones.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector, logit_of, token_rows
from tests.fakes.tei import logits_of, tokens_of, vector_of, weights_of

WORD_ID = 1000
CHAT_FIELDS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
VOCABULARY = 1000


def text_of(content: Any) -> str:
    """Return the text of a message; that of a picture or recording is its address."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else part[part["type"]]["url"] for part in content)


def release(version: str) -> tuple[int, ...]:
    """Return the release of a version: (0, 32) for "0.32.0"."""
    return tuple(map(int, version.split(".")[:2]))


def vocabulary_weights(text: str) -> Any:
    """Return (VOCABULARY,) float32 that is zero except for the text's terms."""
    row = np.zeros(VOCABULARY, np.float32)
    for term, weight in weights_of(text).items():
        row[term] = weight
    return row


class FakeVllm(FakeServer):
    """vLLM server of one model.

    task: embed, classify or token_embed. classes: those of a classifier; 1 is a cross-encoder. splade: its
    vectors are as wide as its vocabulary. instructed: its template puts an instruction before each query.
    images, sound: a message may contain them, and images a pair to score. is_blind: it leaves the images of
    pairs out.
    """

    def __init__(
        self,
        *,
        task: str = "embed",
        version: str = "0.32.0",
        model: str = "fake/model",
        max_tokens: int = 16,
        activation: str = "sigmoid",
        classes: int = 1,
        splade: bool = False,
        chunked: bool = False,
        instructed: bool = False,
        images: bool = False,
        sound: bool = False,
        is_blind: bool = False,
    ) -> None:
        super().__init__()
        self.is_blind = is_blind
        self.images = images
        self.sound = sound
        self.chunked = chunked
        self.instructed = instructed
        self.task = task
        self.version = version
        self.model = model
        self.max_tokens = max_tokens
        self.activation = activation
        self.classes = classes
        self.splade = splade
        self.waiting = 0

    def routes(self) -> Mapping[str, Route]:
        """Return the routes; pooling routes exist for the model's task only."""
        common: dict[str, Route] = {
            "/v1/models": self._models,
            "/version": lambda _: {"version": self.version},
            "/metrics": self._metrics,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/pooling": self._pooling,
        }
        offered: dict[str, Route] = {"/v1/embeddings": self._embeddings, "/v1/score": self._score}
        if self._older_than(0, 12):
            # Every route exists; those not supported reply with an error of status 200.
            return common | offered
        if self.task == "classify":
            del offered["/v1/embeddings"]
            offered["/classify"] = self._classify
        if self.classes > 1:
            del offered["/v1/score"]
        return common | offered

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the API key on paths below /v1 only.

        Raises: ErrorReply.
        """
        if (
            self.api_key
            and path.startswith("/v1")
            and headers.get("authorization") != f"Bearer {self.api_key}"
        ):
            raise ErrorReply(401, {"error": "Unauthorized"})

    def _older_than(self, *release_: int) -> bool:
        return release(self.version) < release_

    def _models(self, _: dict[str, Any]) -> Any:
        entry = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self.max_tokens}
        return {"object": "list", "data": [entry]}

    def _metrics(self, _: dict[str, Any]) -> bytes:
        lines = [
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
            "# TYPE vllm:num_requests_waiting gauge",
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(self.waiting)}',
            f'vllm:num_requests_waiting{{engine="1",model_name="m"}} {float(self.waiting)}',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0',
        ]
        return "\n".join(lines).encode()

    def _tokenize(self, body: dict[str, Any]) -> Any:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise self._refused(400, "Bad Request", "prompt: Input should be a valid string")
        strings = prompt.split()
        ids = [WORD_ID + len(word) for word in strings]
        if body.get("add_special_tokens", True):
            strings, ids = ["[CLS]", *strings, "[SEP]"], [101, *ids, 102]
        shown_strings = strings if body.get("return_token_strs") else None
        return {
            "count": len(ids),
            "max_model_len": self.max_tokens,
            "tokens": ids,
            "token_strs": shown_strings,
        }

    def _detokenize(self, body: dict[str, Any]) -> Any:
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(id_, int) for id_ in ids):
            raise self._refused(400, "Bad Request", "tokens: Input should be a valid list")
        return {"prompt": " ".join(f"t{id_}" for id_ in ids)}

    def _pooling(self, body: dict[str, Any]) -> Any:
        self._check_common(body)
        texts = self._inputs(body)
        if self.task != "token_embed" or body.get("task", "token_embed") != self.task:
            raise self._refused(400, "BadRequestError", f"Unsupported task: this server does {self.task}")
        cut = [self._cut(text, body) for text in texts]
        raw = body.get("use_activation") is False
        data = [
            {"index": i, "object": "pooling", "data": (token_rows(text) * (2 if raw else 1)).tolist()}
            for i, text in enumerate(cut)
        ]
        return {"object": "list", "model": self.model, "data": data} | self._usage(cut)

    def _classify(self, body: dict[str, Any]) -> Any:
        self._check_common(body)
        cut = [self._cut(text, body) for text in self._inputs(body)]
        data = []
        for index, text in enumerate(cut):
            logits = np.array(logits_of((text,), self.classes))
            probs = np.exp(logits) / np.exp(logits).sum()
            scores = logits if body.get("use_activation") is False else probs
            row = {"index": index, "label": None, "probs": scores.tolist(), "num_classes": self.classes}
            data.append(row)
        return {"object": "list", "model": self.model, "data": data} | self._usage(cut)

    def _embeddings(self, body: dict[str, Any]) -> Any:
        self._check_common(body)
        texts = self._inputs(body)
        if self.task == "classify":
            raise self._not_supported("The model does not support Embeddings API")
        if body.get("dimensions") is not None:
            raise self._refused(400, "BadRequestError", "Model does not support matryoshka representation")
        cut = [self._cut(text, body) for text in texts]
        form = body.get("encoding_format", "float")
        if self.task == "token_embed" and form != "float":
            raise self._refused(400, "BadRequestError", "token embeddings are float only")
        data = [
            {"index": i, "object": "embedding", "embedding": encode_vector(row, form)}
            for i, row in enumerate(self._vectors(cut, body))
        ]
        return {"object": "list", "model": self.model, "data": data} | self._usage(cut)

    def _vectors(self, texts: list[str], body: dict[str, Any]) -> list[Any]:
        switch = "normalize" if self._older_than(0, 20) and not self._older_than(0, 11) else "use_activation"
        has_switch = not self._older_than(0, 11)
        raw = has_switch and body.get(switch) is False
        if self.splade:
            return [vocabulary_weights(text) for text in texts]
        return [vector_of(text) * (2 if raw else 1) for text in texts]

    def _score(self, body: dict[str, Any]) -> Any:
        self._check_common(body)
        if "text_1" not in body or "text_2" not in body:
            raise self._refused(400, "Bad Request", "Field required")
        queries, documents = self._sides(body, "text_1"), self._sides(body, "text_2")
        if self.instructed and "instruction" in body:
            queries = [f"{body['instruction']} {query}" for query in queries]
        if len(queries) not in (1, len(documents)):
            raise self._refused(400, "BadRequestError", "Input lengths must be either 1:1, 1:N or N:N")
        pairs = list(zip(queries * (len(documents) // len(queries)), documents, strict=True))
        if self.task == "embed":
            scores = [float(vector_of(query) @ vector_of(document)) for query, document in pairs]
        else:
            # vLLM reads an empty second text as no second text.
            seen = [(q, self._cut(d, body).strip() if d else "no second half") for q, d in pairs]
            scores = self._activated([logit_of(query, document) for query, document in seen], body)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        whole = [self._cut(f"{query} [SEP] {document}", body) for query, document in pairs]
        return {"object": "list", "model": self.model, "data": data} | self._usage(whole)

    def _sides(self, body: dict[str, Any], field: str) -> list[str]:
        """Return the texts of one side of the pairs, with the addresses of images in them."""
        side = body[field]
        items = side if isinstance(side, list) else [side]
        if not any(isinstance(item, dict) for item in items):
            return self._texts(body, field)
        if not self.images:
            message = "MultiModalParam is not supported for FakeForSequenceClassification"
            raise self._refused(400, "BadRequestError", message)
        seen = [item if isinstance(item, str) else self._seen(item["content"]) for item in items]
        return [text_of(parts) for parts in seen]

    def _seen(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [part for part in parts if part["type"] == "text" or not self.is_blind]

    def _activated(self, logits: list[float], body: dict[str, Any]) -> list[float]:
        switched_off = body.get("use_activation") is False and not self._older_than(0, 11)
        if self.activation == "none" or switched_off:
            return logits
        if self.task == "token_embed":
            return [logit * 7 for logit in logits]
        return [float(1 / (1 + np.exp(-logit))) for logit in logits]

    def _cut(self, text: str, body: dict[str, Any]) -> str:
        """Cut a text to the words that the model reads next to its two special tokens."""
        cut = body.get("truncate_prompt_tokens")
        room = (self.max_tokens if cut in (None, -1) else cut) - 2
        words = text.split()
        if len(words) <= room or (self.chunked and cut is None):
            return text
        if cut is None:
            raise self._refused(
                400,
                "BadRequestError",
                f"This model's maximum context length is {self.max_tokens} tokens. However, your request has "
                f"{len(words) + 2} input tokens.",
            )
        if self._older_than(0, 20) or body.get("truncation_side") is None:
            return " ".join(words[:room])
        # With a side, vLLM cuts the final tokens, and one of the special tokens is lost.
        left = body["truncation_side"] == "left"
        return " ".join([*words[-room - 1 :], "[SEP]"] if left else ["[CLS]", *words[: room + 1]])

    def _check_common(self, body: dict[str, Any]) -> None:
        if body.get("model") not in (None, self.model):
            raise self._refused(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        if "normalize" in body and not self._older_than(0, 32):
            raise self._refused(400, "BadRequestError", "Parameter `normalize` was removed")
        cut = body.get("truncate_prompt_tokens")
        if cut is not None and (cut > self.max_tokens or cut < (1 if self._older_than(0, 11) else -1)):
            raise self._refused(400, "BadRequestError", "truncate_prompt_tokens is out of range")
        if "top_n" in body and body["top_n"] is None:
            raise self._refused(400, "Bad Request", "top_n: Input should be a valid integer")

    def _inputs(self, body: dict[str, Any]) -> list[str]:
        """Return the texts of a request, or its conversation as the template writes it."""
        written = json.dumps(body.get("messages", []))
        for kind, is_offered in {"image": self.images, "audio": self.sound}.items():
            if f'"{kind}_url"' in written and not is_offered:
                message = f"At most 0 {kind}(s) may be provided in one prompt."
                raise self._refused(400, "BadRequestError", message)
        if "messages" not in body:
            marks = "" if body.get("add_special_tokens", True) else "bare "
            return [marks + text for text in self._texts(body, "input")]
        if body.get("chat_template") is not None:
            message = "Chat template is passed with request, but --trust-request-chat-template is not set."
            raise self._refused(400, "BadRequestError", message)
        if body["messages"][0]["role"] == "unknown":
            raise self._refused(400, "BadRequestError", "Conversation roles must be known")
        lines = [f"{message['role']}: {text_of(message['content'])}" for message in body["messages"]]
        options = {name: body.get(name) for name in CHAT_FIELDS if body.get(name)}
        return [" | ".join([*lines, *(f"{name}={value}" for name, value in options.items())])]

    def _texts(self, body: dict[str, Any], field: str) -> list[str]:
        texts = body.get(field)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self._refused(400, "Bad Request", f"{field}: Input should be a valid string")
        if not texts:
            raise self._refused(400, "BadRequestError", "You must pass at least one prompt")
        return texts

    def _usage(self, texts: list[str]) -> dict[str, Any]:
        most = 10**9 if self.chunked else self.max_tokens
        tokens = sum(tokens_of(text, most) for text in texts)
        return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}}

    def _not_supported(self, message: str) -> ErrorReply:
        return ErrorReply(200, self._error(400, "BadRequestError", message))

    def _refused(self, status: int, kind: str, message: str) -> ErrorReply:
        return ErrorReply(status, self._error(status, kind, message))

    def _error(self, status: int, kind: str, message: str) -> Any:
        inside = {"message": message, "type": kind, "param": None, "code": status}
        return {"object": "error", **inside} if self._older_than(0, 11) else {"error": inside}
