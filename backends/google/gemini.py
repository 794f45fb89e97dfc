"""Adapter of the Gemini API."""

import msgspec

from backends.contract import ReplicaSpec
from backends.google.kind import GeminiSettings
from backends.google.models import gemini_model
from backends.hosted.adapter import HostedBackend
from backends.http.egress import OpenClient, open_egress

KEY_HEADER = "x-goog-api-key"


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> HostedBackend:
    """Return a client of the model at the spec's base URL."""
    settings = spec.settings if isinstance(spec.settings, GeminiSettings) else GeminiSettings()
    keyed = msgspec.structs.replace(spec, headers=keyed_headers(spec))
    model = gemini_model(spec.model or "", settings.input_type)
    return HostedBackend(open_client(keyed, None), model, spec.tokenizer)


def keyed_headers(spec: ReplicaSpec) -> dict[str, str]:
    """Return the headers with the key where the API reads it."""
    headers = {name.lower(): value for name, value in spec.headers.items()}
    if KEY_HEADER not in headers and (key := headers.pop("authorization", "").removeprefix("Bearer ")):
        headers[KEY_HEADER] = key
    return headers
