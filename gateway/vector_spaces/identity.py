"""Identity of the vectors that an upstream computes: equal only if equal inputs give equal vectors. Pure.

A fingerprint's id tolerates rounding, and so two revisions of a model may share it. The identity covers the
fingerprint's own numbers, the capabilities of the replicas, and every setting but those listed here, so that
a new setting is part of it without a change.
"""

import hashlib

import msgspec

from backends.contract import Capabilities
from gateway import __version__
from gateway.config.schema import UpstreamSettings
from gateway.vector_spaces.fingerprint import Fingerprint

# Settings and capabilities that change no vector: where a replica is, and how work is sent to it.
NEUTRAL_SETTINGS = frozenset(
    {
        "replicas",
        "discover",
        "when_unavailable",
        "api_key",
        "api_key_header",
        "tls",
        "proxy",
        "policy",
        "request_inputs",
        "request_tokens",
        "request_bytes",
        "in_flight_batches",
        "queue_tokens",
        "attempt_timeout_s",
        "retry_share",
        "hedge_share",
        "vector_space",
        "device",
        "process",
        "preload",
        "when_loading",
    }
)
NEUTRAL_CAPABILITIES = frozenset(
    {
        "request_inputs",
        "request_tokens",
        "request_bytes",
        "concurrent_inputs",
        "checkpoint",
        "reports_input_tokens",
        "notes",
        "loaded",
        "metered",
    }
)


class VectorsIdentity(msgspec.Struct, frozen=True):
    """Identity of vectors.

    dimensions: of a full vector. norm_before_cut: narrower ones are not its first components.
    """

    digest: bytes
    dimensions: int
    norm_before_cut: bool = False


class IdentitySource:
    """Identity of one upstream's vectors, computed once for each fingerprint and capabilities."""

    def __init__(self, upstream: str, settings: UpstreamSettings) -> None:
        self._settings = _encoded(settings, NEUTRAL_SETTINGS)
        self._upstream = upstream
        self._sources: tuple[Fingerprint, Capabilities] | None = None
        self._identity = VectorsIdentity(b"", 0)
        self._scores_settings = _encoded(settings, NEUTRAL_SETTINGS - {"device"})
        self._scored: Capabilities | None = None
        self._scores = VectorsIdentity(b"", 2)

    def identity_of(self, fingerprint: Fingerprint, capabilities: Capabilities) -> VectorsIdentity:
        """Return the identity of the vectors of replicas with this fingerprint and these capabilities."""
        sources = self._sources
        if sources is None or sources[0] is not fingerprint or sources[1] is not capabilities:
            parts = (
                self._upstream.encode(),
                self._settings,
                msgspec.msgpack.encode(fingerprint),
                _encoded(capabilities, NEUTRAL_CAPABILITIES),
            )
            digest = hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
            self._identity = VectorsIdentity(digest, fingerprint.dimensions, capabilities.norm_before_cut)
            self._sources = fingerprint, capabilities
        return self._identity

    def scores_of(self, capabilities: Capabilities) -> VectorsIdentity:
        """Return the identity of the scores of a model that the settings determine.

        Other releases and devices may round differently, and no fingerprint would show it.
        """
        if self._scored is not capabilities:
            parts = (b"scores", __version__, self._upstream, self._scores_settings)
            encoded = msgspec.msgpack.encode((*parts, _encoded(capabilities, NEUTRAL_CAPABILITIES)))
            self._scores = VectorsIdentity(hashlib.sha256(encoded).digest(), 2)
            self._scored = capabilities
        return self._scores


def _encoded(struct: UpstreamSettings | Capabilities, neutral: frozenset[str]) -> bytes:
    fields = {name: value for name, value in msgspec.structs.asdict(struct).items() if name not in neutral}
    return msgspec.json.encode(fields, order="deterministic")
