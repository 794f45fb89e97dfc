"""Envelopes of Cohere's errors, and of the rerank path that its clients share with Jina's."""

import msgspec

from gateway.api.server.error_bodies import ErrorFormat
from gateway.errors import GatewayError


class CohereError(msgspec.Struct):
    """Source: cohere-python 7.0.9: clients show `message`."""

    message: str


class RerankError(msgspec.Struct):
    """Envelope of /v1/rerank. Cohere's clients read `message`, Jina's read `detail`."""

    message: str
    detail: str


def _cohere_error(error: GatewayError) -> CohereError:
    return CohereError(error.message)


def _rerank_error(error: GatewayError) -> RerankError:
    return RerankError(error.message, error.message)


COHERE = ErrorFormat("cohere", CohereError, _cohere_error, ("/v2/",))
# Cohere's and Jina's /v1/rerank, whose errors clients of both can read.
RERANK = ErrorFormat("rerank", RerankError, _rerank_error)
