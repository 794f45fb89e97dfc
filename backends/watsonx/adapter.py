"""Adapter of watsonx.ai: embeddings and reranks of texts, as its Python SDK sends them.

Source: ibm-watsonx-ai. A request names the model and what is billed, a project or a space. Long inputs are
cut at the end, at as many tokens as a request says; otherwise they are refused.
"""

from typing import Any

import msgspec

from backends.contract import BaseWork, Embed, ReplicaSpec, Rerank, Truncate
from backends.contract.errors import BackendError, InvalidWork, ModelNotServed, input_too_long
from backends.hosted.adapter import HostedBackend
from backends.hosted.models import Body, HostedModel, HostedRoute, Request, Rows, every_place, vectors_of
from backends.http.answers import decode_json
from backends.http.client import UpstreamResponse
from backends.http.egress import OpenClient, open_egress
from backends.http.openai_wire import REFUSED_INPUT, TOO_LONG
from backends.http.replies import order_scores
from backends.http.statuses import account_spent, status_error, with_answer
from backends.watsonx.iam import iam_token
from backends.watsonx.kind import WatsonxSettings

# As many as its SDK sends.
INPUTS_MAX = 1000


class Result(msgspec.Struct, frozen=True):
    """Vector of one input, or score of one document."""

    embedding: list[float] = []
    index: int | None = None
    score: float = 0.0


class Results(msgspec.Struct, frozen=True):
    """Reply to embeddings and to a rerank."""

    results: list[Result]
    input_token_count: int | None = None


class Fault(msgspec.Struct, frozen=True):
    """One error of a reply."""

    code: str = ""
    message: str = ""


class Faults(msgspec.Struct, frozen=True):
    """Body of an error."""

    errors: list[Fault] = []


def _embed(billed: Body, version: str, work: Embed, model: HostedModel) -> list[Request]:
    body: Body = {"model_id": model.name, **billed, "inputs": list(work.inputs)}
    return [Request(f"/ml/v1/text/embeddings?version={version}", body | _cut(work, model), every_place(work))]


def _rerank(billed: Body, version: str, work: Rerank, model: HostedModel) -> list[Request]:
    inputs = [{"text": text} for text in work.documents]
    body: Body = {"model_id": model.name, **billed, "query": work.query, "inputs": inputs}
    return [Request(f"/ml/v1/text/rerank?version={version}", body | _cut(work, model), every_place(work))]


def _cut(work: Embed | Rerank, model: HostedModel) -> Body:
    if work.truncate is not Truncate.RIGHT or model.max_tokens is None:
        return {}
    return {"parameters": {"truncate_input_tokens": model.max_tokens}}


def _decode_embed(response: UpstreamResponse, expected: int) -> Rows:
    reply = decode_json(response.body, Results)
    return Rows(vectors_of([item.embedding for item in reply.results], expected), reply.input_token_count)


def _decode_rerank(response: UpstreamResponse, expected: int) -> Rows:
    reply = decode_json(response.body, Results)
    ranks = [(item.index, item.score) for item in reply.results]
    return Rows(order_scores(ranks, expected), reply.input_token_count)


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    fault = _fault_of(response)
    match response.status, fault.code:
        case 400 | 422, _ if any(phrase in fault.message.lower() for phrase in TOO_LONG):
            return input_too_long(None)
        case 404, "model_not_supported" | "model_no_support_for_function":
            return ModelNotServed("the upstream does not serve this model")
        case 403, "token_quota_reached":
            return account_spent()
        case 400 | 422, _:
            return InvalidWork(REFUSED_INPUT)
    return status_error(response)


def _fault_of(response: UpstreamResponse) -> Fault:
    try:
        faults = msgspec.json.decode(response.body, type=Faults).errors
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Fault()
    return faults[0] if faults else Fault()


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> HostedBackend:
    """Return a client of the model at the spec's base URL."""
    settings = spec.settings if isinstance(spec.settings, WatsonxSettings) else WatsonxSettings()
    project: dict[str, Any] = {"project_id": settings.project_id, "space_id": settings.space_id}
    billed = {name: value for name, value in project.items() if value is not None}

    def encode_embed(work: Embed, model: HostedModel) -> list[Request]:
        return _embed(billed, settings.version, work, model)

    def encode_rerank(work: Rerank, model: HostedModel) -> list[Request]:
        return _rerank(billed, settings.version, work, model)

    routes: dict[type[BaseWork], HostedRoute] = (
        {Rerank: HostedRoute(encode_rerank, _decode_rerank)}
        if spec.task == "rerank"
        else {Embed: HostedRoute(encode_embed, _decode_embed)}
    )
    model = HostedModel(
        spec.model or "",
        "/ml/v1/text",
        "watsonx.ai",
        routes,
        failure,
        truncation=frozenset({Truncate.ERROR, Truncate.RIGHT}) if settings.input_tokens else frozenset(),
        request_inputs=INPUTS_MAX,
        max_tokens=settings.input_tokens,
    )
    scheme, _, key = spec.headers.get("authorization", "").partition(" ")
    if scheme != "Bearer":
        # On own machines, ZenApiKey.
        return HostedBackend(open_client(spec, None), model, spec.tokenizer)
    headers = {name: value for name, value in spec.headers.items() if name != "authorization"}
    bare = msgspec.structs.replace(spec, headers=headers)
    return HostedBackend(
        open_client(bare, iam_token(bare, settings.iam, key, open_client)), model, spec.tokenizer
    )
