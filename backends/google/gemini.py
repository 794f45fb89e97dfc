"""Adapter of the Gemini API."""

from backends.contract import ReplicaSpec
from backends.google.kind import GeminiSettings
from backends.google.models import gemini_model
from backends.hosted.adapter import HostedBackend
from backends.http.egress import OpenClient, open_egress


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> HostedBackend:
    """Return a client of the model at the spec's base URL."""
    settings = spec.settings if isinstance(spec.settings, GeminiSettings) else GeminiSettings()
    model = gemini_model(spec.model or "", settings.input_type)
    return HostedBackend(open_client(spec, None), model, spec.tokenizer)
