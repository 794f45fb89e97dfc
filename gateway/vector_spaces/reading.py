"""Reader of the vectors that one replica returns for some texts, for comparisons."""

from collections.abc import Sequence

from backends.contract import Backend, Operation
from backends.reference_texts import CANARIES, embed_in_batches, max_inputs_per_request
from gateway.config.schema import UpstreamSettings
from gateway.vector_spaces.comparison import ReplicaVectors
from gateway.vector_spaces.fingerprint import fingerprint_of


async def read_vectors(
    name: str, upstream: str, backend: Backend, settings: UpstreamSettings, texts: Sequence[str]
) -> ReplicaVectors | None:
    """Return a replica's vectors, or None if it embeds nothing.

    texts: begin with the canaries. Each request may take `attempt_timeout_s`. Raises: BackendError.
    """
    capabilities = await backend.describe(settings.attempt_timeout_s)
    if Operation.EMBED not in capabilities.operations:
        return None
    inputs_max = max_inputs_per_request(capabilities, settings.request_inputs)
    reply = await embed_in_batches(backend, texts, inputs_max, settings.attempt_timeout_s)
    fingerprint = fingerprint_of(reply.vectors[: len(CANARIES)], settings.backend, capabilities)
    return ReplicaVectors(
        name, upstream, fingerprint, reply.vectors, reply.tokens, settings.vector_space.min_cosine
    )
