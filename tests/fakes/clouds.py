"""Azure OpenAI, NVIDIA NIM and watsonx.ai as ASGI apps, which refuse fields that are not theirs.

Source: Microsoft's and NVIDIA's API references, langchain-nvidia, and ibm-watsonx-ai. Real clients read their
replies in tests/clients.
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.fakes.openai import rerank_tokens, scores_of
from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector, logit_of
from tests.fakes.tei import tokens_of, vector_of
from tests.fakes.threaded import serve_in_thread
from tests.processes.tls_files import Authority

OPENAI_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "user"})


def _embeddings(body: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    form = body.get("encoding_format", "float")
    data = [
        {"object": "embedding", "index": i, "embedding": encode_vector(vector_of(text), form)}
        for i, text in enumerate(texts)
    ]
    tokens = sum(map(tokens_of, texts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.get("model", "m"), "usage": usage}


class FakeAzure(FakeServer):
    """One resource with the deployment `small`, and Cohere's reranker `ranker` of Foundry.

    token: of Entra that is accepted in place of the key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key = "azure-key-1234"
        self.token: str | None = None

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            "/openai/deployments/small/embeddings": self._classic,
            "/openai/v1/embeddings": self._v1,
            "/providers/cohere/v2/rerank": self._rerank,
            "/v1/rerank": self._rerank,
        }

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the key, which the reranker takes as a bearer token, or Entra's token. Raises: ErrorReply."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        key = bearer if path.endswith("/rerank") else headers.get("api-key", "")
        if key != self.key and not (self.token and bearer == self.token):
            message = "Access denied due to invalid subscription key or wrong API endpoint."
            raise ErrorReply(401, {"error": {"code": "401", "message": message}})
        if "/deployments/" in path and path != "/openai/deployments/small/embeddings":
            message = "The API deployment for this resource does not exist."
            raise ErrorReply(404, {"error": {"code": "DeploymentNotFound", "message": message}})

    def _classic(self, body: dict[str, Any]) -> Any:
        if "api-version" not in parse_qs(self.queries[-1].decode()):
            raise ErrorReply(404, {"error": {"code": "404", "message": "Resource not found"}})
        return self._v1(body)

    def _v1(self, body: dict[str, Any]) -> Any:
        if body.keys() - OPENAI_FIELDS:
            raise ErrorReply(400, {"error": {"message": f"fields: {sorted(body)}"}})
        return _embeddings(body, body["input"])

    def _rerank(self, body: dict[str, Any]) -> Any:
        if body.keys() - {"model", "query", "documents", "top_n", "max_tokens_per_doc"}:
            raise ErrorReply(422, {"message": f"fields: {sorted(body)}"})
        return {"id": "1", "results": scores_of(body), "meta": {"billed_units": {"search_units": 1}}}


