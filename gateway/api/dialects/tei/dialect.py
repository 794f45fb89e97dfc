"""Text Embeddings Inference: /embed, /similarity, /embed_sparse, /embed_all and /predict.

/rerank, which is also a path of Cohere's and Jina's clients, is in `cohere/rerank.py`.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from typing import Any

import msgspec

from backends.contract import EncodeReply, Operation
from gateway.api.dialects.tei import info, operations, tokens
from gateway.api.dialects.tei.operations import (
    EMBED,
    EMBED_ALL,
    EMBED_SPARSE,
    PREDICT,
    SIMILARITY,
    DefaultRequest,
    VertexRequest,
    answer,
    endpoint,
)
from gateway.api.document.fields import CUT, QUERY, TEXTS
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import LazyList
from gateway.api.server.endpoints import BodyForms
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.arrow_http import arrow_body, wants_arrow
from gateway.api.wire.tei import (
    EmbedRequest,
    PredictRequest,
    SimilarityRequest,
    TeiEncodeRequest,
    TeiPrediction,
    TeiSparseRequest,
    TeiWeight,
    compute_headers,
    decode_sparse,
)
from gateway.api.wire.tokens import DecodeRequest, TokenizeRequest
from gateway.errors import InvalidInput

SPARSE_RESPONSE: Any = list[list[TeiWeight]] | list[dict[str, float]]
PREDICTIONS: Any = list[TeiPrediction] | list[list[TeiPrediction]]


@endpoint(
    "/embed",
    reply=list[list[float]],
    description="One vector for each input",
    forms=BodyForms(arrow=arrow_body(EmbedRequest, "inputs")),
)
async def embed(request: Request[EmbedRequest]) -> HttpReply:
    """Turn texts into vectors.

    Returns one vector for each input, in the order of the inputs. An Arrow stream of texts is taken too, with
    the other fields in the query of the URL, and Arrow is returned where it is accepted.
    """
    return await answer(request, EMBED, request.model)


@endpoint("/similarity", reply=list[float], description="A cosine for each sentence, in order")
async def similarity(request: Request[SimilarityRequest]) -> HttpReply:
    """Compare one sentence with others.

    Returns the cosine of the source sentence with each sentence, in their order.
    """
    return await answer(request, SIMILARITY, request.model)


@endpoint(
    "/embed_sparse",
    reply=SPARSE_RESPONSE,
    description="The terms of each input",
    forms=BodyForms(arrow=arrow_body(TeiSparseRequest, "inputs")),
)
async def embed_sparse(request: Request[TeiSparseRequest]) -> HttpReply:
    """Turn texts into sparse vectors.

    Returns the weighted terms of each input, in the order of the inputs. Takes and returns Arrow as `/embed`
    does. With `return_tokens` each input is an object from token to weight.
    """
    if request.body.return_tokens:
        return await _serve_tokens(request)
    return await answer(request, EMBED_SPARSE, request.model)


async def _serve_tokens(request: Request[TeiSparseRequest]) -> HttpReply:
    """Serve sparse vectors whose terms are tokens. A body is refused before it costs anything."""
    context, api = request.context, request.api
    if wants_arrow(context):
        raise InvalidInput("an Arrow reply has ids: leave out `return_tokens`", param="return_tokens")
    call = await decode_sparse(request.body, request.model, context, api)
    vocabulary = await api.open_vocabulary(context, call.model, Operation.ENCODE)
    if vocabulary is None:
        raise InvalidInput(
            "`return_tokens` needs the model's tokenizer, which is not known here: set `tokenizer` of its "
            "upstream",
            param="return_tokens",
        )
    served, reply = await request.serve(call, EncodeReply)
    sparse = reply.sparse or ()
    rows = (
        dict(zip(vocabulary.tokens(terms.indices.tolist()), terms.values, strict=True)) for terms in sparse
    )
    return await request.reply(
        served, LazyList(rows, len(sparse), reply.numbers), compute_headers(context, reply, call)
    )


@endpoint("/embed_all", reply=list[list[list[float]]], description="A vector for each token of each input")
async def embed_all(request: Request[TeiEncodeRequest]) -> HttpReply:
    """Turn texts into one vector for each token.

    Returns a list of vectors for each input, in the order of the inputs. The vectors are not normalized.
    """
    return await answer(request, EMBED_ALL, request.model)


@endpoint("/predict", reply=PREDICTIONS, description="The labels of the input, or of each of a batch")
async def predict(request: Request[PredictRequest]) -> HttpReply:
    """Classify texts or pairs of texts.

    Returns the labels of the input with their scores, best first; for a batch, a list of them for each input.
    A reranker scores pairs, under the label LABEL_0.
    """
    return await answer(request, PREDICT, request.model)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    DecodeRequest: {"ids": [101, 7592, 102]},
    DefaultRequest: {"inputs": TEXTS},
    EmbedRequest: {"inputs": TEXTS},
    PredictRequest: {"inputs": QUERY},
    SimilarityRequest: {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}},
    TeiEncodeRequest: {"inputs": TEXTS},
    TeiSparseRequest: {"inputs": TEXTS},
    TokenizeRequest: {"inputs": TEXTS},
    VertexRequest: {"instances": [{"inputs": TEXTS[0]}, {"inputs": TEXTS[1]}]},
}
MEANINGS = {
    "ids": "Token ids: one list, or a list of lists.",
    "inputs": "One text or a list of texts. The gateway's config bounds their number.",
    "normalize": "Whether vectors are scaled to length 1.",
    "parameters": "Options of the request.",
    "prompt_name": "Name of a prompt in the model's checkpoint, put before each input.",
    "return_tokens": (
        "Whether each input is an object from token to weight, as OpenSearch reads it. It needs the model's "
        "tokenizer."
    ),
    "return_token_strs": "Whether the reply contains each token as text.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "SimilarityRequest.inputs": "One sentence, and the sentences to compare it with.",
    "VertexRequest.instances": "Bodies of `POST /`, each of which gets one prediction.",
    "DefaultRequest.inputs": "Texts, or for similarity one sentence and the sentences to compare it with.",
    "SimilarityInputs.source_sentence": "The sentence to compare with each of the others.",
    "SimilarityInputs.sentences": "The other sentences. The gateway's config bounds their number.",
    "SimilarityParameters.truncate": CUT,
    "SimilarityParameters.truncation_direction": "The end at which a long sentence is cut.",
    "SimilarityParameters.prompt_name": "Name of a prompt in the model's checkpoint, put before each one.",
}
DIALECT = Dialect(
    handlers=[
        embed,
        similarity,
        embed_sparse,
        embed_all,
        predict,
        *info.HANDLERS,
        *tokens.HANDLERS,
        *operations.HANDLERS,
    ],
    tags={"TEI": "The paths of Text Embeddings Inference."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
