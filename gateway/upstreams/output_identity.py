"""Identity of what an upstream computes now, under which the cache keeps it."""

from backends.contract import Rerank, Score, Work
from backends.model_names import is_path
from gateway.config.schema import COMMIT
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.identity import VectorsIdentity


def vectors_identity(upstream: Upstream) -> VectorsIdentity | None:
    """Return the identity of an upstream's vectors, None unless every replica was checked."""
    fingerprint, capabilities = upstream.checked_fingerprint, upstream.capabilities
    if fingerprint is None or capabilities is None:
        return None
    return upstream.identities.identity_of(fingerprint, capabilities)


def scores_identity(upstream: Upstream) -> VectorsIdentity | None:
    """Return the identity of an upstream's scores, None unless a commit determines the model.

    Scores have no fingerprint. The engine of this gateway loads the files of that commit and checks them.
    """
    settings, capabilities = upstream.settings, upstream.capabilities
    if capabilities is None or not settings.is_hosted or is_path(settings.model or ""):
        return None
    if settings.revision is None or not COMMIT.fullmatch(settings.revision):
        return None
    return upstream.identities.scores_of(capabilities)


def identity_of(upstream: Upstream, work: Work) -> VectorsIdentity | None:
    """Return the identity of an upstream's outputs for a work, None if it is unknown."""
    return scores_identity(upstream) if isinstance(work, Rerank | Score) else vectors_identity(upstream)