class FakeNim(FakeServer):
    """One NIM. hosted: it is one of NVIDIA's own, whose ranking has the model in its path.

    queued: requests for the reply to an accepted request before it is ready; 0 answers at once.
    """

    def __init__(self, *, reranks: bool = False, hosted: bool = False) -> None:
        super().__init__()
        self.queued = 0
        self.accepted: dict[str, tuple[Any, int]] = {}
        self.reranks = reranks
        self.hosted = hosted

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        model = "nvidia/llama-3.2-nv-rerankqa-1b-v2" if self.reranks else "nvidia/llama-nemotron-embed-1b-v2"
        listed = {"object": "list", "data": [{"id": model, "object": "model"}]}
        found: dict[str, Route] = {} if self.hosted else {"/v1/models": lambda _: listed}
        if not self.reranks:
            return found | {"/v1/embeddings": self._embed}
        hosted = "/v1/retrieval/nvidia/llama-3_2-nv-rerankqa-1b-v2/reranking"
        return found | {hosted if self.hosted else "/v1/ranking": self._rank}

    async def _answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        start, _, request = path.rpartition("/")
        if start == "/v2/nvcf/pexec/status" and self.hosted:
            self.check_key(path, headers)
            reply, pending = self.accepted[request]
            self.accepted[request] = reply, pending - 1
            return (202, b"") if pending else reply
        reply = await super()._answer(path, headers, body)
        if not self.queued or not body:
            return reply
        request = f"0000-{len(self.accepted)}"
        self.accepted[request] = reply, self.queued - 1
        raise ErrorReply(202, b"", {"NVCF-REQID": request, "NVCF-STATUS": "pending-evaluation"})

    def _embed(self, body: dict[str, Any]) -> Any:
        allowed = OPENAI_FIELDS | {"input_type", "truncate", "embedding_type", "modality"}
        if body.keys() - allowed or body.get("input_type") not in {"query", "passage"}:
            raise ErrorReply(422, {"detail": [{"msg": f"fields: {sorted(body)}"}]})
        if max(map(tokens_of, body["input"])) > 16 and body.get("truncate", "NONE") == "NONE":
            message = "Input length 17 exceeds maximum allowed token size 16"
            raise ErrorReply(400, {"object": "error", "message": message})
        pictures = [text for text in body["input"] if text.startswith("data:image/")]
        if pictures and ("embed-vl" not in body["model"] or body["input_type"] != "passage"):
            raise ErrorReply(400, {"error": "images are passages of a model that reads them"})
        prefix = "" if body["input_type"] == "passage" else "query: "
        return _embeddings(body, [prefix + text for text in body["input"]])

    def _rank(self, body: dict[str, Any]) -> Any:
        if body.keys() - {"model", "query", "passages", "truncate"}:
            raise ErrorReply(422, {"detail": [{"msg": f"fields: {sorted(body)}"}]})
        query, passages = body["query"]["text"], [_passage(each, body["model"]) for each in body["passages"]]
        ranked = [{"index": i, "logit": logit_of(query, text)} for i, text in enumerate(passages)]
        ranked.sort(key=lambda item: -float(item["logit"]))
        tokens = rerank_tokens({"query": query, "documents": passages})
        return {"rankings": ranked, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _passage(fields: dict[str, str], model: str) -> str:
    """Return the text of a passage; of an image, which some models read, its address. Raises: ErrorReply."""
    allowed = {"text", "image"} if "rerank-vl" in model else {"text"}
    if not fields or fields.keys() - allowed or "" in fields.values():
        raise ErrorReply(422, {"detail": [{"msg": f"passage: {sorted(fields)}"}]})
    if not fields.get("image", "data:image/png;base64,").startswith("data:image/"):
        raise ErrorReply(400, {"error": "the image is not a data URL"})
    return " ".join(fields.values())


class FakeWatsonx(FakeServer):
    """watsonx.ai of one project, and the identity service of IBM Cloud.

    issued: number of tokens. identity_status: of the service's answers; it repeats what it was sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.issued = 0
        self.key = "ibm-key-1234"
        self.identity_status: int | None = None

    async def _answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        if path != "/identity/token":
            return await super()._answer(path, headers, body)
        if self.identity_status is not None:
            words = json.dumps({"message": f"was sent {body.decode()}, {parse_qs(body.decode())}"})
            return self.identity_status, words.encode()
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        expected = {"grant_type": "urn:ibm:params:oauth:grant-type:apikey", "apikey": self.key}
        if form != expected:
            return 400, b'{"errorCode": "BXNIM0415E", "errorMessage": "Provided API key could not be found."}'
        self.issued += 1
        return (
            200,
            b'{"access_token": "iam-token-%d", "expires_in": 3600, "token_type": "Bearer"}' % self.issued,
        )

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {"/ml/v1/text/embeddings": self._embed, "/ml/v1/text/rerank": self._rerank}

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the token, and the version of the API. Raises: ErrorReply."""
        del path
        # On own machines its client sends tokens with the word Basic.
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme not in {"Bearer", "Basic"} or token != f"iam-token-{self.issued}":
            fault = {"code": "authentication_token_expired", "message": "Failed to authenticate the request"}
            raise ErrorReply(401, {"errors": [fault], "trace": "t", "status_code": 401})
        if b"version=" not in self.queries[-1]:
            raise _fault(400, "invalid_request_entity", "Missing query parameter: version")

    def _check(self, body: dict[str, Any], *fields: str) -> None:
        billed = {"project_id", "space_id"} & body.keys()
        if body.keys() - {"model_id", "parameters", *billed, *fields} or len(billed) != 1:
            raise _fault(400, "invalid_request_entity", f"fields: {sorted(body)}")
        if body["model_id"] != "ibm/slate":
            raise _fault(404, "model_not_supported", "Model is not supported")

    def _embed(self, body: dict[str, Any]) -> Any:
        self._check(body, "inputs")
        texts = [self._cut(text, body) for text in body["inputs"]]
        results = [{"embedding": vector_of(text).tolist()} for text in texts]
        tokens = sum(map(tokens_of, texts))
        return {
            "model_id": "ibm/slate",
            "results": results,
            "created_at": "2026",
            "input_token_count": tokens,
        }

    def _cut(self, text: str, body: dict[str, Any]) -> str:
        length = body.get("parameters", {}).get("truncate_input_tokens")
        if length is not None:
            return " ".join(text.split()[: length - 2])
        if tokens_of(text) > 16:
            raise _fault(400, "invalid_input_argument", "the input has too many tokens: 17")
        return text

    def _rerank(self, body: dict[str, Any]) -> Any:
        self._check(body, "query", "inputs")
        whole = {"query": body["query"], "documents": [item["text"] for item in body["inputs"]]}
        results = [{"index": s["index"], "score": s["relevance_score"]} for s in scores_of(whole)]
        return {"model_id": "ibm/slate", "results": results, "input_token_count": rerank_tokens(whole)}


def _fault(status: int, code: str, message: str) -> ErrorReply:
    errors = [{"code": code, "message": message, "more_info": "https://cloud.ibm.com/apidocs/watsonx-ai"}]
    return ErrorReply(status, {"errors": errors, "trace": "t", "status_code": status})


SERVERS: dict[str, Callable[[], FakeServer]] = {
    "azure": FakeAzure,
    "nim": FakeNim,
    "nim-ranking": partial(FakeNim, reranks=True),
    "watsonx": FakeWatsonx,
}


def main() -> None:
    """Serve one until the input ends; print its address first, and its requests as JSON at the end.

    A folder as the second argument is for the certificates of HTTPS.
    """
    server = SERVERS[sys.argv[1]]()
    tls = Authority(Path(sys.argv[2])).sign("stub") if len(sys.argv) > 2 else None
    with serve_in_thread(server, tls) as address:
        print(address, flush=True)  # noqa: T201
        sys.stdin.read()
    print(json.dumps(server.requests))  # noqa: T201


if __name__ == "__main__":
    main()
