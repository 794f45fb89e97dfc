"""Envelopes of Cohere's errors, and of the rerank path that its clients share with Jina's."""

import msgspec

from gateway.api.server.error_bodies import ErrorFormat


class CohereError(msgspec.Struct):
    """Source: cohere-python 7.0.9: clients show `message`."""

    message: str


class RerankError(msgspec.Struct):
    """Envelope of /v1/rerank. Cohere's clients read `message`, Jina's read `detail`."""

    message: str
    detail: str


COHERE = ErrorFormat("cohere", CohereError, lambda error: CohereError(error.message), ("/v2/",))
# Cohere's and Jina's /v1/rerank, whose errors clients of both can read.
RERANK = ErrorFormat("rerank", RerankError, lambda error: RerankError(error.message, error.message))
