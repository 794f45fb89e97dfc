"""Text Embeddings Inference: /info, /health and /ping, at the root and below /models/{name}/.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from backends.contract import Capabilities, ModelState, Operation, Output, Truncate
from gateway import __version__
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import model_name, route_options
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import EMPTY, NO_KEY, empty
from gateway.api.wire.tei import NAMELESS_LABEL
from gateway.calls import default_truncation
from gateway.errors import ModelLoading
from gateway.tenants.keyring import Tenant

FAILURES = document_errors(TEI)
# TEI's own default. A client that splits its texts by this number stays within one request of this gateway.
MAX_CONCURRENT_REQUESTS = 512


class InfoResponse(msgspec.Struct):
    """Facts that TEI's clients read before they send, and whether an engine has the model in memory."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    residence: ModelState | None = None
    last_error: str | None = None


@get(["/info", "/models/{name:str}/info"], responses=FAILURES, tags=["TEI"])
async def info(
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    name: FromPath[str | None] = None,
) -> InfoResponse:
    """Describe a model: its kind, its limits, and whether it is in memory."""
    return describe_model(api, api.authenticator.authenticate(context), model_name(name))


def describe_model(api: InferenceApi, tenant: Tenant, name: str | None) -> InfoResponse:
    """Return the facts of a model; without a name, of the one of root paths.

    Raises: ModelLoading, and the errors of `Routes.resolve` and `Routes.root_model`.
    """
    gateway = api.gateway
    route = gateway.routes.resolve(tenant, name or gateway.routes.root_model(tenant), Operation.TOKENIZE)
    upstream = gateway.view_of(route.model)
    if upstream.capabilities is None:
        raise ModelLoading("the model has not reported its capabilities yet")
    facts = info_of(
        route.model,
        upstream.capabilities,
        inputs_max=api.inputs_max,
        auto_truncate=default_truncation(route.truncate, upstream.capabilities) is not Truncate.ERROR,
    )
    if upstream.residence is not None:
        facts.residence, facts.last_error = upstream.residence.state, upstream.residence.error
    return facts


def info_of(model: str, capabilities: Capabilities, *, inputs_max: int, auto_truncate: bool) -> InfoResponse:
    """Return a model's facts in the form of TEI's /info.

    inputs_max: of the gateway. A client may send as much as the gateway takes, whatever a replica takes.
    """
    return InfoResponse(
        model_id=capabilities.model_id,
        model_sha=capabilities.revision,
        model_dtype=capabilities.dtype or "unknown",
        served_model_name=model,
        model_type=model_type(capabilities),
        max_concurrent_requests=MAX_CONCURRENT_REQUESTS,
        max_input_length=capabilities.max_input_tokens or 0,
        max_batch_tokens=capabilities.request_tokens or 16384,
        max_batch_requests=None,
        max_client_batch_size=inputs_max,
        auto_truncate=auto_truncate,
        tokenization_workers=1,
        version=__version__,
        sha=None,
        docker_label=None,
    )


def model_type(capabilities: Capabilities) -> dict[str, Any]:
    """Return the kind of a model, tagged as TEI does. A classifier of one label is a reranker."""
    if Operation.RERANK in capabilities.operations:
        return {"reranker": _labels(capabilities.labels or (NAMELESS_LABEL,))}
    if Operation.CLASSIFY in capabilities.operations:
        return {"classifier": _labels(capabilities.labels)}
    sparse = Output.SPARSE in capabilities.outputs and Output.DENSE not in capabilities.outputs
    # TEI's clients require a text. Servers other than TEI do not report it.
    return {"embedding": {"pooling": capabilities.pooling or ("splade" if sparse else "unknown")}}


def _labels(labels: Sequence[str]) -> dict[str, Any]:
    id2label = {str(index): label for index, label in enumerate(labels)}
    return {"id2label": id2label, "label2id": {label: int(index) for index, label in id2label.items()}}


@get(
    ["/health", "/ping", "/models/{name:str}/health"],
    responses={200: EMPTY} | FAILURES,
    tags=["TEI"],
    opt=route_options(is_probe=True),
    security=NO_KEY,
)
async def health(api: NamedDependency[InferenceApi], name: FromPath[str | None] = None) -> Response[bytes]:
    """Check that the model has a usable replica.

    Returns 200 if it has one, else 503. Needs no key.
    """
    api.check_health(model_name(name))
    return empty()


HANDLERS = [info, health]
