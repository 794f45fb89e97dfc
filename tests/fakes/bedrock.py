"""Amazon Bedrock as an ASGI app: its signatures, its models' request bodies, and its agents' rerank.

Source: botocore, which computes every signature again from what was received, and validates requests and
replies by its service models; AWS' pages on the parameters of models, whose fields are checked one by one.
"""

import json
from collections.abc import Container, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from tests.fakes.server import ErrorReply, FakeServer, HeadedReply, Route
from tests.fakes.tei import is_probe, score_of, tokens_of, vector_of

ACCESS_KEY, SECRET_KEY, SESSION_TOKEN = "AKIDEXAMPLE", "a-very-secret-signing-key", "a-session-token"
REGION = "us-east-1"
TYPE_HEADER, COUNT_HEADER = "x-amzn-ErrorType", "X-Amzn-Bedrock-Input-Token-Count"
TOKENS_MAX = 16
PAGE = 2
PURPOSES = {"GENERIC_INDEX", "GENERIC_RETRIEVAL", "TEXT_RETRIEVAL", "CLASSIFICATION", "CLUSTERING"}
COHERE_TYPES = {"search_document", "search_query", "classification", "clustering"}


def service_model(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


AGENTS = service_model("bedrock-agent-runtime")
RERANK = AGENTS.operation_model("Rerank")


def wide_vector(text: str, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return (width,) float32, different for each text, of which fewer dimensions are the first ones."""
    return np.resize(vector_of(text), width)


def refusal(status: int, kind: str, message: str) -> ErrorReply:
    # The header may have an address after the name.
    address = ":http://internal.amazon.com/coral/com.amazon.bedrock/"
    return ErrorReply(status, {"message": message}, {TYPE_HEADER: kind + address})


class FakeBedrock(FakeServer):
    """One region of Bedrock. models: ids that it serves. api_key: a key of Bedrock, also accepted."""

    def __init__(self, *models: str, width: int = 1024) -> None:
        super().__init__()
        self.session_tokens: Container[str] = {SESSION_TOKEN}
        self.models = models
        self.width = width
        self.raw_paths: list[str] = []
        self.signed_names: list[set[str]] = []

    def routes(self) -> Mapping[str, Route]:
        """Return the routes of the runtime and of the agents' runtime."""
        found: dict[str, Route] = {"/rerank": self._rerank}
        for model in self.models:
            if (route := self._invoke(model)) is not None:
                found[f"/model/{model}/invoke"] = route
        return found

    def check_request(self, scope: Any, headers: dict[str, str], body: bytes) -> None:
        """Compute the signature again, as AWS does. Raises: ErrorReply."""
        raw_path = scope["raw_path"].decode()
        self.raw_paths.append(raw_path)
        authorization = headers.get("authorization", "")
        if authorization.startswith("Bearer "):
            if authorization != f"Bearer {self.api_key}" or raw_path == "/rerank":
                raise refusal(403, "AccessDeniedException", f"Authentication failed for {authorization}")
            return
        if not authorization.startswith("AWS4-HMAC-SHA256 "):
            raise refusal(403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        fields = dict(part.strip().split("=", 1) for part in authorization.partition(" ")[2].split(","))
        access_key, _, region, service, _ = fields["Credential"].split("/")
        names = set(fields["SignedHeaders"].split(";"))
        self.signed_names.append(names)
        request = AWSRequest(
            scope["method"],
            f"http://{headers['host']}{raw_path}",
            {name: headers[name] for name in names if name != "host"},
            body,
        )
        request.context["timestamp"] = headers["x-amz-date"]
        secret = SECRET_KEY if access_key == ACCESS_KEY else "unknown"
        signer = SigV4Auth(Credentials(access_key, secret, SESSION_TOKEN), "bedrock", REGION)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        is_equal = signer.signature(text, request) == fields["Signature"]
        if not is_equal or (region, service) != (REGION, "bedrock") or "host" not in names:
            message = (
                f"The request signature does not match. Canonical string: {signer.canonical_request(request)}"
            )
            raise refusal(403, "InvalidSignatureException", message)
        if "x-amz-security-token" in headers and headers["x-amz-security-token"] not in self.session_tokens:
            raise refusal(
                403, "ExpiredTokenException", "The security token included in the request is expired"
            )

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check nothing more: the signature or the key was checked before."""

    def _invoke(self, model: str) -> Route | None:
        bare = model.rpartition("/")[2].removeprefix("us.")
        for start, route in (
            ("amazon.titan-embed-image", self._titan_image),
            ("amazon.titan-embed-text-v2", self._titan_v2),
            ("amazon.titan-embed", self._titan_v1),
            ("amazon.nova-2-multimodal", self._nova),
            ("cohere.embed-v4", self._cohere_v4),
            ("cohere.embed", self._cohere_v3),
            ("cohere.rerank", self._cohere_rerank),
        ):
            if bare.startswith(start):
                return route
        return None

    def _titan_v1(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"inputText"}, set())
        return self._titan_reply(body["inputText"], self.width)

    def _titan_v2(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"inputText"}, {"dimensions", "normalize", "embeddingTypes"})
        width = body.get("dimensions", 1024)
        if width not in {256, 512, 1024}:
            raise invalid("#/dimensions: it is not a valid enum value")
        reply = self._titan_reply(body["inputText"], width)
        return reply | {"embeddingsByType": {"float": reply["embedding"]}}

    def _titan_image(self, body: dict[str, Any]) -> Any:
        check_fields(body, set(), {"inputText", "inputImage", "embeddingConfig"})
        width = body.get("embeddingConfig", {"outputEmbeddingLength": 1024})["outputEmbeddingLength"]
        # Of this model shorter vectors are other ones.
        text = f"{body.get('inputText', '')}{body.get('inputImage', '')}{width}"
        return self._titan_reply(text, width) | {"message": None}

    def _titan_reply(self, text: str, width: int) -> dict[str, Any]:
        if not isinstance(text, str) or not text:
            raise invalid("#/inputText: expected minLength: 1, actual: 0")
        check_length(text)
        return {"embedding": wide_vector(text, width).tolist(), "inputTextTokenCount": tokens_of(text)}

    def _nova(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"taskType", "singleEmbeddingParams"}, {"schemaVersion"})
        params = body["singleEmbeddingParams"]
        check_fields(params, {"embeddingPurpose"}, {"embeddingDimension", "text", "image", "audio"})
        (kind,) = params.keys() & {"text", "image", "audio"}
        content = params[kind]
        if params["embeddingPurpose"] not in PURPOSES or params["embeddingDimension"] not in {
            256,
            384,
            1024,
            3072,
        }:
            raise invalid("a value is not one of the enum")
        cut: dict[str, Any] = {}
        if kind == "text":
            check_fields(content, {"truncationMode", "value"}, set())
            source = content["value"]
            if content["truncationMode"] == "NONE":
                check_length(source)
            elif tokens_of(source) > TOKENS_MAX:
                cut = {"truncatedCharLength": 100}
        else:
            check_fields(content, {"format", "source"}, {"detailLevel"} if kind == "image" else set())
            source = content["source"]["bytes"]
        vector = wide_vector(f"{params['embeddingPurpose']}{source}", params["embeddingDimension"]).tolist()
        reply = {"embeddings": [{"embeddingType": kind.upper(), "embedding": vector} | cut]}
        return HeadedReply(reply, {COUNT_HEADER: str(tokens_of(source) if kind == "text" else 300)})

    def _cohere_v3(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"input_type"}, {"texts", "images", "truncate", "embedding_types"})
        self._check_cohere(body, {"NONE", "START", "END"}, COHERE_TYPES | {"image"})
        sources = body.get("texts") or body["images"]
        if (longest := max(map(len, body.get("texts", [""])))) > 2048:
            raise invalid(f"expected maxLength: 2048, actual: {longest}")
        if "images" in body and (len(sources) != 1 or body["input_type"] != "image"):
            raise invalid("#/images: expected maximum item count: 1")
        vectors = [wide_vector(source, self.width).tolist() for source in sources]
        return self._counted(
            {"embeddings": vectors, "id": "1", "response_type": "embeddings_floats"}, sources
        )

    def _cohere_v4(self, body: dict[str, Any]) -> Any:
        optional = {
            "texts",
            "images",
            "inputs",
            "truncate",
            "embedding_types",
            "output_dimension",
            "max_tokens",
        }
        check_fields(body, {"input_type"}, optional)
        self._check_cohere(body, {"NONE", "LEFT", "RIGHT"}, COHERE_TYPES)
        width = body.get("output_dimension", 1536)
        if width not in {256, 512, 1024, 1536}:
            raise invalid("#/output_dimension: it is not a valid enum value")
        sources = body.get("texts") or [
            " ".join(
                part["text"] if part["type"] == "text" else part["image_url"] for part in item["content"]
            )
            for item in body["inputs"]
        ]
        vectors = [wide_vector(source, width).tolist() for source in sources]
        reply = {"embeddings": {"float": vectors}, "id": "1", "response_type": "embeddings_by_type"}
        return self._counted(reply, sources)

    def _check_cohere(self, body: dict[str, Any], cuts: set[str], types: set[str]) -> None:
        given = body.keys() & {"texts", "images", "inputs"}
        if len(given) != 1 or len(body[given.pop()]) > 96:
            raise invalid("only one of texts, images, inputs, of at most 96")
        if body.get("truncate", "NONE") not in cuts or body["input_type"] not in types:
            raise invalid("#/truncate: it is not a valid enum value")
        if body.get("truncate", "NONE") == "NONE":
            for text in body.get("texts", []):
                check_length(text)

    def _counted(self, reply: Any, sources: list[str]) -> HeadedReply:
        return HeadedReply(
            reply, {COUNT_HEADER: str(sum(tokens_of(source, TOKENS_MAX) for source in sources))}
        )

    def _cohere_rerank(self, body: dict[str, Any]) -> Any:
        check_fields(body, {"api_version", "query", "documents"}, {"top_n"})
        if body["api_version"] < 2:
            raise invalid("#/api_version: 1 is not greater or equal to 2")
        scores = [(score_of(body["query"], text), i) for i, text in enumerate(body["documents"])]
        ranked = sorted(scores, reverse=True)[: body.get("top_n", 1000)]
        return {"id": "1", "results": [{"index": i, "relevance_score": score} for score, i in ranked]}

    def _rerank(self, body: dict[str, Any]) -> Any:
        """Rerank by botocore's own rules, in pages of two."""
        report = ParamValidator().validate(body, RERANK.input_shape)
        if report.has_errors():
            raise invalid(report.generate_report())
        config = body["rerankingConfiguration"]["bedrockRerankingConfiguration"]
        if not config["modelConfiguration"]["modelArn"].startswith(
            f"arn:aws:bedrock:{REGION}::foundation-model/"
        ):
            raise refusal(404, "ResourceNotFoundException", "The provided model identifier is not known")
        query = body["queries"][0]["textQuery"]["text"]
        texts = [source["inlineDocumentSource"]["textDocument"]["text"] for source in body["sources"]]
        ranked = sorted(((score_of(query, text), i) for i, text in enumerate(texts)), reverse=True)
        start = int(body.get("nextToken", "0"))
        page = [{"index": i, "relevanceScore": score} for score, i in ranked[start : start + PAGE]]
        following = {"nextToken": str(start + PAGE)} if start + PAGE < len(ranked) else {}
        return {"results": page, **following}


def invalid(message: str) -> ErrorReply:
    return refusal(
        400, "ValidationException", f"Malformed input request: {message}, please reformat your input"
    )


def check_fields(body: dict[str, Any], required: set[str], optional: set[str]) -> None:
    """Check the fields of an object. Raises: ErrorReply."""
    if missing := required - body.keys():
        raise invalid(f"#: required key {missing} not found")
    if extraneous := body.keys() - required - optional:
        raise invalid(f"#: extraneous key {extraneous} is not permitted")


def check_length(text: str) -> None:
    """Check that a text is not too long. Raises: ErrorReply."""
    if tokens_of(text) > TOKENS_MAX:
        limit = f"Max input tokens: {TOKENS_MAX}, request input token count: {tokens_of(text)}"
        message = f"400 Bad Request: Too many input tokens. {limit}"
        raise refusal(400, "ValidationException", message)


def is_call(body: bytes) -> bool:
    """Return whether a body is of a call, and not of a check of the gateway's."""
    return not is_probe(json.loads(body))


def model_in(raw_path: str) -> str:
    """Return the model in a path of InvokeModel."""
    return unquote(raw_path.removeprefix("/model/").removesuffix("/invoke"))
